"""Searches all layouts of a model on a number of GPUs: which to take, and why not the others.

Every legal layout is priced, which takes 0.5 ms and gives a lower bound of its step's seconds.
Layouts are simulated in the order of their bounds, until a bound is slower than all rows to be
shown. So the search finds what simulating all layouts would find.

The search takes the fastest layout that fits. On measured runs this lost less than preferring the
fewest kinds of parallelism among layouts that are equal within the planner's error
(docs/planning.md). Only where predictions are equal to three digits do the fewest kinds of
parallelism decide, then the least memory in whole GiB.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, get_type_hints

from .cost import PricedStep
from .describe import MODELS, RANKS, Layout, Machine, Model, divisors
from .passes import group

NAMES = tuple(
    name for name in get_type_hints(Layout) if name not in ("gpus", "batch_size", "order")
)
KINDS: tuple[tuple[str, int | None], ...] = (  # a schedule and its chunks
    ("1f1b", None), ("zb", None), ("interleaved", 2), ("interleaved", 4), ("zbv", None)
)  # fmt: skip
SLOW = "zbv"  # the one of these whose lists take long to make
ALWAYS_SHOWN = ("dp", "pp", "tp", "micro_batch", "precision")  # even at their defaults
MOST_SHARDED = 16  # the most nodes of any measured run with ZeRO-2 or 3
FEWEST = 2048  # positions that a rank must have where sequences are cut
# Why a layout is slower, by the part of a step that grows most. share: that part's of the step.
REASONS = {
    "products": "its matrix products take longer",
    "attention": "attention takes longer",
    "elementwise": "norms, dropout, activations and the adding of gradients take longer",
    "tensor": "{share} of the step waits for the all-reduces of its matrices",
    "context": "{share} of the step waits for keys and values of other positions",
    "experts": "its tokens travel to experts and back for {share} of the step",
    "host": "{share} of the step waits for the host, which starts many small kernels",
    "gathering": "{share} of the step waits for gathered parameters and reduced gradients",
    "fill": "{share} of the step is the filling and draining of its pipeline",
    "imbalance": "{share} of the step waits for the slowest stage",
    "transfer": "{share} of the step waits for messages between stages",
    "exchange": "{share} of the step waits for the exchange of gradients",
    "update": "{share} of the step is the optimizer's",
}


def layouts(
    model: Model, gpus: int, batch_size: int, gpus_per_node: int = 0, **fixed: Any
) -> Iterator[Layout]:
    """Every legal layout. Under ZeRO all replicas share one copy, or those of a node do. `fixed`:
    options, each with the only value to try."""
    given = {name: value for name, value in fixed.items() if value is not None}
    batches = sorted({1, 2, 4, 8, 16, 32, given.get("micro_batch", 1)})
    again = dict.fromkeys(("never", "always", given.get("recompute", "never")))
    may_split = given.get("sequence_parallel", True)
    axes = product(divisors(gpus), divisors(gpus), divisors(gpus))
    for tp, pp, cp in axes:
        dp = gpus // (tp * pp * cp)
        if dp * tp * pp * cp != gpus or batch_size % dp or model.heads % tp or model.ffn % tp:
            continue
        if cp > 1 and model.seq // cp < FEWEST and cp != given.get("cp"):
            continue
        if tp > 1 and model.experts > 1:  # train.py has no experts whose matrices are cut
            continue
        kinds = list(KINDS[:1])
        if pp > 1:
            kinds = [kind for kind in KINDS if pp <= 16 or kind[0] != SLOW]
            kind = given.get("schedule", "interleaved"), given.get("chunks")
            if kind not in (*kinds, ("interleaved", None)):
                kinds.append(kind)
        zeros = [0]
        if dp * cp > 1:
            zeros = [0, 1] + [2] * (cp * pp * tp == 1) + [3] * (pp == 1)
        eps = divisors(math.gcd(dp, model.experts))
        ways = ("ring", "heads") if cp > 1 and model.heads % (cp * tp) == 0 else ("ring",)
        of_node = gpus_per_node // (cp * pp * tp)  # replicas
        groups = {None, given.get("shards"), of_node if 1 < of_node < dp else None}
        for b, (schedule, chunks), zero, recompute, ep, way, shards in product(
            batches, kinds, zeros, again, eps, ways, groups
        ):
            if shards and not (zero and dp % shards == 0 and shards % ep == 0):
                continue
            layout = Layout(
                gpus, dp, cp, pp, tp, ep, way, b, batch_size, schedule, chunks, zero, recompute,
                given.get("precision", "bf16"), may_split and tp > 1 and model.seq % tp == 0,
                shards,
            )  # fmt: skip
            legal = batch_size // dp % b == 0 and layout.stages <= model.layers
            if legal and all(getattr(layout, name) == value for name, value in given.items()):
                yield layout


def fastest(steps: Iterable[PricedStep], top: int) -> list[PricedStep]:
    """The fastest steps that fit, fastest first: at least all that are `equal` to the first, and
    one of each of `top` cuts of the model."""
    best: list[PricedStep] = []
    for step in sorted(steps, key=lambda step: step.least_seconds):
        rows = one_of_each_cut(best)
        if len(rows) >= top:
            slowest = max(rows[top - 1].seconds, 1.01 * best[0].seconds)  # 1.00 to 1.01: equal
            if step.least_seconds > slowest:
                break
        if step.fits:
            insort(best, step, key=lambda step: step.seconds)
    return best


def one_of_each_cut(steps: Iterable[PricedStep]) -> list[PricedStep]:
    """The first step of each cut of the model, in their order."""
    rows: dict[tuple[int, ...], PricedStep] = {}
    for step in steps:
        rows.setdefault(cut(step.layout), step)
    return list(rows.values())


def cut(layout: Layout) -> tuple[int, ...]:
    """Its ranks on each axis."""
    return tuple(getattr(layout, axis) for axis in RANKS)


def limits(step: PricedStep) -> tuple[float, float]:
    """The range of seconds in which two of three runs lay that the planner had not seen."""
    return step.seconds * (1 - step.machine.error), step.seconds * (1 + step.machine.error)


def equal(step: PricedStep, other: PricedStep) -> bool:
    """Whether their seconds are equal to three digits."""
    return f"{step.seconds:.3g}" == f"{other.seconds:.3g}"


def preferred(steps: Sequence[PricedStep]) -> PricedStep:
    """The step to take. `steps` has the fastest first. Among those `equal` to it, the fewest kinds
    of parallelism decide, then the least memory in whole GiB, then the seconds."""
    alike = [step for step in steps if equal(step, steps[0])]
    return min(alike, key=lambda step: (kinds(step.layout), round(step.memory_gb)))


def beyond(step: PricedStep) -> int:
    """The most nodes of any measured run, if the step is on more; else 0. No run with ZeRO-2 or 3
    was on more than 16."""
    most = step.machine.measured_nodes
    most = min(most, MOST_SHARDED) if step.layout.zero > 1 else most
    return most if step.nodes > most else 0


def doubts(step: PricedStep) -> str:
    """How sure the rows of a search are, in a few lines."""
    where = step.machine
    said = (
        "The first row is the fastest; of rows equal to three digits, that with the fewest kinds "
        "of parallelism, then with the least memory in whole GiB."
    )
    if where.measured_nodes:
        said += (
            f"\nTwo out of three unseen runs came within {where.error:.0%} of the prediction: "
            "layouts closer than that may change places."
        )
    if step.layout.cp > 1 or step.layout.ep > 1 or step.layout.shards:
        said += (
            "\nNo measured run had parts of sequences, shared experts or replicas of shards: their "
            "costs are counted, not measured."
        )
    if not where.measured_nodes:
        return f"{said}\nNo run was on this machine: nobody knows the error here."
    if most := beyond(step):
        said += f"\nBut no run was on more than {most} nodes: nobody knows the error here."
    return said


def kinds(layout: Layout) -> int:
    """How many kinds of parallelism the layout has."""
    return sum(ranks > 1 for ranks in cut(layout))


def search(
    model: Model, gpus: int, machine: Machine, batch_size: int, top: int = 5, **fixed: Any
) -> list[PricedStep]:
    """The layout to take, then the fastest layouts with other cuts of the model. All of them fit.
    Raises ValueError if none fits, with the layout that needs the least memory."""
    Layout(gpus).nodes(machine.gpus_per_node)  # refuses GPUs that nodes cannot share equally
    steps = [
        PricedStep(model, layout, machine)
        for layout in layouts(model, gpus, batch_size, machine.gpus_per_node, **fixed)
    ]
    if not steps:
        for name, value in fixed.items():
            others = {k: v for k, v in fixed.items() if k != name}
            if value is not None and next(layouts(model, gpus, batch_size, **others), None):
                raise ValueError(
                    f"--{name} {value}: no layout of --gpus {gpus} --batch_size {batch_size} "
                    "has it, with the other options; without it there are some"
                )
        raise ValueError(
            f"--gpus {gpus} --batch_size {batch_size}: no layout divides both, with these options; "
            f"--batch_size {-(-batch_size // gpus) * gpus} works"
        )
    best = fastest(steps, top)
    if not best:
        least = min(steps, key=lambda step: step.memory_gb)
        raise ValueError(
            f"--gpus {gpus} --machine {machine.name}: no layout fits; {options(least.layout)} "
            f"needs {least.memory_gb:.0f} GiB of {least.usable_gb:.0f}: more GPUs work"
        )
    return one_of_each_cut([preferred(best), *best])[:top]


def why(best: PricedStep, other: PricedStep) -> str:
    """Why the other layout is not taken, in one clause: by how much it is slower and what takes
    longer in it, or that it is equal."""
    slower = other.seconds / best.seconds - 1
    if equal(other, best):
        more = other.memory_gb - best.memory_gb
        memory = f"{abs(more):.1f} GiB {'more' if more > 0 else 'less'}"
        if memory.startswith("0.0"):
            memory = "as much memory"
        number = kinds(other.layout)
        noun = "kind" if number == 1 else "kinds"
        return f"equal: it needs {memory}, and {number} {noun} of parallelism"
    if other.layout.recompute != "never" == best.layout.recompute:
        return f"{slower:.1%} slower: it computes every forward twice"
    grown = {part: seconds - best.parts[part] for part, seconds in other.parts.items()}
    part = max(grown, key=grown.__getitem__)
    reason = REASONS[part].format(share=f"{other.parts[part] / other.seconds:.0%}")
    tp = other.layout.tp
    if part == "tensor" and group(other.machine, tp, 1).inside < tp:
        reason = f"tp {tp} leaves the node: {reason}"
    return f"{slower:.1%} slower: {reason}"


def options(layout: Layout, names: Iterable[str] = NAMES) -> str:
    """The layout as options of plan.py, limited to `names`."""
    shown = (*ALWAYS_SHOWN, "schedule") if layout.pp > 1 else ALWAYS_SHOWN
    given = {name: getattr(layout, name) for name in names}
    return " ".join(
        f"--{name}" if value is True else f"--{name} {value}"
        for name, value in given.items()
        if name in shown or value != getattr(Layout, name)
    )


def untrainable(model: Model, layout: Layout) -> str:
    """The options of plan.py that this was priced with and that train.py does not have."""
    options = {
        f"--ffn {model.ffn}": model.ffn != 4 * model.hidden,
        f"--kv_heads {model.kv_heads}": model.kv_heads not in (None, model.heads),
        "--gated_mlp": model.gated_mlp,
        "--tied false": not model.tied,
        "--precision fp16 (bf16 works)": layout.precision == "fp16",
        "--recompute selective (always works)": layout.recompute == "selective",
    }
    return ", ".join(option for option, priced in options.items() if priced)


def command(model: Model, layout: Layout, machine: Machine, preset: str | None) -> str:
    """The command that trains with this layout. On several nodes, which share the ranks equally, it
    is typed on each, with FIRST_HOST and THIS_HOST replaced."""
    start = "python project/train.py"
    if (nodes := layout.nodes(machine.gpus_per_node)) > 1:
        start = (
            f"torchrun --nnodes {nodes} --nproc-per-node {layout.gpus // nodes} "
            "--rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29400 --rdzv-id my_run "
            "--local-addr THIS_HOST project/train.py"
        )
    # train.py has no other presets. A preset has a learning rate, too.
    words = preset if preset and preset.startswith("gpt2") else "gpt2"
    known, sizes = MODELS[words], ("layers", "hidden", "heads")
    if any(getattr(known, size) != getattr(model, size) for size in sizes):
        words += f" --n_layer {model.layers} --n_embd {model.hidden} --n_head {model.heads}"
    # Without --vocab_size train.py takes as many tokens as its tokenizer learns.
    words = f"--model {words} --vocab_size {model.vocab}"
    if model.experts > 1:
        words += f" --experts {model.experts} --top_k {model.top_k}"
    # train.py takes the number of micro-batches in place of their size.
    names = tuple(name for name in NAMES if name not in (*RANKS, "micro_batch"))
    if layout.gpus == 1:
        words = f"single {words}"
    elif layout.pp == layout.tp == layout.cp == 1 and layout.zero != 1:
        words = f"{'fsdp' if layout.zero else 'ddp'} {words} --world_size {layout.dp}"
    else:
        words, names = f"3d {words}", (*RANKS, *names)
    return (
        f"{start} {words} {options(layout, names)} --batch_size {layout.batch_size} "
        f"--num_microbatches {layout.num_microbatches} --model_max_length {model.seq} "
        "--padding max_length"
    )

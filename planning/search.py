"""Searches all layouts of a model over GPUs: the fastest that fit, and why others are not chosen.

Every legal layout is priced by a closed form, which takes 0.5 ms; the best are simulated. Where the
form is too short, that costs simulations; where it is 5 % too long, a layout may be missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .cost import Prediction, PricedStep
from .describe import Layout, Machine, Model, model_of

MARGIN = 1.05  # simulated as long as the closed form is within this of the best
NAMES = (
    "dp", "pp", "tp", "micro_batch", "schedule", "chunks", "zero", "recompute", "precision",
    "sequence_parallel",
)  # fmt: skip
REASONS = {
    "products": "its matrix products take longer",
    "attention": "attention takes longer",
    "elementwise": "norms, dropout, activations and the adding of gradients take longer",
    "tensor": "{share} of the step waits for the all-reduces of its matrices",
    "host": "{share} of the step the GPUs wait for the host, which starts many small kernels",
    "gathering": "{share} of the step waits for gathered parameters and reduced gradients",
    "fill": "{share} of the step is the filling and draining of its pipeline",
    "imbalance": "{share} of the step waits for the slowest stage",
    "transfer": "{share} of the step waits for messages between stages",
    "exchange": "{share} of the step waits for the exchange of gradients",
    "update": "{share} of the step is the optimizer's",
}


def divisors(number: int) -> list[int]:
    """All of them."""
    return [k for k in range(1, number + 1) if number % k == 0]


def layouts(model: Model, gpus: int, batch_size: int, **fixed: object) -> Iterator[Layout]:
    """Every legal layout. ``fixed``: options with the only value that is tried."""

    def tried(name: str, *values: object) -> list[object]:
        return [fixed[name]] if fixed.get(name) is not None else list(values)

    for tp in [t for t in divisors(gpus) if model.heads % t == 0 == model.ffn % t]:
        for pp in [p for p in divisors(gpus // tp) if p <= model.layers]:
            dp = gpus // tp // pp
            if batch_size % dp:
                continue
            kinds: list[tuple[str, int | None]] = [("1f1b", None)]
            if pp > 1:
                kinds += [("zb", None), ("interleaved", 2), ("interleaved", 4)]
                kinds += [("zbv", None)] if pp <= 16 else []  # its lists take long to make
            zeros = [0] if dp == 1 else [0, 1] if pp > 1 else [0, 1, 3] if tp > 1 else [0, 1, 2, 3]
            if pp > 1 and (named := fixed.get("schedule")) not in (None, "interleaved"):
                kinds = [(str(named), None)]  # also one that is not tried otherwise
            for b in tried("micro_batch", 1, 2, 4, 8, 16, 32):
                if batch_size // dp % b:  # type: ignore[operator]
                    continue
                for schedule, chunks in kinds:
                    for zero in tried("zero", *zeros):
                        for recompute in tried("recompute", "never", "always"):
                            layout = Layout(
                                gpus, dp, tp, pp, b, batch_size, schedule, chunks,  # type: ignore[arg-type]
                                zero, tp > 1 and model.seq % tp == 0, recompute,  # type: ignore[arg-type]
                                str(fixed.get("precision") or "bf16"),
                            )  # fmt: skip
                            given = {k: v for k, v in fixed.items() if v is not None}
                            legal = layout.stages <= model.layers and zero in zeros
                            if legal and all(getattr(layout, k) == v for k, v in given.items()):
                                yield layout


def search(
    model: Model, gpus: int, machine: Machine, batch_size: int, top: int = 5, **fixed: object
) -> tuple[list[Prediction], list[Layout]]:
    """The fastest layouts that fit, fastest first, and all that may be worth trying on a better
    machine. Raises ValueError if none fits, with the one that needs least."""
    steps = [
        PricedStep(model, layout, machine) for layout in layouts(model, gpus, batch_size, **fixed)
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
            f"--batch_size {-(-batch_size // gpus) * gpus} has some"
        )
    priced = sorted(((step.estimate(), k) for k, step in enumerate(steps)))
    roomy = [(cost, steps[k]) for cost, k in priced if steps[k].least_memory() < machine.memory_gb]
    best: list[Prediction] = []
    for cost, step in roomy:
        if len(best) >= top and cost > MARGIN * best[top - 1].seconds:
            break
        found = step.predict(explain=False)
        if found.fits:
            best = sorted([*best, found], key=lambda p: p.seconds)[: 2 * top]
    if not best:
        least = min(
            (step.predict(explain=False) for step in steps[:: max(1, len(steps) // 50)]),
            key=lambda p: p.memory_gb,
        )
        raise ValueError(
            f"--gpus {gpus} --machine {machine.name}: no layout fits; {options(least.layout)} "
            f"needs {least.memory_gb:.0f} GiB of {least.usable_gb:.0f}: more GPUs work"
        )
    again = [PricedStep(model, found.layout, machine).predict() for found in best[:top]]
    near = [steps[k].layout for cost, k in priced if cost < 1.5 * best[0].seconds]
    return again, near


def neighbours(best: Prediction) -> Iterator[tuple[str, Prediction]]:
    """Layouts that differ from it in one choice, and the choice."""
    at = best.layout
    changes: list[dict[str, object]] = [
        {"tp": 2 * at.tp, "dp": at.dp / 2}, {"tp": at.tp / 2, "dp": 2 * at.dp},
        {"pp": 2 * at.pp, "dp": at.dp / 2}, {"pp": at.pp / 2, "dp": 2 * at.dp},
        {"tp": 2 * at.tp, "pp": at.pp / 2}, {"tp": at.tp / 2, "pp": 2 * at.pp},
        {"micro_batch": 2 * at.micro_batch}, {"micro_batch": at.micro_batch / 2},
        {"recompute": "always" if at.recompute == "never" else "never"},
    ]  # fmt: skip
    changes += [{"zero": z} for z in (0, 1, 2, 3) if z != at.zero]
    if at.pp > 1:
        changes += [{"schedule": s, "chunks": c} for s, c in _KINDS if s != at.schedule]
    for change in changes:
        if any(isinstance(v, float) and v % 1 for v in change.values()):
            continue
        whole = {k: int(v) if isinstance(v, float) else v for k, v in change.items()}
        other = replace(at, **whole)  # type: ignore[arg-type]
        tp, pp = other.tp > 1, other.pp > 1
        other = replace(other, sequence_parallel=tp and best.model.seq % other.tp == 0)
        if not pp:
            other = replace(other, schedule="1f1b", chunks=None)
        if other.dp == 1 or (pp and other.zero > 1):
            other = replace(other, zero=min(other.zero, 0 if other.dp == 1 else 1))
        if other == at:
            continue
        try:
            found = PricedStep(best.model, other, best.machine).predict()
        except ValueError:
            continue  # it cannot run
        yield " ".join(f"--{k} {v}" for k, v in whole.items() if v is not None), found


_KINDS = (("1f1b", None), ("zb", None), ("interleaved", 2))


def why(best: Prediction, other: Prediction) -> str:
    """One clause: what is wrong with the other layout."""
    if not other.fits:
        worst = max(other.memory, key=lambda m: m.gib)
        kind = max(worst._asdict().items(), key=lambda item: item[1])
        return (
            f"does not fit: {other.memory_gb:.0f} GiB of {other.usable_gb:.0f}, "
            f"{kind[1] / 2**30:.0f} of them {kind[0]}"
        )
    ratio = other.seconds / best.seconds - 1
    grown = {k: v - best.parts[k] for k, v in other.parts.items()}
    part = max(grown, key=grown.__getitem__)
    reason = REASONS[part].format(share=f"{other.parts[part] / other.seconds:.0%}")
    if part == "tensor" and other.layout.tp > other.machine.gpus_per_node:
        reason = f"tp {other.layout.tp} leaves the node: {reason}"
    if other.layout.recompute != "never" == best.layout.recompute:
        reason = "it computes every forward twice"
    if ratio < 0.0005:
        return f"as fast, with {other.memory_gb - best.memory_gb:+.0f} GiB"
    return f"{ratio:.1%} slower: {reason}"


def what_if(best: Prediction, near: list[Layout]) -> Iterator[str]:
    """Sentences: what would change the choice."""
    machine = best.machine
    for label, change in (
        ("twice the memory", {"memory_gb": 2 * machine.memory_gb}),
        ("links inside a node of twice the speed", {"link_gbs": 2 * machine.link_gbs}),
        ("a network of twice the speed", {"network_gbs": 2 * machine.network_gbs}),
        ("a batch of twice the size", {}),
    ):
        times = 1 if change else 2
        other = replace(machine, **change)  # type: ignore[arg-type]
        steps = [
            PricedStep(best.model, replace(x, batch_size=times * x.batch_size), other) for x in near
        ]
        steps = sorted(
            (s for s in steps if s.least_memory() < other.memory_gb), key=PricedStep.estimate
        )
        fitting: list[Prediction] = []
        own = replace(best.layout, batch_size=times * best.layout.batch_size)
        for step in (PricedStep(best.model, own, other), *(s for s in steps if s.layout != own)):
            found = step.predict(explain=False)
            fitting += [found] * found.fits
            if len(fitting) == 5:
                break
        if not fitting:
            continue
        first = min(fitting, key=lambda p: p.seconds)
        gain = times * best.seconds / first.seconds - 1
        same = options(replace(first.layout, batch_size=best.layout.batch_size)) == options(
            best.layout
        )
        chosen = "the same layout" if same else options(first.layout)
        yield f"With {label}: {chosen}, {gain:+.1%} tokens per second."


def options(layout: Layout) -> str:
    """Those of plan.py."""
    given = {name: getattr(layout, name) for name in NAMES}
    if layout.pp == 1:
        del given["schedule"], given["chunks"]
    if layout.tp == 1:
        del given["sequence_parallel"]
    return " ".join(
        f"--{k}" if v is True else f"--{k} {v}"
        for k, v in given.items()
        if v not in (None, False) and (k, v) not in (("zero", 0), ("recompute", "never"))
    )


def command(model: Model, layout: Layout, machine: Machine, preset: str | None) -> str:
    """That trains with this layout."""
    nodes = -(-layout.gpus // machine.gpus_per_node)
    start = "python project/train.py"
    if nodes > 1:
        start = (
            f"torchrun --nnodes {nodes} --nproc-per-node {machine.gpus_per_node} project/train.py"
        )
    sizes = f"--n_layer {model.layers} --n_embd {model.hidden} --n_head {model.heads}"
    words = f"--model gpt2 {sizes} --vocab_size {model.vocab}"
    if preset and replace(model_of(preset), seq=model.seq) == model:
        words = f"--model {preset}"
    if layout.gpus == 1:
        words = f"single {words}"
    elif layout.pp == layout.tp == 1 and layout.zero != 1:
        words = f"{'fsdp' if layout.zero else 'ddp'} {words} --world_size {layout.dp}"
    else:
        words = f"3d {words} --dp {layout.dp} --pp {layout.pp} --tp {layout.tp}"
    words += f" --zero {layout.zero}" if layout.zero else ""
    words += " --sequence_parallel" if layout.sequence_parallel else ""
    if layout.pp > 1:
        words += f" --schedule {layout.schedule}"
        words += f" --chunks {layout.chunks}" if layout.schedule == "interleaved" else ""
    words += f" --batch_size {layout.batch_size} --num_microbatches {layout.num_microbatches}"
    words += f" --model_max_length {model.seq} --padding max_length --precision {layout.precision}"
    words += f" --recompute {layout.recompute}" if layout.recompute != "never" else ""
    return f"{start} {words}"

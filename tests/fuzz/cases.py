"""A random case: a model, a strategy and its options, all drawn from one number; and how it is run.

Each rank of a world of three builds the case from its seed, runs the strategy, and compares what it
found, by name, with what it computes alone: plain PyTorch on the full batch, in float64. Where
dropout draws, two runs must give the same bits; data parallel ranks draw as one process that takes
their parts in turn, each with its rank's generator; and a pipeline must give the same, up to
rounding, under another cut and schedule. Processes always give the bits of threads.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate, count, pairwise
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from data_parallel.ddp import DistributedDataParallel
from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.gradients import GradientBuckets, average_gradients, average_gradients_flat
from pipeline.messages import PeerError
from pipeline.microbatch import MicroBatches
from pipeline.pipe import Pipe
from pipeline.process import ProcessPipe
from pipeline.schedule import SCHEDULES
from tests.data_parallel.sharded_models import DTYPE, fill, whole
from tests.fuzz.models import OPAQUE, WRAP, Plan, loss_of, part
from tests.pipeline.pipeline_models import cut

WORLD_SIZE = 3
PIPELINES = ("forward", "train_step", "process")
TIMEOUT = 30.0  # seconds
# Relative to the largest value of a gradient or weight. Sums of less than 1e3 terms of like size
# are off by 1e-13; the rest is for what cancels, and for three steps.
TOLERANCE = 1e-9
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    # A gradient that is 0 but for rounding must not become a step of lr: hence eps.
    "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-2, weight_decay=0.0),
}
Found = dict[str, Any]  # losses, gradients, weights and outputs by name
Step = Callable[[int, Any, Tensor, float], Tensor]  # its number, x, target, scale; to the loss


@dataclass(frozen=True)
class Case:
    """What a seed stands for.

    Attributes:
        n: stages, or ranks.
        steps: per step, the examples of the batch and their length.
        hook: on the output of a layer or a partition, or on gradients; and on which.
        may_refuse: words: a ValueError or TypeError that has one is right, and so is a RuntimeError
            that says where a gradient would be lost.
    """

    seed: int
    kind: str
    plan: Plan
    n: int
    sizes: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    optimizer: str
    training: bool
    hook: tuple[str, int]
    options: dict[str, Any] = field(hash=False)
    may_refuse: tuple[str, ...] = ()

    @property
    def draws(self) -> bool:
        """Whether there is dropout."""
        return self.training and self.plan.dropout > 0

    def model(self, device: str = "cpu") -> nn.Sequential:
        model = self.plan.build(device).train(self.training)
        what, k = self.hook
        if what == "layer":
            model[k].register_forward_hook(louder)
        elif what == "gradient":
            for p in [p for p in model.parameters() if p.requires_grad][k::2]:
                # `Pipe.forward` hands it None where nothing depends on p; plain PyTorch nothing.
                p.register_hook(lambda g: None if g is None else g * 0.5)
        return model

    def batch(self, step: int) -> tuple[Any, Tensor]:
        target = torch.linspace(-1, 1, self.steps[step][0], dtype=DTYPE)
        return self.plan.input(step, *self.steps[step]), target

    def shares(self, step: int) -> list[tuple[int, int, int]]:
        """Micro-batches as (start, stop, rank). Where a layer may refuse, every rank gets one."""
        rng, B = Random(f"{self.seed} {step}"), self.steps[step][0]
        m = rng.randint(self.n if self.may_refuse else 1, max(self.n, 6))
        ends = [0, *sorted(rng.sample(range(1, B), min(B, m) - 1)), B]
        owners = [i if self.may_refuse and i < self.n else rng.randrange(self.n) for i in range(B)]
        return [(*ab, owner) for ab, owner in zip(pairwise(ends), owners, strict=False)]

    def __str__(self) -> str:
        model = self.plan.build()
        layers = ", ".join(" ".join(repr(layer).split()) for layer in model)
        frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
        settings = {
            "n": self.n, "sizes": self.sizes, "steps": self.steps, **self.options, "frozen": frozen,
            "input": self.plan.inputs, "optimizer": self.optimizer, "training": self.training,
            "hook": self.hook,
        }  # fmt: skip
        return f"{self.kind}: [{layers}]; " + ", ".join(f"{k}={v}" for k, v in settings.items())


def kind_of(seed: int) -> str:
    """Kinds take turns."""
    return list(KINDS)[seed % len(KINDS)]


@cache
def draw(seed: int) -> Case:
    """The case of that number: the first drawn from it that plain PyTorch can train."""
    for attempt in count():
        case = _draw(seed, f"{seed}/{attempt}")
        try:
            found = plain(case)
        except RuntimeError:  # a layer writes to what another needs; nothing has a gradient
            continue
        if all(found[f"loss {k}"].isfinite() for k in range(len(case.steps))):
            return case
    raise AssertionError


def _draw(seed: int, attempt: str) -> Case:
    kind, rng = kind_of(seed), Random(attempt)
    containers = [tuple(WRAP), tuple(k for k in WRAP if k not in OPAQUE), (), ()]
    plan = Plan(
        f"model of {attempt}", rng.choice(("flat", "sequence", "ids", "image")),
        rng.choice((*WRAP, *[None] * 18)), rng.choice((0.0, 0.0, 0.3)), rng.choice(containers),
        rng.choice(("sum", "detached", *[None] * 18)),
    )  # fmt: skip
    L = len(plan.build("meta"))
    n = rng.randint(1, min(L, 3 if kind not in ("forward", "train_step") else 4))
    hooks = {"none": 1, "layer": L} | ({"gradient": 2, "partition": n} if kind in PIPELINES else {})
    hook = rng.choice(("none", "none", "none", *hooks))
    m = rng.choice((1, 2, 3, 4, 5, 12))
    flags = {name: rng.random() < 0.6 for name in FLAGS.get(kind, ("share_memory",))}
    own: dict[str, dict[str, Any]] = {
        "forward": {"split_size": m},
        "train_step": {"schedule": rng.choice(tuple(SCHEDULES)), "m": m},
        "process": {"schedule": rng.choice(tuple(SCHEDULES)), "m": m},
        "average": {"way": rng.choice(("per_parameter", "flat", "buckets"))},
    }
    options = own.get(kind, {}) | flags
    allowed = () if kind in ("average", "ddp") else tuple(_refusals(kind, plan, hook))
    least = n if allowed else 1  # examples: see Case.shares
    steps = tuple((max(least, rng.randint(1, 9)), rng.choice((1, 3, 5))) for _ in range(3))
    return Case(
        seed, kind, plan, n, _sizes(rng, L, n), steps, rng.choice(tuple(OPTIMIZERS)),
        rng.random() < 0.8, (hook, rng.randrange(hooks[hook])), options, allowed,
    )  # fmt: skip


def _refusals(kind: str, plan: Plan, hook: str) -> list[str]:
    """Words of the errors that are right: see Case.may_refuse."""
    layers = plan.build("meta")
    kinds = {plan.inputs, *(getattr(layer, "kind", None) for layer in layers)}
    words = [word for word in OPAQUE if word in kinds]
    words += ["number per micro-batch"] if plan.number and kind == "forward" else []
    words += ["hook"] if hook in ("layer", "partition") and kind in PIPELINES else []
    shared = any(getattr(layer, "what", "") in ("view", "detached") for layer in layers)
    return words + ["changes a tensor in place that shares memory"] * shared


FLAGS = {
    "forward": ("x wants a gradient",),
    "train_step": ("cut already",),
    "process": ("cut already", "share_memory", "early_gradients", "by_layer"),
    "average": ("share_memory", "small buckets"),
    "ddp": ("share_memory", "small buckets"),
    **dict.fromkeys(("fsdp1", "fsdp2", "fsdp3"), ("share_memory", "meta", "count")),
}  # fmt: skip


def _sizes(rng: Random, layers: int, n: int) -> tuple[int, ...]:
    ends = [0, *sorted(rng.sample(range(1, layers), n - 1)), layers]
    return tuple(b - a for a, b in pairwise(ends))


def louder(_: nn.Module, __: Any, output: Any) -> Any:
    """A forward hook."""
    return output * 1.25 if isinstance(output, Tensor) else output


# The strategies


def plain(case: Case) -> Found:
    """One process, the full batch; with dropout over data parallel ranks, their parts in turn."""
    model = run = case.model()
    if case.hook[0] == "partition":
        ends = [0, *accumulate(case.sizes)]
        run = nn.Sequential(*(nn.Sequential(*list(model)[a:b]) for a, b in pairwise(ends)))
        run[case.hook[1]].register_forward_hook(louder)
    states = [torch.Generator().manual_seed(case.seed + r).get_state() for r in range(case.n)]

    def step(k: int, x: Any, target: Tensor, scale: float) -> Tensor:
        if not case.draws or case.kind in PIPELINES:
            return _backward(run(x), target, scale)
        total = torch.zeros((), dtype=DTYPE)
        for a, b, owner in case.shares(k):
            torch.set_rng_state(states[owner])
            total += _backward(run(part(x, a, b)), target[a:b], scale)
            states[owner] = torch.get_rng_state()
        return total

    return _train(case, dict(model.named_parameters()), step) | _evaluated(case, model, run)


def _backward(output: Any, target: Tensor, scale: float) -> Tensor:
    loss = loss_of(output, target) * scale
    loss.backward()
    return loss.detach()


def _train(case: Case, parameters: Mapping[str, nn.Parameter], step: Step) -> Found:
    """Some optimizer steps; ``step`` does forward and backward."""
    found: Found = {}
    optimizer = OPTIMIZERS[case.optimizer](list(parameters.values()) or [torch.zeros(1)])
    for k, (B, _) in enumerate(case.steps):
        x, target = case.batch(k)
        leaf = isinstance(x, Tensor) and x.is_floating_point()
        leaf = leaf and case.options.get("x wants a gradient", False)
        given = x.requires_grad_().clone() if leaf else x  # a layer may write to its input
        found[f"loss {k}"] = step(k, given, target, 1 / B)
        found |= {f"gradient {k} of x": x.grad} if leaf else {}
        for name, p in parameters.items():
            found[f"gradient {k} of {name}"] = None if p.grad is None else p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"weight {name}": p.detach().clone() for name, p in parameters.items()}


def _evaluated(case: Case, model: nn.Module, run: Callable[[Any], Any]) -> Found:
    """The output in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return _tensors(run(case.batch(0)[0]))


def _tensors(value: Any) -> Found:
    return {f"output {k}": t for k, t in enumerate(pytree.tree_leaves(value)) if t is not None}


def _threads(case: Case, *_: Any, **changed: Any) -> Found:
    """`Pipe.forward` and a plain backward, or `Pipe.train_step`. Stages may share a worker."""
    case = replace(case, **changed)
    model, workers = case.model(), Random(case.seed).choice((2, 5))
    devices = [f"cpu:{s % workers}" for s in range(len(case.sizes))]

    def step(k: int, x: Any, target: Tensor, scale: float) -> Tensor:
        if case.kind == "forward":
            return _backward(pipe(x), target, scale)
        return pipe.train_step(*_given(case, k, x, target), scale=scale)

    set_threads = torch.set_num_threads
    with (  # a process computes on one core, and so do workers: the order of sums depends on it
        patch.object(torch, "set_num_threads", lambda _: set_threads(1)),
        Pipe(cut(model, case.sizes, devices), case.options.get("split_size", 2)) as pipe,
    ):
        if case.hook[0] == "partition":
            pipe.partitions[case.hook[1]].register_forward_hook(louder)
        found = _train(case, dict(model.named_parameters()), step)
        return found | (_evaluated(case, model, pipe) if case.plan.number is None else {})


def _given(case: Case, step: int, x: Any, target: Tensor) -> tuple[Any, Any, Any, str, int]:
    """The arguments of a train_step."""
    options = loss_of, case.options["schedule"], case.options["m"]
    if not case.options["cut already"]:
        return x, target, *options
    shares = case.shares(step)
    xs = MicroBatches(part(x, a, b) for a, b, _ in shares)
    return xs, MicroBatches(target[a:b] for a, b, _ in shares), *options


def _process(case: Case, rank: int, group: Any) -> Found:
    """`ProcessPipe`."""
    options = {name: case.options[name] for name in FLAGS["process"][1:]}
    with ProcessPipe(case.model(), case.sizes, group=group, timeout=TIMEOUT, **options) as pipe:
        if case.hook == ("partition", rank):
            pipe.module.register_forward_hook(louder)

        def step(k: int, x: Any, target: Tensor, scale: float) -> Tensor:
            return pipe.train_step(*_given(case, k, x, target), scale=scale)

        found = _train(case, pipe.named_parameters(), step)
        if case.plan.number is not None:
            return found
        return found | _tensors(pipe.eval(case.batch(0)[0], num_microbatches=case.options["m"])[1])


def _data_parallel(case: Case, rank: int, group: Any) -> Found:
    """`average_gradients` and its relatives, and DistributedDataParallel."""
    run: nn.Module
    model = run = case.model()
    small = 100 if case.options["small buckets"] else 4 << 20
    later: Callable[[], Any] = contextlib.nullcontext
    average: Callable[[], None]
    if case.kind == "ddp":
        _empty(model if rank > 0 else nn.Module())
        run = ddp = DistributedDataParallel(
            model, group, small, share_memory=case.options["share_memory"]
        )
        average, later = ddp.average_gradients, ddp.no_sync
    elif case.options["way"] == "buckets":
        buckets = GradientBuckets(model, group, small, share_memory=case.options["share_memory"])
        average, later = buckets.finish, buckets.no_sync
    else:
        flat = case.options["way"] == "flat"
        average = partial(average_gradients_flat if flat else average_gradients, model, group)

    def step(k: int, x: Any, target: Tensor, scale: float) -> Tensor:
        mine = [(a, b) for a, b, owner in case.shares(k) if owner == rank]
        total = torch.zeros((), dtype=DTYPE)
        for i, (a, b) in enumerate(mine, 1):
            with later() if i < len(mine) else contextlib.nullcontext():
                total += _backward(run(part(x, a, b)), target[a:b], scale * case.n)
        average()
        dist.all_reduce(total, group=group)
        return total / case.n

    return _train(case, dict(model.named_parameters()), step) | _evaluated(case, model, run)


def _empty(model: nn.Module) -> None:
    """The values of rank 0 count."""
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.zero_()


def _fsdp(case: Case, rank: int, group: Any) -> Found:
    """FullyShardedDataParallel. Rank 0 has the whole gradients and weights."""
    meta = case.options["meta"]
    model = case.model("meta" if meta else "cpu")
    _empty(model if rank > 0 and not meta else nn.Module())
    fsdp = FullyShardedDataParallel(
        model, OPTIMIZERS[case.optimizer], init=fill if meta else None, zero=int(case.kind[-1]),
        group=group, share_memory=case.options["share_memory"],
    )  # fmt: skip
    found: Found = {}
    for k, (B, _) in enumerate(case.steps):
        x, target = case.batch(k)
        owners = [owner for *_, owner in case.shares(k)]
        mine = [(a, b) for a, b, owner in case.shares(k) if owner == rank]
        most = max(map(owners.count, owners)) if case.options["count"] else None
        xs, targets = [part(x, a, b) for a, b in mine], [target[a:b] for a, b in mine]
        found[f"loss {k}"] = fsdp.train_step(xs, targets, loss_of, 1 / B, most).to(DTYPE)
        dist.all_reduce(found[f"loss {k}"], group=group)
        found |= {f"gradient {k} of {n}": t for n, t in whole(fsdp, "gradients").items()}
        fsdp.optimizer_step()
    found |= {f"weight {name}": t for name, t in whole(fsdp, "parameters").items()}
    return found | _evaluated(case, model, fsdp)


KINDS: dict[str, Callable[..., Found]] = {
    "forward": _threads, "train_step": _threads, "process": _process,
    "average": _data_parallel, "ddp": _data_parallel,
    "fsdp1": _fsdp, "fsdp2": _fsdp, "fsdp3": _fsdp,
}  # fmt: skip


# One rank's part in a case


class Verdict(NamedTuple):
    """What a rank says: by name, the difference relative to the largest value (infinity: one is
    missing, or bits differ); the names that there should be; or the error, with its traceback, and
    whether it is one of those that the case allows."""

    differences: dict[str, float]
    expected: list[str]
    error: str = ""
    trace: str = ""
    allowed: bool = False


def run(rank: int, _: int, seed: int) -> Verdict | None:
    """The verdict of this rank of three; None if the case needs fewer."""
    groups, case = _groups(), draw(seed)
    n = 1 if case.kind in ("forward", "train_step") else case.n
    if rank < WORLD_SIZE - n:  # a group's ranks are not those of the world
        return None
    try:
        return _compare(case, rank - (WORLD_SIZE - n), groups[n])
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        named = isinstance(error, ValueError | TypeError) or "gradient would be lost" in text
        allowed = named and any(word in text for word in case.may_refuse)
        allowed = allowed or isinstance(error, PeerError)  # the peer knows whether it is
        return Verdict({}, [], text, traceback.format_exc(), allowed)


def _compare(case: Case, rank: int, group: Any) -> Verdict:
    pipelined = case.kind in PIPELINES

    def again(strategy: Callable[..., Found], **changed: Any) -> Found:
        torch.manual_seed(case.seed + (0 if pipelined else rank))
        return strategy(case, rank, group, **changed)

    strategy, differences = KINDS[case.kind], dict[str, float]()
    found = again(strategy)
    if case.draws:
        differences |= _bits("twice", found, again(strategy))
    if case.kind == "process":
        trained = {name: v for name, v in found.items() if not name.startswith("output")}
        differences |= _bits("threads", trained, again(_threads))
    if not (case.draws and pipelined):
        expected = plain(case)
    elif case.kind == "process" or case.hook[0] == "partition":
        expected = again(_threads)
    else:
        rng = Random(case.seed)
        options = case.options | {"schedule": rng.choice(tuple(SCHEDULES))}
        sizes = _sizes(rng, sum(case.sizes), case.n)
        expected = again(_threads, sizes=sizes, options=options)
    if pipelined and case.plan.number is not None:  # no output of a batch
        expected = {name: v for name, v in expected.items() if not name.startswith("output")}
    for name, value in found.items():
        differences[name] = _difference(value, expected.get(name), case.kind)
    return Verdict(differences, [name for name, v in expected.items() if v is not None])


def _bits(what: str, found: Found, expected: Found) -> dict[str, float]:
    """Infinity where they differ."""
    return {
        f"{name} ({what})": 0.0 if v is (e := expected[name]) or torch.equal(v, e) else math.inf
        for name, v in found.items()
    }


def _difference(value: Tensor | None, expected: Tensor | None, kind: str) -> float:
    if expected is None and value is not None and kind.startswith("fsdp"):
        expected = torch.zeros_like(value)  # a weight nobody uses has a gradient of zeros there
    if value is None or expected is None or value.shape != expected.shape:
        return 0.0 if value is expected else math.inf
    worst = (value.detach() - expected).abs().max().item()
    return math.inf if math.isnan(worst) else worst / max(expected.abs().max().item(), 1e-3)


@cache
def _groups() -> dict[int, Any]:
    """The last n ranks of the world, made once."""
    limit, ranks = datetime.timedelta(seconds=TIMEOUT), range(WORLD_SIZE)
    parts = {n: dist.new_group(ranks[-n:], limit) for n in ranks[1:]}
    return {**parts, WORLD_SIZE: None}

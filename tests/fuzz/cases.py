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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count, pairwise
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.ddp import DistributedDataParallel
from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.gradients import average_gradients, average_gradients_flat
from pipeline.catalogue import ONE_EACH
from pipeline.pipe import Pipe
from pipeline.process import ProcessPipe
from tests.data_parallel.sharded_models import DTYPE, fill, whole
from tests.fuzz.models import Plan, loss_of
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
Found = dict[str, Tensor | None]  # losses, gradients, weights and outputs by name
Step = Callable[[int, Tensor, Tensor, float], Tensor]  # its number, x, target, scale; to the loss


@dataclass(frozen=True)
class Case:
    """What a seed stands for.

    Attributes:
        n: stages, or ranks.
        sizes: layers per stage.
        steps: per step, the examples of the batch and their length.
    """

    seed: int
    kind: str
    plan: Plan
    n: int
    sizes: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    optimizer: str
    training: bool
    options: dict[str, Any] = field(hash=False)

    @property
    def draws(self) -> bool:
        """Whether there is dropout."""
        return self.training and self.plan.dropout > 0

    def model(self, device: str = "cpu") -> nn.Sequential:
        return self.plan.build(device).train(self.training)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        target = torch.linspace(-1, 1, self.steps[step][0], dtype=DTYPE)
        return self.plan.input(step, *self.steps[step]), target

    def shares(self, step: int) -> list[tuple[int, int, int]]:
        """Micro-batches as (start, stop, rank)."""
        rng, B = Random(f"{self.seed} {step}"), self.steps[step][0]
        m = rng.randint(1, max(self.n, 6))
        ends = [0, *sorted(rng.sample(range(1, B), min(B, m) - 1)), B]
        return [(a, b, rng.randrange(self.n)) for a, b in pairwise(ends)]


def kind_of(seed: int) -> str:
    """Kinds take turns."""
    return list(KINDS)[seed % len(KINDS)]


@cache
def draw(seed: int) -> Case:
    """The case of that number: the first drawn from it that plain PyTorch can train."""
    for attempt in count():
        case = _draw(seed, Random(f"{seed}/{attempt}"))
        try:
            found = plain(case)
        except RuntimeError:  # a layer writes to what another needs; nothing has a gradient
            continue
        losses = [found[f"loss {k}"] for k in range(len(case.steps))]
        if all(loss is not None and loss.isfinite() for loss in losses):
            return case
    raise AssertionError


def _draw(seed: int, rng: Random) -> Case:
    kind, domain = kind_of(seed), rng.choice(("flat", "sequence", "ids", "image"))
    plan = Plan(f"model {rng.random()}", domain, rng.choice((0.0, 0.0, 0.3)))
    num_layers = len(plan.build("meta"))
    n = rng.randint(1, min(num_layers, 4 if kind in ("forward", "train_step") else 3))
    options = {
        "m": rng.choice((1, 2, 3, 4, 5, 12)),
        "schedule": rng.choice(ONE_EACH),
        "flat": rng.random() < 0.5,
        "small buckets": rng.random() < 0.5,
        "share_memory": rng.random() < 0.6,
        "meta": rng.random() < 0.6,
    }
    steps = tuple((rng.randint(1, 9), rng.choice((1, 3, 5))) for _ in range(3))
    return Case(
        seed, kind, plan, n, _sizes(rng, num_layers, n), steps, rng.choice(tuple(OPTIMIZERS)),
        rng.random() < 0.8, options,
    )  # fmt: skip


def _sizes(rng: Random, num_layers: int, n: int) -> tuple[int, ...]:
    ends = [0, *sorted(rng.sample(range(1, num_layers), n - 1)), num_layers]
    return tuple(b - a for a, b in pairwise(ends))


# The strategies


def plain(case: Case) -> Found:
    """One process, the full batch; with dropout over data parallel ranks, their parts in turn."""
    model = case.model()
    states = [torch.Generator().manual_seed(case.seed + r).get_state() for r in range(case.n)]

    def step(k: int, x: Tensor, target: Tensor, scale: float) -> Tensor:
        if not case.draws or case.kind in PIPELINES:
            return _backward(model(x), target, scale)
        total = torch.zeros((), dtype=DTYPE)
        for a, b, owner in case.shares(k):
            torch.set_rng_state(states[owner])
            total += _backward(model(x[a:b].clone()), target[a:b], scale)
            states[owner] = torch.get_rng_state()
        return total

    return _train(case, dict(model.named_parameters()), step) | _evaluated(case, model, model)


def _backward(output: Tensor, target: Tensor, scale: float) -> Tensor:
    loss = loss_of(output, target) * scale
    loss.backward()
    return loss.detach()


def _train(case: Case, parameters: Mapping[str, nn.Parameter], step: Step) -> Found:
    """Some optimizer steps; ``step`` does forward and backward."""
    found: Found = {}
    optimizer = OPTIMIZERS[case.optimizer](list(parameters.values()) or [torch.zeros(1)])
    for k, (B, _) in enumerate(case.steps):
        found[f"loss {k}"] = step(k, *case.batch(k), 1 / B)
        for name, p in parameters.items():
            found[f"gradient {k} of {name}"] = None if p.grad is None else p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"weight {name}": p.detach().clone() for name, p in parameters.items()}


def _evaluated(case: Case, model: nn.Module, run: Callable[[Any], Any]) -> Found:
    """The output in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return {"output": run(case.batch(0)[0])}


def _threads(case: Case, *_: Any, **changed: Any) -> Found:
    """`Pipe.forward` and a plain backward, or `Pipe.train_step`. Stages may share a worker."""
    case = replace(case, **changed)
    model, workers = case.model(), Random(case.seed).choice((2, 5))
    devices = [f"cpu:{s % workers}" for s in range(len(case.sizes))]

    def step(_: int, x: Tensor, target: Tensor, scale: float) -> Tensor:
        if case.kind == "forward":
            return _backward(pipe(x), target, scale)
        schedule, m = case.options["schedule"], case.options["m"]
        return pipe.train_step(x, target, loss_of, schedule, m, scale=scale)

    set_threads = torch.set_num_threads
    with (  # a process computes on one core, and so do workers: the order of sums depends on it
        patch.object(torch, "set_num_threads", lambda _: set_threads(1)),
        Pipe(cut(model, case.sizes, devices), case.options["m"]) as pipe,
    ):
        found = _train(case, dict(model.named_parameters()), step)
        return found | _evaluated(case, model, pipe)


def _process(case: Case, rank: int, group: Any) -> Found:
    """`ProcessPipe`."""
    del rank
    share_memory, m = case.options["share_memory"], case.options["m"]
    with ProcessPipe(
        case.model(), case.sizes, group=group, timeout=TIMEOUT, share_memory=share_memory
    ) as pipe:

        def step(_: int, x: Tensor, target: Tensor, scale: float) -> Tensor:
            return pipe.train_step(x, target, loss_of, case.options["schedule"], m, scale=scale)

        found = _train(case, pipe.named_parameters(), step)
        output = pipe.eval(case.batch(0)[0])
        dist.barrier(group)  # all have received what was sent: a pipe may be closed
        return found if output is None else found | {"output": output}


def _data_parallel(case: Case, rank: int, group: Any) -> Found:
    """`average_gradients`, at once or per parameter, and DistributedDataParallel."""
    run: nn.Module
    model = run = case.model()
    later: Callable[[], Any] = contextlib.nullcontext
    average: Callable[[], None]
    if case.kind == "ddp":
        _only_on_first(rank, model)
        nbytes, share_memory = 100, case.options["share_memory"]
        if not case.options["small buckets"]:
            nbytes = 4 << 20
        run = ddp = DistributedDataParallel(model, group, nbytes, share_memory=share_memory)
        average, later = ddp.average_gradients, ddp.no_sync
    else:
        flat = case.options["flat"]
        average = partial(average_gradients_flat if flat else average_gradients, model, group)

    def step(k: int, x: Tensor, target: Tensor, scale: float) -> Tensor:
        mine = [(a, b) for a, b, owner in case.shares(k) if owner == rank]
        total = torch.zeros((), dtype=DTYPE)
        for i, (a, b) in enumerate(mine, 1):
            with later() if i < len(mine) else contextlib.nullcontext():
                total += _backward(run(x[a:b].clone()), target[a:b], scale * case.n)
        average()
        dist.all_reduce(total, group=group)
        return total / case.n

    return _train(case, dict(model.named_parameters()), step) | _evaluated(case, model, run)


def _only_on_first(rank: int, model: nn.Module) -> None:
    """The values of rank 0 count."""
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.mul_(rank == 0)


def _fsdp(case: Case, rank: int, group: Any) -> Found:
    """FullyShardedDataParallel. Every rank puts together the whole gradients and weights."""
    meta = case.options["meta"]
    model = case.model("meta" if meta else "cpu")
    if not meta:
        _only_on_first(rank, model)
    fsdp = FullyShardedDataParallel(
        model, OPTIMIZERS[case.optimizer], init=fill if meta else None, zero=int(case.kind[-1]),
        group=group, share_memory=case.options["share_memory"],
    )  # fmt: skip
    found: Found = {}
    for k, (B, _) in enumerate(case.steps):
        x, target = case.batch(k)
        mine = [slice(a, b) for a, b, owner in case.shares(k) if owner == rank]
        xs, targets = [x[at].clone() for at in mine], [target[at] for at in mine]
        found[f"loss {k}"] = loss = fsdp.train_step(xs, targets, loss_of, 1 / B).to(DTYPE)
        dist.all_reduce(loss, group=group)
        found |= {f"gradient {k} of {n}": t for n, t in whole(fsdp, "gradients").items()}
        fsdp.optimizer_step()
    found |= {f"weight {name}": t for name, t in whole(fsdp, "parameters").items()}
    return found | _evaluated(case, model, fsdp.forward)


KINDS: dict[str, Callable[..., Found]] = {
    "forward": _threads, "train_step": _threads, "process": _process,
    "average": _data_parallel, "ddp": _data_parallel,
    "fsdp1": _fsdp, "fsdp2": _fsdp, "fsdp3": _fsdp,
}  # fmt: skip


# One rank's part in a case


class Verdict(NamedTuple):
    """What a rank says: by name, the difference relative to the largest value (infinity: one is
    missing, or bits differ); and the names that there should be."""

    differences: dict[str, float]
    expected: list[str]


def run(rank: int, _: int, seed: int) -> Verdict | None:
    """The verdict of this rank of three; None if the case needs fewer."""
    groups, case = _groups(), draw(seed)
    n = 1 if case.kind in ("forward", "train_step") else case.n
    first = WORLD_SIZE - n  # a group's ranks are not those of the world
    return None if rank < first else _compare(case, rank - first, groups[n])


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
        trained = {name: v for name, v in found.items() if name != "output"}
        differences |= _bits("threads", trained, again(_threads))
    if not (case.draws and pipelined):
        expected = plain(case)
    else:
        rng = Random(case.seed)
        options = case.options | {"schedule": rng.choice(ONE_EACH)}
        sizes = case.sizes
        if case.kind != "process":
            sizes = _sizes(rng, sum(case.sizes), case.n)
        expected = again(_threads, sizes=sizes, options=options)
    for name, value in found.items():
        differences[name] = _difference(value, expected.get(name), case.kind)
    return Verdict(differences, [name for name, v in expected.items() if v is not None])


def _bits(what: str, found: Found, expected: Found) -> dict[str, float]:
    """Infinity where they differ."""
    differences = {}
    for name, value in found.items():
        other = expected[name]
        same = value is other or (
            value is not None and other is not None and torch.equal(value, other)
        )
        differences[f"{name} ({what})"] = 0.0 if same else math.inf
    return differences


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

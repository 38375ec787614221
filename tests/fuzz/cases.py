"""A random case: a model, a strategy and its options, all drawn from one number; and how it is run.

Each rank of a world of three builds the case from its seed and runs the strategy. What the ranks
have found is compared, by name, with plain PyTorch on one process: the full batch, in float64.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count, pairwise
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.gradients import DistributedDataParallel
from pipeline.pipe import Pipe
from pipeline.processes.process import ProcessPipe
from tests.data_parallel.sharded_models import DTYPE, fill, whole
from tests.fuzz.models import DOMAINS, build, loss_of, make_input
from tests.pipeline.pipeline_models import cut
from tests.pipeline.schedules.drawn import ONE_EACH
from tests.ranks import nan_in_new_memory, sharing

WORLD_SIZE = 3
ON_ONE = ("forward", "train_step")  # kinds that need one process
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
        name: from which the model is drawn.
        n: stages, or ranks.
        sizes: layers per stage.
        steps: per step, the examples of the batch and their length.
    """

    seed: int
    kind: str
    name: str
    domain: str
    n: int
    sizes: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    options: dict[str, Any] = field(hash=False)

    def model(self, device: str = "cpu") -> nn.Sequential:
        return build(self.name, self.domain, device)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        size, length = self.steps[step]
        target = torch.linspace(-1, 1, size, dtype=DTYPE)
        return make_input(self.domain, step, size, length), target

    def shares(self, step: int, rank: int) -> list[slice]:
        """This rank's micro-batches."""
        rng, B = Random(f"{self.seed} {step}"), self.steps[step][0]
        m = rng.randint(1, max(self.n, 6))
        ends = [0, *sorted(rng.sample(range(1, B), min(B, m) - 1)), B]
        return [slice(a, b) for a, b in pairwise(ends) if rng.randrange(self.n) == rank]


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
        losses = [found[f"loss {k}"] for k in range(len(case.steps))]
        if all(loss is not None and loss.isfinite() for loss in losses):
            return case
    raise AssertionError


def _draw(seed: int, name: str) -> Case:
    rng, kind = Random(name), kind_of(seed)
    domain = rng.choice(DOMAINS)
    num_layers = len(build(name, domain, "meta"))
    n = rng.randint(1, 4) if kind in ON_ONE else WORLD_SIZE  # there are four layers and more
    ends = [0, *sorted(rng.sample(range(1, num_layers), n - 1)), num_layers]
    options = {
        "m": rng.choice((1, 2, 3, 4, 5, 12)),
        "workers": rng.choice((2, 5)),  # stages may share one
        "schedule": rng.choice(ONE_EACH),
        "optimizer": rng.choice(tuple(OPTIMIZERS)),
        "bucket_bytes": rng.choice((100, 4 << 20)),
        "share_memory": rng.random() < 0.6,
        "meta": rng.random() < 0.6,
    }
    steps = tuple((rng.randint(1, 9), rng.choice((1, 3, 5))) for _ in range(3))
    sizes = tuple(b - a for a, b in pairwise(ends))
    return Case(seed, kind, name, domain, n, sizes, steps, options)


# The strategies


def plain(case: Case) -> Found:
    """One process, the full batch."""
    model = case.model()

    def step(_: int, x: Tensor, target: Tensor, scale: float) -> Tensor:
        return _backward(model(x), target, scale)

    return _train(case, dict(model.named_parameters()), step) | _evaluated(case, model, model)


def _backward(output: Tensor, target: Tensor, scale: float) -> Tensor:
    loss = loss_of(output, target) * scale
    loss.backward()
    return loss.detach()


def _train(case: Case, parameters: Mapping[str, nn.Parameter], step: Step) -> Found:
    """Some optimizer steps; `step` does forward and backward."""
    found: Found = {}
    make = OPTIMIZERS[case.options["optimizer"]]
    optimizer = make(list(parameters.values()) or [torch.zeros(1)])
    for k, (B, _) in enumerate(case.steps):
        found[f"loss {k}"] = step(k, *case.batch(k), 1 / B)
        for name, p in parameters.items():
            gradient = None if p.grad is None else p.grad.to_dense().clone()  # may be sparse
            found[f"gradient {k} of {name}"] = gradient
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"weight {name}": p.detach().clone() for name, p in parameters.items()}


def _evaluated(case: Case, model: nn.Module, run: Callable[[Any], Any]) -> Found:
    """The output in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return {"output": run(case.batch(0)[0])}


def _threads(case: Case, _: int) -> Found:
    """`Pipe.forward` and a plain backward, or `Pipe.train_step`."""
    model, m = case.model(), case.options["m"]
    devices = [f"cpu:{s % case.options['workers']}" for s in range(case.n)]
    with Pipe(cut(model, case.sizes, devices), m) as pipe:

        def step(_: int, x: Tensor, target: Tensor, scale: float) -> Tensor:
            if case.kind == "forward":
                return _backward(pipe(x), target, scale)
            return pipe.train_step(x, target, loss_of, case.options["schedule"], m, scale=scale)

        found = _train(case, dict(model.named_parameters()), step)
        return found | _evaluated(case, model, pipe)


def _process(case: Case, _: int) -> Found:
    """`ProcessPipe`."""
    m = case.options["m"]
    with ProcessPipe(case.model(), case.sizes, timeout=30.0) as pipe:

        def step(_: int, x: Tensor, target: Tensor, scale: float) -> Tensor:
            loss = pipe.train_step(x, target, loss_of, case.options["schedule"], m, scale=scale)
            dist.all_reduce(loss)  # the last stage has it
            return loss

        found = _train(case, pipe.named_parameters(), step)
        pipe.module.eval()
        output = pipe.forward(case.batch(0)[0])
        dist.barrier()  # all have received what was sent: a pipe may be closed
        return found if output is None else found | {"output": output}


def _ddp(case: Case, rank: int) -> Found:
    """DistributedDataParallel."""
    model = case.model()
    _only_on_first(rank, model)
    with sharing(case.options["share_memory"]):
        ddp = DistributedDataParallel(model, None, case.options["bucket_bytes"])

    def step(k: int, x: Tensor, target: Tensor, scale: float) -> Tensor:
        mine, total = case.shares(k, rank), torch.zeros((), dtype=DTYPE)
        for i, part in enumerate(mine, 1):
            with ddp.no_sync() if i < len(mine) else contextlib.nullcontext():
                total += _backward(ddp(x[part].clone()), target[part], scale * case.n)
        ddp.average_gradients()
        dist.all_reduce(total)
        return total / case.n

    return _train(case, dict(model.named_parameters()), step) | _evaluated(case, model, ddp)


def _only_on_first(rank: int, model: nn.Module) -> None:
    """The values of rank 0 count."""
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.mul_(rank == 0)


def _fsdp(case: Case, rank: int) -> Found:
    """FullyShardedDataParallel. Every rank puts together the whole gradients and weights."""
    meta = case.options["meta"]
    model = case.model("meta" if meta else "cpu")
    if not meta:
        _only_on_first(rank, model)
    with sharing(case.options["share_memory"]):
        fsdp = FullyShardedDataParallel(
            model,
            OPTIMIZERS[case.options["optimizer"]],
            init=fill if meta else None,
            zero=int(case.kind[-1]),
        )
    found: Found = {}
    for k, (B, _) in enumerate(case.steps):
        (x, target), mine = case.batch(k), case.shares(k, rank)
        xs, targets = [x[part].clone() for part in mine], [target[part] for part in mine]
        found[f"loss {k}"] = loss = fsdp.train_step(xs, targets, loss_of, 1 / B).to(DTYPE)
        dist.all_reduce(loss)
        found |= {f"gradient {k} of {n}": t for n, t in whole(fsdp, "gradients").items()}
        fsdp.optimizer_step()
    found |= {f"weight {name}": t for name, t in whole(fsdp, "parameters").items()}
    return found | _evaluated(case, model, fsdp.forward)


KINDS: dict[str, Callable[[Case, int], Found]] = {
    "forward": _threads, "train_step": _threads, "process": _process, "ddp": _ddp,
    "fsdp2": _fsdp, "fsdp3": _fsdp,
}  # fmt: skip


# A case on its ranks


def run(rank: int, _: int, seed: int) -> bytes:
    """What this rank of three has found; nothing if the case needs one process. As bytes: torch
    would share each tensor as a file."""
    case = draw(seed)
    idle = rank > 0 and case.kind in ON_ONE
    with nan_in_new_memory():
        return pickle.dumps({} if idle else KINDS[case.kind](case, rank))


def wrong(seed: int, by_rank: Sequence[bytes]) -> list[str]:
    """What differs from plain training; what no rank has found is infinitely far off."""
    expected = plain(draw(seed))
    # Of an empty weight no rank of fsdp holds a part.
    nothing = [name for name, v in expected.items() if v is None or not v.numel()]
    worst = dict.fromkeys(expected, math.inf) | dict.fromkeys(nothing, 0.0)
    found = [item for mine in by_rank for item in pickle.loads(mine).items()]
    worst |= dict.fromkeys((name for name, _ in found), 0.0)
    for name, value in found:
        difference = _difference(value, expected.get(name), kind_of(seed))
        worst[name] = max(worst[name], difference)
    return [f"{name}: {d:.1e}" for name, d in worst.items() if d > TOLERANCE]


def _difference(value: Tensor | None, expected: Tensor | None, kind: str) -> float:
    """The largest, relative to the largest value."""
    if expected is None and value is not None and kind.startswith("fsdp"):
        expected = torch.zeros_like(value)  # a weight nobody uses has a gradient of zeros there
    if value is None or expected is None or value.shape != expected.shape:
        return 0.0 if value is expected else math.inf
    if not value.numel():
        return 0.0
    worst = (value.detach() - expected).abs().max().item()
    return math.inf if math.isnan(worst) else worst / max(expected.abs().max().item(), 1e-3)

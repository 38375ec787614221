"""What builds each strategy for verify.py, of what it is `Given`: functions that return functions.

Where a program trains that way, its own parts are taken: the loss, the averaging, the optimizers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from data_parallel.ddp import DistributedDataParallel
from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.gradients import GradientBuckets
from pipeline.microbatch import MicroBatches
from pipeline.model import place
from pipeline.pipe import Pipe
from pipeline.process import ProcessPipe
from project.problems import Loader, Problem, Sentences
from project.run_data_parallel import make_backward, make_gradient_sync, make_optimizer
from project.run_pipeline import BlocksOnly, WholeModel
from project.session import Session
from project.trajectory import Tensors, copies
from training.data import Encoded, Step
from training.launch import World
from training.optimization import Optimizers, Recipe

LEARNING_RATE = 1e-3
# AdamW divides by |gradient| + eps. With the usual 1e-8 a gradient that is zero but for rounding
# (of the keys' biases, on which attention does not depend) moves its weight by a learning rate in
# a direction of chance; with 1e-4 rounding moves weights by as little as gradients.
EPS = 1e-4
BUCKET = 8 << 10  # bytes: several buckets even of these models


@dataclass(frozen=True)
class Given:
    """What a strategy starts from, on one rank."""

    problem: Problem
    world: World
    dtype: torch.dtype
    initial: Tensors  # weights, by parameter name

    def fill(self, name: str, p: Tensor) -> None:
        """Gives a parameter, or what this rank holds of all of it, its initial value."""
        with torch.no_grad():
            p.copy_(self.initial[name])

    def model(self) -> Any:
        """The plain model with the initial weights, in the type, on this rank's device."""
        model = self.problem.model().to(self.dtype)
        for name, p in model.named_parameters():
            self.fill(name, p)
        return model.to(self.world.device)

    def skeleton(self) -> Any:
        """The plain model's shapes and names, without memory."""
        with torch.device("meta"):
            return self.problem.model().to(self.dtype)

    def pairs(self, step: Step) -> list[tuple[Any, Any]]:
        """Input and target of each of a step's micro-batches."""
        return [self.problem.pair(batch, self.dtype) for batch in step.micro_batches]

    @property
    def recipe(self) -> Recipe:
        """How weights are updated."""
        steps, clip = len(self.problem.batches()), self.problem.max_grad_norm
        return Recipe(LEARNING_RATE, steps, max_grad_norm=clip)

    def devices(self, num_stages: int) -> list[torch.device]:
        """Of the stages of one process: GPUs, if there are enough, or slices of the cores."""
        on_gpu = self.world.device.type == "cuda" and torch.cuda.device_count() >= num_stages
        return [torch.device("cuda" if on_gpu else "cpu", s) for s in range(num_stages)]


@dataclass
class Trainer:
    """A strategy, ready to train in the programs' loop, `project.utils.train`.

    Attributes:
        backward: computes gradients of a step's loss, returns this rank's summed loss.
        average: makes the gradients those of all ranks.
        gradients, weights: by the plain model's names, whole ones, of as many parameters as this
            rank has whole. Over all ranks no parameter may be missing.
        close: ends what the strategy started.
    """

    model: nn.Module
    optimizer: Optimizers
    backward: Callable[[Step], Tensor]
    loader: Loader
    average: Callable[[nn.Module], None] | None = None
    gradients: Callable[[], Tensors] | None = None  # by default of all of the model's parameters
    weights: Callable[[], Tensors] | None = None
    close: Callable[[], object] = lambda: None

    def held_gradients(self) -> Tensors:
        """Copies, of this moment."""
        if self.gradients:
            return self.gradients()
        return copies((name, p.grad) for name, p in self.model.named_parameters())

    def held_weights(self) -> Tensors:
        """Copies, of this moment."""
        return self.weights() if self.weights else copies(self.model.named_parameters())


Build = Callable[[Given], Trainer]


def adamw(parameters: Any) -> torch.optim.AdamW:
    """The optimizer of strategies that do not bring their own."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPS)


def data_parallel(sync: str, share_memory: bool = True, **cut: Any) -> Build:
    """run_data_parallel.py, as it trains."""

    def build(given: Given) -> Trainer:
        model = given.model()
        args = argparse.Namespace(
            gradient_sync=sync, bucket_mb=BUCKET / 2**20, comm_dtype="fp32", precision="fp32"
        )
        if share_memory:
            average, no_sync = make_gradient_sync(args, model)
        else:  # the way of ranks on several machines
            buckets = GradientBuckets(model, bucket_bytes=BUCKET, share_memory=False)
            average, no_sync = (lambda _: buckets.finish()), buckets.no_sync
        optimizer = _with_eps(make_optimizer(model, given.recipe, given.world))
        backward = make_backward(args, given.world, model, no_sync)
        return Trainer(
            model, optimizer, backward, given.problem.loader(given.world, **cut), average
        )

    return build


def ddp(share_memory: bool = True, **cut: Any) -> Build:
    """DistributedDataParallel around the layers."""

    def build(given: Given) -> Trainer:
        problem, world, model = given.problem, given.world, given.model()
        if not world.is_main:  # these must be overwritten by rank 0's
            for p in model.parameters():
                p.data.zero_()
        net = DistributedDataParallel(
            nn.Sequential(*problem.layers(model)), bucket_bytes=BUCKET, share_memory=share_memory
        )

        def backward(step: Step) -> Tensor:
            total = torch.zeros((), dtype=given.dtype)
            for i, (x, target) in enumerate(given.pairs(step)):
                loss = problem.loss(net(x), target)
                last = i == len(step.micro_batches) - 1
                with nullcontext() if last else net.no_sync():
                    (loss * world.world_size / step.target_tokens).backward()
                total += loss.detach().cpu()
            net.average_gradients()
            return total

        optimizer = _with_eps(make_optimizer(model, given.recipe, world))
        return Trainer(model, optimizer, backward, problem.loader(world, **cut), close=net.close)

    return build


def fsdp(zero: int, share_memory: bool = True, **cut: Any) -> Build:
    """FullyShardedDataParallel. Rank 0 gathers what is compared."""

    def build(given: Given) -> Trainer:
        problem, model = given.problem, given.skeleton()
        sharded = FullyShardedDataParallel(
            problem.layers(model), adamw, zero=zero, init=given.fill, share_memory=share_memory,
            names={p: name for name, p in model.named_parameters()}, device=given.world.device,
        )  # fmt: skip

        def backward(step: Step) -> Tensor:
            inputs, targets = [x for x, _ in given.pairs(step)], [y for _, y in given.pairs(step)]
            loss = sharded.train_step(inputs, targets, problem.loss, 1 / step.target_tokens)
            sharded.expose_gradients()
            return loss * step.target_tokens

        def gathered(what: str) -> Tensors:
            return copies(sharded.gather(what))

        optimizer = cast(torch.optim.Optimizer, _ShardOptimizer(sharded))
        return Trainer(
            model,
            Optimizers([optimizer], given.recipe, given.world),
            backward,
            problem.loader(given.world, **cut),
            gradients=partial(gathered, "gradients"),
            weights=partial(gathered, "parameters"),
        )

    return build


class _ShardOptimizer:
    """The optimizer of the shards, as `Optimizers` knows optimizers."""

    def __init__(self, sharded: FullyShardedDataParallel) -> None:
        self.zero_grad, self.step = sharded.zero_grad, sharded.optimizer_step
        self.param_groups = sharded.optimizer.param_groups


def over_processes(sizes: tuple[int, ...], schedule: str, m: int, **how: Any) -> Build:
    """A ProcessPipe: a rank per stage, `sizes` layers each, m micro-batches."""

    def build(given: Given) -> Trainer:
        problem, model = given.problem, given.skeleton()
        pipe = ProcessPipe(
            nn.Sequential(*problem.layers(model)), sizes, given.world.device, model=model,
            initialize=given.fill, **how,
        )  # fmt: skip

        def backward(step: Step) -> Tensor:
            x, target = (MicroBatches(part) for part in zip(*given.pairs(step), strict=True))
            loss = pipe.train_step(x, target, problem.loss, schedule, scale=1 / step.target_tokens)
            return loss.detach() * (step.target_tokens if given.world.is_main else 0)

        owned = list(pipe.owned_parameters().values())
        whole_batch = problem.loader(World(device=given.world.device), accumulation=m)
        return Trainer(
            model,
            Optimizers([adamw(pipe.parameters())], given.recipe, given.world, counted=owned),
            backward,
            whole_batch,
            gradients=lambda: copies((n, p.grad) for n, p in pipe.named_parameters().items()),
            weights=lambda: copies(pipe.named_parameters().items()),
            close=pipe.close,
        )

    return build


def whole_model(sizes: tuple[int, ...], schedule: str, m: int, balance: str | None = None) -> Build:
    """run_pipeline.py, as it trains: m micro-batches through len(sizes) stages of so many layers;
    or as the option `balance` says."""

    def build(given: Given) -> Trainer:
        session = _session(
            given, model_parallel_mode="pipeline_parallel", pipeline="whole", schedule=schedule,
            balance=balance,
        )  # fmt: skip
        loader = given.problem.loader(given.world, accumulation=m)
        whole = WholeModel(
            session, given.devices(len(sizes)), next(loader.steps(0)),
            list(sizes) if balance is None else None,
        )  # fmt: skip
        return Trainer(
            session.model, _with_eps(whole.optimizer), whole.backward, loader, close=whole.close
        )

    return build


def as_a_module(sizes: tuple[int, ...], split_size: int) -> Build:
    """A Pipe in a plain loop: its forward, a loss, backward()."""

    def build(given: Given) -> Trainer:
        problem, model = given.problem, given.model()
        module, replicas = place(problem.layers(model), sizes, given.devices(len(sizes)))
        pipe = Pipe(module, split_size=split_size, replicas=replicas)

        def backward(step: Step) -> Tensor:
            ((x, target),) = given.pairs(step)
            loss = problem.loss(pipe(x), target)
            (loss / step.target_tokens).backward()
            return loss.detach()

        optimizer = Optimizers([adamw(model.parameters())], given.recipe, given.world)
        return Trainer(model, optimizer, backward, problem.loader(given.world), close=pipe.close)

    return build


def blocks_only(n: int, m: int, mode: str = "pipeline_parallel") -> Build:
    """The course's GPT2LMHeadModelParallel, as run_pipeline.py --pipeline blocks trains it."""

    def build(given: Given) -> Trainer:
        session = _session(
            given, model_parallel_mode=mode, pipeline="blocks", n_chunk=m, balance="uniform"
        )
        with _default_dtype(given.dtype):  # it makes a model of its own
            blocks = BlocksOnly(session, given.devices(n))
        loader = given.problem.loader(given.world)
        return Trainer(
            blocks.model, _with_eps(blocks.optimizer), blocks.backward, loader, close=blocks.close
        )

    return build


def _session(given: Given, **options: Any) -> Session:
    """As much of a program's session as its strategies look at."""
    recipe, problem = given.recipe, cast(Sentences, given.problem)
    args = argparse.Namespace(
        precision="fp32", batch_size=problem.batch_size, n_epochs=1, **options,
        learning_rate=recipe.learning_rate, lr_scheduler=recipe.lr_scheduler,
        warmup_steps=recipe.warmup_steps, max_grad_norm=recipe.max_grad_norm, on_nan=recipe.on_nan,
    )  # fmt: skip
    unused: Any = None
    examples: dict[str, list[Encoded]] = {"train": problem.examples()}
    return Session(args, given.world, unused, unused, given.model(), examples)


def _with_eps(optimizers: Optimizers) -> Optimizers:
    for optimizer in optimizers.optimizers:
        for group in optimizer.param_groups:
            group["eps"] = EPS
    return optimizers


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

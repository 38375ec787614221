"""The strategies that verify.py compares with one plain process: a table, and what builds them.

A new strategy joins by one entry of `STRATEGIES`:

    Strategy("fsdp3-zero2", world_size=3, build=fsdp(zero=2))

where `fsdp(zero=2)` is a function that makes, on every rank, a `Trainer` of what it is `Given`: the
problem, the initial weights, the rank's `World`, the type. The training loop around it is the
programs' own. Another model is another `Problem`; its plain loop goes into verify.py.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from data_parallel.gradients import GradientBuckets
from pipeline.model import gpt2_layers, loss_of_targets, place
from pipeline.pipe import Pipe
from project.run_data_parallel import make_backward, make_gradient_sync, make_optimizer
from project.run_pipeline import BlocksOnly, WholeModel
from project.session import Session
from project.trajectory import Tensors, named_gradients, named_weights
from training.data import Encoded, GlobalBatches, RankLoader, Step
from training.launch import World
from training.model import gpt2_config
from training.optimization import Optimizers, Recipe

LEARNING_RATE = 1e-3
# AdamW divides by |gradient| + eps. With the usual 1e-8 a gradient that is zero but for rounding
# (of the keys' biases, on which attention does not depend) moves its weight by a learning rate in
# a direction of chance; with 1e-4 rounding moves weights by as little as gradients.
EPS = 1e-4


@dataclass(frozen=True)
class Problem:
    """What is trained: a GPT-2 of width 16 on random sentences, and in which batches."""

    num_examples: int = 16
    batch_size: int = 8
    n_layer: int = 2
    tied: bool = True  # the head is the embedding
    same_length: bool = False  # micro-batches have equal shapes, and can be mistaken for each other
    some_without_target: bool = False  # every second is a source sentence alone
    max_grad_norm: float | None = None
    dropout: float = 0.0
    seed: int = 0  # of data order and dropout

    def config(self) -> GPT2Config:
        """The model's sizes."""
        config = gpt2_config(
            "gpt2-mini", 64, 32, dropout=self.dropout, n_layer=self.n_layer, n_embd=16, n_head=2
        )
        config.tie_word_embeddings = self.tied
        return config

    def examples(self) -> list[Encoded]:
        """Sentences of tokens 1 to 63; 0 pads."""
        rng, examples = random.Random(3), []
        for i in range(self.num_examples):
            source, target = rng.randint(2, 9), rng.randint(1, 12)
            if self.same_length:
                target = 14 - source
            if self.some_without_target and i % 2:
                source, target = source + target, 0
            ids = [rng.randrange(1, 64) for _ in range(source + target)]
            examples.append(Encoded(ids, source))
        return examples

    def batches(self) -> GlobalBatches:
        """Which examples form which step's batch."""
        return GlobalBatches(self.num_examples, self.batch_size, self.seed)


@dataclass(frozen=True)
class Given:
    """What a strategy starts from, on one rank."""

    problem: Problem
    world: World
    dtype: torch.dtype
    initial: Tensors  # weights, by parameter name

    def model(self) -> GPT2LMHeadModel:
        """The plain model with the initial weights, in the type, on this rank's device."""
        model = GPT2LMHeadModel(self.problem.config()).to(self.dtype)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(self.initial[name])
        return model.to(self.world.device)

    def loader(self, **cut: Any) -> RankLoader:
        """This rank's part of every batch; `cut`: into which micro-batches, see RankLoader."""
        return RankLoader(
            self.problem.examples(), self.problem.batches(),
            rank=self.world.rank, world_size=self.world.world_size, pad_id=0,
            device=self.world.device, **cut,
        )  # fmt: skip

    @property
    def recipe(self) -> Recipe:
        """How weights are updated: at one rate, and clipped where the problem says so."""
        steps = -(-self.problem.num_examples // self.problem.batch_size)
        return Recipe(LEARNING_RATE, steps, max_grad_norm=self.problem.max_grad_norm)

    def devices(self, num_stages: int) -> list[torch.device]:
        """Of the stages of one process: GPUs, if there are enough, or slices of the cores."""
        on_gpu = self.world.device.type == "cuda" and torch.cuda.device_count() >= num_stages
        return [torch.device("cuda" if on_gpu else "cpu", s) for s in range(num_stages)]


@dataclass
class Trainer:
    """A strategy, ready to train. All but the loader is what `project.utils.train` asks for.

    Attributes:
        backward: computes gradients of a step's loss, returns this rank's summed loss.
        average: makes the gradients those of all ranks.
        gradients, weights: whole ones by the plain model's names, on every rank that returns any.
        close: ends what the strategy started.
    """

    model: nn.Module
    optimizer: Optimizers
    backward: Callable[[Step], Tensor]
    loader: RankLoader
    average: Callable[[nn.Module], None] | None = None
    gradients: Callable[[nn.Module], Tensors] = named_gradients
    weights: Callable[[nn.Module], Tensors] = named_weights
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Strategy:
    """An entry of the table.

    `same_bits`: compared with another run of itself instead of the plain process: for dropout.
    """

    name: str
    world_size: int
    build: Callable[[Given], Trainer]
    problem: Problem = Problem()
    same_bits: bool = False

    @property
    def without_dropout(self) -> Problem:
        """What the plain process trains."""
        return replace(self.problem, dropout=0.0)


def data_parallel(sync: str, share_memory: bool = True, **cut: Any) -> Callable[[Given], Trainer]:
    """run_data_parallel.py, as it trains."""

    def build(given: Given) -> Trainer:
        model = given.model()
        args = argparse.Namespace(
            gradient_sync=sync, bucket_mb=0.008, comm_dtype="fp32", precision="fp32"
        )
        if share_memory:
            average, no_sync = make_gradient_sync(args, model)
        else:  # the way of ranks on several machines
            buckets = GradientBuckets(model, bucket_bytes=8 << 10, share_memory=False)
            average, no_sync = (lambda _: buckets.finish()), buckets.no_sync
        optimizer = make_optimizer(model, given.recipe, given.world)
        _set_eps(optimizer)
        return Trainer(
            model,
            optimizer,
            make_backward(args, given.world, model, no_sync),
            given.loader(**cut),
            average,
        )

    return build


def whole_model(
    sizes: tuple[int, ...], schedule: str, m: int, balance: str | None = None
) -> Callable[[Given], Trainer]:
    """run_pipeline.py, as it trains: m micro-batches through len(sizes) stages.

    sizes: halves of blocks per stage; embedding and head come on top. Or `balance`, as the option.
    """

    def build(given: Given) -> Trainer:
        session = _session(given, model_parallel_mode="pipeline_parallel", schedule=schedule)
        loader = given.loader(accumulation=m)
        if balance is not None:
            session.args.balance = balance
        cut = None if balance is not None else _with_ends(sizes)
        whole = WholeModel(session, given.devices(len(sizes)), next(loader.steps(0)), cut)
        _set_eps(whole.optimizer)
        return Trainer(session.model, whole.optimizer, whole.backward, loader, close=whole.close)

    return build


def _with_ends(sizes: tuple[int, ...]) -> list[int]:
    """Layers per stage: the embedding is on the first, the head on the last."""
    layers = [*sizes]
    layers[0] += 1
    layers[-1] += 1
    return layers


def _pipe(given: Given, model: GPT2LMHeadModel, sizes: tuple[int, ...]) -> Pipe:
    layers = gpt2_layers(model, halves=True)
    module, replicas = place(layers, _with_ends(sizes), given.devices(len(sizes)))
    return Pipe(module, replicas=replicas)


def as_a_module(sizes: tuple[int, ...], split_size: int) -> Callable[[Given], Trainer]:
    """A Pipe in a plain loop: its forward, a loss, backward()."""

    def build(given: Given) -> Trainer:
        model = given.model()
        pipe = _pipe(given, model, sizes)
        pipe.split_size = split_size

        def backward(step: Step) -> Tensor:
            (batch,) = step.micro_batches
            weights = batch["label_token_weights"]
            loss = loss_of_targets(pipe((batch["input_ids"], weights)), (batch["labels"], weights))
            (loss / step.target_tokens).backward()
            return loss.detach()

        adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        optimizer = Optimizers([adamw], given.recipe, given.world)
        _set_eps(optimizer)
        return Trainer(model, optimizer, backward, given.loader(), close=pipe.close)

    return build


def blocks_only(n: int, m: int, mode: str = "pipeline_parallel") -> Callable[[Given], Trainer]:
    """The course's GPT2LMHeadModelParallel, as run_pipeline.py --pipeline blocks trains it."""

    def build(given: Given) -> Trainer:
        session = _session(given, model_parallel_mode=mode, n_chunk=m)
        session.args.balance = "uniform"
        with _default_dtype(given.dtype):
            blocks = BlocksOnly(session, given.devices(n))
        _set_eps(blocks.optimizer)
        return Trainer(
            blocks.model, blocks.optimizer, blocks.backward, given.loader(), close=blocks.close
        )

    return build


def _session(given: Given, **options: Any) -> Session:
    """As much of a program's session as a strategy looks at."""
    args = argparse.Namespace(
        precision="fp32",
        learning_rate=LEARNING_RATE,
        batch_size=given.problem.batch_size,
        n_epochs=1,
        lr_scheduler=given.recipe.lr_scheduler,
        warmup_steps=given.recipe.warmup_steps,
        max_grad_norm=given.recipe.max_grad_norm,
        on_nan=given.recipe.on_nan,
        pipeline="whole",
        balance="auto",
        **options,
    )
    unused: Any = None
    examples = {"train": given.problem.examples()}
    return Session(args, given.world, unused, unused, given.model(), examples)


def _set_eps(optimizers: Optimizers) -> None:
    for optimizer in optimizers.optimizers:
        for group in optimizer.param_groups:
            group["eps"] = EPS


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _data_parallel_strategies() -> Iterator[Strategy]:
    """Each way to average, on 2 and 3 ranks, with the layouts on which sums per rank go wrong."""
    for W, B in ((2, 8), (3, 6)):
        layouts: dict[str, tuple[Problem, dict[str, Any]]] = {
            "even": (Problem(2 * B, B), {}),
            "one_more": (Problem(B + W + 1, B), {"max_positions": 30}),  # rank 0, every second step
            "none_left": (Problem(B + 1, B), {"max_positions": 1}),  # for all but rank 0, likewise
            "accumulate": (Problem(B + W, B), {"accumulation": 2}),
            "no_target": (Problem(6 * W, 2 * W, some_without_target=True), {}),  # on some rank
        }
        for layout, (problem, cut) in layouts.items():
            for sync in ("per_parameter", "flat", "overlap"):
                name = f"dp{W}-{sync}-{layout}"
                yield Strategy(name, W, data_parallel(sync, **cut), problem)
            gloo = data_parallel("overlap", share_memory=False, **cut)
            yield Strategy(f"dp{W}-gloo-{layout}", W, gloo, problem)
        clipped = Problem(2 * B + 1, B, max_grad_norm=0.1)
        yield Strategy(f"dp{W}-overlap-clipped", W, data_parallel("overlap"), clipped)


def _pipeline_strategies() -> Iterator[Strategy]:
    """Each schedule, with 1 to 3 stages of three blocks. Every second batch has 3 examples, fewer
    than 8 micro-batches; of 8 examples in 3 micro-batches the last has fewer."""
    problem = Problem(11, n_layer=3)
    even: dict[int, tuple[int, ...]] = {1: (6,), 2: (2, 4), 3: (2, 2, 2)}  # halves of blocks
    for n, sizes in even.items():
        for schedule in ("gpipe", "1f1b", "zb"):
            for m in (1, 3, 8) if n > 1 else (3,):
                build = whole_model(sizes, schedule, m)
                yield Strategy(f"pipe{n}-{schedule}-m{m}", 1, build, problem)
    for schedule in ("gpipe", "1f1b", "zb"):
        for cut in ((3, 3), (0, 6), (5, 1, 0)):  # in a block; an embedding or a head alone
            name = f"pipe{len(cut)}-{schedule}-cut_{'_'.join(f'{half / 2:g}' for half in cut)}"
            yield Strategy(name, 1, whole_model(cut, schedule, 4), problem)
        untied = Problem(11, n_layer=3, tied=False)
        alike = Problem(16, n_layer=3, same_length=True)
        yield Strategy(f"pipe2-{schedule}-untied", 1, whole_model((2, 4), schedule, 4), untied)
        yield Strategy(f"pipe2-{schedule}-same_length", 1, whole_model((2, 4), schedule, 4), alike)
    clipped = Problem(11, n_layer=3, max_grad_norm=0.1)
    yield Strategy("pipe3-1f1b-clipped", 1, whole_model((2, 2, 2), "1f1b", 3), clipped)
    yield Strategy("pipe2-blocks-clipped", 1, blocks_only(2, m=3), clipped)
    sequential = whole_model((2, 4), "sequential", 4)
    yield Strategy("pipe2-sequential-m4", 1, sequential, problem)
    yield Strategy("pipe2-1f1b-balance_auto", 1, whole_model((3, 3), "1f1b", 4, "auto"), problem)
    for n, sizes in even.items():
        yield Strategy(f"pipe{n}-module", 1, as_a_module(sizes, split_size=3), problem)
        yield Strategy(f"pipe{n}-blocks", 1, blocks_only(n, m=3), problem)
    yield Strategy("pipe2-blocks-one_by_one", 1, blocks_only(2, 1, "model_parallel"), problem)


def _same_bits_strategies() -> Iterator[Strategy]:
    """Dropout on, twice: no race of threads or ranks may show."""
    problem = Problem(11, n_layer=3, dropout=0.1)
    for sync in ("per_parameter", "flat", "overlap"):
        yield Strategy(f"dp2-{sync}-twice", 2, data_parallel(sync, accumulation=2), problem, True)
    gloo = data_parallel("overlap", share_memory=False, accumulation=2)
    yield Strategy("dp2-gloo-twice", 2, gloo, problem, True)
    for schedule in ("gpipe", "1f1b", "zb"):
        build = whole_model((2, 2, 2), schedule, 4)
        yield Strategy(f"pipe3-{schedule}-twice", 1, build, problem, True)
    yield Strategy("pipe3-module-twice", 1, as_a_module((2, 2, 2), 3), problem, True)
    yield Strategy("pipe3-blocks-twice", 1, blocks_only(3, 3), problem, True)


STRATEGIES: tuple[Strategy, ...] = (
    *_data_parallel_strategies(),
    *_pipeline_strategies(),
    *_same_bits_strategies(),
)


def find(name: str) -> Strategy:
    """The strategy of that name."""
    return next(strategy for strategy in STRATEGIES if strategy.name == name)

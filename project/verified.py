"""The table of what verify.py compares with one plain process.

A new strategy joins by one entry: its name, the ranks it needs, what builds it, and what it trains.

    Strategy("fsdp3-zero2-even", 3, fsdp(zero=2), Sentences(12, 6))

`fsdp(zero=2)` is a function that makes, on every rank, a `Trainer` of what it is `Given`: see
trainers.py. Another model is another `Problem`, see problems.py, with its plain loss in verify.py.

    dp      run_data_parallel.py       pipe   run_pipeline.py, and Pipe as a module
    ddp     DistributedDataParallel    proc   ProcessPipe, a rank per stage
    fsdp    FullyShardedDataParallel

The number behind it is that of ranks, or of stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from project.problems import Pictures, Problem, Sentences
from project.trainers import (
    Build,
    as_a_module,
    blocks_only,
    data_parallel,
    ddp,
    fsdp,
    over_processes,
    whole_model,
)

SCHEDULES = ("gpipe", "1f1b", "zb")
EQUAL: tuple[tuple[int, ...], ...] = ((8,), (3, 5), (3, 2, 3))  # layers of three blocks, per stage
VGG: tuple[tuple[int, ...], ...] = ((16,), (7, 9), (4, 5, 7))


@dataclass(frozen=True)
class Strategy:
    """An entry of the table.

    Attributes:
        beside: what it must equal: up to rounding one process; or to the bit, which is for dropout,
            a second run of itself, or one that was interrupted.
    """

    name: str
    world_size: int
    build: Build
    problem: Problem
    beside: Literal["one process", "second run", "resumed run"] = "one process"


def _layouts(W: int) -> dict[str, tuple[Sentences, dict[str, Any]]]:
    """What goes wrong where sums are taken per rank. Every second batch is the odd one."""
    B = {2: 8, 3: 6}[W]
    layouts: dict[str, tuple[Sentences, dict[str, Any]]] = {
        "one_more": (Sentences(B + W + 1, B), {"max_positions": 30}),  # for rank 0
        "none_left": (Sentences(B + 1, B), {"max_positions": 1}),  # for all but rank 0
        "accumulate": (Sentences(B + W, B), {"accumulation": 2}),
    }
    if W == 2:  # what three ranks would do no other way
        layouts["even"] = Sentences(2 * B, B), {}
        layouts["no_target"] = Sentences(6 * W, 2 * W, some_without_target=True), {}  # on some rank
        layouts["clipped"] = Sentences(2 * B, B, max_grad_norm=0.1), {}
    return layouts


def _data_parallel() -> Iterator[Strategy]:
    for W in (2, 3):
        for layout, (problem, cut) in _layouts(W).items():
            syncs = ("per_parameter", "flat", "overlap") if W == 2 else ("overlap",)
            for sync in syncs:
                yield Strategy(f"dp{W}-{sync}-{layout}", W, data_parallel(sync, **cut), problem)
            if W == 2 or layout == "none_left":
                gloo = data_parallel("overlap", share_memory=False, **cut)
                yield Strategy(f"dp{W}-gloo-{layout}", W, gloo, problem)
            if layout in ("none_left", "accumulate", "clipped"):
                yield Strategy(f"ddp{W}-{layout}", W, ddp(**cut), problem)
        yield Strategy(f"ddp{W}-vgg16", W, ddp(accumulation=2), Pictures(10, 8))
    yield Strategy("ddp2-vgg16-gloo", 2, ddp(share_memory=False), Pictures(9, 8))


def _sharded() -> Iterator[Strategy]:
    for W in (2, 3):
        for zero in (1, 2, 3):
            for layout, (problem, cut) in _layouts(W).items():
                if W == 3 and layout != "none_left":  # as two ranks
                    continue
                yield Strategy(f"fsdp{W}-zero{zero}-{layout}", W, fsdp(zero, **cut), problem)
            if W == 3 and zero < 3:  # as zero 3
                continue
            problem, cut = _layouts(W)["accumulate"]
            gloo = fsdp(zero, share_memory=False, **cut)
            yield Strategy(f"fsdp{W}-zero{zero}-gloo", W, gloo, problem)
            yield Strategy(f"fsdp{W}-zero{zero}-vgg16", W, fsdp(zero), Pictures(10, 8))


def _pipelines() -> Iterator[Strategy]:
    """Every second batch has 3 examples, fewer than 8 micro-batches; of 8 examples in 3
    micro-batches the last has fewer."""
    problem, clipped = Sentences(11, n_layer=3), Sentences(16, n_layer=3, max_grad_norm=0.1)
    untied, alike = Sentences(11, n_layer=3, tied=False), Sentences(16, n_layer=3, same_length=True)
    for schedule in SCHEDULES:
        for n, sizes in enumerate(EQUAL, 1):
            if n == 1 and schedule != "1f1b":  # one stage does the same in any order
                continue
            for m in {1: (3,), 2: (1, 3, 8), 3: (3, 8)}[n]:
                build = whole_model(sizes, schedule, m)
                yield Strategy(f"pipe{n}-{schedule}-m{m}", 1, build, problem)
                if n < 3 or m == 8:
                    over = over_processes(sizes, schedule, m)
                    yield Strategy(f"proc{n}-{schedule}-m{m}", n, over, problem)
        for cut in ((4, 4), (1, 7), (6, 1, 1)):  # in a block; an embedding or a head alone
            name = f"pipe{len(cut)}-{schedule}-cut_{'_'.join(map(str, cut))}"
            yield Strategy(name, 1, whole_model(cut, schedule, 4), problem)
        whole = whole_model((3, 5), schedule, 4)
        over = over_processes((3, 5), schedule, 4)
        for what, special in (("untied", untied), ("same_length", alike), ("clipped", clipped)):
            yield Strategy(f"pipe2-{schedule}-{what}", 1, whole, special)
            yield Strategy(f"proc2-{schedule}-{what}", 2, over, special)
        gloo = over_processes((1, 6, 1), schedule, 4, share_memory=False)
        yield Strategy(f"proc3-{schedule}-gloo", 3, gloo, problem)
        for n in (2, 3) if schedule == "zb" else (2,):
            over = over_processes(VGG[n - 1], schedule, 4)
            yield Strategy(f"proc{n}-{schedule}-vgg16", n, over, Pictures(11, 8))
    sequential = whole_model((3, 5), "sequential", 4)
    yield Strategy("pipe2-sequential-m4", 1, sequential, problem)
    yield Strategy("pipe2-1f1b-balance_auto", 1, whole_model((4, 4), "1f1b", 4, "auto"), problem)
    for n, sizes in enumerate(EQUAL, 1):
        yield Strategy(f"pipe{n}-module", 1, as_a_module(sizes, split_size=3), problem)
        yield Strategy(f"pipe{n}-module-vgg16", 1, as_a_module(VGG[n - 1], 3), Pictures(11, 8))
        yield Strategy(f"pipe{n}-blocks", 1, blocks_only(n, m=3), problem)
    yield Strategy("pipe2-blocks-one_by_one", 1, blocks_only(2, 1, "model_parallel"), problem)


def _same_bits() -> Iterator[Strategy]:
    """Dropout on: no race of threads or ranks may show, and no interruption."""
    problem = Sentences(11, n_layer=3, dropout=0.1)
    gloo = data_parallel("overlap", share_memory=False, accumulation=2)
    builds: dict[str, tuple[int, Build]] = {
        "dp2-per_parameter": (2, data_parallel("per_parameter", accumulation=2)),
        "dp2-flat": (2, data_parallel("flat", accumulation=2)),
        "dp2-overlap": (2, data_parallel("overlap", accumulation=2)),
        "dp2-gloo": (2, gloo),
        **{f"pipe3-{s}": (1, whole_model((3, 2, 3), s, 4)) for s in SCHEDULES},
        "pipe3-module": (1, as_a_module((3, 2, 3), 3)),
        "pipe3-blocks": (1, blocks_only(3, 3)),
        "ddp2": (2, ddp()),
        "fsdp2-zero3": (2, fsdp(3)),
        "proc2-1f1b": (2, over_processes((3, 5), "1f1b", 4)),
        "proc2-zb": (2, over_processes((3, 5), "zb", 4)),
    }
    for name, (W, build) in builds.items():
        yield Strategy(f"{name}-twice", W, build, problem, "second run")
        if not name.startswith(("fsdp", "proc")):  # what is spread is saved another way
            yield Strategy(f"{name}-resumed", W, build, problem, "resumed run")


STRATEGIES: tuple[Strategy, ...] = (
    *_data_parallel(), *_sharded(), *_pipelines(), *_same_bits(),
)  # fmt: skip


def find(name: str) -> Strategy:
    """The strategy of that name."""
    return next(strategy for strategy in STRATEGIES if strategy.name == name)

"""The rows: every layout, and what goes wrong in it.

A new one joins by one line: its name, how many ranks it needs, what lays the model out, and what
it trains.

    Row("fsdp3-zero2-even", 3, sharded(2), Sentences(12, 6))

Names begin with the layout and the number of its ranks or stages:

    single     one process                    threads    stages in threads
    mesh       dp x pp x tp ranks             context    positions
    ddp        the whole model on each rank   module     a Pipe as a plain nn.Module
    fsdp       shards                         blocks     the course's GPT2LMHeadModelParallel
    pipeline   stages, one on each rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pipeline.schedules.written import write_schedule
from runtime.axes import LAYER_AXES, ranks_of
from runtime.mesh import make_mesh
from tests.equivalence.problems import Noise, Problem, Sentences
from tests.pipeline.schedules.drawn import drawn
from training.launch.world import World
from training.layouts.layout import LaidOutModel, Setup
from training.layouts.replicated import Replicated
from training.layouts.sharded import Sharded
from training.layouts.stages import Staged
from training.layouts.threads import BlocksInThreads, StagesInThreads
from training.tasks.gpt2 import Sequences
from training.tasks.task import Step, TrainingTask

Build = Callable[[TrainingTask, World, Setup], LaidOutModel]
Cut = tuple[int, ...]  # layers per stage

SCHEDULES = ("gpipe", "1f1b", "zb")
EQUAL: tuple[Cut, ...] = ((8,), (3, 5), (3, 2, 3))  # of the eight layers of three blocks
# Schedules with several stages per rank: how many ranks and chunks, and a cut.
CHUNKED: tuple[tuple[str, int, int, Cut], ...] = (
    ("interleaved", 2, 2, (3, 2, 1, 2)),
    ("interleaved", 2, 3, (2, 1, 2, 1, 1, 1)),
    ("interleaved", 3, 2, (1, 2, 1, 1, 1, 2)),
    ("zbv", 2, 2, (3, 2, 1, 2)),
    ("zbv", 3, 2, (1, 2, 1, 1, 1, 2)),
    ("vhalf", 3, 2, (1, 2, 1, 1, 1, 2)),
    ("vmin", 3, 2, (1, 2, 1, 1, 1, 2)),
    ("dualpipev", 2, 2, (3, 2, 1, 2)),
)
DRAWN: tuple[tuple[Cut, Cut], ...] = (  # the rank of each stage, and a cut
    ((0, 1), (3, 5)), ((0, 1, 2), (3, 2, 3)), ((0, 1, 1, 0), (3, 2, 1, 2)),
    ((0, 1, 0, 1), (3, 2, 1, 2)),
)  # fmt: skip
UNEVEN = {1: (8,), 2: (3, 5), 4: (1, 3, 3, 1), 8: (1,) * 8}
VGG: tuple[Cut, ...] = ((16,), (7, 9), (4, 5, 7))
BUCKET = 8 << 10  # bytes: several buckets even of these models


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        num_microbatches: of a rank's part of a batch; None: as many as fit `Sentences.positions`.
        beside: what it must equal: one process up to rounding; or, bit for bit, which is for
            dropout, a second run of itself, one that was interrupted, or one that recomputes
            nothing.
        recompute: as --recompute.
    """

    name: str
    ranks: int
    build: Build
    problem: Problem
    num_microbatches: int | None = None
    beside: Literal["one process", "second run", "resumed run", "nothing recomputed"] = (
        "one process"
    )
    recompute: str = "never"

    @property
    def share_memory(self) -> bool:
        """Not in rows named gloo: there the ranks send, as if each had a machine of its own."""
        return "gloo" not in self.name


# What lays a model out


def having(setup: Setup, cut: Cut | None = None, **options: Any) -> Setup:
    """The same with this cut, and these options."""
    return replace(setup, args=replace(setup.args, **options), cut=cut)


def replicated(sync: str = "overlap") -> Build:
    """Gradients averaged in this way."""
    return lambda task, world, setup: Replicated(
        task, world, having(setup, gradient_sync=sync, bucket_mb=BUCKET / 2**20)
    )


def sharded(zero: int) -> Build:
    """ZeRO 1, 2, 3."""
    return lambda task, world, setup: mesh(world.world_size, 1, 1, zero=zero)(task, world, setup)


def staged(cut: Cut, schedule: str, m: int, chunks: int = 1) -> Build:
    """A rank per stage, or per `chunks` of them; m micro-batches."""
    options: Any = {"schedule": schedule, "num_microbatches": m, "chunks": chunks}
    return lambda task, world, setup: Staged(
        task,
        world,
        having(setup, cut, **options),
        make_mesh({"pp": world.world_size}, 60.0, [LAYER_AXES]),
    )


def mesh(
    dp: int,
    pp: int,
    tp: int,
    schedule: str = "1f1b",
    sequence_parallel: bool = False,
    zero: int | None = None,
    chunks: int = 1,
    ep: int = 1,
    cp: int = 1,
    attention: str = "ring",
    shards: int | None = None,
) -> Build:
    """dp x cp x pp x tp ranks, layers cut unevenly. Of the dp, `ep` share experts, and `shards` a
    copy."""

    def build(task: TrainingTask, world: World, setup: Setup) -> LaidOutModel:
        ranks = ranks_of(
            {"dp": dp, "shards": shards, "ep": ep, "cp": cp, "pp": pp, "tp": tp, "zero": zero}
        )
        more = [LAYER_AXES] if setup.args.optimizer == "muon" else []
        places = make_mesh(ranks, 60.0, more)
        cut = UNEVEN[pp * chunks] if pp > 1 else None  # one stage: all layers, however many
        asked = having(
            setup, cut, schedule=schedule, sequence_parallel=sequence_parallel, zero=zero,
            chunks=chunks, attention=attention,
        )  # fmt: skip
        return (Sharded if zero in (2, 3) else Staged)(task, world, asked, places)

    return build


def threads(cut: Cut | int, schedule: str, m: int, chunks: int = 1) -> Build:
    """A thread per stage, or per `chunks` of them; m micro-batches. A number of stages is cut by
    the time that layers take."""
    stages, given = (cut, None) if isinstance(cut, int) else (len(cut), cut)
    n = stages // chunks
    options: Any = {"schedule": schedule, "num_microbatches": m, "chunks": chunks}
    return lambda task, world, setup: StagesInThreads(
        task, world, having(setup, given, **options), devices(world, n)
    )


def module(cut: Cut, split_size: int) -> Build:
    """A `Pipe` in a plain loop."""

    def build(task: TrainingTask, world: World, setup: Setup) -> LaidOutModel:
        where = devices(world, len(cut))
        model = PlainModule(task, world, having(setup, cut, num_microbatches=1), where)
        model.pipe.split_size = split_size
        return model

    return build


def blocks(n: int, split_size: int | None) -> Build:
    """The blocks in n stages; None: one stage at a time."""
    return lambda task, world, setup: BlocksInThreads(
        task, world, setup, devices(world, n), split_size
    )


def devices(world: World, num_stages: int) -> list[torch.device]:
    """The devices of one process's stages: GPUs, if there are enough, or slices of the cores."""
    on_gpu = world.device.type == "cuda" and torch.cuda.device_count() >= num_stages
    return [torch.device("cuda" if on_gpu else "cpu", s) for s in range(num_stages)]


class PlainModule(StagesInThreads):
    """Calls `Pipe` as any other module: its forward, a loss, backward()."""

    def backward(self, step: Step) -> Tensor:
        """The batch is one piece to the caller."""
        (x,), (target,) = step.inputs, step.targets
        if isinstance(x, Sequences) and x.targets is not None:  # weights are cut as the ids are
            weights = x.hidden.new_zeros(x.hidden.numel()).index_fill(0, x.targets, 1)
            x = x._replace(targets=weights.view_as(x.hidden))
        output = self.pipe(x)  # on the last device
        loss = self.task.loss(output, tree_map(lambda t: t.to(output.device), target))
        (loss / max(1, step.count)).backward()
        return loss.detach()


# The rows


def _parts(W: int) -> dict[str, tuple[Sentences, int | None]]:
    """What goes wrong where a batch is dealt out to W ranks, and the number of micro-batches. Every
    second batch is the odd one."""
    B = {2: 8, 3: 6}[W]
    parts: dict[str, tuple[Sentences, int | None]] = {
        "one_more": (Sentences(B + W + 1, B, positions=30), None),  # for rank 0
        "none_left": (Sentences(B + 1, B), 100),  # for all ranks but 0; a micro-batch per example
        "m2": (Sentences(B + W, B), 2),
    }
    if W == 2:  # what three ranks would do no other way
        parts["even"] = Sentences(2 * B, B), 1
        parts["no_target"] = Sentences(6 * W, 2 * W, some_without_target=True), 1  # on some rank
        parts["clipped"] = Sentences(2 * B, B, max_grad_norm=0.1), 1
        parts["odd"] = ODD, 2
    return parts


ODD = Sentences(31, 6, max_grad_norm=1.0, n_layer=3, odd=True)
TEXT = Sentences(11, n_layer=3)  # for stages: three blocks are eight layers
DROPPED = replace(TEXT, dropout=0.1)
SPECIAL = {
    "untied": replace(TEXT, tied=False),
    "same_length": Sentences(16, n_layer=3, same_length=True),
    "clipped": Sentences(16, n_layer=3, max_grad_norm=0.1),
    "odd": ODD,
}


def _whole_models() -> Iterator[Row]:
    yield Row("single-one_more", 1, replicated(), *_parts(2)["one_more"])
    yield Row("single-odd", 1, replicated(), ODD, 2)
    for W in (2, 3):
        for what, trained in _parts(W).items():
            for sync in ("per_parameter", "flat", "overlap") if W == 2 else ("overlap",):
                yield Row(f"ddp{W}-{sync}-{what}", W, replicated(sync), *trained)
            if W == 2 or what == "none_left":
                yield Row(f"ddp{W}-gloo-{what}", W, replicated(), *trained)
        yield Row(f"ddp{W}-overlap-vgg16", W, replicated(), Noise(10, 8), 2)
    yield Row("ddp2-gloo-vgg16", 2, replicated(), Noise(9, 8), 1)


def _shards() -> Iterator[Row]:
    for zero in (1, 2, 3):
        for what, trained in _parts(2).items():
            yield Row(f"fsdp2-zero{zero}-{what}", 2, sharded(zero), *trained)
        yield Row(f"fsdp3-zero{zero}-none_left", 3, sharded(zero), *_parts(3)["none_left"])
        for W in (2, 3) if zero == 3 else (2,):
            yield Row(f"fsdp{W}-zero{zero}-gloo", W, sharded(zero), *_parts(W)["m2"])
            yield Row(f"fsdp{W}-zero{zero}-vgg16", W, sharded(zero), Noise(10, 8), 1)


def _stages() -> Iterator[Row]:
    """Every second batch has 3 examples, fewer than 8 micro-batches; of 8 examples in 3
    micro-batches the last has fewer."""
    for schedule in SCHEDULES:
        for n, cut in enumerate(EQUAL, 1):
            if n == 1 and schedule != "1f1b":  # one stage does the same in any order
                continue
            for m in {1: (3,), 2: (1, 3, 8), 3: (3, 8)}[n]:
                yield Row(f"threads{n}-{schedule}-m{m}", 1, threads(cut, schedule, m), TEXT)
                if n < 3 or m == 8:
                    yield Row(f"pipeline{n}-{schedule}-m{m}", n, staged(cut, schedule, m), TEXT)
        for cut in ((4, 4), (1, 7), (6, 1, 1)):  # in a block; an embedding or a head alone
            name = f"threads{len(cut)}-{schedule}-cut_{'_'.join(map(str, cut))}"
            yield Row(name, 1, threads(cut, schedule, 4), TEXT)
        for what, trained in SPECIAL.items():
            yield Row(f"threads2-{schedule}-{what}", 1, threads((3, 5), schedule, 4), trained)
            yield Row(f"pipeline2-{schedule}-{what}", 2, staged((3, 5), schedule, 4), trained)
        for n in (2, 3) if schedule == "zb" else (2,):
            build = staged(VGG[n - 1], schedule, 4)
            yield Row(f"pipeline{n}-{schedule}-vgg16", n, build, Noise(11, 8))
    yield Row("threads2-sequential-m4", 1, threads((3, 5), "sequential", 4), TEXT)
    yield Row("threads2-1f1b-auto", 1, threads(2, "1f1b", 4), TEXT)
    for n, cut in enumerate(EQUAL, 1):
        yield Row(f"module{n}-gpt2", 1, module(cut, 3), TEXT)
        yield Row(f"module{n}-vgg16", 1, module(VGG[n - 1], 3), Noise(11, 8))
        yield Row(f"blocks{n}-split_size3", 1, blocks(n, 3), TEXT)
    yield Row("blocks2-one_by_one", 1, blocks(2, None), TEXT)
    yield Row("blocks2-odd", 1, blocks(2, 3), ODD)


def _chunks() -> Iterator[Row]:
    """Several stages per rank; in a V the first rank has the embedding and the head."""
    for seed, (ranks, cut) in enumerate(DRAWN):  # of one's own, in any order
        n, v, text = (
            max(ranks) + 1,
            len(ranks) // (max(ranks) + 1),
            write_schedule(drawn(ranks, 4, seed), "own"),
        )
        yield Row(f"threads{n}-own{seed}", 1, threads(cut, text, 4, v), TEXT)
        yield Row(f"pipeline{n}-own{seed}", n, staged(cut, text, 4, v), TEXT)
    for schedule, n, v, cut in CHUNKED:
        for m in (3, 8):
            name, here = f"{n}-{schedule}-v{v}_m{m}", threads(cut, schedule, m, v)
            yield Row(f"threads{name}", 1, here, TEXT)
            yield Row(f"pipeline{name}", n, staged(cut, schedule, m, chunks=v), TEXT)
        if (n, v) != (2, 2):
            continue
        on_ranks = staged(cut, schedule, 4, chunks=2)
        for what, trained in (SPECIAL | {"dropout": DROPPED}).items():
            yield Row(f"threads2-{schedule}-{what}", 1, threads(cut, schedule, 4, 2), trained)
            yield Row(f"pipeline2-{schedule}-{what}", 2, on_ranks, trained)
        build = staged((4, 3, 5, 4), schedule, 4, chunks=2)
        yield Row(f"pipeline2-{schedule}-vgg16", 2, build, Noise(11, 8))
        yield Row(f"pipeline2-{schedule}-twice", 2, on_ranks, DROPPED, 2, "second run")
        yield Row(f"pipeline2-{schedule}-resumed", 2, on_ranks, DROPPED, 2, "resumed run")
        meshed = Sentences(22, n_layer=3, n_head=4, vocabulary=67, dropout=0.1, max_grad_norm=1.0)
        for layout in ((2, 2, 1), (1, 2, 2)):
            name = f"mesh4-{'x'.join(map(str, layout))}-{schedule}"
            yield Row(name, 4, mesh(*layout, schedule, chunks=2), meshed, 3)
        zero1 = mesh(2, 2, 1, schedule, zero=1, chunks=2)
        yield Row(f"mesh4-2x2x1-{schedule}-zero1", 4, zero1, meshed, 3)


def _meshes() -> Iterator[Row]:
    """Every way to lay 2, 4 and 8 ranks out in three dimensions. The last batch is smaller, the
    vocabulary has no divisor, and dropout is on."""
    problem = Sentences(
        22, n_layer=3, n_head=8, vocabulary=67, dropout=0.1, max_grad_norm=1.0, positions=40
    )
    of_8 = [1, 2, 4, 8]
    layouts = [(W, *axes) for W in of_8[1:] for axes in product(of_8, repeat=3) if prod(axes) == W]
    for W, dp, pp, tp in layouts:
        m = 3 if pp > 1 else 2 if tp > 1 else None
        name = f"mesh{W}-{dp}x{pp}x{tp}"
        yield Row(name, W, mesh(dp, pp, tp), problem, m)
        if tp > 1:
            yield Row(f"{name}-sequence", W, mesh(dp, pp, tp, sequence_parallel=True), problem, m)
        if dp > 1:
            yield Row(f"{name}-zero1", W, mesh(dp, pp, tp, zero=1), problem, m)
        if dp > 1 and pp == 1 and tp > 1:
            build = mesh(dp, pp, tp, sequence_parallel=True, zero=3)
            yield Row(f"{name}-sequence-zero3", W, build, problem, m)
    odd = replace(ODD, n_head=4)
    yield Row("mesh2-1x1x2-odd", 2, mesh(1, 1, 2), odd, 2)
    # What pads a sequence is beyond the model's last position.
    full = Sentences(6, same_length=True, n_positions=13, n_head=4)
    yield Row("mesh2-1x1x2-sequence-full", 2, mesh(1, 1, 2, sequence_parallel=True), full, 2)
    with_contexts = mesh(1, 1, 2, cp=2, sequence_parallel=True)
    yield Row("mesh4-1x1x2-cp2-sequence-full", 4, with_contexts, full, 2)
    yield Row("mesh2-1x1x2-gloo", 2, mesh(1, 1, 2), problem, 2)
    yield Row("mesh2-1x1x2-untied", 2, mesh(1, 1, 2), replace(problem, tied=False), 2)
    of_three = replace(problem, n_head=3, n_embd=24)
    yield Row("mesh3-1x1x3", 3, mesh(1, 1, 3, sequence_parallel=True), of_three, 2)
    yield Row("mesh4-2x1x2-none_left", 4, mesh(2, 1, 2), Sentences(9, 8, n_head=4), 100)
    yield Row("mesh4-1x2x2-odd", 4, mesh(1, 2, 2, sequence_parallel=True), odd, 2)
    yield Row("mesh4-2x1x2-zero2", 4, mesh(2, 1, 2, zero=2), problem, 2)
    yield Row("mesh4-1x2x2-zb", 4, mesh(1, 2, 2, "zb"), problem, 3)
    yield Row("mesh4-2x2x1-zero1-resumed", 4, mesh(2, 2, 1, zero=1), problem, 2, "resumed run")
    yield Row("mesh4-1x2x2-resumed", 4, mesh(1, 2, 2), problem, 2, "resumed run")
    yield Row("mesh4-1x2x2-twice", 4, mesh(1, 2, 2), problem, 2, "second run")


def _contexts() -> Iterator[Row]:
    """Sequences of 2 to 20 positions, most of which no rank's stretches divide, over up to four
    ranks; a few have no position for each stretch. With m = 100 micro-batches each has an example,
    or none. Dropout is on where nothing else is said."""
    problem = Sentences(
        22, n_layer=3, n_head=8, vocabulary=67, dropout=0.1, max_grad_norm=1.0, positions=40
    )
    odd, no_target = replace(ODD, n_head=4), Sentences(12, 4, some_without_target=True)
    for attention, c in product(("ring", "heads"), (2, 3, 4)):
        trained = replace(problem, n_head=6, n_embd=24) if c == 3 else problem
        build, name = mesh(1, 1, 1, cp=c, attention=attention), f"context{c}-{attention}"
        yield Row(name, c, build, trained, 2)
        kept = replace(trained, dropout=0.0)  # by fused kernels
        yield Row(f"{name}-no_dropout", c, build, kept, 2)
        yield Row(f"{name}-one_each", c, build, replace(kept, max_grad_norm=None), 100)
        if c == 2:
            yield Row(f"{name}-odd", c, build, odd, 2)
            yield Row(f"{name}-gloo", c, build, kept, 2)
            yield Row(f"{name}-no_target", c, build, no_target, 3)
            yield Row(f"{name}-untied", c, build, replace(trained, tied=False), 2)
            yield Row(f"{name}-twice", c, build, problem, 2, "second run")
            yield Row(f"{name}-resumed", c, build, problem, 2, "resumed run")
            beside: Any = "nothing recomputed"
            yield Row(f"{name}-recompute_always", c, build, problem, 2, beside, "always")
        for zero in (1, 2, 3):
            build = mesh(1, 1, 1, zero=zero, cp=c, attention=attention)
            yield Row(f"{name}-zero{zero}", c, build, trained, 2)
    for schedule in ("gpipe", "1f1b", "zb", "interleaved", "zbv"):
        chunks = 2 if schedule in ("interleaved", "zbv") else 1
        build = mesh(1, 2, 1, schedule, chunks=chunks, cp=2)
        yield Row(f"mesh4-1x2x1-cp2-{schedule}", 4, build, problem, 3)
    for dp, pp, tp in ((2, 1, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)):
        W, m = 2 * dp * pp * tp, 3 if pp > 1 else 2
        name = f"mesh{W}-{dp}x{pp}x{tp}-cp2"
        for attention in ("ring", "heads"):
            build = mesh(dp, pp, tp, cp=2, attention=attention)
            yield Row(f"{name}-{attention}", W, build, problem, m)
        yield Row(f"{name}-zero1", W, mesh(dp, pp, tp, "zb", zero=1, cp=2), problem, m)
        if tp > 1:
            build = mesh(dp, pp, tp, sequence_parallel=True, cp=2)
            yield Row(f"{name}-sequence", W, build, problem, m)
        if pp == 1:
            build = mesh(dp, pp, tp, sequence_parallel=tp > 1, zero=3, cp=2)
            yield Row(f"{name}-zero3", W, build, problem, m)
    build = mesh(1, 1, 3, sequence_parallel=True, cp=2)
    yield Row("mesh6-1x1x3-cp2-sequence", 6, build, replace(problem, n_head=3, n_embd=24), 2)
    yield Row("mesh6-1x2x1-cp3-zb", 6, mesh(1, 2, 1, "zb", cp=3), problem, 3)
    yield Row("mesh4-2x1x1-cp2-none_left", 4, mesh(2, 1, 1, cp=2), Sentences(9, 8, n_head=4), 100)


def _documents() -> Iterator[Row]:
    """Rows of documents that do not see each other, beside each document alone; and with dropout,
    twice, resumed, and recomputed."""
    rows = Sentences(22, n_layer=3, n_head=4, vocabulary=67, documents=True, positions=40)
    layouts: dict[str, tuple[int, Build, int | None]] = {
        "single": (1, replicated(), None),
        "threads2-zb": (1, threads((3, 5), "zb", 4), None),
        "module2": (1, module((3, 5), 3), None),
        "ddp2-overlap": (2, replicated(), None),
        **{f"fsdp2-zero{zero}": (2, sharded(zero), 2) for zero in (1, 2, 3)},
        **{f"pipeline2-{s}": (2, staged((3, 5), s, 3), 3) for s in SCHEDULES},
        "pipeline2-zbv": (2, staged((3, 2, 1, 2), "zbv", 4, chunks=2), 4),
        "mesh2-1x1x2": (2, mesh(1, 1, 2), 2),
        "mesh2-1x1x2-sequence": (2, mesh(1, 1, 2, sequence_parallel=True), 2),
        "mesh4-2x2x1-zero1": (4, mesh(2, 2, 1, zero=1), 2),
        "mesh4-1x2x1-cp2": (4, mesh(1, 2, 1, cp=2), 3),
        "mesh4-1x1x2-cp2-sequence": (4, mesh(1, 1, 2, cp=2, sequence_parallel=True), 2),
        "hybrid4-shards2-zero3": (4, mesh(4, 1, 1, zero=3, shards=2), 2),
        **{f"context{c}-{attention}": (c, mesh(1, 1, 1, cp=c, attention=attention), 2)
           for attention, c in product(("ring", "heads"), (2, 4))},
        "context2-ring-zero3": (2, mesh(1, 1, 1, cp=2, zero=3), 2),
    }  # fmt: skip
    for name, (ranks, build, m) in layouts.items():
        yield Row(f"{name}-documents", ranks, build, rows, m)
    routed = replace(rows, experts=4)  # their balance is of a row, whatever its documents
    busy = replace(routed, shared_experts=2, balance_by="bias", router_z=0.1)
    of_experts: dict[str, tuple[int, Build]] = {
        "single": (1, replicated()),
        "mesh2-ep2": (2, mesh(2, 1, 1, ep=2)),
        "mesh2-ep2-zero3": (2, mesh(2, 1, 1, ep=2, zero=3)),
        "context2": (2, mesh(1, 1, 1, cp=2)),
        "mesh4-ep2-cp2-heads": (4, mesh(2, 1, 1, ep=2, cp=2, attention="heads")),
    }
    for name, (ranks, build) in of_experts.items():
        yield Row(f"{name}-experts-documents", ranks, build, routed, 2)
        yield Row(f"{name}-bias-documents", ranks, build, busy, 2)
    dropped = replace(rows, dropout=0.1)
    besides: dict[str, Any] = {
        "twice": "second run", "resumed": "resumed run", "recompute_always": "nothing recomputed"
    }  # fmt: skip
    for name in ("single", "fsdp2-zero3", "pipeline2-zb", "mesh2-1x1x2-sequence", "context2-ring"):
        ranks, build, m = layouts[name]
        for what, beside in besides.items():
            mode = "always" if "recompute" in what else "never"
            yield Row(f"{name}-documents-{what}", ranks, build, dropped, m, beside, mode)


def _replicas_of_shards() -> Iterator[Row]:
    """Four ranks: four copies, two copies in two shards each, one in four; with experts, positions,
    matrices and stages cut, too. The last batch is smaller, and a replica may have no example."""
    problem = Sentences(
        22, n_layer=3, n_head=4, vocabulary=67, dropout=0.1, max_grad_norm=1.0, positions=40
    )
    for zero, shards in product((1, 2, 3), (1, 2, 4)):
        build = mesh(4, 1, 1, zero=zero, shards=shards)
        yield Row(f"hybrid4-shards{shards}-zero{zero}", 4, build, problem, 2)
    for zero in (1, 3):
        build, name = mesh(4, 1, 1, zero=zero, shards=2), f"hybrid4-shards2-zero{zero}"
        yield Row(f"{name}-gloo", 4, build, problem, 2)
        yield Row(f"{name}-none_left", 4, build, Sentences(9, 8, n_head=4), 100)
        yield Row(f"{name}-resumed", 4, build, problem, 2, "resumed run")
        yield Row(f"{name}-twice", 4, build, problem, 2, "second run")
        with_experts = mesh(4, 1, 1, ep=2, zero=zero, shards=2)
        yield Row(f"{name}-ep2", 4, with_experts, replace(ROUTED, max_grad_norm=1.0))
        with_positions = mesh(2, 1, 1, cp=2, zero=zero, shards=1)
        yield Row(f"hybrid4-cp2-shards1-zero{zero}", 4, with_positions, problem, 2)
        of_matrices = mesh(2, 1, 2, sequence_parallel=True, zero=zero, shards=1)
        yield Row(f"hybrid4-tp2-shards1-zero{zero}", 4, of_matrices, problem, 2)
    yield Row("hybrid8-pp2-shards2", 8, mesh(4, 2, 1, "zb", zero=1, shards=2), problem, 3)


def _same_bits() -> Iterator[Row]:
    """Dropout on: no race of threads or ranks may show, and no interruption."""
    builds: dict[str, tuple[int, Build]] = {
        "single": (1, replicated()),
        **{f"ddp2-{sync}": (2, replicated(sync)) for sync in ("per_parameter", "flat", "overlap")},
        "ddp2-gloo": (2, replicated()),
        **{f"fsdp2-zero{zero}": (2, sharded(zero)) for zero in (1, 3)},
        **{f"pipeline2-{s}": (2, staged((3, 5), s, 4)) for s in ("1f1b", "zb")},
        **{f"threads3-{s}": (1, threads((3, 2, 3), s, 4)) for s in SCHEDULES},
        "module3": (1, module((3, 2, 3), 3)),
        "blocks3": (1, blocks(3, 3)),
    }
    for name, (ranks, build) in builds.items():
        if name != "blocks3":  # whose dropout is transformers' own, and draws
            yield Row(f"{name}-dropout", ranks, build, DROPPED, 2)
        yield Row(f"{name}-twice", ranks, build, DROPPED, 2, "second run")
        yield Row(f"{name}-resumed", ranks, build, DROPPED, 2, "resumed run")


def _recomputed() -> Iterator[Row]:
    """Dropout on: activations that are computed again are those that were forgotten."""
    problem = Sentences(11, n_layer=3, n_head=4, dropout=0.1)
    always, but_last, sqrt = every = "always", "except_last", "sqrt"
    text: dict[str, tuple[int, Build, tuple[str, ...]]] = {
        "single": (1, replicated(), (always, sqrt)),
        "ddp2-overlap": (2, replicated(), (always, sqrt)),
        "fsdp2-zero1": (2, sharded(1), (always,)),
        "fsdp2-zero3": (2, sharded(3), (always,)),
        **{f"threads2-{s}": (1, threads((3, 5), s, 4), every) for s in SCHEDULES},
        **{f"pipeline2-{s}": (2, staged((3, 5), s, 4), every) for s in SCHEDULES},
        "module3": (1, module((3, 2, 3), 3), (always, but_last)),
        "blocks3": (1, blocks(3, 3), every),
        "mesh2-1x1x2": (2, mesh(1, 1, 2), (always, sqrt)),
        "mesh4-2x1x2-zero3": (4, mesh(2, 1, 2, sequence_parallel=True, zero=3), (always,)),
        "mesh4-1x2x2": (4, mesh(1, 2, 2, "zb", True), (always, but_last)),
        "mesh8-2x2x2": (8, mesh(2, 2, 2, zero=1), (always,)),
    }
    for name, (ranks, build, modes) in text.items():
        for mode in modes:
            m = 2 if "x" not in name or ranks < 4 else 3
            beside: Any = "nothing recomputed"
            yield Row(f"{name}-recompute_{mode}", ranks, build, problem, m, beside, mode)
    for name, ranks, build in (
        ("ddp2-overlap", 2, replicated()),
        ("fsdp2-zero3", 2, sharded(3)),
        ("pipeline2-zb", 2, staged(VGG[1], "zb", 4)),
    ):
        name = f"{name}-recompute_vgg16"
        yield Row(name, ranks, build, Noise(11, 8), 2, "nothing recomputed", "always")


ROUTED = Sentences(22, n_layer=3, n_head=4, dropout=0.1, max_grad_norm=1.0, positions=40, experts=4)


BUSY = replace(ROUTED, shared_experts=2, balance_by="bias", router_z=0.1)


def _experts() -> Iterator[Row]:
    """Experts on every rank, and shared by ranks, whose micro-batches are unequally many. Dropout
    is on, and the last batch is smaller."""
    yield Row("single-experts", 1, replicated(), ROUTED)
    yield Row("single-experts-top1", 1, replicated(), replace(ROUTED, top_k=1), 2)
    yield Row("ddp2-experts", 2, replicated(), ROUTED)
    yield Row("pipeline2-experts", 2, staged((3, 5), "zb", 3), ROUTED)
    beside: Any = "nothing recomputed"
    name = "single-experts-recompute_always"
    yield Row(name, 1, replicated(), ROUTED, 2, beside, "always")
    yield Row("mesh2-ep2-gloo", 2, mesh(2, 1, 1, ep=2), ROUTED)
    yield Row("single-bias", 1, replicated(), BUSY)
    yield Row("single-bias-recompute_always", 1, replicated(), BUSY, 2, beside, "always")
    yield Row("threads2-bias", 1, threads((3, 5), "1f1b", 3), BUSY)
    for sync in ("per_parameter", "flat", "overlap"):
        yield Row(f"ddp2-bias-{sync}", 2, replicated(sync), BUSY)
    yield Row("pipeline2-bias", 2, staged((3, 5), "zb", 3), BUSY)
    yield Row("fsdp2-bias-zero2", 2, sharded(2), BUSY)
    yield Row("single-z", 1, replicated(), replace(ROUTED, router_z=0.1))
    yield Row("context2-z", 2, mesh(1, 1, 1, cp=2), replace(ROUTED, router_z=0.1), 2)
    layouts: dict[str, tuple[int, Build, int | None]] = {
        "mesh2-ep2": (2, mesh(2, 1, 1, ep=2), None),
        "mesh2-ep2-zero1": (2, mesh(2, 1, 1, ep=2, zero=1), None),
        "mesh2-ep2-zero3": (2, mesh(2, 1, 1, ep=2, zero=3), None),
        "mesh4-dp4-ep2": (4, mesh(4, 1, 1, ep=2), None),
        **{f"mesh4-dp4-ep2-zero{z}": (4, mesh(4, 1, 1, ep=2, zero=z), None) for z in (1, 2, 3)},
        "mesh4-dp4-ep4": (4, mesh(4, 1, 1, ep=4), None),
        **{f"mesh4-ep2-pp2-{s}": (4, mesh(2, 2, 1, s, ep=2), 3) for s in SCHEDULES},
        "mesh4-ep2-pp2-zbv": (4, mesh(2, 2, 1, "zbv", ep=2, chunks=2), 3),
        "mesh4-ep2-pp2-zb-zero1": (4, mesh(2, 2, 1, "zb", ep=2, zero=1), 3),
        "mesh8-dp4-ep2-pp2": (8, mesh(4, 2, 1, ep=2), 2),
        "context2-experts": (2, mesh(1, 1, 1, cp=2), 2),
        "mesh4-ep2-cp2": (4, mesh(2, 1, 1, ep=2, cp=2), 2),
        "mesh4-ep2-cp2-zero3": (4, mesh(2, 1, 1, ep=2, cp=2, zero=3), None),
        "mesh4-ep2-cp2-heads-zero1": (4, mesh(2, 1, 1, ep=2, cp=2, zero=1, attention="heads"), 2),
    }
    for name, (ranks, build, m) in layouts.items():
        yield Row(name, ranks, build, ROUTED, m)
        yield Row(f"{name}-bias", ranks, build, BUSY, m)
        if name in ("mesh2-ep2", "mesh2-ep2-zero3", "mesh4-ep2-pp2-zb-zero1"):
            yield Row(f"{name}-bias-resumed", ranks, build, BUSY, m, "resumed run")
            yield Row(f"{name}-twice", ranks, build, ROUTED, m, "second run")
            yield Row(f"{name}-resumed", ranks, build, ROUTED, m, "resumed run")
            yield Row(f"{name}-recompute_always", ranks, build, ROUTED, m, beside, "always")
    alone = Sentences(9, 8, experts=4)  # an example for one rank, and none for the others
    for zero in (None, 3):
        name = f"mesh4-dp4-ep4{'-zero3' * bool(zero)}-none_left"
        yield Row(name, 4, mesh(4, 1, 1, ep=4, zero=zero), alone, 100)


def _muon() -> Iterator[Row]:
    """Matrices that are whole, cut and in pieces."""
    problem = Sentences(
        22, n_layer=3, n_head=4, vocabulary=67, max_grad_norm=1.0, positions=40, optimizer="muon"
    )
    routed = replace(ROUTED, dropout=0.0, optimizer="muon")
    busy = replace(BUSY, dropout=0.0, optimizer="muon")
    layouts: dict[str, tuple[int, Build, Sentences]] = {
        "single-muon": (1, replicated(), problem),
        "single-experts-muon": (1, replicated(), routed),
        "ddp2-muon": (2, replicated(), problem),
        "ddp3-gloo-muon": (3, replicated(), problem),
        "threads2-zb-muon": (1, threads((3, 5), "zb", 3), problem),
        "blocks2-muon": (1, blocks(2, 3), problem),
        "pipeline2-1f1b-muon": (2, staged((3, 5), "1f1b", 3), problem),
        "pipeline2-zbv-muon": (2, staged((3, 2, 1, 2), "zbv", 3, 2), problem),
        **{f"fsdp2-zero{z}-muon": (2, sharded(z), problem) for z in (1, 2, 3)},
        "fsdp3-zero3-gloo-muon": (3, sharded(3), problem),
        "mesh2-1x1x2-muon": (2, mesh(1, 1, 2), problem),
        "mesh2-2x1x1-muon": (2, mesh(2, 1, 1), problem),
        "mesh4-2x1x2-zero1-muon": (4, mesh(2, 1, 2, zero=1), problem),
        "mesh4-2x1x2-zero3-muon": (4, mesh(2, 1, 2, sequence_parallel=True, zero=3), problem),
        "mesh4-1x2x2-muon": (4, mesh(1, 2, 2, "zb"), problem),
        "mesh4-2x2x1-zero1-muon": (4, mesh(2, 2, 1, zero=1), problem),
        "mesh8-2x2x2-zero1-muon": (8, mesh(2, 2, 2, zero=1), problem),
        "context2-ring-muon": (2, mesh(1, 1, 1, cp=2), problem),
        "context2-ring-zero3-muon": (2, mesh(1, 1, 1, cp=2, zero=3), problem),
        "mesh2-ep2-muon": (2, mesh(2, 1, 1, ep=2), routed),
        "mesh4-dp4-ep2-zero1-muon": (4, mesh(4, 1, 1, ep=2, zero=1), routed),
        "mesh4-dp4-ep2-zero3-muon": (4, mesh(4, 1, 1, ep=2, zero=3), routed),
        "single-bias-muon": (1, replicated(), busy),
        "ddp2-bias-muon": (2, replicated(), busy),
        "mesh2-ep2-bias-muon": (2, mesh(2, 1, 1, ep=2), busy),
        "mesh4-dp4-ep2-zero3-bias-muon": (4, mesh(4, 1, 1, ep=2, zero=3), busy),
        "hybrid4-shards2-zero1-muon": (4, mesh(4, 1, 1, zero=1, shards=2), problem),
        "hybrid4-shards2-zero3-gloo-muon": (4, mesh(4, 1, 1, zero=3, shards=2), problem),
    }
    for name, (ranks, build, trained) in layouts.items():
        yield Row(name, ranks, build, trained, 2)
        if name in ("single-muon", "fsdp2-zero3-muon", "mesh4-2x1x2-zero1-muon"):
            yield Row(f"{name}-resumed", ranks, build, trained, 2, "resumed run")
            yield Row(f"{name}-twice", ranks, build, trained, 2, "second run")


PARTS = (
    _whole_models, _shards, _stages, _chunks, _meshes, _contexts, _documents, _replicas_of_shards,
    _same_bits, _recomputed, _experts, _muon,
)  # fmt: skip
TABLE = tuple(row for part in PARTS for row in part())


def find(name: str) -> Row:
    """The row of that name."""
    return next(row for row in TABLE if row.name == name)

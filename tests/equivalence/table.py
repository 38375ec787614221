"""The rows: every layout, and what goes wrong in it.

A new row is one line: its name, which says what lays the model out, and what it trains.

    Row("fsdp3-zero2-even", Sentences(12, 6))

Names begin with the layout and the number of its ranks or stages:

    single     one process                    threads    stages in threads
    mesh       dp x pp x tp ranks             context    positions
    ddp        the whole model on each rank   module     a Pipe as a plain nn.Module
    fsdp       shards                         blocks     the course's GPT2LMHeadModelParallel
    pipeline   stages, one on each rank       hybrid     copies in shards

What follows are options, and words that say in short what is trained:

    zb v3_m8               a schedule, and its stages per rank   flat       --gradient_sync
    2x1x2 cp2 ep2 shards1  axes of a mesh; dp is what is left    heads      --attention
    cut_6_1_1              layers per stage                      sequence   --sequence_parallel
    recompute_sqrt         it must have the same bits as without
    resumed                it must have the same bits as without an interruption
    gloo                   ranks send, as if each had a machine of its own

`OTHERS` has the words that are no options. A word that is neither raises KeyError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pipeline.schedules import catalogue
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
Cuts = dict[int, tuple[int, ...]]  # layers per stage, by the number of stages

SCHEDULES = ("gpipe", "1f1b", "zb")
# Schedules with several stages per rank: how many ranks and chunks.
CHUNKED: tuple[tuple[str, int, int], ...] = (
    ("interleaved", 2, 2), ("interleaved", 2, 3), ("interleaved", 3, 2), ("zbv", 2, 2),
    ("zbv", 3, 2), ("vhalf", 3, 2), ("vmin", 3, 2), ("dualpipev", 2, 2),
)  # fmt: skip
DRAWN = ((0, 1), (0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1))  # schedules of one's own: ranks of stages
CUTS: Cuts = {  # the eight layers of three blocks
    1: (8,), 2: (3, 5), 3: (3, 2, 3), 4: (3, 2, 1, 2), 6: (1, 2, 1, 1, 1, 2), 8: (1,) * 8,
}  # fmt: skip
VGG: Cuts = {1: (16,), 2: (7, 9), 3: (4, 5, 7), 4: (4, 3, 5, 4)}
SYNCS = ("per_parameter", "flat", "overlap")
SPLIT_SIZE = 3  # of a batch that a `Pipe` cuts
BUCKET = 8 << 10  # bytes: several buckets even of these models


@dataclass(frozen=True)
class Row:
    """A row of the table: how a model is laid out, and what it must equal, as its name says.

    Attributes:
        num_microbatches: of a rank's part of a batch; None: as many as fit `Sentences.positions`.
    """

    name: str
    problem: Problem
    num_microbatches: int | None = None

    def __post_init__(self) -> None:
        if said := re.search(r"[-_]m(\d)\b", self.name):
            assert int(said[1]) == self.num_microbatches, self.name

    @property
    def kind(self) -> str:
        """The layout's name."""
        return self.name.split("-")[0].rstrip("0123456789")

    @property
    def number(self) -> int:
        """How many ranks or stages it has."""
        return int(self.name.split("-")[0].removeprefix(self.kind) or 1)

    @property
    def ranks(self) -> int:
        """How many processes train it."""
        return 1 if self.kind in ("threads", "module", "blocks") else self.number

    @property
    def recompute(self) -> str:
        """As --recompute."""
        mode = re.search(r"-recompute_(\w+)", self.name)
        return mode[1] if mode else "never"

    @property
    def beside(self) -> str:
        """What it must equal: one process up to rounding; or, bit for bit, which is for dropout,
        itself."""
        if "-resumed" in self.name:
            return "uninterrupted run"
        return "one process" if self.recompute == "never" else "nothing recomputed"

    @property
    def share_memory(self) -> bool:
        """Else ranks send, as if each had a machine of its own."""
        return "gloo" not in self.name

    def build(self, task: TrainingTask, world: World, setup: Setup) -> LaidOutModel:
        """Lays the model out."""
        options, cuts = options_of(self.name), VGG if isinstance(self.problem, Noise) else CUTS
        stages = self.number * options.get("chunks", 1)
        if given := re.search(r"-cut_([\d_]+)", self.name):
            cuts = {stages: tuple(map(int, given[1].split("_")))}
        elif "-auto" in self.name:  # by the time that layers take
            cuts = {}
        where = devices(world, self.number)
        if self.kind in ("single", "ddp"):
            asked = having(setup, bucket_mb=BUCKET / 2**20, **options)
            return Replicated(task, world, asked)
        if self.kind == "threads":
            asked = having(setup, cuts.get(stages), **options)
            return StagesInThreads(task, world, asked, where)
        if self.kind == "module":
            asked = having(setup, cuts[stages], num_microbatches=1)
            return PlainModule(task, world, asked, where)
        if self.kind == "blocks":
            split_size = None if "-one_by_one" in self.name else SPLIT_SIZE
            return BlocksInThreads(task, world, setup, where, split_size)
        if axis := {"pipeline": "pp", "context": "cp"}.get(self.kind):
            options[axis] = self.number
        return mesh(self.number, cuts, **options)(task, world, setup)


# What lays a model out


# Words of what is trained, and of how a row is checked.
OTHERS = """
    auto bias clipped documents dropout even experts full gloo gpt2 muon no_dropout no_target
    none_left odd one_by_one one_each one_more resumed same_length top1 untied vgg16 z
"""
WORDS: dict[str, dict[str, Any]] = {
    **{word: {} for word in OTHERS.split()},
    "sequence": {"sequence_parallel": True},
    **{sync: {"gradient_sync": sync} for sync in SYNCS},
    **{attention: {"attention": attention} for attention in ("ring", "heads")},
    **{schedule: {"schedule": schedule} for schedule in catalogue.SCHEDULES},
    **{schedule: {"schedule": schedule, "chunks": 2} for schedule, *_ in CHUNKED},
}


def options_of(name: str) -> dict[str, Any]:
    """The options for which the words of a name stand. KeyError: a word that stands for nothing."""
    options: dict[str, Any] = {}
    for word in name.split("-")[1:]:
        if axis := re.fullmatch(r"(dp|cp|ep|pp|tp|shards|zero)(\d)", word):
            options[axis[1]] = int(axis[2])
        elif axes := re.fullmatch(r"(\d)x(\d)x(\d)", word):
            options |= zip(("dp", "pp", "tp"), map(int, axes.groups()), strict=True)
        elif chunks := re.fullmatch(r"v(\d)_m\d", word):
            options["chunks"] = int(chunks[1])
        elif own := re.fullmatch(r"own(\d)", word):
            ranks, seed = DRAWN[int(own[1])], int(own[1])
            options["schedule"] = write_schedule(drawn(ranks, 4, seed), "own")
            options["chunks"] = len(ranks) // len({*ranks})
        elif not re.match(r"m\d|(cut|recompute|split)_", word):
            options |= WORDS[word]
    return options


def having(setup: Setup, cut: tuple[int, ...] | None = None, **options: Any) -> Setup:
    """The same with this cut, and these options."""
    return replace(setup, args=replace(setup.args, **options), cut=cut)


def mesh(W: int, cuts: Cuts = CUTS, **options: Any) -> Build:
    """W ranks: dp is what the axes among the options leave, and no other. Layers are cut
    unevenly."""
    pp = options.get("pp", 1)
    dp = W // (pp * options.get("tp", 1) * options.get("cp", 1))
    assert options.setdefault("dp", dp) == dp
    # One stage: all layers, however many.
    cut = cuts[pp * options.get("chunks", 1)] if pp > 1 else None
    layout = Sharded if options.get("zero") in (2, 3) else Staged

    def build(task: TrainingTask, world: World, setup: Setup) -> LaidOutModel:
        more = [LAYER_AXES] if setup.args.optimizer == "muon" else []
        places = make_mesh(ranks_of(options), 60.0, more)
        return layout(task, world, having(setup, cut, **options), places)

    return build


def devices(world: World, num_stages: int) -> list[torch.device]:
    """The devices of one process's stages: GPUs, if there are enough, or slices of the cores."""
    on_gpu = world.device.type == "cuda" and torch.cuda.device_count() >= num_stages
    return [torch.device("cuda" if on_gpu else "cpu", s) for s in range(num_stages)]


class PlainModule(StagesInThreads):
    """Calls `Pipe` as any other module: its forward, a loss, backward()."""

    def backward(self, step: Step) -> Tensor:
        """The batch is one piece to the caller."""
        self.pipe.split_size = SPLIT_SIZE
        (x,), (target,) = step.inputs, step.targets
        if isinstance(x, Sequences) and x.targets is not None:  # weights are cut as the ids are
            weights = x.hidden.new_zeros(x.hidden.numel()).index_fill(0, x.targets, 1)
            x = x._replace(targets=weights.view_as(x.hidden))
        output = self.pipe(x)  # on the last device
        loss = self.task.loss(output, tree_map(lambda t: t.to(output.device), target))
        (loss / max(1, step.count)).backward()
        return loss.detach()


# The rows


def _parts(W: int) -> dict[str, tuple[Problem, int | None]]:
    """What goes wrong where a batch is dealt out to W ranks, and the number of micro-batches. Every
    second batch is the odd one."""
    B = {2: 8, 3: 6}[W]
    parts: dict[str, tuple[Problem, int | None]] = {
        "one_more": (Sentences(B + W + 1, B, positions=30), None),  # for rank 0
        "none_left": (Sentences(B + 1, B), 100),  # for all ranks but 0; a micro-batch per example
        "m2": (Sentences(B + W, B), 2),
        "vgg16": (Noise(B + 2, B), 2),
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
# For meshes: the last batch is smaller, the vocabulary has no divisor, and dropout is on.
MESHED = Sentences(
    22, n_layer=3, n_head=8, vocabulary=67, dropout=0.1, max_grad_norm=1.0, positions=40
)
OF_THREE = replace(MESHED, n_head=6, n_embd=24)  # ranks that share heads
ROUTED = replace(MESHED, n_head=4, vocabulary=64, experts=4)
BUSY = replace(ROUTED, shared_experts=2, balance_by="bias", router_z=0.1)


def _whole_models() -> Iterator[Row]:
    yield Row("single-one_more", *_parts(2)["one_more"])
    yield Row("single-odd", ODD, 2)
    for W in (2, 3):
        for what, trained in _parts(W).items():
            for sync in (*SYNCS, "gloo") if W == 2 else ("overlap", "gloo"):
                yield Row(f"ddp{W}-{sync}-{what}", *trained)


def _shards() -> Iterator[Row]:
    for zero in (1, 2, 3):
        for what, trained in _parts(2).items():
            yield Row(f"fsdp2-zero{zero}-{what}", *trained)
        yield Row(f"fsdp3-zero{zero}-none_left", *_parts(3)["none_left"])
        yield Row(f"fsdp2-zero{zero}-gloo", *_parts(2)["m2"])
    yield Row("fsdp3-zero3-gloo", *_parts(3)["m2"])
    yield Row("fsdp3-zero3-vgg16", *_parts(3)["vgg16"])


def _stages() -> Iterator[Row]:
    """Every second batch has 3 examples, fewer than 8 micro-batches; of 8 examples in 3
    micro-batches the last has fewer."""
    yield Row("threads1-1f1b-m3", TEXT, 3)  # one stage does the same in any order
    yield Row("pipeline1-1f1b-m3", TEXT, 3)
    for schedule in SCHEDULES:
        for n, m in ((2, 1), (2, 3), (2, 8), (3, 3), (3, 8)):
            yield Row(f"threads{n}-{schedule}-m{m}", TEXT, m)
            if (n, m) != (3, 3):
                yield Row(f"pipeline{n}-{schedule}-m{m}", TEXT, m)
        for n, cut in ((2, "4_4"), (2, "1_7"), (3, "6_1_1")):  # in a block; an end alone
            yield Row(f"threads{n}-{schedule}-cut_{cut}", TEXT, 4)
        for what, trained in SPECIAL.items():
            yield Row(f"threads2-{schedule}-{what}", trained, 4)
            yield Row(f"pipeline2-{schedule}-{what}", trained, 4)
        for n in (2, 3) if schedule == "zb" else (2,):
            yield Row(f"pipeline{n}-{schedule}-vgg16", Noise(11, 8), 4)
    yield Row("threads2-sequential-m4", TEXT, 4)
    yield Row("threads2-1f1b-auto", TEXT, 4)
    for n in (1, 2, 3):
        yield Row(f"module{n}-gpt2", TEXT)
        yield Row(f"module{n}-vgg16", Noise(11, 8))
        yield Row(f"blocks{n}-split_size3", TEXT)
    yield Row("blocks2-one_by_one", TEXT)
    yield Row("blocks2-odd", ODD)


def _chunks() -> Iterator[Row]:
    """Several stages per rank; in a V the first rank has the embedding and the head."""
    for seed, ranks in enumerate(DRAWN):  # in any order
        yield Row(f"threads{max(ranks) + 1}-own{seed}", TEXT, 4)
        yield Row(f"pipeline{max(ranks) + 1}-own{seed}", TEXT, 4)
    for schedule, n, v in CHUNKED:
        for m in (3, 8):
            yield Row(f"threads{n}-{schedule}-v{v}_m{m}", TEXT, m)
            yield Row(f"pipeline{n}-{schedule}-v{v}_m{m}", TEXT, m)
        if (n, v) != (2, 2):
            continue
        for what, trained in (SPECIAL | {"dropout": DROPPED}).items():
            yield Row(f"threads2-{schedule}-{what}", trained, 4)
            yield Row(f"pipeline2-{schedule}-{what}", trained, 4)
        yield Row(f"pipeline2-{schedule}-vgg16", Noise(11, 8), 4)
        yield Row(f"pipeline2-{schedule}-resumed", DROPPED, 4)
        for axes in ("2x2x1", "1x2x2"):
            yield Row(f"mesh4-{axes}-{schedule}", MESHED, 3)
        yield Row(f"mesh4-2x2x1-{schedule}-zero1", MESHED, 3)


def _meshes() -> Iterator[Row]:
    """Every way to lay 2, 4 and 8 ranks out in three dimensions."""
    of_8 = [1, 2, 4, 8]
    layouts = [(W, *axes) for W in of_8[1:] for axes in product(of_8, repeat=3) if prod(axes) == W]
    for W, dp, pp, tp in layouts:
        m = 3 if pp > 1 else 2 if tp > 1 else None
        name = f"mesh{W}-{dp}x{pp}x{tp}"
        yield Row(name, MESHED, m)
        if tp > 1:
            yield Row(f"{name}-sequence", MESHED, m)
        if dp > 1:
            yield Row(f"{name}-zero1", MESHED, m)
        if dp > 1 and pp == 1 and tp > 1:
            yield Row(f"{name}-sequence-zero3", MESHED, m)
    odd = replace(ODD, n_head=4)
    yield Row("mesh2-1x1x2-odd", odd, 2)
    # What pads a sequence is beyond the model's last position.
    full = Sentences(6, same_length=True, n_positions=13, n_head=4)
    yield Row("mesh2-1x1x2-sequence-full", full, 2)
    yield Row("mesh4-1x1x2-cp2-sequence-full", full, 2)
    yield Row("mesh2-1x1x2-gloo", MESHED, 2)
    yield Row("mesh2-1x1x2-untied", replace(MESHED, tied=False), 2)
    yield Row("mesh3-1x1x3-sequence", OF_THREE, 2)
    yield Row("mesh4-2x1x2-none_left", Sentences(9, 8, n_head=4), 100)
    yield Row("mesh4-1x2x2-sequence-odd", odd, 2)
    yield Row("mesh4-2x1x2-zero2", MESHED, 2)
    yield Row("mesh4-1x2x2-zb", MESHED, 3)
    yield Row("mesh4-2x2x1-zero1-resumed", MESHED, 2)
    yield Row("mesh4-1x2x2-resumed", MESHED, 2)


def _contexts() -> Iterator[Row]:
    """Sequences of 2 to 20 positions, most of which no rank's stretches divide, over up to four
    ranks; a few have no position for each stretch. With m = 100 micro-batches each has an example,
    or none. Dropout is on where nothing else is said."""
    for attention, c in product(("ring", "heads"), (2, 3, 4)):
        trained, name = OF_THREE if c == 3 else MESHED, f"context{c}-{attention}"
        kept = replace(trained, dropout=0.0)  # by fused kernels
        yield Row(name, trained, 2)
        yield Row(f"{name}-no_dropout", kept, 2)
        yield Row(f"{name}-one_each", replace(kept, max_grad_norm=None), 100)
        if c == 2:
            yield Row(f"{name}-odd", replace(ODD, n_head=4), 2)
            yield Row(f"{name}-gloo", kept, 2)
            yield Row(f"{name}-no_target", Sentences(12, 4, some_without_target=True), 3)
            yield Row(f"{name}-untied", replace(trained, tied=False), 2)
            yield Row(f"{name}-resumed", MESHED, 2)
            yield Row(f"{name}-recompute_always", MESHED, 2)
        for zero in (1, 2, 3):
            yield Row(f"{name}-zero{zero}", trained, 2)
    for schedule in ("gpipe", "1f1b", "zb", "interleaved", "zbv"):
        yield Row(f"mesh4-1x2x1-cp2-{schedule}", MESHED, 3)
    for dp, pp, tp in ((2, 1, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)):
        W, m = 2 * dp * pp * tp, 3 if pp > 1 else 2
        name = f"mesh{W}-{dp}x{pp}x{tp}-cp2"
        for words in ("ring", "heads", "zb-zero1"):
            yield Row(f"{name}-{words}", MESHED, m)
        sequence = "-sequence" if tp > 1 else ""
        if sequence:
            yield Row(f"{name}-sequence", MESHED, m)
        if pp == 1:
            yield Row(f"{name}{sequence}-zero3", MESHED, m)
    yield Row("mesh6-1x1x3-cp2-sequence", OF_THREE, 2)
    yield Row("mesh6-1x2x1-cp3-zb", MESHED, 3)
    yield Row("mesh4-2x1x1-cp2-none_left", Sentences(9, 8, n_head=4), 100)


def _each(layouts: str, problem: Problem, m: int | None = None, what: str = "") -> Iterator[Row]:
    """The same under each layout."""
    for name in layouts.split():
        yield Row(f"{name}{what}", problem, m)


def _documents() -> Iterator[Row]:
    """Rows of documents that do not see each other, beside each document alone; and with dropout,
    resumed and recomputed."""
    rows = replace(MESHED, dropout=0.0, max_grad_norm=None, n_head=4, documents=True)
    whole = """
        module2 fsdp2-zero1 fsdp2-zero2 fsdp2-zero3 mesh2-1x1x2 mesh2-1x1x2-sequence
        mesh4-1x1x2-cp2-sequence hybrid4-shards2-zero3 context2-ring context4-ring context2-heads
        context4-heads context2-ring-zero3
    """
    stages = """
        threads2-zb pipeline2-gpipe pipeline2-1f1b pipeline2-zb pipeline2-zbv mesh4-2x2x1-zero1
        mesh4-1x2x1-cp2
    """
    for names, m in (("single ddp2-overlap", None), (whole, 2), (stages, 3)):
        yield from _each(names, rows, m, "-documents")
    of_experts = "single mesh2-ep2 mesh2-ep2-zero3 context2 mesh4-ep2-cp2-heads"
    routed = replace(rows, experts=4)  # their balance is of a row, whatever its documents
    busy = replace(routed, shared_experts=2, balance_by="bias", router_z=0.1)
    yield from _each(of_experts, routed, 2, "-experts-documents")
    yield from _each(of_experts, busy, 2, "-bias-documents")
    some = "single fsdp2-zero3 pipeline2-zb mesh2-1x1x2-sequence context2-ring"
    for how in ("resumed", "recompute_always"):
        yield from _each(some, replace(rows, dropout=0.1), 2, f"-documents-{how}")


def _replicas_of_shards() -> Iterator[Row]:
    """Four ranks: four copies, two copies in two shards each, one in four; with experts, positions,
    matrices and stages cut, too. A replica may have no example."""
    for zero, shards in product((1, 2, 3), (1, 2, 4)):
        yield Row(f"hybrid4-shards{shards}-zero{zero}", MESHED, 2)
    for zero in (1, 3):
        name = f"hybrid4-shards2-zero{zero}"
        yield Row(f"{name}-gloo", MESHED, 2)
        yield Row(f"{name}-none_left", Sentences(9, 8, n_head=4), 100)
        yield Row(f"{name}-resumed", MESHED, 2)
        yield Row(f"{name}-ep2", ROUTED)
        yield Row(f"hybrid4-cp2-shards1-zero{zero}", MESHED, 2)
        yield Row(f"hybrid4-tp2-sequence-shards1-zero{zero}", MESHED, 2)
    yield Row("hybrid8-pp2-zb-shards2-zero1", MESHED, 3)


def _same_bits() -> Iterator[Row]:
    """Dropout on: no race of threads or ranks may show, and no interruption."""
    layouts = """
        single ddp2-per_parameter ddp2-flat ddp2-overlap ddp2-gloo fsdp2-zero1 fsdp2-zero3 module3
        pipeline2-1f1b pipeline2-zb threads3-gpipe threads3-1f1b threads3-zb
    """
    yield from _each(layouts, DROPPED, 3, "-dropout")
    # The dropout of blocks is transformers' own, and draws.
    yield from _each(f"{layouts} blocks3", DROPPED, 3, "-resumed")


def _recomputed() -> Iterator[Row]:
    """Dropout on: activations that are computed again are those that were forgotten."""
    whole, last = "single ddp2-overlap mesh2-1x1x2", "module3 mesh4-1x2x2-zb-sequence"
    shards = "fsdp2-zero1 fsdp2-zero3 mesh4-2x1x2-sequence-zero3 mesh8-2x2x2-zero1"
    stages = """
        blocks3 threads2-gpipe threads2-1f1b threads2-zb pipeline2-gpipe pipeline2-1f1b pipeline2-zb
    """
    yield from _each(f"{whole} {last} {shards} {stages}", DROPPED, 3, "-recompute_always")
    yield from _each(f"{whole} {stages}", DROPPED, 3, "-recompute_sqrt")
    yield from _each(f"{last} {stages}", DROPPED, 3, "-recompute_except_last")
    pictures = "ddp2-overlap fsdp2-zero3 pipeline2-zb"
    yield from _each(pictures, Noise(11, 8), 2, "-recompute_always-vgg16")


def _experts() -> Iterator[Row]:
    """Experts on every rank, and shared by ranks, whose micro-batches are unequally many. Dropout
    is on, and the last batch is smaller."""
    yield from _each("single-experts ddp2-experts", ROUTED)
    yield Row("pipeline2-zb-experts", ROUTED, 3)
    yield Row("single-experts-top1", replace(ROUTED, top_k=1), 2)
    yield Row("single-experts-recompute_always", ROUTED, 2)
    yield Row("mesh2-ep2-gloo", ROUTED)
    whole = "single ddp2-per_parameter ddp2-flat ddp2-overlap fsdp2-zero2"
    yield from _each(whole, BUSY, what="-bias")
    yield from _each("threads2-1f1b pipeline2-zb", BUSY, 3, "-bias")
    yield Row("single-bias-recompute_always", BUSY, 2)
    yield from _each("single-z context2-z", replace(ROUTED, router_z=0.1), 2)
    shared = """
        mesh2-ep2 mesh2-ep2-zero1 mesh2-ep2-zero3 mesh4-dp4-ep2 mesh4-dp4-ep2-zero1
        mesh4-dp4-ep2-zero2 mesh4-dp4-ep2-zero3 mesh4-dp4-ep4 mesh4-ep2-cp2-zero3
    """
    positions = "context2-experts mesh4-ep2-cp2 mesh4-ep2-cp2-heads-zero1 mesh8-dp4-ep2-pp2"
    stages = """
        mesh4-ep2-pp2-gpipe mesh4-ep2-pp2-1f1b mesh4-ep2-pp2-zb mesh4-ep2-pp2-zbv
        mesh4-ep2-pp2-zb-zero1
    """
    for names, m in ((shared, None), (positions, 2), (stages, 3)):
        yield from _each(names, ROUTED, m)
        yield from _each(names, BUSY, m, "-bias")
    for names, m in (("mesh2-ep2 mesh2-ep2-zero3", None), ("mesh4-ep2-pp2-zb-zero1", 3)):
        yield from _each(names, BUSY, m, "-bias-resumed")
        for how in ("-resumed", "-recompute_always"):
            yield from _each(names, ROUTED, m, how)
    alone = Sentences(9, 8, experts=4)  # an example for one rank, and none for the others
    yield from _each("mesh4-dp4-ep4 mesh4-dp4-ep4-zero3", alone, 100, "-none_left")


def _muon() -> Iterator[Row]:
    """Matrices that are whole, cut and in pieces."""
    plain, routed, busy = (
        replace(problem, dropout=0.0, optimizer="muon") for problem in (MESHED, ROUTED, BUSY)
    )
    layouts = """
        single ddp2 ddp3-gloo threads2-zb blocks2 pipeline2-1f1b pipeline2-zbv fsdp2-zero1
        fsdp2-zero2 fsdp2-zero3 fsdp3-zero3-gloo mesh2-1x1x2 mesh2-2x1x1 mesh4-2x1x2-zero1
        mesh4-2x1x2-sequence-zero3 mesh4-1x2x2-zb mesh4-2x2x1-zero1 mesh8-2x2x2-zero1 context2-ring
        context2-ring-zero3 hybrid4-shards2-zero1 hybrid4-shards2-zero3-gloo
    """
    of_experts = "single-experts mesh2-ep2 mesh4-dp4-ep2-zero1 mesh4-dp4-ep2-zero3"
    yield from _each(layouts, plain, 2, "-muon")
    yield from _each(of_experts, routed, 2, "-muon")
    yield from _each("single ddp2 mesh2-ep2 mesh4-dp4-ep2-zero3", busy, 2, "-bias-muon")
    yield from _each("single fsdp2-zero3 mesh4-2x1x2-zero1", plain, 2, "-muon-resumed")


PARTS = (
    _whole_models, _shards, _stages, _chunks, _meshes, _contexts, _documents, _replicas_of_shards,
    _same_bits, _recomputed, _experts, _muon,
)  # fmt: skip
TABLE = tuple(row for part in PARTS for row in part())


def find(name: str) -> Row:
    """The row of that name."""
    return next(row for row in TABLE if row.name == name)

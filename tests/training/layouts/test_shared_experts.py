"""What ranks that share experts hold. That they train as one process does: tests/equivalence."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from runtime.waits import set_timeouts
from tests.equivalence.problems import Sentences
from tests.equivalence.table import having, mesh
from tests.ranks import Ranks
from training.launch.world import World
from training.layouts.layout import LaidOutModel, Setup
from training.optimization import make_optimizer
from training.tasks.cache import Cache

PROBLEM = Sentences(experts=4)


def layout(rank: int, world_size: int, **options: Any) -> Any:
    world = World(rank, world_size)
    precision = options.pop("precision", "fp64")
    dtype = torch.float64 if precision == "fp64" else torch.float32
    args = PROBLEM.options
    setup = Setup(replace(args, precision=precision), lambda ps: make_optimizer(args, ps))
    build = mesh(world_size, **options)
    return build(PROBLEM.task(world, dtype), world, having(setup))


def held(rank: int, world_size: int, ep: int, zero: int | None) -> tuple[Any, ...]:
    """Elements that are counted and held, of experts and of others; and the axes of replicas."""
    model: LaidOutModel = layout(rank, world_size, ep=ep, zero=zero)
    counted, elements = Counter[bool](), Counter[bool]()
    axes: dict[bool, set[tuple[str, ...]]] = {True: set(), False: set()}
    for x in model.held:
        of_expert = ".experts." in x.name
        elements[of_expert] += x.tensor.numel()
        counted[of_expert] += x.tensor.numel() * x.counts
        axes[of_expert].add(x.replicas)
    model.close()
    return counted, elements, axes


def test_experts_are_shared_and_each_is_counted_once(four_ranks: Ranks) -> None:
    """In two pairs of ranks, a rank has half of the experts; ZeRO divides them by two again, and
    all other parameters by four."""
    model = PROBLEM.task(World(), torch.float64).skeleton()
    whole = Counter[bool]()
    for name, p in model.named_parameters():
        whole[".experts." in name] += p.numel()
    for zero, divisor, others in ((None, 2, 1), (1, 4, 4), (3, 4, 4)):
        found = four_ranks.run(held, 2, zero)
        assert sum((counted for counted, *_ in found), Counter[bool]()) == whole
        for _, elements, axes in found:
            assert elements[True] == whole[True] / divisor
            assert abs(elements[False] - whole[False] / others) < 0.2 * whole[False]
            if zero is None:
                assert axes == {True: {("dp",)}, False: {("dp", "ep")}}
            else:
                assert axes == {True: {()}, False: {()}}


def compute_types(rank: int, world_size: int) -> dict[str, torch.dtype]:
    model = layout(rank, world_size, ep=2, zero=3, precision="bf16")
    return {
        entry.name: u.unit.compute_dtype for u in model.fsdp.units for entry in u.unit.entries
    }  # fmt: skip


def test_routers_alone_are_gathered_in_float32(ranks: Ranks) -> None:
    """Their probabilities decide who sees a position."""
    for types in ranks.run(compute_types):
        for name, dtype in types.items():
            assert dtype == (torch.float32 if "router" in name else torch.bfloat16), name


def translated(rank: int, world_size: int) -> None:
    """The last rank has no sentence, and the others take two tokens of one each."""
    model = layout(rank, world_size, ep=2, cp=2)
    set_timeouts(5)
    with model.evaluating():
        cache = Cache([0], [3], torch.device("cpu"))
        newest = torch.ones(1, 3, dtype=torch.long)
        for _ in range(2 if rank < world_size - 1 else 0):
            newest = model.next_tokens(newest, cache, 4)[:, None]
            cache.extend()
        model.end()
    model.close()


def test_a_rank_without_sentences_waits_for_those_alone_that_share_its_experts(
    four_ranks: Ranks,
) -> None:
    """Not for those that have other positions: they balance nothing while they translate."""
    four_ranks.run(translated)

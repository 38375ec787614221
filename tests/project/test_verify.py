"""verify.py: every strategy equals one process, and every way to break one is seen."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from project import verify
from project.verification import Row, check
from project.verified import STRATEGIES, Strategy, find
from tests.project.mutations import MUTATIONS
from tests.ranks import Ranks
from training.data import RankLoader
from training.launch import World

STEPS = 3  # an epoch has two, the second odd where a layout says so
reference = functools.cache(verify.plain)


def rows(rank: int, world_size: int, names: list[str], steps: int, mutation: str) -> list[Row]:
    """The rows of some strategies, with code that is broken, on a rank."""
    found = []
    for strategy in map(find, names):
        expected = reference(strategy.without_dropout, steps, torch.float64)
        with MUTATIONS[mutation]():
            world = World(rank, world_size)
            found.append(check(strategy, expected, world, steps, torch.float64))
    return found


def failures(ranks: Ranks | None, names: list[str], mutation: str = "nothing") -> list[str]:
    """What verify.py says of each; all ranks say the same."""
    if ranks is None:
        return [row.failure for row in rows(0, 1, names, STEPS, mutation)]
    found = ranks.run(rows, names, STEPS, mutation)
    assert all(len(each) == len(names) for each in found)
    first = [row.failure for row in found[0]]
    assert [[row.failure for row in each] for each in found] == [first] * ranks.world_size
    return first


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in the program: matrices are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def of(world_size: int, *parts: str) -> list[str]:
    """The names of the strategies for so many ranks, in whose names one of `parts` is."""
    return [
        s.name for s in STRATEGIES if s.world_size == world_size and any(p in s.name for p in parts)
    ]


def test_the_table_has_what_there_is() -> None:
    names = [strategy.name for strategy in STRATEGIES]
    assert len(names) == len(set(names)) == 94
    assert {s.world_size for s in STRATEGIES} == {1, 2, 3}


@pytest.mark.parametrize("part", ["gpipe", "1f1b", "zb", "sequential", "module", "blocks"])
def test_pipelines(part: str) -> None:
    names = of(1, f"-{part}")
    assert len(names) >= 1
    assert failures(None, names) == [""] * len(names)


@pytest.mark.parametrize("sync", ["per_parameter", "flat", "overlap", "gloo"])
def test_two_ranks(ranks: Ranks, sync: str) -> None:
    assert failures(ranks, of(2, sync)) == [""] * 6


@pytest.mark.parametrize("sync", ["per_parameter", "flat", "overlap", "gloo"])
def test_three_ranks(three_ranks: Ranks, sync: str) -> None:
    assert failures(three_ranks, of(3, sync)) == [""] * 5


def test_every_strategy_is_tested_above() -> None:
    syncs = ("per_parameter", "flat", "overlap", "gloo")
    pipelines = ("-gpipe", "-1f1b", "-zb", "-sequential", "-module", "-blocks")
    tested = [*of(1, *pipelines), *of(2, *syncs), *of(3, *syncs)]
    assert sorted(tested) == sorted(strategy.name for strategy in STRATEGIES)


def test_the_layouts_are_what_they_say() -> None:
    """In the first steps, on a rank each: examples, micro-batches; and for one layout targets."""

    def look(name: str, steps: int) -> list[list[tuple[int, int]]]:
        strategy = find(name)
        initial = reference(strategy.without_dropout, STEPS, torch.float64).initial
        found = []
        for rank in range(strategy.world_size):
            world = World(rank, strategy.world_size)
            loader = _loader(strategy, world, initial)
            parts = [step.micro_batches for step in loader.steps(0)][:steps]
            found.append([(sum(len(b["labels"]) for b in p), len(p)) for p in parts])
        return found

    assert look("dp2-flat-even", 2) == [[(4, 1), (4, 1)]] * 2
    assert [each[1][0] for each in look("dp2-flat-one_more", 2)] == [2, 1]
    assert [each[1] for each in look("dp3-flat-none_left", 2)] == [(1, 1), (0, 0), (0, 0)]
    assert look("dp2-flat-accumulate", 1) == [[(4, 2)]] * 2
    assert look("pipe2-zb-m3", 2) == [[(8, 3), (3, 3)]]


def _loader(strategy: Strategy, world: World, initial: Any) -> RankLoader:
    from project.verified import Given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("project.verified.make_gradient_sync", lambda *_: (None, None))
        trainer = strategy.build(Given(strategy.problem, world, torch.float64, initial))
    trainer.close()
    return trainer.loader


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_may_have_no_target_but_never_all(world_size: int) -> None:
    problem = find(f"dp{world_size}-flat-no_target").problem
    targets = []
    for rank in range(world_size):
        loader = RankLoader(
            problem.examples(), problem.batches(), rank=rank, world_size=world_size, pad_id=0,
            device="cpu",
        )  # fmt: skip
        steps = list(loader.steps(0))
        targets.append([sum(len(b["target_index"]) for b in s.micro_batches) for s in steps])
    assert min(map(min, targets)) == 0
    assert min(map(sum, zip(*targets, strict=True))) > 0


# A mutation, the strategies that it must turn red, and how the line begins.
GRADIENT = "gradient of "
RED: list[tuple[str, list[str]]] = [
    ("a_bucket_is_not_reduced", ["dp2-per_parameter-even", "dp2-flat-one_more"]),
    ("a_bucket_is_not_reduced", ["dp2-overlap-accumulate", "dp2-gloo-even"]),
    (
        "a_mean_over_ranks",
        ["dp2-overlap-even", "dp2-flat-accumulate", "dp2-per_parameter-one_more"],
    ),
    ("a_micro_batch_is_not_scaled", ["dp2-overlap-accumulate", "dp2-gloo-accumulate"]),
    ("a_micro_batch_is_not_scaled", ["pipe2-gpipe-m3", "pipe2-1f1b-m8", "pipe3-zb-m3"]),
    ("two_micro_batches_are_swapped", [f"pipe2-{s}-same_length" for s in ("gpipe", "1f1b", "zb")]),
    ("two_micro_batches_are_swapped", ["pipe2-module", "pipe3-blocks"]),
    ("a_tied_weight_loses_a_gradient", ["pipe2-1f1b-m3", "pipe3-zb-m3"]),
    ("gradients_are_kept", ["dp2-flat-even", "dp2-per_parameter-even"]),
    ("gradients_are_kept", ["pipe2-1f1b-m3", "pipe2-blocks"]),
    ("dropout_is_not_seeded", ["dp2-overlap-twice"]),
    ("dropout_is_not_seeded", ["pipe3-1f1b-twice", "pipe3-blocks-twice"]),
]


@pytest.mark.parametrize(("mutation", "names"), RED, ids=[f"{m}-{n[0]}" for m, n in RED])
def test_broken_code_is_red(ranks: Ranks, mutation: str, names: list[str]) -> None:
    found = failures(ranks if names[0].startswith("dp") else None, names, mutation)
    if mutation == "dropout_is_not_seeded":
        assert [f[:5] for f in found] == ["loss "] * len(names)
    else:
        assert [f[: len(GRADIENT)] for f in found] == [GRADIENT] * len(names), found

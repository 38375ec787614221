"""verify.py: every strategy equals one process, and every way to break one is seen."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.pipe import Pipe
from project import verify
from project.verification import Row, check
from project.verified import STRATEGIES, find
from tests.project.mutations import MUTATIONS
from tests.ranks import Ranks
from training.launch import World

STEPS = 2  # the second is the odd one where a layout says so
reference = functools.cache(verify.plain)


def rows(rank: int, world_size: int, names: list[str], steps: int, mutation: str) -> list[Row]:
    """The rows of some strategies, with code that is broken, on a rank."""
    found = []
    for strategy in map(find, names):
        expected = reference(strategy.problem.without_dropout, steps, torch.float64)
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


def of(world_size: int) -> list[str]:
    """The names of the strategies for so many ranks."""
    return [s.name for s in STRATEGIES if s.world_size == world_size]


def test_names_are_unique() -> None:
    names = [strategy.name for strategy in STRATEGIES]
    assert len(names) == len(set(names)) == len([*of(1), *of(2), *of(3)])


# The short form: every other row, and few of three ranks, which are slow here. `make verify`
# runs all there are.
THREE = ("dp3-overlap-none_left", "fsdp3-zero3-none_left", "proc3-1f1b-m8", "proc3-zb-gloo")


@pytest.mark.parametrize("name", of(1)[::2])
def test_in_one_process(name: str) -> None:
    assert failures(None, [name]) == [""]


@pytest.mark.parametrize("name", of(2)[::2])
def test_two_ranks(ranks: Ranks, name: str) -> None:
    assert failures(ranks, [name]) == [""]


@pytest.mark.parametrize("name", THREE)
def test_three_ranks(three_ranks: Ranks, name: str) -> None:
    assert failures(three_ranks, [name]) == [""]


@pytest.mark.parametrize("world_size", [2])
def test_a_rank_may_have_no_target_but_never_all(world_size: int) -> None:
    problem = find(f"dp{world_size}-flat-no_target").problem
    targets = []
    for rank in range(world_size):
        steps = problem.loader(World(rank, world_size)).steps(0)
        targets.append([sum(len(b["target_index"]) for b in s.micro_batches) for s in steps])
    assert min(map(min, targets)) == 0
    assert min(map(sum, zip(*targets, strict=True))) > 0


# A mutation, and strategies that it must turn red. (That they are green without is tested above.)
GRADIENT, WEIGHT = "gradient of ", "weight of "
RED: list[tuple[str, list[str]]] = [
    ("a_bucket_is_not_reduced", ["dp2-per_parameter-even", "dp2-flat-one_more"]),
    ("a_bucket_is_not_reduced", ["dp2-overlap-accumulate", "dp2-gloo-even", "ddp2-accumulate"]),
    ("a_rank_is_left_out_of_the_sum", [f"fsdp2-zero{z}-accumulate" for z in (1, 2, 3)]),
    ("a_rank_is_left_out_of_the_sum", ["fsdp2-zero3-gloo"]),
    ("micro_batches_replace", ["ddp2-accumulate"]),
    ("micro_batches_replace", [f"fsdp2-zero{z}-accumulate" for z in (1, 2, 3)]),
    (
        "a_mean_over_ranks",
        ["dp2-overlap-even", "dp2-flat-accumulate", "dp2-per_parameter-one_more"],
    ),
    ("a_micro_batch_is_not_scaled", ["dp2-overlap-accumulate", "dp2-gloo-accumulate"]),
    ("a_micro_batch_is_not_scaled", ["pipe2-gpipe-m3", "pipe2-1f1b-m8", "pipe3-zb-m3"]),
    ("a_micro_batch_is_not_scaled", ["proc2-gpipe-m3", "proc2-zb-m8"]),
    ("two_micro_batches_are_swapped", [f"pipe2-{s}-same_length" for s in ("gpipe", "1f1b", "zb")]),
    ("two_micro_batches_are_swapped", ["pipe3-blocks"]),
    ("a_tied_weight_loses_a_gradient", ["pipe2-1f1b-m3", "pipe3-zb-m3"]),
    ("a_rank_keeps_its_part_of_a_tied_gradient", ["proc2-1f1b-m3", "proc2-zb-m3"]),
    ("gradients_are_kept", ["dp2-flat-even", "dp2-per_parameter-even"]),
    ("gradients_are_kept", ["pipe2-1f1b-m3", "pipe2-blocks"]),
    ("dropout_is_not_seeded", ["dp2-overlap-twice"]),
    ("dropout_is_not_seeded", ["pipe3-1f1b-twice", "pipe3-blocks-twice"]),
]


@pytest.mark.parametrize(("mutation", "names"), RED, ids=[f"{m}-{n[0]}" for m, n in RED])
def test_broken_code_is_red(ranks: Ranks, mutation: str, names: list[str]) -> None:
    found = failures(ranks if find(names[0]).world_size == 2 else None, names, mutation)
    assert [f[: len(GRADIENT)] for f in found] == [GRADIENT] * len(names), found


@pytest.mark.parametrize(
    "names",
    [["dp2-overlap-clipped", "ddp2-clipped", "fsdp2-zero3-clipped", "proc2-1f1b-clipped"],
     ["pipe2-1f1b-clipped"]],
    ids=["ranks", "stages"],
)  # fmt: skip
def test_a_norm_that_is_not_the_whole_models_is_red(ranks: Ranks, names: list[str]) -> None:
    """The first step's gradients, which are compared before they are clipped, are right."""
    of_ranks = ranks if find(names[0]).world_size == 2 else None
    found = failures(of_ranks, names, "the_norm_is_of_a_part")
    assert all(f.startswith((GRADIENT, WEIGHT)) for f in found), found


# What a person sees of it

GREEN, BROKEN = "pipe2-module", "pipe2-1f1b-m3"


def said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, list[str]]:
    """The status of the program, and its lines under the table's header, less the seconds."""
    status: object = 0
    try:
        verify.main([*argv, "--steps", str(STEPS)])
    except SystemExit as end:
        status = end.code
    lines = capsys.readouterr().out.split(f"{verify.HEADER}\n")[1].split("\n")
    return status, [line.split(", in ")[0] for line in lines if line]


def test_all_agree(capsys: pytest.CaptureFixture[str]) -> None:
    status, (row, last) = said(["--strategy", GREEN], capsys)
    assert (status, row.split()[0], row.split()[-1]) == (0, GREEN, "equal")
    assert last == "1 of 1 strategies agree"


def test_one_that_does_not_makes_the_status_1_and_says_where(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    with MUTATIONS["a_micro_batch_is_not_scaled"]():
        status, (red, where, green, last) = said(
            ["--strategy", f"{BROKEN},{GREEN}", "--json", str(file)], capsys
        )
    assert status == 1
    assert (red.split()[0], red.split()[-1]) == (BROKEN, "FAILED")
    assert where.startswith("    gradient of transformer.") and where.endswith(" (at most 1e-10)")
    assert ": off by " in where
    assert (green.split()[0], green.split()[-1]) == (GREEN, "equal")
    assert last == "1 of 2 strategies agree"
    failures = [row["failure"] for row in json.loads(file.read_text())["rows"]]
    assert failures == [where.strip().removesuffix(" (at most 1e-10)"), ""]


def test_one_that_raises_is_a_failure_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the one after it is trained."""
    train_step = Pipe.train_step

    def fail(pipe: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if len(x) == 1:
            raise ArithmeticError("on purpose")
        return train_step(pipe, x, *args, **kwargs)

    monkeypatch.setattr(Pipe, "train_step", fail)
    status, (red, where, green, last) = said(["--strategy", "pipe2-1f1b-m1,pipe2-1f1b-m8"], capsys)
    assert status == 1
    assert (red.split()[-1], where.split(" (")[0]) == (
        "FAILED", "    ArithmeticError: on purpose"
    )  # fmt: skip
    assert green.split()[-1] == "equal"
    assert last == "1 of 2 strategies agree"

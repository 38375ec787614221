"""Ranks that do not hold the same are told apart by name, before anything is averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from training.agreement import check_replicas, check_same, option_values
from training.launch import RunError, World


def same(rank: int, world_size: int, per_rank: list[dict[str, bytes]]) -> str | None:
    try:
        check_same(World(rank, world_size, rank), per_rank[rank])
    except RunError as error:
        return str(error)
    return None


ADVICE = (
    "; every host needs the same options, data, model and tokenizer: remove what "
    "earlier runs left in --workdir there"
)


def test_what_is_the_same_passes(ranks: Ranks) -> None:
    assert ranks.run(same, [{"a": b"x", "b": b""}, {"b": b"", "a": b"x"}]) == [None, None]


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({"tokenizer": b"x", "data": b"y"}, {"tokenizer": b"z", "data": b"y"}, "tokenizer"),
        ({"data": b"y"}, {"data": b"y", "--new": b"1"}, "--new"),
        ({"data": b"y", "--new": b"1"}, {"data": b"y"}, "--new"),
    ],
)
def test_what_differs_is_named(
    ranks: Ranks, first: dict[str, bytes], second: dict[str, bytes], named: str
) -> None:
    expected = f"not the same as on rank 0: {named} (rank 1){ADVICE}"
    assert ranks.run(same, [first, second]) == [expected, expected]


def test_every_rank_that_differs_is_named(three_ranks: Ranks) -> None:
    things = [{"a": b"1", "b": b"1"}, {"a": b"2", "b": b"1"}, {"a": b"3", "b": b"2"}]
    expected = f"not the same as on rank 0: a (ranks 1, 2), b (rank 2){ADVICE}"
    assert three_ranks.run(same, things) == [expected] * 3


def test_options_that_a_host_may_choose_are_not_compared() -> None:
    options = {"seed": 0, "workdir": "here", "dataset": "/a", "timeout": 3.0}
    assert option_values(options) == {"--seed": b"0"}


def replicas(rank: int, world_size: int, moved: dict[int, tuple[str, int]], held: Any) -> Any:
    """Moves an element of a parameter by the least that float32 can."""
    parameters = {
        "weight": torch.arange(12.0).view(3, 4).t(),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "number": torch.tensor(1.0),
        "empty": torch.zeros(0),
    }
    if rank in moved:
        name, place = moved[rank]
        p = parameters[name]
        bits = p.flatten().view(torch.int16 if p.dtype == torch.bfloat16 else torch.int32)
        bits[place] += 1
        parameters[name] = bits.view(p.dtype).view(p.shape)
    if held is not None:
        parameters = {name: parameters[name] for name in held[rank]}
    try:
        check_replicas(World(rank, world_size, rank), parameters, "in epoch 3")
    except RunError as error:
        return str(error)
    return None


@pytest.mark.parametrize("where", [("weight", 11), ("half", 0), ("number", 0)])
def test_a_replica_that_is_off_by_one_bit_is_named(ranks: Ranks, where: tuple[str, int]) -> None:
    assert ranks.run(replicas, {}, None) == [None, None]
    expected = f"replicas have come apart in epoch 3: {where[0]} (rank 1, against rank 0)"
    assert ranks.run(replicas, {1: where}, None) == [expected] * 2


def test_only_what_several_ranks_hold_is_compared(three_ranks: Ranks) -> None:
    """As the stages of a pipeline whose first and last are tied; or as shards: nothing."""
    held = [["weight", "half"], ["number"], ["weight", "empty"]]
    assert three_ranks.run(replicas, {1: ("number", 0)}, held) == [None] * 3
    expected = "replicas have come apart in epoch 3: weight (rank 2, against rank 0)"
    assert three_ranks.run(replicas, {2: ("weight", 0)}, held) == [expected] * 3
    assert three_ranks.run(replicas, {}, [[], [], []]) == [None] * 3

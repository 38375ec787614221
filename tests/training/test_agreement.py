"""Ranks that do not hold the same are told apart by name, before anything is averaged."""

from __future__ import annotations

from typing import Any

import torch

from tests.ranks import Ranks
from training.agreement import check_replicas, check_same, run_things
from training.errors import RunError
from training.world import World


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


def test_what_differs_is_named_with_every_rank(three_ranks: Ranks) -> None:
    assert (
        three_ranks.run(same, [{"a": b"x", "b": b""}, *[{"b": b"", "a": b"x"}] * 2]) == [None] * 3
    )
    things = [{"a": b"1", "b": b"1"}, {"a": b"2", "b": b"1"}, {"a": b"3", "b": b"2", "--new": b"1"}]
    expected = f"not the same as on rank 0: a (ranks 1, 2), b (rank 2), --new (rank 2){ADVICE}"
    assert three_ranks.run(same, things) == [expected] * 3


def test_options_that_a_host_may_choose_are_not_compared() -> None:
    options = {"seed": 0, "workdir": "here", "dataset": "/a", "timeout": 3.0}
    assert run_things(options, {"test": "x"}) == {"--seed": b"0", "the test data": b"x"}


def replicas(rank: int, world_size: int, moved: dict[int, str], held: Any) -> str | None:
    """Moves an element of a parameter by the least that its type can."""
    parameters = {
        "weight": torch.arange(12.0).view(3, 4).t(),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "number": torch.tensor(1.0),
        "empty": torch.zeros(0),
    }
    if name := moved.get(rank):
        p = parameters[name]
        bits = p.flatten().view(torch.int16 if p.dtype == torch.bfloat16 else torch.int32)
        bits[-1] += 1
        parameters[name] = bits.view(p.dtype).view(p.shape)
    if held is not None:
        parameters = {name: parameters[name] for name in held[rank]}
    try:
        check_replicas(World(rank, world_size, rank), parameters, "in epoch 3")
    except RunError as error:
        return str(error)
    return None


def test_a_replica_that_is_off_by_one_bit_is_named(ranks: Ranks) -> None:
    assert ranks.run(replicas, {}, None) == [None, None]
    for name in ("weight", "half", "number"):
        expected = f"replicas have come apart in epoch 3: {name} (rank 1, against rank 0)"
        assert ranks.run(replicas, {1: name}, None) == [expected] * 2


def test_only_what_several_ranks_hold_is_compared(three_ranks: Ranks) -> None:
    """As the stages of a pipeline whose first and last are tied; or as shards: nothing."""
    held = [["weight", "half"], ["number"], ["weight", "empty"]]
    assert three_ranks.run(replicas, {1: "number"}, held) == [None] * 3
    expected = "replicas have come apart in epoch 3: weight (rank 2, against rank 0)"
    assert three_ranks.run(replicas, {2: "weight"}, held) == [expected] * 3
    assert three_ranks.run(replicas, {}, [[], [], []]) == [None] * 3

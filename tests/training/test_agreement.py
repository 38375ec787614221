"""Ranks that do not hold the same are told apart by name, before anything is averaged."""

from __future__ import annotations

import torch

from tests.ranks import Ranks
from training.agreement import check_replicas, check_same, run_things
from training.errors import RunError
from training.world import World

ADVICE = (
    "; every host needs the same options, data, model and tokenizer: remove what "
    "earlier runs left in --workdir there"
)


def same(rank: int, world_size: int, per_rank: list[dict[str, bytes]]) -> str | None:
    try:
        check_same(World(rank, world_size, rank), per_rank[rank])
    except RunError as error:
        return str(error)
    return None


def test_what_differs_is_named_with_every_rank(three_ranks: Ranks) -> None:
    things = [{"a": b"x", "b": b""}, *[{"b": b"", "a": b"x"}] * 2]
    assert three_ranks.run(same, things) == [None] * 3
    things = [{"a": b"1", "b": b"1"}, {"a": b"2", "b": b"1"}, {"a": b"3", "b": b"2", "--new": b"1"}]
    expected = f"not the same as on rank 0: a (ranks 1, 2), b (rank 2), --new (rank 2){ADVICE}"
    assert three_ranks.run(same, things) == [expected] * 3


def test_options_that_a_host_may_choose_are_not_compared() -> None:
    options = {"seed": 0, "workdir": "here", "dataset": "/a", "timeout": 3.0}
    assert run_things(options, {"test": "x"}) == {"--seed": b"0", "the test data": b"x"}


def replicas(rank: int, world_size: int, at: int, name: str, held: list[list[str]]) -> str | None:
    """What is said where rank `at` has moved an element by the least that its type can."""
    parameters = {
        "weight": torch.arange(12.0).view(3, 4).t(),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "number": torch.tensor(1.0),
        "empty": torch.zeros(0),
    }
    if rank == at:
        p = parameters[name]
        bits = p.flatten().view(torch.int16 if p.dtype == torch.bfloat16 else torch.int32)
        bits[-1] += 1
        parameters[name] = bits.view(p.dtype).view(p.shape)
    mine = {name: parameters[name] for name in (held[rank] if held else parameters)}
    try:
        check_replicas(World(rank, world_size, rank), mine, "in epoch 3")
    except RunError as error:
        return str(error)
    return None


def test_a_replica_that_is_off_by_one_bit_is_named(three_ranks: Ranks) -> None:
    """What only one rank holds, as the stages of a pipeline but for what is tied, is not compared;
    nor are shards."""
    assert three_ranks.run(replicas, -1, "", []) == [None] * 3
    for name in ("weight", "half", "number"):
        said = f"replicas have come apart in epoch 3: {name} (rank 1, against rank 0)"
        assert three_ranks.run(replicas, 1, name, []) == [said] * 3
    held = [["weight", "half"], ["number"], ["weight", "empty"]]
    assert three_ranks.run(replicas, 1, "number", held) == [None] * 3
    said = "replicas have come apart in epoch 3: weight (rank 2, against rank 0)"
    assert three_ranks.run(replicas, 2, "weight", held) == [said] * 3
    assert three_ranks.run(replicas, -1, "", [[], [], []]) == [None] * 3

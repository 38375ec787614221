"""Ranks that do not hold the same are told apart by name; in runs: tests/project."""

from __future__ import annotations

import torch

from tests.ranks import Ranks
from training.agreement import check_replicas, run_things
from training.errors import RunError
from training.world import World


def test_options_that_a_host_may_choose_are_not_compared() -> None:
    options = {"seed": 0, "workdir": "here", "dataset": "/a", "timeout": 3.0}
    expected = {"--seed": b"0", "the test data": b"x"}
    assert run_things(options, {"test": "x"}) == expected
    assert run_things(options | {"workdir": "there"}, {"test": "x"}) == expected


def replicas(rank: int, world_size: int, at: int, name: str, held: list[list[str]]) -> str | None:
    """What is said where ranks from `at` on have moved an element by the least its type can."""
    parameters = {
        "weight": torch.arange(12.0).view(3, 4).t(),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "number": torch.tensor(1.0),
        "empty": torch.zeros(0),
    }
    if rank >= at:
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
    assert three_ranks.run(replicas, 3, "", []) == [None] * 3
    for name in ("weight", "half", "number"):
        said = f"replicas differ in epoch 3: {name} (rank 1, 2 against rank 0)"
        assert three_ranks.run(replicas, 1, name, []) == [said] * 3
    held = [["weight", "half"], ["number"], ["weight", "empty"]]
    assert three_ranks.run(replicas, 1, "number", held) == [None] * 3
    said = "replicas differ in epoch 3: weight (rank 2 against rank 0)"
    assert three_ranks.run(replicas, 2, "weight", held) == [said] * 3
    assert three_ranks.run(replicas, 3, "", [[], [], []]) == [None] * 3

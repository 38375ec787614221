"""The short form: some cases of every kind; and a planted fault turns a case of each red."""

from __future__ import annotations

import pytest

from tests.equivalence.mutations import MUTATIONS
from tests.fuzz.__main__ import wrong
from tests.fuzz.cases import KINDS, Verdict, kind_of, run
from tests.ranks import Ranks

SEEDS = range(24)  # three of each kind


@pytest.mark.parametrize("kind", KINDS)
def test_random_cases_agree_with_plain_training(three_ranks: Ranks, kind: str) -> None:
    for seed in SEEDS:
        if kind_of(seed) == kind:
            assert wrong(three_ranks.run(run, seed)) == [], f"python -m tests.fuzz --seed {seed}"


def _broken(rank: int, world_size: int, mutation: str, seed: int) -> Verdict | None:
    with MUTATIONS[mutation]():
        try:
            return run(rank, world_size, seed)
        except RuntimeError:  # shapes that do not fit
            return Verdict({}, ["an error"])


@pytest.mark.parametrize(
    ("mutation", "seed"),
    [
        ("two_micro_batches_are_swapped", 0),
        ("two_micro_batches_are_swapped", 1),
        ("a_bucket_is_not_reduced", 3),
        ("a_bucket_is_not_reduced", 4),
        ("a_rank_is_left_out_of_the_sum", 5),
        ("a_rank_is_left_out_of_the_sum", 6),
        ("a_rank_is_left_out_of_the_sum", 7),
    ],
)
def test_a_planted_fault_turns_a_case_red(three_ranks: Ranks, mutation: str, seed: int) -> None:
    """Of the first cases of its kind, one or more."""
    seeds = range(seed, 4 * len(KINDS), len(KINDS))
    assert any(wrong(three_ranks.run(_broken, mutation, s)) for s in seeds)

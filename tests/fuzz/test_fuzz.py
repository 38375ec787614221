"""The short form: some cases of every kind; and a planted fault turns a case of each red."""

from __future__ import annotations

import pytest

from tests.equivalence.mutations import MUTATIONS
from tests.fuzz.__main__ import wrong
from tests.fuzz.cases import KINDS, Verdict, kind_of, run
from tests.ranks import Ranks

# Of every kind three and more, most of them on several ranks or stages.
SEEDS = (
    0, 8, 24, 25, 33, 57, 2, 10, 50, 19, 27, 35, 28, 36, 52, 13, 29, 37, 6, 14, 30, 7, 15, 31, 39,
)  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS, ids=[f"{kind_of(seed)}-{seed}" for seed in SEEDS])
def test_a_random_case_agrees_with_plain_training(three_ranks: Ranks, seed: int) -> None:
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
        ("two_micro_batches_are_swapped", 1),
        ("a_bucket_is_not_reduced", 3),
        ("a_bucket_is_not_reduced", 4),
        ("a_rank_is_left_out_of_the_sum", 7),
    ],
)
def test_a_planted_fault_turns_a_case_red(three_ranks: Ranks, mutation: str, seed: int) -> None:
    """Of the first cases of its kind, one or more."""
    seeds = range(seed, 4 * len(KINDS), len(KINDS))
    assert any(wrong(three_ranks.run(_broken, mutation, s)) for s in seeds)

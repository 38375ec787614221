"""The short form: some cases of every kind; and a planted fault turns a case of each red."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from torch import Tensor

from pipeline.dataflow import Losses
from tests.equivalence.mutations import MUTATIONS
from tests.fuzz.__main__ import judge
from tests.fuzz.cases import KINDS, Verdict, draw, kind_of, run
from tests.ranks import Ranks

SEEDS = range(24)  # three of each kind


@pytest.mark.parametrize("kind", KINDS)
def test_random_cases_agree_with_plain_training(three_ranks: Ranks, kind: str) -> None:
    seeds = [seed for seed in SEEDS if kind_of(seed) == kind]
    words = []
    for seed in seeds:
        outcome = judge(three_ranks.run(run, seed))
        assert outcome.word != "failed", f"python -m tests.fuzz --case {seed}\n{outcome.text}"
        words.append(outcome.word)
    assert len(words) == 3 and "agreed" in words


@contextmanager
def _louder() -> Iterator[None]:
    """The first micro-batch of a pipeline counts twice."""
    gradient = Losses.gradient

    def wrong(self: Losses, i: int) -> list[Tensor | None]:
        return [g if g is None or i else 2 * g for g in gradient(self, i)]

    with patch.object(Losses, "gradient", wrong):
        yield


FAULTS = {**MUTATIONS, "a_micro_batch_counts_twice": _louder}


def _broken(rank: int, world_size: int, mutation: str, seed: int) -> Verdict | None:
    with FAULTS[mutation]():
        return run(rank, world_size, seed)


@pytest.mark.parametrize(
    ("mutation", "seed"),
    [
        ("two_micro_batches_are_swapped", 32),
        ("a_micro_batch_counts_twice", 49),
        ("a_micro_batch_counts_twice", 18),
        ("a_bucket_is_not_reduced", 51),
        ("a_bucket_is_not_reduced", 12),
        ("a_rank_is_left_out_of_the_sum", 5),
        ("a_rank_is_left_out_of_the_sum", 14),
        ("a_rank_is_left_out_of_the_sum", 47),
    ],
)
def test_a_planted_fault_turns_a_case_red(three_ranks: Ranks, mutation: str, seed: int) -> None:
    outcome = judge(three_ranks.run(_broken, mutation, seed))
    assert outcome.word == "failed" and "gradient" in outcome.text


def test_a_case_is_a_function_of_its_seed() -> None:
    """What is drawn, to the values of the weights."""
    for seed in range(8):
        first, second = draw(seed), draw(seed)
        assert str(first) == str(second)
        pairs = zip(first.model().parameters(), second.model().parameters(), strict=True)
        assert all(bool((p == q).all()) for p, q in pairs)

"""The short form: some cases of every kind; and a planted fault turns a case of each red."""

from __future__ import annotations

import pickle
from itertools import count, islice

import pytest
import torch

from tests.equivalence.mutations import MUTATIONS
from tests.fuzz.cases import KINDS, draw, kind_of, run, wrong
from tests.ranks import Ranks

SEEDS = range(4 * len(KINDS))  # four of every kind


@pytest.mark.parametrize("seed", SEEDS, ids=[f"{kind_of(seed)}-{seed}" for seed in SEEDS])
def test_a_random_case_agrees_with_plain_training(three_ranks: Ranks, seed: int) -> None:
    found = three_ranks.run(run, seed)
    assert wrong(seed, found) == [], f"python -m tests.fuzz --seed {seed}"


def _broken(rank: int, world_size: int, mutation: str, seed: int) -> bytes:
    with MUTATIONS[mutation]():
        try:
            return run(rank, world_size, seed)
        except RuntimeError:  # shapes that do not fit
            return pickle.dumps({"an error": torch.ones(())})


def _several(seed: int) -> bool:
    """Whether the case always has micro-batches that can be swapped."""
    case = draw(seed)
    return min(case.options["m"], *(examples for examples, _ in case.steps)) > 1


@pytest.mark.parametrize(
    ("mutation", "kind"),
    [
        ("two_micro_batches_are_swapped", "train_step"),
        ("a_bucket_is_not_reduced", "ddp"),
        ("a_rank_is_left_out_of_the_sum", "fsdp3"),
    ],
)
def test_a_planted_fault_turns_a_case_red(three_ranks: Ranks, mutation: str, kind: str) -> None:
    seeds = islice((s for s in count() if kind_of(s) == kind and _several(s)), 4)
    assert any(wrong(seed, three_ranks.run(_broken, mutation, seed)) for seed in seeds)

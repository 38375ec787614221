"""The short form: some cases of every kind. Wrong lines that turn them red: tests/mutants."""

from __future__ import annotations

import pytest

from tests.fuzz.cases import KINDS, kind_of, run, wrong
from tests.ranks import Ranks

SEEDS = range(3 * len(KINDS))  # three of every kind


@pytest.mark.parametrize("seed", SEEDS, ids=[f"{kind_of(seed)}-{seed}" for seed in SEEDS])
def test_a_random_case_agrees_with_plain_training(three_ranks: Ranks, seed: int) -> None:
    found = three_ranks.run(run, seed)
    assert wrong(seed, found) == [], f"python -m tests.fuzz --seed {seed}"

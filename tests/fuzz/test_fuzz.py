"""Random models under random layouts beside plain PyTorch on one process.

A case is drawn from one number: a model, a strategy and its options. After every step its losses
and gradients, and at the end its weights and outputs, must be those of plain training with the full
batch, in float64 and by name.

    make fuzz                                               1,500 cases, every kind in turn
    FUZZ=9000 python -m pytest -x tests/fuzz -k fsdp3       9,000, of which those of one kind
    FUZZ=9000 python -m pytest tests/fuzz -k 4711           one case

The tests take the first three of every kind. Wrong lines that turn them red: tests/mutants.
"""

from __future__ import annotations

import os

import pytest

from tests.fuzz.cases import KINDS, draw, kind_of, run, wrong
from tests.ranks import Ranks

SEEDS = range(int(os.environ.get("FUZZ", 3 * len(KINDS))))


@pytest.mark.parametrize("seed", SEEDS, ids=[f"{kind_of(seed)}-{seed}" for seed in SEEDS])
def test_a_random_case_agrees_with_plain_training(three_ranks: Ranks, seed: int) -> None:
    assert wrong(seed, three_ranks.run(run, seed)) == [], f"{draw(seed)}\n{draw(seed).model()}"

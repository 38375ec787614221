"""A run under torchrun that faults strike comes to the weights of the run that was left alone.

Two rows of the table of `python -m tests.faults`, of which docs/faults.md shows the rest.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.shared_memory import SharedBuffers
from tests.faults.faults import LAYOUTS, OPTIONS, cut_link, hash_of, kill, scores_of
from tests.faults.faults import run as run_struck
from tests.faults.hosts import MissingError
from tests.project.programs import run
from tests.ranks import Ranks
from training.results import read_metrics

PICTURES = LAYOUTS["pictures"]


def apart(_: int, patch: pytest.MonkeyPatch) -> None:
    """Ranks share no memory, as those of two hosts."""
    patch.setattr(SharedBuffers, "open", lambda *_, **__: None)


def test_a_killed_rank_costs_a_step_and_a_short_cut_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """On two hosts, as far as this computer may have them; then they are two ranks of one."""
    line = " ".join([*PICTURES.words, *OPTIONS, "--workdir", str(tmp_path)])
    assert run(line, ranks, apart)[1] is None  # left alone
    try:
        faults = kill(rank=1, step=5), cut_link(host=1, seconds=2, step=9)
        found = run_struck(PICTURES, 2, *faults)
    except MissingError as why:
        pytest.skip(str(why))
    assert (found.statuses, found.left) == ([0, 0], []), found.said
    assert (found.starts, found.lost) == (2, 1)
    assert "rank 1 is elsewhere: look there" in found.blamed
    assert (found.weights, found.scores) == (hash_of(tmp_path), scores_of(read_metrics(tmp_path)))
    # They share no folder: what all have saved is on the first.
    assert found.workdirs == [["000005-epoch1-step2", "000006-epoch1-step4"], []]

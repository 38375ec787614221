"""A run under torchrun that faults strike ends with the weights of the run that was left alone.

These are two rows of the table of `python -m tests.faults`. docs/faults.md shows all rows, also
those of several hosts and cut links.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.faults.faults import LAYOUTS, OPTIONS, hash_of, kill, notice, scores_of
from tests.faults.faults import run as run_struck
from tests.project.programs import finish
from tests.ranks import Ranks
from training.results import read_metrics

PICTURES = LAYOUTS["pictures"]


def test_a_killed_rank_costs_a_step_and_notice_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """Both befall one run on one host. Notice ends it, with what it has done by then."""
    line = " ".join([*PICTURES.words, *OPTIONS, "--workdir", str(tmp_path)])
    # Left alone, until the end of the step in which the other gets notice.
    finish(line, ranks, None, stop_at=10)
    asked = replace(notice(step=9), undo=None)
    found = run_struck(PICTURES, 1, kill(rank=1, step=5), asked, forks=True)
    assert (found.statuses, found.left) == ([1], []), found.said[-3000:]  # torchrun's
    assert (found.starts, found.lost) == (2, 1)
    assert found.said.count("asked to end: step 10 is saved") == 1
    assert (found.weights, found.scores) == (hash_of(tmp_path), scores_of(read_metrics(tmp_path)))
    assert found.workdirs == [["000003-epoch0-step6", "000004-epoch0-step8", "000005-epoch1-step2"]]

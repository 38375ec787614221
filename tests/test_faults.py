"""A run under torchrun that faults strike comes to the weights of the run that was left alone.

Three rows of the table of `python -m tests.faults`, of which docs/faults.md shows the rest.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runtime.shared_memory import SharedMemory
from tests.faults.faults import LAYOUTS, OPTIONS, cut_link, hash_of, kill, notice, scores_of
from tests.faults.faults import run as run_struck
from tests.faults.hosts import Hosts, MissingError
from tests.project.programs import run
from tests.ranks import Ranks
from training.results import read_metrics

PICTURES = LAYOUTS["pictures"]


def apart(_: int, patch: pytest.MonkeyPatch) -> None:
    """Ranks share no memory, as those of two hosts."""
    patch.setattr(SharedMemory, "open", lambda *_, **__: None)


def number_of_hosts() -> int:
    """Two, if this computer may have them."""
    try:
        with Hosts(2):
            return 2
    except MissingError:
        return 1


def test_a_killed_rank_costs_a_step_and_a_short_cut_or_notice_nothing(
    ranks: Ranks, tmp_path: Path
) -> None:
    """All three befall one run. Notice ends it, with what it has done by then."""
    line = " ".join([*PICTURES.words, *OPTIONS, "--workdir", str(tmp_path)])
    hosts = number_of_hosts()
    # Left alone, until the end of the step in which the other gets notice.
    assert run(line, ranks, apart if hosts > 1 else None, stop_at=10)[1] is None
    faults = [kill(rank=1, step=5), replace(notice(step=9), undo=None)]
    if hosts > 1:
        faults.insert(1, cut_link(host=1, seconds=2, step=7))
    found = run_struck(PICTURES, hosts, *faults)
    assert (found.statuses, found.left) == ([1] * hosts, []), found.said  # torchrun's
    assert (found.starts, found.lost) == (2, 1)
    assert found.said.count("asked to end: step 10 is saved") == hosts
    assert (found.weights, found.scores) == (hash_of(tmp_path), scores_of(read_metrics(tmp_path)))
    # They share no folder: what all have saved is on the first.
    of_first = ["000003-epoch0-step6", "000004-epoch0-step8", "000005-epoch1-step2"]
    assert found.workdirs == [of_first, []][:hosts]

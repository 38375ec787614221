"""A run under torchrun that a fault strikes comes to the weights of the run that was left alone.

Two rows of the table of `python -m tests.faults`, of which docs/faults.md shows the rest.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.faults import LAYOUTS, OPTIONS, Faults, Found, hash_of, scores_of
from tests.faults.hosts import MissingError
from tests.project.programs import run
from tests.ranks import Ranks
from training.results import read_metrics

PICTURES = LAYOUTS["pictures"]


def after(faults: Faults, hosts: int) -> Found:
    """What has come of the run, which has ended well."""
    try:
        found = faults.strike(PICTURES, hosts)
    except MissingError as why:
        pytest.skip(str(why))
    assert (found.statuses, found.left) == ([0] * hosts, []), found.said
    return found


def test_a_killed_rank_costs_a_step_and_two_hosts_train_as_two_ranks_of_one(
    ranks: Ranks, tmp_path: Path
) -> None:
    line = " ".join([*PICTURES.words, *OPTIONS, "--workdir", str(tmp_path)])
    assert run(line, ranks)[1] is None  # left alone
    rows = read_metrics(tmp_path)
    *_, score = scores_of(rows)
    killed = after(Faults().kill(rank=1, step=5), hosts=1)
    assert (killed.starts, killed.lost) == (2, 1)
    assert "rank 1 is elsewhere: look there" in killed.blamed
    assert (killed.weights, killed.scores[-1]) == (hash_of(tmp_path), score)
    cut = after(Faults().cut_link(host=1, seconds=2), hosts=2)
    assert (cut.starts, cut.lost) == (1, 0)
    # Sums over a network are taken in another order than those in shared memory.
    assert cut.losses == pytest.approx([row["loss"] for row in rows if "loss" in row], rel=1e-6)
    assert cut.scores[-1] == pytest.approx(score, rel=1e-6)
    # They share no folder: what all have saved is on the first.
    assert cut.workdirs == [["000005-epoch1-step2", "000006-epoch1-step4"], []]

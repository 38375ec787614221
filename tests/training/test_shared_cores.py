"""Ranks that share cores are said to, and no others."""

from __future__ import annotations

import torch

from training.shared_cores import core_notes, sharing
from training.world import World


def test_workers_that_share_cores_are_said_to() -> None:
    note = "want {} CPU cores and share 2: they take turns, and steps take longer."
    assert sharing([("a", [0, 1]), ("a", [1, 0])]) == ["2 ranks " + note.format(4)]
    assert sharing([("a", [i % 2]) for i in range(3)], "stages") == ["3 stages " + note.format(3)]
    assert sharing([("a", [0]), ("a", [1])]) == []
    assert sharing([("a", [0, 1]), ("b", [0, 1])]) == []  # two hosts
    assert sharing([("a", []), ("a", [])]) == []  # the system does not tell
    assert core_notes(World()) == []
    assert core_notes(World(0, 2, 0, torch.device("meta"))) == []

"""Ranks that share cores are said to, and no others."""

from __future__ import annotations

import torch

from training.shared_cores import core_notes, sharing
from training.world import World


def test_workers_that_share_cores_are_said_to() -> None:
    assert sharing([("a", [0, 1]), ("a", [1, 0])]) == [
        "2 ranks want 4 CPU cores and share 2: they take turns, and steps take longer."
    ]
    assert sharing([("a", [i % 2]) for i in range(3)], "stages") == [
        "3 stages want 3 CPU cores and share 2: they take turns, and steps take longer."
    ]


def test_cores_of_ones_own_are_nothing_to_say() -> None:
    assert sharing([("a", [0]), ("a", [1])]) == []
    assert sharing([("a", [0, 1]), ("b", [0, 1])]) == []  # two hosts
    assert sharing([("a", []), ("a", [])]) == []  # the system does not tell
    assert core_notes(World()) == []
    assert core_notes(World(0, 2, 0, torch.device("meta"))) == []

"""Saves in every layout and resumes in every other, on one host and on two.

    python -m pytest tests/faults/matrix.py                   five minutes on two cores
    python -m pytest tests/faults/matrix.py -k "two hosts"

A run is of two epochs of four steps, with dropout, in float64. It ends after the second step in one
layout, and is resumed in all of them: all losses are those of one process within 1e-9. Two hosts
are ranks that share neither memory nor a folder: each half has a workdir of its own. A layout of
one rank is then on the first host.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.project.programs import FLOW, PAIRS, SAME, on_rank
from tests.ranks import Ranks, sharing
from training.launch.world import World
from training.results import read_metrics

LINE = f"{PAIRS} --dropout 0.1 --benchmark_only --save_every 1 --resume"
SAVED = 2
LAYOUTS = {
    "single": (1, "train single"),
    "threads": (1, f"run_pipeline {FLOW} --schedule 1f1b"),
    "ddp": (2, "run_data_parallel"),
    "ZeRO 1": (2, "train fsdp --zero 1"),
    "ZeRO 3": (2, "train fsdp --zero 3"),
    "pipeline": (2, "train pipeline --schedule zbv"),
    "tensor": (2, "train tensor --sequence_parallel"),
    "context": (2, "train context"),
    "dp x pp": (4, "train 3d --dp 2 --pp 2 --zero 1"),
    "dp x tp": (4, "train 3d --dp 2 --tp 2 --zero 3"),
    "pp x tp": (4, "train 3d --pp 2 --tp 2"),
    "cp x pp": (4, "train 3d --cp 2 --pp 2 --zero 1"),
}


def train(
    rank: int, world_size: int, line: str, folder: Path, hosts: int, stop_at: int | None
) -> str | None:
    """On a rank of one of the hosts: the error with which the run ends, or None."""
    workdir, each = folder / f"host{rank * hosts // world_size}", max(world_size // hosts, 1)

    def world(rank: int, world_size: int, _: int, device: torch.device) -> World:
        return World(rank, world_size, rank % each, device)

    with sharing(allowed=hosts == 1), patch("tests.project.programs.World", world):
        return on_rank(rank, world_size, f"{line} --workdir {workdir}", stop_at=stop_at)[1]


WorldOf = Callable[[int], Ranks]  # tests/conftest.py


def run(
    world_of: WorldOf, layout: str, folder: Path, hosts: int, stop_at: int | None = None
) -> list[float]:
    """The losses of all steps so far, 0 where a step has no target."""
    number, options = LAYOUTS[layout]
    line = f"{options} {LINE}"
    if number == 1:
        errors = [train(0, 1, line, folder, hosts, stop_at)]
    else:
        line += f" --world_size {number}"
        errors = world_of(number).run(train, line, folder, hosts, stop_at)
    assert not any(errors), f"{layout}: {errors}"
    return [row["loss"] or 0.0 for row in read_metrics(folder / "host0") if "loss" in row]


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hosts", [1, 2], ids=["one host", "two hosts"])
@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_layout_goes_on_where_one_was_saved(
    world_of: WorldOf, tmp_path: Path, saved: str, hosts: int
) -> None:
    alone = run(world_of, "single", tmp_path / "alone", 1)
    run(world_of, saved, tmp_path / "saved", hosts, SAVED)
    for loaded in LAYOUTS:
        folder = tmp_path / loaded.replace(" ", "")
        shutil.copytree(tmp_path / "saved", folder)
        assert run(world_of, loaded, folder, hosts) == pytest.approx(alone, rel=SAME), loaded

"""Saves in every layout and goes on in every other, on one host and on two: a table.

    python -m tests.faults.matrix                  five minutes on two cores
    python -m tests.faults.matrix --hosts 2

A cell is a run of two epochs of four steps, with dropout, in float64. It ends after the second step
in the layout of its row, and is resumed in that of its column. "same": all losses are those of one
process within 1e-9. Two hosts are ranks that share neither memory nor a folder: each half has a
workdir of its own. A layout of one rank is then on the first host.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from contextlib import ExitStack, closing
from itertools import zip_longest
from math import isclose
from pathlib import Path
from unittest.mock import patch

import torch

from tests.chaos.run import scratch
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
    "dp x pp": (4, "train 3d --dp 2 --pp 2 --zero 1"),
    "dp x tp": (4, "train 3d --dp 2 --tp 2 --zero 3"),
    "pp x tp": (4, "train 3d --pp 2 --tp 2"),
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


def run(
    worlds: dict[int, Ranks], layout: str, folder: Path, hosts: int, stop_at: int | None = None
) -> list[float]:
    """The losses of all steps so far, 0 where a step has no target.

    Raises:
        AssertionError: the run has failed.
    """
    number, options = LAYOUTS[layout]
    line = f"{options} {LINE}"
    if number == 1:
        errors = [train(0, 1, line, folder, hosts, stop_at)]
    else:
        line += f" --world_size {number}"
        errors = worlds[number].run(train, line, folder, hosts, stop_at)
    assert not any(errors), f"{layout}: {errors}"
    return [row["loss"] or 0.0 for row in read_metrics(folder / "host0") if "loss" in row]


def table(folder: Path, hosts: int) -> int:
    """Prints it; how many cells differ."""
    print(f"\n| saved, on {hosts} | " + " | ".join(LAYOUTS) + f" |\n|{'---|' * (len(LAYOUTS) + 1)}")
    alone, bad = run({}, "single", folder / f"alone{hosts}", 1), 0
    for saved in LAYOUTS:
        first = folder / f"saved{hosts}" / saved.replace(" ", "")
        cells = []
        with ExitStack() as stack:  # new ranks, since each run leaves its groups' threads there
            worlds = {n: stack.enter_context(closing(Ranks(n, limit=300.0))) for n in (2, 4)}
            run(worlds, saved, first, hosts, SAVED)
            for loaded in LAYOUTS:
                shutil.copytree(first, folder / "run")
                losses = run(worlds, loaded, folder / "run", hosts)
                shutil.rmtree(folder / "run")
                pairs = zip_longest(losses, alone, fillvalue=-1.0)
                same = all(isclose(a, b, rel_tol=SAME) for a, b in pairs)
                cells.append("same" if same else "**no**")
        bad += cells.count("**no**")
        print(f"| {saved} | {' | '.join(cells)} |", flush=True)
    return bad


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.matrix", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--hosts", type=int, choices=(1, 2))
    hosts = parser.parse_args().hosts
    with scratch() as folder:
        return int(sum(table(Path(folder), n) for n in ([hosts] if hosts else [1, 2])) > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Checks many rows, each on the ranks that it needs.

A process needs seconds to import its libraries, so ranks are started once per world size and given
all rows of that size, one after the other.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.equivalence.compare import Result, check
from tests.equivalence.plain import Reference, plain
from tests.equivalence.problems import Noise, Problem
from tests.equivalence.table import Row, find
from training.launch.launch import launch
from training.launch.world import World, choose_device
from training.options import Options

TIMEOUT = 60.0  # seconds that a rank may wait for another
Show = Callable[[Result], None]


@dataclass(frozen=True)
class Run:
    """What all rows of a run have in common, on every rank.

    Attributes:
        show: is called with each result as soon as it is there, by the process that has it.
    """

    references: Mapping[Problem, Reference]
    n_steps: int
    dtype: torch.dtype
    device: Any  # as --device has it
    show: Show

    def check(self, row: Row, world: World) -> Result:
        """All ranks call it together."""
        reference = self.references[row.problem]
        result = check(row, reference, world, self.n_steps, self.dtype)
        if world.is_main:
            self.show(result)
        return result


def check_all(
    rows: Sequence[Row], n_steps: int, dtype: torch.dtype, device: str, show: Show
) -> list[Result]:
    """The results of the rows, those of one process first."""
    # In matrices as small as these, threads would wait for each other.
    torch.set_num_threads(1)
    rows = [comparable(row, device) for row in rows]
    problems = dict.fromkeys(row.problem for row in rows)
    references = {problem: plain(problem, n_steps, dtype) for problem in problems}
    run = Run(references, n_steps, dtype, device, show)
    results = [_check_here(run, row) for row in rows if row.ranks == 1]
    for W in sorted({row.ranks for row in rows} - {1}):
        results += _check_on_ranks(run, W, [row.name for row in rows if row.ranks == W])
    return results


def comparable(row: Row, device: str) -> Row:
    """The row, without dropout where one process on the CPU would draw other masks than `device`:
    see runtime/dropout.py."""
    if device == "cpu" or row.beside != "one process" or isinstance(row.problem, Noise):
        return row
    return replace(row, problem=replace(row.problem, dropout=0.0))  # type: ignore[call-arg]


def _check_here(run: Run, row: Row) -> Result:
    try:
        return run.check(row, World(device=choose_device(run.device)))
    except Exception as error:
        traceback.print_exc()
        result = Result(row.name, run.n_steps, failure=f"{type(error).__name__}: {error}")
        run.show(result)
        return result


def _check_on_ranks(run: Run, world_size: int, names: list[str]) -> list[Result]:
    """A row that ends a rank ends the run, with that rank's traceback."""
    with TemporaryDirectory(prefix="verify-") as folder:
        path = Path(folder) / "results"
        settings = Options(world_size=world_size, device=run.device, timeout=TIMEOUT)
        launch(_rank, settings, run, names, path)
        results: list[Result] = pickle.loads(path.read_bytes())
    return results


def _rank(world: World, run: Run, names: list[str], path: Path) -> None:
    torch.set_num_threads(1)
    results = [run.check(comparable(find(name), run.device), world) for name in names]
    if world.is_main:
        path.write_bytes(pickle.dumps(results))

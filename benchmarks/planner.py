"""Repeats what docs/planning.md and docs/planning_details.md say about errors.

    python -m benchmarks.planner           runs that no constant was fitted to: benchmarks/runs
    python -m benchmarks.planner FOLDER    the calibration, also with a part of the runs left out

The folder has vtrain_one_node_a100.csv, narayanan2021_table1_a100.csv and
playbook_one_node_h100.csv. Every fit starts from the same round figures, sees some of the rows, and
predicts the others: mean and worst error, pairs in the right order, regret. A fit minimises the
mean absolute logarithm of predicted by measured seconds, every table weighing the same: least
squares, reweighted. It moves along the closed form of a step, times what the simulation of each row
adds to it.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planning.cost import PricedStep
from planning.describe import Machine, machine
from planning.table import compared, read_table, row_of, summary

START = {
    "matmul_efficiency": 0.6, "memory_efficiency": 0.8, "kernel_us": 2.0, "host_us": 20.0,
    "link_efficiency": 0.7, "collective_us": 50.0, "message_us": 50.0, "step_ms": 10.0,
}  # fmt: skip
TABLES = {
    "a100-80gb": ("vtrain_one_node_a100", "narayanan2021_table1_a100"),
    "h100": ("playbook_one_node_h100",),
}
RUNS = Path(__file__).parent / "runs"
UNSEEN = {  # its machine, and its network if that is another
    "mtnlg2022": ("a100-80gb", None), "bigscience2022": ("a100-80gb", "50"),
    "mosaicml2023_a100-40gb": ("a100-40gb", None), "mosaicml2023_a100-80gb": ("a100-80gb", None),
    "mosaicml2023_h100": ("h100", None), "torchtitan2024_a100-80gb": ("a100-80gb", None),
    "torchtitan2024_h100": ("h100", "infiniband-8x400"), "megatron2020": ("v100", None),
    "nemo2024_h100": ("h100-megatron", None), "oneflow2021_v100": ("v100", "12.5"),
}  # fmt: skip
ROWS = 300  # of a table at most in a fit, drawn at random
Row = dict[str, str]
Numbers = NDArray[np.float64]


def fitted(begin: Machine, tables: Sequence[Sequence[Row]]) -> Machine:
    """The machine with those constants of START that are best for some rows."""
    names, drawn = list(START), random.Random(0)
    tables = [drawn.sample(list(rows), min(ROWS, len(rows))) for rows in tables]
    weights = np.array([1 / len(rows) for rows in tables for _ in rows])
    best = replace(begin, **START)  # type: ignore[arg-type]
    for _ in range(4):  # what the simulation adds depends a little on the constants
        runs = [_Run(row, best) for rows in tables for row in rows]
        for _ in range(12):
            logs, errors = _logs(best, names), _errors(runs, best)
            moved = [_moved(best, names, logs + 0.03 * axis) for axis in np.eye(len(names))]
            slopes = np.stack([_errors(runs, other) - errors for other in moved], 1) / 0.03
            near = np.sqrt(weights / np.maximum(np.abs(errors), 0.02))
            rows = np.vstack([near[:, None] * slopes, 0.02 * np.eye(len(names))])
            wanted = np.concatenate([-near * errors, np.zeros(len(names))])
            step = np.clip(np.linalg.lstsq(rows, wanted, rcond=None)[0], -0.7, 0.7)
            tried = [_moved(best, names, logs + part * step) for part in (1, 0.5, 0.2, 0.05)]
            losses = [float(weights @ np.abs(_errors(runs, other))) for other in (best, *tried)]
            k = int(np.argmin(losses))
            if k == 0 or losses[0] - losses[k] < 1e-5:
                break
            best = tried[k - 1]
    return best


@dataclass
class _Run:
    row: Row
    machine: Machine

    def __post_init__(self) -> None:
        step = self._step(self.machine)
        simulated = step.seconds / step.least_seconds
        self.times = simulated / float(self.row["seconds_per_step"])

    def _step(self, machine: Machine) -> PricedStep:
        model, layout, nodes = row_of(self.row, machine)
        return PricedStep(model, layout, nodes, legal=False)

    def error(self, machine: Machine) -> float:
        return math.log(self._step(machine).least_seconds * self.times)


def _errors(runs: Iterable[_Run], machine: Machine) -> Numbers:
    return np.array([run.error(machine) for run in runs])


def _logs(machine: Machine, names: Sequence[str]) -> Numbers:
    return np.log([getattr(machine, name) for name in names])


def _moved(machine: Machine, names: Sequence[str], logs: Numbers) -> Machine:
    """With other constants; no efficiency is above 1."""
    values = {
        n: math.exp(min(x, 0.0) if "eff" in n else x) for n, x in zip(names, logs, strict=True)
    }
    return replace(machine, **values)  # type: ignore[arg-type]


def _left_out(what: str, k: int, row: Row) -> bool:
    """Whether the k-th row of the first table of a machine is to be predicted, not fitted."""
    return random.Random(k).random() < 0.2 if what == "a random fifth" else row["hidden"] == what


def _said(rows: Sequence[Row], where: Machine) -> str:
    return ", ".join(f"{k} {v:.3g}" for k, v in summary(compared(rows, where)).items())


def calibrations(folder: Path) -> None:
    """Prints every fit, its constants, and how well it predicts what it has not seen."""
    for name, tables in TABLES.items():
        first, *others = [read_table(folder / f"{table}.csv") for table in tables]
        for what in ("nothing", "a random fifth", *sorted({row["hidden"] for row in first})):
            kept = [row for k, row in enumerate(first) if not _left_out(what, k, row)]
            out = [row for k, row in enumerate(first) if _left_out(what, k, row)] or first
            found = fitted(machine(name), [kept, *others])
            values = ", ".join(f"{n} {getattr(found, n):.3g}" for n in START)
            what = f"hidden {what}" if what.isdigit() else what
            print(f"\n{tables[0]}, {what} left out: {len(out)} rows predicted\n  {values}")
            for table, rows in zip(tables, [out, *others], strict=True):
                print(f"  {table}: {_said(rows, found)}", flush=True)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folder", nargs="?", type=Path, help="of the tables of the calibration")
    if folder := parser.parse_args().folder:
        calibrations(folder)
        return
    for name, (where, network) in UNSEEN.items():
        print(f"{name}: {_said(read_table(RUNS / f'{name}.csv'), machine(where, network))}")


if __name__ == "__main__":
    main()

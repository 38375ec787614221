"""How wrong the planner is on measured runs: what docs/planning.md and planning_details.md say.

    python -m benchmarks.planner            runs that no constant was fitted to: benchmarks/runs
    python -m benchmarks.planner FOLDER [--machine h100]     the calibration, with each part of the
                                                             runs left out in turn
    python -m benchmarks.planner TABLE.csv --machine a100-80gb [--network 50]  any other table

A table is a CSV file with a row per run: global_batch; layers, hidden, heads and seq; and the other
columns of benchmarks/runs. docs/planning_details.md says what an empty cell means.

The folder has the tables of TABLES. Every fit starts from the same round figures and sees some of
the rows. It then predicts the rows of a model, or of a number of nodes, that it has not seen. Each
line has the mean and worst error; the error that two of three rows stay within; the share of pairs
in the right order; by how much the layout that is predicted to be the fastest is slower than the
fastest that was measured, mean and worst; and the same for the layout that `search` prefers.

A fit minimises the mean absolute logarithm of predicted over measured seconds, by reweighted least
squares; every table has the same weight. It uses the closed form of a step, times the factor by
which the simulation of each row exceeds it.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from planning.cost import PricedStep
from planning.describe import Layout, Machine, Model, layout_of, machine, model_of
from planning.search import preferred

START = {
    "matmul_efficiency": 0.6, "memory_efficiency": 0.8, "kernel_us": 2.0, "host_us": 20.0,
    "link_efficiency": 0.7, "collective_us": 50.0, "staged_us": 200.0, "slices_us": 20.0,
    "step_ms": 10.0,
}  # fmt: skip
TABLES = {  # of a machine: those of which a part is left out, and those that are always fitted
    "a100-80gb": (("vtrain_one_node_a100",), ("narayanan2021_table1_a100",)),
    "h100": (("playbook_one_node_h100", "playbook_nodes_h100"), ()),
}
RUNS = Path(__file__).parent / "runs"
UNSEEN = {  # its machine, and its network if that differs
    "mtnlg2022": ("a100-deepspeed", None), "bigscience2022": ("a100-deepspeed", "50"),
    "mosaicml2023_a100-40gb": ("a100-40gb", None), "mosaicml2023_a100-80gb": ("a100-80gb", None),
    "mosaicml2023_h100": ("h100", None), "torchtitan2024_a100-80gb": ("a100-80gb", None),
    "torchtitan2024_h100": ("h100", "infiniband-8x400"), "megatron2020": ("v100", None),
    "nemo2024_h100": ("h100-megatron", None), "oneflow2021_v100": ("v100", "12.5"),
}  # fmt: skip
ROWS = 300  # of a table at most in a fit, drawn at random
RECOMPUTE = {"full": "always", "none": "never", "selective": "selective", "": "never"}
SIZES = ("layers", "hidden", "heads", "ffn", "vocab", "seq", "gated_mlp", "tied", "kv_heads")
Row = dict[str, str]
Numbers = NDArray[np.float64]
Timed = tuple[float, PricedStep]  # measured seconds, and the prediction


def read_table(path: Path) -> list[Row]:
    """The rows of a table. Lines that begin with # are comments."""
    lines = [line for line in path.read_text("utf-8-sig").splitlines() if line[:1] != "#"]
    return [dict(row) for row in csv.DictReader(lines, restval="")]


def row_of(row: Row, machine: Machine) -> tuple[Model, Layout, Machine]:
    """The model, layout and nodes of a row."""
    numbers = {
        name: int(float(row[name]))
        for name in (*SIZES, "gpus", "gpus_per_node", "dp", "tp", "pp", "chunks", "micro_batch",
                     "global_batch", "zero", "sequence_parallel") if row.get(name)
    }  # fmt: skip
    sizes = {name: numbers[name] for name in SIZES if name in numbers}
    model = model_of(None, **({"vocab": 51200} | sizes))
    pp, chunks = numbers.get("pp", 1), numbers.get("chunks")
    schedule = row.get("schedule") or "1f1b"
    if schedule == "interleaved" and not chunks:
        units = model.layers  # if that cannot be cut, embedding and head count as a block each
        units += 0 if units % pp == 0 else 2
        chunks = next((c for c in range(2, units // pp + 1) if units % (pp * c) == 0), 1)
    if schedule in ("interleaved", "1f1b"):  # the chunks say which
        schedule = "interleaved" if pp > 1 and (chunks or 1) > 1 else "1f1b"
    layout = layout_of(
        **{name: numbers.get(name) for name in ("gpus", "dp", "pp", "tp", "micro_batch", "zero")},
        batch_size=numbers["global_batch"], schedule=schedule,
        chunks=chunks if schedule == "interleaved" else None,
        sequence_parallel=bool(numbers.get("sequence_parallel")),
        recompute=RECOMPUTE[row.get("recompute", "")], order="pp-dp-tp",
        precision=row.get("precision") or ("bf16" if "bf16" in machine.tflops else "fp16"),
    )  # fmt: skip
    # Runs with ZeRO 2 and 3 are of torch with fused kernels; gated MLPs came with fused attention.
    attention = "flash" if layout.zero > 1 or model.gated_mlp else machine.attention
    loss = row.get("loss") or ("fused" if layout.zero > 1 else machine.loss)
    nodes = machine.with_nodes(numbers.get("gpus_per_node", machine.gpus_per_node))
    nodes = replace(nodes, attention=attention, loss=loss)
    if layout.schedule == "interleaved":  # Megatron-LM's: equal stages, inputs gathered again
        nodes = replace(nodes, balance="uniform", gathered="again")
    return model, layout, nodes


def predicted(row: Row, machine: Machine) -> PricedStep:
    """The step of a row."""
    model, layout, nodes = row_of(row, machine)
    return PricedStep(model, layout, nodes, legal=False)


def summary(rows: Sequence[Row], machine: Machine) -> dict[str, float]:
    """The errors of a table: of time and memory, mean and worst; the share of pairs of different
    layouts of the same model, GPUs and batch whose order is right; regret, the share by which the
    layout predicted to be the fastest is slower than the fastest; preferred, the same for the
    layout that `search` prefers; the share of rows that fit, or do not, as predicted. If a layout
    has several runs, the fastest counts for regret: no prediction tells them apart."""
    steps = [(row, predicted(row, machine)) for row in rows]
    errors: dict[str, list[float]] = {"time": [], "memory": []}
    fits, groups = list[bool](), defaultdict[tuple[object, ...], list[Timed]](list)
    for row, step in steps:
        if row.get("seconds_per_step"):
            seconds = float(row["seconds_per_step"])
            errors["time"].append(abs(step.seconds / seconds - 1))
            key = (step.model, step.layout.gpus, step.layout.batch_size)
            groups[key].append((seconds, step))
        if row.get("memory_gb"):
            errors["memory"].append(abs(step.memory_gb / float(row["memory_gb"]) - 1))
        if row.get("fits"):
            fits.append(step.fits == (row["fits"] == "1"))
    sums = {"rows": float(len(rows))}
    for what, each in errors.items():
        if each:
            sums |= {f"{what}_error": fmean(each), f"{what}_worst": max(each)}
    if errors["time"]:
        sums["two_of_three"] = float(np.quantile(errors["time"], 2 / 3))
    alike = [group for group in groups.values() if len({step.layout for _, step in group}) > 1]
    pairs = [
        (a, b)
        for group in alike
        for a, b in combinations(group, 2)
        if a[0] != b[0] and a[1].layout != b[1].layout
    ]
    if pairs:
        right = ((a[0] < b[0]) == (a[1].seconds < b[1].seconds) for a, b in pairs)
        sums["pairs_in_order"] = fmean(right)
        regrets, preferences = [], []
        for group in alike:
            fastest = min(seconds for seconds, _ in group)
            slowest_first = sorted(group, key=lambda run: -run[0])
            measured = {step.layout: seconds for seconds, step in slowest_first}
            ordered = sorted((step for _, step in group), key=lambda step: step.seconds)
            regrets.append(measured[ordered[0].layout] / fastest - 1)
            preferences.append(measured[preferred(ordered).layout] / fastest - 1)
        sums |= {"regret": fmean(regrets), "regret_worst": max(regrets)}
        sums |= {"preferred": fmean(preferences), "preferred_worst": max(preferences)}
    return sums | ({"fits_right": fmean(fits)} if fits else {})


def fitted(begin: Machine, tables: Sequence[Sequence[Row]]) -> Machine:
    """The machine with those constants of START that are best for some rows."""
    # Where a machine has 0 for a cost, its software does not have that cost.
    names = [name for name in START if getattr(begin, name)]
    drawn = random.Random(0)
    tables = [drawn.sample(list(rows), min(ROWS, len(rows))) for rows in tables]
    weights = np.array([1 / len(rows) for rows in tables for _ in rows])
    best = replace(begin, **{name: START[name] for name in names})  # type: ignore[arg-type]
    for _ in range(3):  # what the simulation adds depends a little on the constants
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
        step = predicted(self.row, self.machine)
        simulated = step.seconds / step.least_seconds
        self.times = simulated / float(self.row["seconds_per_step"])

    def error(self, machine: Machine) -> float:
        return math.log(predicted(self.row, machine).least_seconds * self.times)


def _errors(runs: Iterable[_Run], machine: Machine) -> Numbers:
    return np.array([run.error(machine) for run in runs])


def _logs(machine: Machine, names: Sequence[str]) -> Numbers:
    return np.log([getattr(machine, name) for name in names])


def _moved(machine: Machine, names: Sequence[str], logs: Numbers) -> Machine:
    """The machine with these constants; no efficiency is above 1."""
    values = {
        n: math.exp(min(x, 0.0) if "eff" in n else x) for n, x in zip(names, logs, strict=True)
    }
    return replace(machine, **values)  # type: ignore[arg-type]


def _part(what: str, k: int, row: Row) -> bool:
    """Whether the k-th row belongs to what is left out, and so is to be predicted, not fitted."""
    kind, _, value = what.partition(" ")
    if kind == "hidden":
        return row["hidden"] == value
    return _nodes(row) == int(value) if kind == "nodes" else random.Random(k).random() < 0.2


def _nodes(row: Row) -> int:
    return -(-int(row["gpus"]) // int(row["gpus_per_node"]))


def _timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["seconds_per_step"]]


def _said(rows: Sequence[Row], where: Machine) -> str:
    return ", ".join(f"{k} {v:.3g}" for k, v in summary(rows, where).items())


def calibrations(folder: Path, name: str) -> None:
    """Prints every fit of a machine, its constants, and how well it predicts what it has not
    seen."""
    parted, kept = (
        [_timed(read_table(folder / f"{table}.csv")) for table in tables] for tables in TABLES[name]
    )
    rows = [row for table in parted for row in table]
    parts = [f"hidden {h}" for h in sorted({row["hidden"] for row in rows}, key=int)]
    nodes = sorted({_nodes(row) for row in rows})
    parts += [f"nodes {n}" for n in nodes if len(nodes) > 1]
    for what in ("nothing", "random fifth", *parts):
        out = [row for k, row in enumerate(rows) if what != "nothing" and _part(what, k, row)]
        seen = {id(row) for row in rows} - {id(row) for row in out}
        tables = [[row for row in table if id(row) in seen] for table in parted]
        found = fitted(machine(name), [table for table in (*tables, *kept) if table])
        values = ", ".join(f"{n} {getattr(found, n):.3g}" for n in START)
        print(f"\n{name}, {what} left out\n  {values}")
        for table in [out] if out else [*parted, *kept]:
            print(f"  {_said(table, found)}", flush=True)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("path", nargs="?", type=Path, help="a table, or the calibration's folder")
    parser.add_argument("--machine", default="a100-80gb", help="of the tables (%(default)s)")
    parser.add_argument("--network", help="of the table, if it is not the machine's")
    args = parser.parse_args()
    if args.path and args.path.is_dir():
        calibrations(args.path, args.machine)
    elif args.path:
        print(_said(read_table(args.path), machine(args.machine, args.network)))
    else:
        for name, (where, network) in UNSEEN.items():
            print(f"{name}: {_said(read_table(RUNS / f'{name}.csv'), machine(where, network))}")


if __name__ == "__main__":
    main()

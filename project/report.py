"""Writes one page on runs: what was measured beside what was predicted, and why it differs.

    python project/report.py workdir                            writes workdir/report.html
    python project/report.py workdir_ddp workdir_3d --machine machine.yaml --output both.html

Of each run: the recorded step (--timeline 10) above its prediction from the same schedule, every
idle gap explained, memory per rank, bytes per link, whether its weights are those of one process
(--check_weights), and sliders that simulate the step again with more micro-batches, another
schedule, or another cut. Of all runs: losses, speed, and the error of the planner, if --machine
says on what they ran: a name or a file as `plan.py calibrate` writes.

The page needs no network, and no JavaScript but for the sliders. Every number in it comes from the
files of the runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.schedules.catalogue import SCHEDULES, find
from planning import describe, search
from planning.cost import GIB, Prediction, PricedStep
from project.command_line import Parser
from project.figures.compared import Compared, compare_step, micro_batches
from project.figures.epochs import read_json
from project.figures.recorded import THROUGHPUT, TIME, Run, speed_up
from project.figures.style import readable, with_error
from project.plot import describe as in_words
from training.files import OPTIONS, SUMMARY, writing
from training.launch.errors import UserError
from training.results import read_metrics
from training.timeline import KINDS

PAGE = Path(__file__).parent / "page"
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # micro-batches that the sliders offer


def parse_report(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="the --workdir of a finished run")
    add("--machine", metavar="FILE_OR_NAME", help="what they ran on, to predict them")
    add(
        "--output", type=Path, metavar="FILE", help="default: report.html in the first run's folder"
    )
    add("--template", type=Path, default=PAGE / "report.html", metavar="FILE",
        help="another page, such as a course's [%(default)s]")  # fmt: skip
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Reported(Run):
    """A run as the page shows it."""

    machine: describe.Machine | None = None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's sizes; empty if it is no GPT-2."""
        path = self.folder / "config.json"
        return read_json(path) if path.is_file() else {}

    @property
    def command(self) -> str:
        """The command line that made it."""
        path = self.folder / OPTIONS
        return read_json(path).get("command", "") if path.is_file() else ""

    @cached_property
    def step(self) -> Compared | None:
        """A recorded step beside its prediction; None: there is none."""
        if not any(self.folder.glob("timeline_rank*.json")):
            return None
        planned = self.priced
        return compare_step(self, planned.work() if planned else None)

    @cached_property
    def positions(self) -> float:
        """Positions of a step, padding included, on all ranks."""
        steps = [line for line in read_metrics(self.folder) if "loss" in line]
        return fmean(line["tokens_per_sec"] * line["seconds"] for line in steps)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Data, pipeline and tensor parallel."""
        used = self.summary
        tp, pp = used.get("tp") or 1, max(used.get("pp") or 1, used.get("num_devices") or 1)
        return max(1, used.get("world_size", 1) // (tp * pp)), pp, tp

    @property
    def seconds(self) -> float:
        """Of a step: the median of all but the first."""
        steps = self.summary["step_seconds"]
        return median(steps[1:] or steps)

    @property
    def memory(self) -> float:
        """GiB of the fullest rank."""
        return max(self.summary["peak_rss_bytes"]) / GIB

    @cached_property
    def priced(self) -> PricedStep | None:
        """The run as the planner sees it; None without a machine, or if it is no GPT-2."""
        used, size = self.summary, self.config
        if self.machine is None or "n_embd" not in size:
            return None
        (dp, pp, tp), batch, m = self.shape, used["batch_size"], used.get("num_microbatches") or 1
        gpus = dp * pp * tp
        model = describe.model_of(
            None, layers=size["n_layer"], hidden=size["n_embd"], heads=size["n_head"],
            vocab=size["vocab_size"], seq=round(self.positions / batch),
        )  # fmt: skip
        recompute = "never" if used.get("recompute") in (None, "never") else "always"
        layout = describe.Layout(
            gpus, dp, tp, pp, -(-batch // (dp * m)), batch, used.get("schedule") or "1f1b",
            used.get("chunks") if used.get("schedule") == "interleaved" else None,
            used.get("zero") or 0, bool(used.get("sequence_parallel")), recompute,
            used.get("precision") or "fp32",
        )  # fmt: skip
        machine = self.machine.shared(gpus) if used.get("cores") else self.machine
        return PricedStep(model, layout, machine, legal=False)

    @cached_property
    def planned(self) -> Prediction | None:
        """The planner's prediction."""
        return self.priced.predict(explain=False) if self.priced else None

    def shown(self, metric: str, unit: str = "") -> str:
        """The mean over all epochs but the first and its spread: of the slowest rank's time, or of
        the ranks' sum."""
        mean, std = self.over_epochs(metric)
        return f"{with_error(mean, std if len(self.ranks[0]) > 2 else 0.0)}{unit}"

    def links(self) -> list[tuple[str, float]]:
        """What a rank sends in a step, in bytes, by closed forms: docs/mathematics.md."""
        used, (dp, pp, tp), found = self.summary, self.shape, list[tuple[str, float]]()
        width = self.config.get("n_embd", 0)
        hidden = self.positions / dp * width * (8 if used.get("precision") == "fp64" else 4)
        if pp > 1 and width and used["world_size"] > 1:  # threads share their memory
            found.append(("a stage to the next: activations", hidden))
            found.append(("a stage to the one before: their gradients", hidden))
        if tp > 1 and width:
            blocks = self.config["n_layer"] / pp
            ring = 2 * (tp - 1) / tp
            found.append(("tensor parallel: 4 all-reduces of a block", 4 * blocks * ring * hidden))
        if dp > 1:
            held = used["state_bytes"]["gradients"][0]
            zero, part = used.get("zero") or 0, (dp - 1) / dp
            whole = held * (dp if zero >= 2 else 1)
            found.append((f"gradients to {dp} replicas", (1 if zero else 2) * part * whole))
            if zero:
                times = 2 if zero == 3 else 1
                found.append(("parameters, gathered", times * part * whole))
        return found

    def sliders(self) -> dict[str, Any] | None:
        """What page/page.js simulates; None without stages."""
        step = self.step
        if step is None or len(step.predicted.rows) < 2:
            return None
        ranks, taken = step.pipeline.simulator.ranks, step.seconds
        n, m = len(step.predicted.rows), micro_batches(step.events)
        lists = {name: schedules(name, n, m, len(ranks) // n) for name in SCHEDULES}
        return {
            "ranks": ranks, "layers": step.pipeline.cut, "m": m,
            "schedule": self.summary["schedule"], "transfer": taken.transfer,
            "exchange": taken.exchange, "update": taken.update, "measured": step.measured,
            "bubble": step.bubble, "lists": {name: found for name, found in lists.items() if found},
            "batch": {kind.value: [m * x for x in each] for kind, each in taken.actions.items()},
            "recompute": [m * x for x in taken.recompute],
        }  # fmt: skip


def schedules(name: str, n: int, m: int, chunks: int) -> dict[int, str]:
    """A schedule's lists, by micro-batches, as text: `F0.1 B0.1|F0.0`, micro-batch and stage."""
    make, found = find(name, max(2, chunks) if name == "interleaved" else None), {}
    for size in sorted({*SIZES, m}):
        with suppress(ValueError):  # e.g. no multiple of the ranks
            rows = ([f"{a.kind.value}{a.microbatch}.{a.stage}" for a in r] for r in make(n, size))
            found[size] = "|".join(map(" ".join, rows))
    return found


def gradients(runs: Sequence[Reported]) -> list[dict[str, Any]]:
    """Of the runs that left the gradients of their first step (--pytest): the largest difference
    between their ranks, and from the first such run, and the parameter where it is."""
    import torch

    found: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    for run in runs:
        paths = sorted((run.folder / "tests").glob("model*_gradients.pth"))
        if not paths:
            continue
        ranks = [torch.load(path, weights_only=True) for path in paths]
        first = first or ranks[0]
        apart = {name: float((ranks[0][name] - g).abs().max()) for name, g in first.items()}
        between = (float((r[name] - ranks[0][name]).abs().max()) for r in ranks for name in first)
        worst = max(apart, key=apart.__getitem__)
        found.append({
            "name": run.folder.name, "ranks": len(ranks), "between": max(between), "worst": worst,
            "apart": apart[worst], "largest": max(float(g.abs().max()) for g in first.values()),
        })  # fmt: skip
    return found


def apart(run: Run, first: Run) -> str:
    """The largest difference of a step's loss from another run's, relative; `-` if they have
    different steps, or some were skipped."""
    ours, theirs = run.summary["loss"], first.summary["loss"]
    if run is first or len(ours) != len(theirs) or None in (*ours, *theirs):
        return "-"
    return f"{max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)):.1e}"


def render(runs: Sequence[Reported], template: Path) -> str:
    """The page. Raises UserError if the files of a run are missing."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, PAGE]), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "number": readable,
        "tiny": lambda value: f"{value:.1e}" if value else "0",
        "share": lambda value: f"{value:.1%}",
        "ms": lambda value: f"{1e3 * value:.1f}",
    }
    scripts = [(PAGE / name).read_text("utf-8") for name in ("simulate.js", "page.js")]
    finished = [run for run in runs if "step_seconds" in run.summary]
    top = max((x or 0.0 for run in finished for x in run.summary["loss"]), default=1.0)
    first = next((run.priced for run in finished if run.priced), None)
    best = list[Prediction]()
    if first is not None:
        layout = first.layout
        with suppress(ValueError):  # nothing fits
            best, _ = search.search(
                first.model, layout.gpus, first.machine, layout.batch_size, 5,
                precision=layout.precision,
            )  # fmt: skip
    return environment.get_template(template.name).render(
        runs={run.folder.name: run for run in runs},
        finished=finished,
        gradients=gradients(runs),
        about=in_words,
        busy=max((run.summary["load"] / (os.cpu_count() or 1) for run in finished), default=0.0),
        best=[(search.options(found.layout), found) for found in best],
        top=top,
        apart=apart,
        kinds=KINDS,
        speed_up=speed_up,
        script=Markup("\n".join(scripts)),
        TIME=TIME,
        THROUGHPUT=THROUGHPUT,
        GIB=GIB,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The program."""
    args = parse_report(argv)
    machine = None
    if args.machine:
        try:
            machine = describe.machine(args.machine)
        except ValueError as error:
            raise UserError(str(error)) from None
    runs = [Reported(folder, machine) for folder in args.runs]
    for run in runs:
        if not run.summary:
            raise UserError(f"{run.folder}: it has no {SUMMARY}; name the --workdir of a run")
    output = args.output or args.runs[0] / "report.html"
    text = render(runs, args.template)
    with writing(output):
        output.write_text(text, encoding="utf-8")
    print(f"The page is {output}.")


if __name__ == "__main__":
    from project.utils import run_program

    run_program(main)

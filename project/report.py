"""Writes one page on runs: what was measured beside what was predicted, and why it differs.

    python project/report.py workdir                            writes workdir/report.html
    python project/report.py workdir_ddp workdir_3d --machine machine.yaml --output both.html
    python project/report.py --explore                          no run: writes workdir/explore.html

Of each run: the recorded step (--timeline 10) above its prediction from the same schedule, every
idle gap explained, memory per rank, and whether its weights are those of one process
(--check_weights). Of all runs: losses, speed, and the error of the planner, if --machine names the
machine on which they ran: a name, a file, or `this` for this computer.

A step of a pipeline can be taken apart: choose more micro-batches or a different schedule, or move
an action within its list, and the page says what that breaks or costs. The page of --explore is for
learning: it has such a step without a run, the textbook's formulas, and puzzles.

A page needs no network, and JavaScript only for the step to take apart. Every number of a run comes
from its files.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import project  # noqa: F401  (first: it says what to type if the environment is not active)
from training.launch.signals import ENDING_SIGNALS, end_process, set_handlers

if __name__ == "__main__":  # before torch is imported, which takes seconds
    set_handlers(ENDING_SIGNALS, end_process)

# isort: split
import torch
from markupsafe import Markup
from torch import Tensor

from pipeline.schedules.catalogue import SCHEDULES
from planning import describe
from planning.cost import GIB, PricedStep
from project.command_line import Parser
from project.figures.compared import Compared, compare_step, micro_batches
from project.figures.epochs import draw_curves, read_json
from project.figures.gantt import draw_step
from project.figures.pages import GRID, PAGE, fill_template, stepper
from project.figures.runs import Run
from project.plan import machine_named
from project.plot import WORKDIR
from project.plot import describe as in_words
from runtime.axes import BATCH_AXES, place_of
from training.files import OPTIONS, writing
from training.launch.errors import UserError
from training.results import read_metrics


def parse_report(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("runs", type=Path, nargs="*", metavar="RUN", help="the --workdir of a finished run")
    add("--explore", action="store_true", help="a page to learn with, which needs no run")
    add("--machine", metavar="NAME", help="predict the runs on this machine, as plan.py does")
    add("--output", type=Path, metavar="FILE",
        help="default: report.html in the first run's folder, or workdir/explore.html")  # fmt: skip
    add("--template", type=Path, metavar="FILE",
        help="HTML template, such as a course's; default: project/page/report.html")  # fmt: skip
    args = parser.parse_args(argv)
    of_runs = {"RUN": args.runs, "--machine": args.machine, "--template": args.template}
    needless = [word for word, value in of_runs.items() if value and args.explore]
    if needless or not (args.explore or args.runs):
        given = f"--explore needs no {needless[0]}" if needless else "RUN is missing"
        parser.error(f"{given}; `report.py workdir` or `report.py --explore` works")
    args.template = args.template or PAGE / "report.html"
    return args


def inline(draw: Callable[[Path], Path]) -> Markup:
    """A picture as a part of the page: SVG without the file's header and metadata, and without the
    ids that other pictures have, too."""
    with TemporaryDirectory() as folder:
        svg = draw(Path(folder) / "picture.svg").read_text("utf-8")
    needless = r'<metadata>.*?</metadata>| id="[A-Za-z0-9.]+_\d+"'
    return Markup(re.sub(needless, "", svg[svg.index("<svg") :], flags=re.DOTALL))


@dataclass(frozen=True)
class Reported(Run):
    """A run as the page shows it."""

    machine: describe.Machine | None = None

    @cached_property
    def step(self) -> Compared | None:
        """A recorded step beside its prediction; None: there is none."""
        if not any(self.folder.glob("timeline_rank*.json")):
            return None
        return compare_step(self, self.priced.work() if self.priced else None)

    @cached_property
    def positions(self) -> float:
        """Positions of a step, padding included, on all ranks."""
        steps = [line for line in read_metrics(self.folder) if "loss" in line]
        return fmean(step["tokens_per_sec"] * step["seconds"] for step in steps)

    @property
    def behind(self) -> float:
        """How much longer epochs take on the slowest rank than the mean of all: a share of that."""
        times = [[rank["training_time"] for rank in epoch] for epoch in self.epochs]
        return fmean(max(epoch) / fmean(epoch) - 1 for epoch in times[1:] or times)

    @property
    def memory(self) -> float:
        """Peak memory of the fullest rank, in GiB."""
        return max(self.summary["peak_rss_bytes"]) / GIB

    @cached_property
    def priced(self) -> PricedStep | None:
        """The run as the planner predicts it; the planner's dp counts all replicas. None without a
        machine, or if the model is not a GPT-2 or has shared experts, which the planner does not
        know."""
        used, size = self.summary, read_json(self.folder / "config.json")
        dp = prod(self.shape[axis] for axis in BATCH_AXES)
        ranks: dict[str, Any] = {**self.shape, "dp": dp, "shards": used.get("shards")}
        if self.machine is None or "n_embd" not in size or used.get("shared_experts"):
            return None
        batch, m = used["batch_size"], used.get("num_microbatches") or 1
        model = describe.model_of(
            None, layers=size["n_layer"], hidden=size["n_embd"], heads=size["n_head"],
            vocab=size["vocab_size"], seq=round(self.positions / batch),
            experts=used.get("experts"), top_k=used["top_k"] if used.get("experts") else None,
        )  # fmt: skip
        layout = describe.layout_of(
            **ranks, micro_batch=-(-batch // (ranks["dp"] * m)), batch_size=batch,
            chunks=used.get("chunks") if used.get("schedule") == "interleaved" else None,
            recompute="never" if used.get("recompute") in (None, "never") else "always",
            precision=used.get("precision") or "fp32", attention=used.get("attention"),
            **{name: used.get(name) for name in ("schedule", "zero", "sequence_parallel")},
        )  # fmt: skip
        machine = self.machine.shared(layout.gpus) if used.get("cores") else self.machine
        try:
            return PricedStep(model, layout, machine, legal=False)
        except ValueError as error:
            raise UserError(f"{self.folder} on --machine {machine.name}: {error}") from None

    @property
    def rate(self) -> float:
        """Examples per second, which compares runs whose batches differ in size."""
        return self.summary["batch_size"] / self.seconds

    def planned_memory(self) -> list[float]:
        """The planner's bytes of each rank; empty if the stages are threads of one rank."""
        ranks = self.summary["world_size"]
        if self.priced is None or ranks < self.shape["pp"]:
            return []
        stages = [sum(held) for held in self.priced.memory]
        return [stages[place_of(r, self.shape)["pp"]] for r in range(ranks)]

    @cached_property
    def start(self) -> dict[str, Any] | None:
        """The settings with which page/explore.js begins, and the measured milliseconds of a
        micro-batch on each rank; None without stages."""
        step = self.step
        if step is None or len(step.ranks) == 1:
            return None
        n, work = 1 + max(step.ranks), step.work
        stages = [[s for s, rank in enumerate(step.ranks) if rank == r] for r in range(n)]
        of_ranks = step.rank_times()
        times = {
            kind: [1e3 * seconds for seconds in each]
            for kind, each in zip("FIW", of_ranks, strict=False)
        }
        times["R"] = [1e3 * sum(map(work.recompute, own)) for own in stages]
        schedule, chunks = self.summary["schedule"], len(step.ranks) // n
        own = "" if schedule in SCHEDULES else schedule
        if own:  # the page begins with its lists, as changes of a schedule that has such stages
            loops = [s % n for s in range(len(step.ranks))]
            schedule = "1f1b" if chunks == 1 else "interleaved" if step.ranks == loops else "zbv"
        return {
            "name": self.name, "schedule": schedule, "lists": own, "ranks": n,
            "m": micro_batches(step.events), "chunks": max(2, chunks), "message": 1,
            "times": times, "messages": 1e3 * of_ranks.transfer[0],
            "text": f"Step {step.step + 1} of this run took {1e3 * step.span:.1f} ms from the "
            f"first action to the last, and ranks were idle {step.bubble:.1%} of it.",
        }  # fmt: skip


def apart(run: Run, first: Run) -> str:
    """The largest relative difference of a step's loss from another run's; empty if the runs differ
    in their number of steps, or a step was skipped."""
    ours, theirs = run.summary["loss"], first.summary["loss"]
    if run is first or len(ours) != len(theirs) or None in (*ours, *theirs):
        return ""
    return f"{max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)):.1e}"


def furthest(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference of two sets of gradients, and the parameter where it is."""
    return max((float((ours[name] - theirs[name]).abs().max()), name) for name in theirs)


def gradients(runs: Sequence[Reported]) -> list[dict[str, Any]]:
    """Compares the gradients that runs left of their last step (--pytest): the largest difference
    between the ranks of each run, and the largest from the first run, with its parameter."""
    rows: list[dict[str, Any]] = []
    first: dict[str, Tensor] = {}
    for run in runs:
        paths = sorted((run.folder / "tests").glob("model*_gradients.pth"))
        if ranks := [torch.load(path, weights_only=True) for path in paths]:
            first = first or ranks[0]
            difference, worst = furthest(ranks[0], first)
            rows.append({
                "name": run.name, "ranks": len(ranks), "apart": difference, "worst": worst,
                "between": max(furthest(rank, ranks[0])[0] for rank in ranks),
                "largest": max(float(g.abs().max()) for g in first.values()),
            })  # fmt: skip
    return rows


def render(runs: Sequence[Reported], template: Path) -> str:
    """The page. Raises UserError if a run has neither finished nor left gradients."""
    compared = gradients(runs)
    names = {row["name"] for row in compared}
    finished = [run for run in runs if "step_seconds" in run.summary or run.name not in names]
    losses = {run.name: dict(enumerate(run.finished["loss"], 1)) for run in finished}
    panels, foot = {"training loss": losses}, "nats per target"
    return fill_template(
        template,
        runs={run.name: run for run in runs},
        finished=finished,
        gradients=compared,
        about=in_words,
        commands={run.name: read_json(run.folder / OPTIONS).get("command") for run in finished},
        busy=max((run.summary["load"] / (os.cpu_count() or 1) for run in finished), default=0.0),
        apart=apart,
        picture=lambda step: inline(lambda path: draw_step(path, step, "predicted")),
        losses=inline(lambda path: draw_curves(path, panels, "", foot, "step")) if finished else "",
        **stepper([run.start for run in finished if run.start]),
    )


def reported(folders: Iterable[Path], machine: describe.Machine | None = None) -> list[Reported]:
    """The runs of these folders; their names are paths where folders share a name."""
    folders = list(dict.fromkeys(folders))
    names = [folder.absolute().name for folder in folders]
    if len({*names}) < len(names):
        names = [str(folder) for folder in folders]
    return [Reported(folder, name, machine) for folder, name in zip(folders, names, strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    """The program."""
    args = parse_report(argv)
    try:
        machine = machine_named(args.machine) if args.machine else None
    except ValueError as error:
        raise UserError(str(error)) from None
    if args.explore:
        text = fill_template(PAGE / "explore.html", **stepper([], GRID["ranks"]))
        output = args.output or WORKDIR / "explore.html"
    else:
        text = render(reported(args.runs, machine), args.template)
        output = args.output or args.runs[0] / "report.html"
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    print(f"The page is {output}.")


if __name__ == "__main__":
    from project.utils import run_program

    run_program(main)

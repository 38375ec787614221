"""Writes one page on runs: what was measured beside what was predicted, and why it differs.

    python project/report.py workdir                            writes workdir/report.html
    python project/report.py workdir_ddp workdir_3d --machine machine.yaml --output both.html
    python project/report.py --explore                          writes explore.html, of no run

Of each run: the recorded step (--timeline 10) above its prediction from the same schedule, sliders
that simulate it again with more micro-batches, another schedule, or another cut, every idle gap
explained, memory per rank, and whether its weights are those of one process (--check_weights). Of
all runs: losses, speed, and the error of the planner, if --machine says on what they ran: a name, a
file, or `this` for this computer.

The page needs no network, and no JavaScript but for the sliders. Every number in it comes from the
files of the runs.

The page of --explore is to learn with: any schedule, its step and why ranks wait; an action that is
moved to another place of its list, and what that breaks or costs; puzzles.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from markupsafe import Markup
from torch import Tensor

from pipeline.schedules.catalogue import SCHEDULES, find
from pipeline.schedules.schedule import Kind
from planning import describe
from planning.cost import GIB, PricedStep
from project.command_line import Parser
from project.figures.compared import Compared, compare_step, micro_batches
from project.figures.epochs import draw_curves, read_json
from project.figures.gantt import draw_step
from project.figures.pages import PAGE, explore, fill_template, scripts
from project.figures.runs import Run, speed_up
from project.figures.style import with_error
from project.plan import machine_named
from project.plot import describe as in_words
from runtime.axes import place_of, ranks_of, sizes
from training.files import METRICS, OPTIONS, SUMMARY, writing
from training.launch.errors import UserError
from training.results import read_metrics


def parse_report(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("runs", type=Path, nargs="*", metavar="RUN", help="the --workdir of a finished run")
    add("--explore", action="store_true", help="a page to learn with, which needs no run")
    add(
        "--machine",
        metavar="NAME",
        help="predict the runs for this machine, as plan.py --machine does",
    )
    add("--output", "--out", type=Path, metavar="FILE",
        help="default: report.html in the first run's folder, or explore.html")  # fmt: skip
    add("--template", type=Path, default=PAGE / "report.html", metavar="FILE",
        help="HTML template, such as a course's; default: project/page/report.html")  # fmt: skip
    args = parser.parse_args(argv)
    if args.explore == bool(args.runs):
        given = "--explore needs no RUN" if args.explore else "RUN is missing"
        parser.error(f"{given}; `report.py workdir` or `report.py --explore` works")
    if not args.template.is_file():
        parser.error(f"--template {args.template}: there is no such file; it may be left out")
    return args


def inline(draw: Callable[[Path], Path]) -> Markup:
    """A picture as a part of the page: without what makes it a file, and without the names of its
    parts, which are in other pictures, too."""
    with TemporaryDirectory() as folder:
        svg = draw(Path(folder) / "picture.svg").read_text("utf-8")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)
    return Markup(re.sub(r"\s+", " ", svg))


@dataclass(frozen=True)
class Reported(Run):
    """A run as the page shows it."""

    machine: describe.Machine | None = None

    def read(self, name: str) -> dict[str, Any]:
        """A file in JSON; empty if there is none."""
        path = self.folder / name
        return read_json(path) if path.is_file() else {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's sizes; empty if it is no GPT-2."""
        return self.read("config.json")

    @property
    def command(self) -> str:
        """The command line that made it."""
        return self.read(OPTIONS).get("command", "")

    @cached_property
    def step(self) -> Compared | None:
        """A recorded step beside its prediction; None: there is none."""
        if not any(self.folder.glob("timeline_rank*.json")):
            return None
        return compare_step(self, self.priced.work() if self.priced else None)

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The numbers of every step; also of a run that was interrupted, which has no summary."""
        lines = read_metrics(self.folder) if (self.folder / METRICS).is_file() else []
        return [line for line in lines if "loss" in line]

    @cached_property
    def positions(self) -> float:
        """Positions of a step, padding included, on all ranks."""
        return fmean(line["tokens_per_sec"] * line["seconds"] for line in self.steps)

    @cached_property
    def shape(self) -> dict[str, int]:
        """Ranks, or stages in threads, on each axis."""
        used = self.summary
        if used.get("num_devices"):
            return sizes(pp=used["num_devices"])
        return ranks_of(used)

    @property
    def seconds(self) -> float:
        """The seconds of a step: the median of all but the first."""
        steps = self.summary.get("step_seconds") or [line["seconds"] for line in self.steps]
        return median(steps[1:] or steps)

    @property
    def memory(self) -> float:
        """GiB of the fullest rank."""
        return max(self.summary["peak_rss_bytes"]) / GIB

    @cached_property
    def priced(self) -> PricedStep | None:
        """The run as the planner sees it, to which dp counts all replicas; None without a machine,
        or if it is no GPT-2."""
        used, size = self.summary, self.config
        ranks = {**self.shape, "dp": self.shape["dp"] * self.shape["ep"]}
        if self.machine is None or "n_embd" not in size:
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

    def shown(self, metric: str) -> str:
        """The mean over all epochs but the first and its spread: of the slowest rank's time, or of
        the ranks' sum."""
        return with_error(*self.over_epochs(metric))

    @property
    def rate(self) -> float:
        """Examples per second: batches of runs may be of different sizes."""
        return self.summary["batch_size"] / self.seconds

    def planned_memory(self) -> list[float]:
        """The planner's bytes of each rank; none of stages that are threads of one rank."""
        ranks = self.summary["world_size"]
        if self.priced is None or ranks < self.shape["pp"]:
            return []
        stages = [sum(held) for held in self.priced.memory]
        return [stages[place_of(r, self.shape)["pp"]] for r in range(ranks)]

    def picture(self) -> Markup:
        """The recorded step above its prediction."""
        step = self.step
        assert step is not None
        return inline(lambda path: draw_step(path, step, "predicted"))

    def sliders(self) -> dict[str, Any] | None:
        """What page/page.js simulates, from measured seconds; None without stages."""
        step = self.step
        if step is None or len(step.ranks) == 1:
            return None
        n, m, own = 1 + max(step.ranks), micro_batches(step.events), self.summary["schedule"]
        sizes = list(range(m % n or n, max(6 * n, m) + 1, n))
        lists = {}
        for name in SCHEDULES:
            chunks = step.seconds.chunks if name == own else None
            with suppress(ValueError):  # e.g. no multiple of the ranks
                lists[name] = {size: find(name, chunks)(n, size) for size in sizes}

        def of_ranks(values: Iterable[float]) -> list[float]:
            sums = [0.0] * n
            for rank, value in zip(step.ranks, values, strict=True):
                sums[rank] += value
            return sums

        def halves(kind: Kind) -> list[float]:
            wholes = taken.actions[Kind.BACKWARD]
            return [x or y / 2 for x, y in zip(taken.actions[kind], wholes, strict=True)]

        taken = step.seconds
        batch = {
            "F": taken.actions[Kind.FORWARD], "I": halves(Kind.BACKWARD_INPUT),
            "W": halves(Kind.BACKWARD_WEIGHT), "R": taken.recompute,
        }  # fmt: skip
        return {
            "lists": lists, "sizes": sizes, "m": m, "schedule": own,
            "layers": of_ranks(self.summary["stage_sizes"]),
            "batch": {kind: [m * x for x in of_ranks(each)] for kind, each in batch.items()},
            "transfer": taken.transfer, "exchange": taken.exchange, "update": taken.update,
            "measured": step.measured, "bubble": step.bubble,
        }  # fmt: skip


def apart(run: Run, first: Run) -> str:
    """The largest difference of a step's loss from another run's, relative; empty if they have
    different steps, or some were skipped."""
    ours, theirs = run.summary["loss"], first.summary["loss"]
    if run is first or len(ours) != len(theirs) or None in (*ours, *theirs):
        return ""
    return f"{max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)):.1e}"


def furthest(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference of two sets of gradients, and the parameter where it is."""
    return max((float((ours[name] - theirs[name]).abs().max()), name) for name in theirs)


def gradients(runs: Sequence[Reported]) -> list[dict[str, Any]]:
    """Compares the gradients that runs left of their first step (--pytest): the largest difference
    between the ranks of each, and from the first run, and the parameter where it is. Raises
    UserError if they are of different models."""
    rows: list[dict[str, Any]] = []
    first: dict[str, Tensor] = {}
    for run in runs:
        paths = sorted((run.folder / "tests").glob("model*_gradients.pth"))
        if not paths:
            continue
        ranks = [torch.load(path, weights_only=True) for path in paths]
        first = first or ranks[0]
        for path, rank in zip(paths, ranks, strict=True):
            if {n: g.shape for n, g in rank.items()} != {n: g.shape for n, g in first.items()}:
                raise UserError(
                    f"{path}: its gradients are of another model than the first run's; runs of one "
                    "model can be compared"
                )
        between, _ = max(furthest(rank, ranks[0]) for rank in ranks)
        difference, worst = furthest(ranks[0], first)
        largest = max(float(g.abs().max()) for g in first.values())
        rows.append({
            "name": run.name, "ranks": len(ranks), "between": between, "apart": difference,
            "worst": worst, "largest": largest,
        })  # fmt: skip
    return rows


def render(runs: Sequence[Reported], template: Path) -> str:
    """The page. Raises UserError if the files of a run are missing."""
    finished = [run for run in runs if "step_seconds" in run.summary]
    compared = gradients(runs)
    names = {run.name for run in finished} | {row["name"] for row in compared}
    losses = {run.name: dict(enumerate(run.summary["loss"], 1)) for run in finished}
    panels, foot = {"training loss": losses}, "nats per target"
    return fill_template(
        template,
        runs={run.name: run for run in runs},
        finished=finished,
        unfinished=[run for run in runs if run.name not in names],
        gradients=compared,
        about=in_words,
        busy=max((run.summary["load"] / (os.cpu_count() or 1) for run in finished), default=0.0),
        apart=apart,
        losses=inline(lambda path: draw_curves(path, panels, "", foot, "step")) if finished else "",
        speed_up=speed_up,
        scripts=scripts("simulate", "page"),
    )


def reported(folders: Iterable[Path], machine: describe.Machine | None = None) -> list[Reported]:
    """The runs of these folders; their names are paths where folders share a name. Raises UserError
    if one has no run."""
    folders = list(dict.fromkeys(folders))
    names = [folder.absolute().name for folder in folders]
    if len({*names}) < len(names):
        names = [str(folder) for folder in folders]
    runs = [Reported(folder, name, machine) for folder, name in zip(folders, names, strict=True)]
    for run in runs:
        if not run.summary:
            raise UserError(f"{run.folder}: it has no {SUMMARY}; name the --workdir of a run")
    return runs


def main(argv: Sequence[str] | None = None) -> None:
    """The program."""
    args = parse_report(argv)
    try:
        machine = machine_named(args.machine) if args.machine else None
    except ValueError as error:
        raise UserError(str(error)) from None
    if args.explore:
        text, output = explore(), args.output or Path("explore.html")
    else:
        text = render(reported(args.runs, machine), args.template)
        output = args.output or args.runs[0] / "report.html"
    with writing(output):
        output.write_text(text, encoding="utf-8")
    print(f"The page is {output}.")


if __name__ == "__main__":
    from project.utils import run_program

    run_program(main)

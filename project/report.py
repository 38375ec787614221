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
import re
import sys
from collections.abc import Callable, Mapping, Sequence
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
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from torch import Tensor

from pipeline.schedules.catalogue import SCHEDULES, find
from pipeline.schedules.schedule import Kind
from planning import describe
from planning.cost import GIB, PricedStep
from project.command_line import Parser
from project.figures.bars import with_error
from project.figures.compared import Compared, compare_step, micro_batches
from project.figures.epochs import read_json
from project.figures.gantt import draw_step
from project.figures.recorded import Run, speed_up
from project.figures.style import LINES, picture, readable
from project.plot import describe as in_words
from project.plot import plot_memory
from training.files import OPTIONS, SUMMARY, writing
from training.launch.errors import UserError
from training.results import read_metrics

PAGE = Path(__file__).parent / "page"


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
        help="another page, such as a course's; default: project/page/report.html")  # fmt: skip
    args = parser.parse_args(argv)
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
        model = describe.model_of(
            None, layers=size["n_layer"], hidden=size["n_embd"], heads=size["n_head"],
            vocab=size["vocab_size"], seq=round(self.positions / batch),
        )  # fmt: skip
        layout = describe.layout_of(
            dp=dp, pp=pp, tp=tp, micro_batch=-(-batch // (dp * m)), batch_size=batch,
            chunks=used.get("chunks") if used.get("schedule") == "interleaved" else None,
            recompute="never" if used.get("recompute") in (None, "never") else "always",
            precision=used.get("precision") or "fp32",
            **{name: used.get(name) for name in ("schedule", "zero", "sequence_parallel")},
        )  # fmt: skip
        machine = self.machine.shared(layout.gpus) if used.get("cores") else self.machine
        try:
            return PricedStep(model, layout, machine, legal=False)
        except ValueError as error:
            raise UserError(f"{self.folder} on --machine {machine.name}: {error}") from None

    def planned_memory(self) -> list[float]:
        """The planner's bytes of each rank; none of stages that are threads of one rank."""
        ranks = self.summary["world_size"]
        if self.priced is None or ranks < self.shape[1]:
            return []
        stages = [held.gib * GIB for held in self.priced.memory]
        return [stages[r // self.shape[2] % len(stages)] for r in range(ranks)]

    def shown(self, metric: str) -> str:
        """The mean over all epochs but the first and its spread: of the slowest rank's time, or of
        the ranks' sum."""
        return with_error(*self.over_epochs(metric))

    def links(self) -> dict[str, float]:
        """What a rank sends in a step, in bytes, by closed forms: docs/mathematics.md."""
        used, (dp, pp, tp) = self.summary, self.shape
        width = 8 if used.get("precision") == "fp64" else 4
        hidden = self.positions / dp * self.config.get("n_embd", 0) * width
        stages = pp if used["world_size"] > 1 else 1  # threads share their memory
        zero, blocks = used.get("zero") or 0, self.config.get("n_layer", 0) / pp
        whole = used["state_bytes"]["gradients"][0] * (dp if zero >= 2 else 1)
        part = (dp - 1) / dp * whole
        # ZeRO-2 and 3 gather what layers compute with; gradients are summed in fp32.
        gathered = part / 2 if zero >= 2 and used.get("precision") == "bf16" else part
        recorded = micro_batches(self.step.events) if self.step else 1
        m = (used["num_microbatches"] or recorded) if zero >= 2 else 1  # which each exchange
        sent = {
            "activations to the next stage": hidden if stages > 1 else 0,
            "gradients of activations to the stage before": hidden if stages > 1 else 0,
            "tensor parallel: 4 all-reduces of a block": 8 * (tp - 1) / tp * blocks * hidden,
            "gradients to replicas": m * part if zero else 2 * part,
            "parameters, gathered": (0, 1, 1, 2 * m)[zero] * gathered,
        }
        return {link: size for link, size in sent.items() if size}

    def pictures(self) -> dict[str, Markup]:
        """By what they show."""
        step, found = self.step, {}
        if step is not None:
            foot = "measured: colour by distance from prediction, upper edge by kind; "
            foot += "numbers: micro-batches; of sharded runs, layers"
            found["step"] = inline(lambda path: draw_step(path, step, "predicted", foot=foot))
        held = self.planned_memory()
        limit = self.machine.memory_gb * GIB if self.machine else 0.0
        return found | {"memory": inline(lambda path: plot_memory([self], path, held, limit))}

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

        def of_ranks(values: Sequence[float]) -> list[float]:
            found = [0.0] * n
            for rank, value in zip(step.ranks, values, strict=True):
                found[rank] += value
            return found

        def halves(kind: Kind) -> list[float]:
            wholes = taken.actions[Kind.BACKWARD]
            return [x or y / 2 for x, y in zip(taken.actions[kind], wholes, strict=True)]

        taken = step.seconds
        batch = {
            "F": taken.actions[Kind.FORWARD], "I": halves(Kind.BACKWARD_INPUT),
            "W": halves(Kind.BACKWARD_WEIGHT), "R": taken.recompute,
        }  # fmt: skip
        layers = re.findall(r"\d+", self.summary["layout"].split(" on ")[0])  # 5 | 3 on cpu:0
        return {
            "lists": lists, "sizes": sizes, "m": m, "schedule": own,
            "layers": of_ranks([int(size) for size in layers]),
            "batch": {kind: [m * x for x in of_ranks(each)] for kind, each in batch.items()},
            "transfer": taken.transfer, "exchange": taken.exchange, "update": taken.update,
            "measured": step.measured, "bubble": step.bubble,
        }  # fmt: skip


def furthest(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference of two sets of gradients, and the parameter where it is."""
    return max((float((ours[name] - theirs[name]).abs().max()), name) for name in theirs)


def gradients(runs: Sequence[Reported]) -> list[dict[str, Any]]:
    """Of the runs that left the gradients of their first step (--pytest): the largest difference
    between their ranks, and from the first such run, and the parameter where it is."""
    found: list[dict[str, Any]] = []
    first: dict[str, Tensor] = {}
    for run in runs:
        paths = sorted((run.folder / "tests").glob("model*_gradients.pth"))
        if not paths:
            continue
        ranks = [torch.load(path, weights_only=True) for path in paths]
        first = first or ranks[0]
        between, _ = max(furthest(rank, ranks[0]) for rank in ranks)
        apart, worst = furthest(ranks[0], first)
        largest = max(float(g.abs().max()) for g in first.values())
        found.append({
            "name": run.name, "ranks": len(ranks), "between": between, "apart": apart,
            "worst": worst, "largest": largest,
        })  # fmt: skip
    return found


def apart(run: Run, first: Run) -> str:
    """The largest difference of a step's loss from another run's, relative; `-` if they have
    different steps, or some were skipped."""
    ours, theirs = run.summary["loss"], first.summary["loss"]
    if run is first or len(ours) != len(theirs) or None in (*ours, *theirs):
        return "-"
    return f"{max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)):.1e}"


def draw_losses(path: Path, runs: Sequence[Run]) -> Path:
    """Draws the training loss of every step."""
    with picture(path, "", "training loss, nats per target, of each step") as (_, (ax,)):
        for k, run in enumerate(runs):
            ax.plot(run.summary["loss"], label=run.name, color=LINES[k % len(LINES)])
        ax.set_ylim(bottom=0)
        if runs:  # that have finished
            ax.legend()
    return path


def render(runs: Sequence[Reported], template: Path) -> str:
    """The page. Raises UserError if the files of a run are missing."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, PAGE]), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {
        "number": readable,
        "tiny": lambda value: f"{value:.1e}" if value else "0",
        "share": lambda value: f"{value:.1%}",
        "ms": lambda value: f"{1e3 * value:.1f}",
    }
    finished = [run for run in runs if "step_seconds" in run.summary]
    return environment.get_template(template.name).render(
        runs={run.name: run for run in runs},
        finished=finished,
        gradients=gradients(runs),
        about=in_words,
        busy=max((run.summary["load"] / (os.cpu_count() or 1) for run in finished), default=0.0),
        losses=inline(lambda path: draw_losses(path, finished)),
        apart=apart,
        speed_up=speed_up,
        scripts=[Markup((PAGE / name).read_text("utf-8")) for name in ("simulate.js", "page.js")],
        GIB=GIB,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The program."""
    args = parse_report(argv)
    try:
        machine = describe.machine(args.machine) if args.machine else None
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

"""The runs that figures compare, by name: `ddp=2` is what `project/train.py ddp --num_workers 2`
left in workdir/ddp2.

Such a folder holds summary.json (what was run, the seconds of every step, bytes per rank) and the
timelines of the ranks.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from project.task import VGG
from training.breakdown import Workers, settled
from training.launch import UserError
from training.timeline import RankTimeline, by_worker, read_timelines
from training.vgg import WIDTH

SUMMARY = "summary.json"
STRATEGIES = ("single", "ddp", "model", "fsdp", "pipeline")
WORKDIR = Path("workdir")
ALIKE = {"model": VGG, "precision": "fp32", "vgg_width": WIDTH}  # in all runs of a figure; defaults


@dataclass(frozen=True)
class Spec:
    """A strategy and a number of workers, as the command line names them."""

    strategy: str
    workers: int

    def folder(self, root: Path) -> Path:
        """Where the run is."""
        return root / f"{self.strategy}{self.workers}"

    def command(self, folder: Path, like: Mapping[str, Any] = MappingProxyType({})) -> str:
        """What makes the run in that folder, to be compared with one whose summary is `like`."""
        words = [f"python project/train.py {self.strategy} --num_workers {self.workers}"]
        words += [
            f"--{name} {like[name]}"
            for name, default in ALIKE.items()
            if like.get(name) not in (None, default)
        ]
        words.append("--timeline 10")
        words += [f"--workdir {folder}"] * (folder != self.folder(WORKDIR))
        return " ".join(words)

    def __str__(self) -> str:
        return f"{self.strategy} {self.workers}"


def specs(text: str) -> list[Spec]:
    """The type of an option: `ddp=1,ddp=2`."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\w+)=(\d+)", part.strip())
        if not match or match[1] not in STRATEGIES or int(match[2]) < 1:
            raise argparse.ArgumentTypeError(
                f"{part!r}: a strategy ({', '.join(STRATEGIES)}) = a number of workers is needed, "
                "separated by commas, e.g. ddp=1,ddp=2"
            )
        found.append(Spec(match[1], int(match[2])))
    return found


@dataclass(frozen=True)
class Run:
    """A run that was made."""

    spec: Spec
    folder: Path
    summary: Mapping[str, Any]
    remedy: str

    def value(self, key: str) -> Any:
        """What the summary says; UserError where it does not."""
        if key not in self.summary:
            raise UserError(f"{self.folder / SUMMARY} has no {key}; {self.remedy}")
        return self.summary[key]

    def step_seconds(self) -> list[float]:
        """Seconds of the steps, the first left out: it pays for what happens once."""
        seconds = [float(s) for s in self.value("step_seconds")]
        if not seconds:
            raise UserError(f"{self.folder / SUMMARY}: no step was timed; {self.remedy}")
        return [seconds[k] for k in settled(range(len(seconds)))]

    def rates(self) -> list[float]:
        """Examples per second, step by step."""
        return [self.value("batch_size") / seconds for seconds in self.step_seconds()]

    def peaks(self) -> list[int]:
        """Per rank, the most memory that was resident, in bytes."""
        return per_rank(self.value("peak_rss_bytes"), self.spec.workers)

    def states(self) -> dict[str, list[int]]:
        """Per kind, and per rank, bytes of parameters, gradients and optimizer; where the run did
        not tell them apart, all in one."""
        state = self.value("state_bytes")
        kinds = state if isinstance(state, Mapping) else {"state": state}
        return {kind: per_rank(value, self.spec.workers) for kind, value in kinds.items()}

    def timelines(self) -> list[RankTimeline]:
        """What its ranks recorded."""
        return timelines_of(self.folder, self.remedy)

    def workers(self) -> Workers:
        """The events of each worker."""
        return by_worker(self.timelines())


def per_rank(value: Any, workers: int) -> list[int]:
    """A number of each rank; one number stands for all."""
    return [int(v) for v in value] if isinstance(value, Sequence) else [int(value)] * workers


def timelines_of(folder: Path, remedy: str) -> list[RankTimeline]:
    """What the ranks of a run recorded; UserError, ending with `remedy`, where there is nothing."""
    try:
        return read_timelines(folder)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is not there; {remedy}") from None
    except ValueError as error:
        raise UserError(f"{error}; {remedy}") from None


def load_runs(wanted: Sequence[Spec], root: Path) -> list[Run]:
    """The runs of that names, in their order.

    Raises:
        UserError: some are not there; one line that says which commands make them. Or they trained
            different models, or in different numbers, and do not compare.
    """
    folders = {spec: spec.folder(root) for spec in wanted}
    missing = [spec for spec, folder in folders.items() if not (folder / SUMMARY).is_file()]
    summaries = {s: _summary(s, folder) for s, folder in folders.items() if s not in missing}
    _check_alike({folders[spec]: summary for spec, summary in summaries.items()})
    if missing:
        like = next(iter(summaries.values()), {})
        commands = " && ".join(spec.command(folders[spec], like) for spec in missing)
        names = ", ".join(str(folders[spec]) for spec in missing)
        raise UserError(f"no run in {names}; make it with: {commands}")
    return [
        Run(spec, folders[spec], summaries[spec], _again(spec, folders[spec], summaries[spec]))
        for spec in wanted
    ]


def _again(spec: Spec, folder: Path, summary: Mapping[str, Any]) -> str:
    return f"make it again with: {spec.command(folder, summary)}"


def _summary(spec: Spec, folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except ValueError as error:
        remedy = _again(spec, folder, {})
        raise UserError(f"{folder / SUMMARY} cannot be read ({error}); {remedy}") from None


def _check_alike(summaries: Mapping[Path, Mapping[str, Any]]) -> None:
    """Raises UserError where they differ in what all of a figure must have."""
    for name in ALIKE:
        held = {s[name]: folder for folder, s in summaries.items() if s.get(name) is not None}
        if len(held) > 1:
            found = ", ".join(f"{folder} {value}" for value, folder in held.items())
            raise UserError(f"only runs of the same {name} compare, and these differ: {found}")


def describe_runs(runs: Sequence[Run]) -> str:
    """What was trained: the model, and the batch where all have the same."""
    parts = [str(runs[0].summary.get("model", "")).upper().replace("GPT2", "GPT-2")]
    batches = [run.summary.get("batch_size") for run in runs]
    if batches[0] is not None:
        same = len(set(batches)) == 1
        parts.append(f"batches of {batches[0] if same else ', '.join(map(str, batches))}")
    return ", ".join(filter(None, parts))

"""How much code a reader meets who follows a step, counted by a trace of one rank.

    python -m tests.step_trace

prints them for several layouts. A step is traced on rank 0's main thread, from the seed of the
second step to that of the third, without a timeline. Only functions of this project count:

    lines     code lines of all functions that are entered, each once, without docstrings
    files     in which they are
    depth     of calls among them, the most
    stored    functions that are called under a name that is not their own: out of an attribute, an
              argument or a variable. A search for the call does not find them.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.project.programs import ROOT, TINY, finish
from tests.ranks import Ranks, start_server
from tests.test_layout import code_lines
from training import loop
from training.files import show

LAYOUTS = {
    "ddp": "train ddp",
    "threads": "run_pipeline --model_parallel_mode pipeline_parallel --num_devices 2",
    "processes": "train pipeline",
    "ZeRO-3": "train fsdp",
    "tensor": "train tensor",
    "context": "train context",
}


@dataclass
class Trace:
    """What has been entered so far."""

    depth: int = 0
    entered: set[CodeType] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """For `sys.setprofile`."""
        if event != "call" or not _ours(frame.f_code):
            return
        code, caller = frame.f_code, frame.f_back
        self.entered.add(code)
        self.depth = max(self.depth, sum(_ours(outer.f_code) for outer in _outwards(frame)))
        if caller is not None and _ours(caller.f_code) and not _named(code, caller.f_code):
            self.stored.add(f"{code.co_name}, {Path(code.co_filename).name}")

    def counts(self) -> dict[str, Any]:
        """By the names at the head of this file; files and stored functions in full."""
        lines: dict[str, set[int]] = {}
        for code in self.entered:
            lines.setdefault(code.co_filename, set()).update(_lines_of(code))
        return {
            "lines": sum(map(len, lines.values())),
            "files": sorted(str(Path(file).relative_to(ROOT)) for file in lines),
            "depth": self.depth,
            "stored": sorted(self.stored),
        }


@cache
def _ours(code: CodeType) -> bool:
    """Whether it is of this project, and no test."""
    file = code.co_filename
    inside = file.startswith(f"{ROOT}/") and "site-packages" not in file
    return inside and not file.startswith(f"{ROOT}/tests/")


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of a call, up to the training loop."""
    while frame is not None and frame.f_code is not loop.train.__code__:
        yield frame
        frame = frame.f_back
    if frame is not None:
        yield frame


def _named(code: CodeType, caller: CodeType) -> bool:
    """Whether the caller's text has the function's name, or the function is part of that text."""
    if code in caller.co_consts:
        return True
    if code.co_flags & inspect.CO_NESTED:  # defined in a function that has made it for somebody
        return False
    special = code.co_name.startswith("__")  # a construction, an operator
    return special or code.co_name in {*caller.co_names, *caller.co_freevars}


@cache
def _lines_of(code: CodeType) -> frozenset[int]:
    """The numbers of a function's code lines."""
    path, first = Path(code.co_filename), code.co_firstlineno
    text = path.read_text("utf-8").splitlines(keepends=True)
    block = inspect.getblock(text[first - 1 :])
    return frozenset(code_lines(path) & {*range(first, first + len(block))})


def trace_second_step(rank: int, patches: pytest.MonkeyPatch, result: Path) -> None:
    """Has rank 0 write the counts of its second step."""
    seeded, trace = loop.seed_step, Trace()

    def seed_step(model: Any, seed: int, number: int) -> None:
        if rank == 0 and number == 2:
            sys.setprofile(None)
            result.write_text(json.dumps(trace.counts()))
        seeded(model, seed, number)
        if rank == 0 and number == 1:
            sys.setprofile(trace.note)

    patches.setattr(loop, "seed_step", seed_step)


def counts_of(line: str, ranks: Ranks | None, folder: Path) -> dict[str, Any]:
    """Those of a step of a program."""
    result = folder / "counts.json"
    tamper = partial(trace_second_step, result=result)
    finish(f"{line} {TINY} --num_batches 3 --dropout 0.1", ranks, tamper)
    counts: dict[str, Any] = json.loads(result.read_text())
    return counts


def main() -> None:
    """Prints a line per layout."""
    start_server()
    with closing(Ranks(2)) as ranks, tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, line in LAYOUTS.items():
            counts = counts_of(line, None if name == "threads" else ranks, Path(folder))
            files, stored = counts["files"], counts["stored"]
            show(
                f"{name:10} {counts['lines']:5} lines {len(files):3} files "
                f"{counts['depth']:3} deep {len(stored):3} stored"
            )
            if "-v" in sys.argv:
                show("   " + "\n   ".join([*files, *stored]))


if __name__ == "__main__":
    main()

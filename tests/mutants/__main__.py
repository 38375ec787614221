"""Breaks one line at a time in a copy of the project, and runs the tests that must turn red.

    python -m tests.mutants                     all of them, four at a time: many wait
    python -m tests.mutants --only loop.py      those whose file, text or place has these words

First the tests run in the copy as it is. Then, for each mutant of the table (tests/mutants/
table.py), its tests run until one is red. A mutant under which all are green has survived: a line
may be wrong and nobody notices. Tests that do not end count as red. The status is 1 if a mutant has
survived, its test is skipped or its text does not occur once, or a test is red without a mutant or
does not exist.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm

from tests.mutants.table import ROOT, Mutant, mutants

LIMIT = 300.0  # seconds for a mutant's tests
ALL = 1800.0  # for all tests, without a mutant
GREEN = 0  # pytest's status
NOT_COPIED = (
    ".git",
    ".venv",
    "__pycache__",
    ".*_cache",
    "workdir",
    "workdir_*",
    "results",
    "*.egg-info",
)


class Copy:
    """A copy of the project, and a worker that runs tests in it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
        # Compiled files are recognised by the content of their source: times are too coarse.
        by_content = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder, quiet=2, invalidation_mode=by_content)
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
        self.worker = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.worker"], cwd=folder, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def test(self, tests: list[str], limit: float) -> tuple[bool, str]:
        """Whether all are green; and what pytest said."""
        assert self.worker.stdin is not None and self.worker.stdout is not None
        self.worker.stdin.write(json.dumps({"tests": tests, "limit": limit}) + "\n")
        self.worker.stdin.flush()
        answer: dict[str, Any] = json.loads(self.worker.stdout.readline())
        return answer["status"] == GREEN, answer["said"]

    def judge(self, mutant: Mutant) -> str:
        """What became of it: killed, or else what is wrong."""
        path = self.root / mutant.file
        source = path.read_text("utf-8")
        try:
            wrong = mutant.applied_to(source)
        except ValueError as error:
            return str(error)
        path.write_text(wrong, "utf-8")
        try:
            green, said = self.test(list(mutant.tests), LIMIT)
        finally:
            path.write_text(source, "utf-8")
        if green and re.search(r"^\d.* skipped", said, re.MULTILINE):  # pytest's last line
            return "a test is skipped here, as those of pages without Chromium"
        return "survived" if green else "killed"

    def close(self) -> None:
        """Ends the worker."""
        assert self.worker.stdin is not None
        self.worker.stdin.close()
        self.worker.wait()


@contextmanager
def copies(number: int) -> Iterator[list[Copy]]:
    """In a temporary folder."""
    with TemporaryDirectory(prefix="mutants-") as folder:
        made = [Copy(Path(folder) / str(i)) for i in range(number)]
        try:
            yield made
        finally:
            for copy in made:
                copy.close()


def run(chosen: list[Mutant], jobs: int) -> int:
    """The exit status."""
    start, tally, free = time.monotonic(), Counter[str](), Queue[Copy]()
    tests = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
    with copies(jobs) as made, ThreadPoolExecutor(jobs) as pool:
        for copy in made:
            free.put(copy)

        def green(tests: list[str]) -> str:
            copy = free.get()
            fine, said = copy.test(tests, ALL)
            free.put(copy)
            return "" if fine else said

        def judge(mutant: Mutant) -> str:
            copy = free.get()
            found = copy.judge(mutant)
            free.put(copy)
            return found

        shares = [share for i in range(jobs) if (share := tests[i::jobs])]
        if red := "".join(pool.map(green, shares)):
            print(f"{red}\nwithout a mutant these tests must be green")
            return 1
        with tqdm(total=len(chosen), disable=None) as bar:
            for mutant, found in zip(chosen, pool.map(judge, chosen), strict=True):
                tally[found if found in ("killed", "survived") else "not tried"] += 1
                if found != "killed":
                    bar.write(f"{mutant.said()}: {found}")
                bar.update()
    seconds = time.monotonic() - start
    print(", ".join(f"{n} {what}" for what, n in tally.items()), f"in {seconds:.0f} s")
    return int(tally["killed"] < len(chosen))


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--only", action="append", metavar="WORDS", help="may be given repeatedly")
    add("--jobs", type=int, default=4, help="at a time (default 4)")
    args = parser.parse_args()
    chosen = [m for m in mutants() if not args.only or any(o in m.said() for o in args.only)]
    if not chosen:
        parser.error(f"no mutant has {' or '.join(args.only)}")
    return run(chosen, args.jobs)


if __name__ == "__main__":
    sys.exit(main())

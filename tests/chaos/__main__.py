"""Chaos: real runs are started, something happens to them, and what is left is inspected.

Each attempt starts a program with a tiny model, waits for a random moment (while its processes
import their libraries, while it trains, or as it ends), and does one thing to one random process.
Then the run must end in time, with the right status; the rank that failed first must be named; and
no process, shared memory or temporary file may be left. (What raises on a rank, or on a stage's
thread: tests/training/launch/test_launch.py, tests/pipeline.)

    python -m tests.chaos                              everything once: 30 minutes
    python -m tests.chaos --rounds 10 --only kill --only stop
    python -m tests.chaos --program torchrun --seed 7

An attempt whose run was over before it was struck is counted as missed, and not as tried. The
same --seed draws the same moments and victims; what they meet there depends on the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

from tests.chaos.attempt import Attempt
from tests.chaos.kinds import KINDS
from tests.chaos.programs import PROGRAMS


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add, programs = parser.add_argument, [program.name for program in PROGRAMS]
    add("--rounds", type=int, default=1, help="attempts of each kind on each program (default 1)")
    add("--seed", type=int, default=0, help="of moments and victims (default 0)")
    often: Any = {"action": "append", "help": "may be given repeatedly"}
    add("--only", metavar="KIND", choices=KINDS, **often)
    add("--program", choices=programs, **often)
    return parser.parse_args()


def plan(args: argparse.Namespace) -> Iterator[Attempt]:
    """The attempts, round by round."""
    for round_, kind, program in product(range(args.rounds), args.only or KINDS, PROGRAMS):
        wanted = args.program is None or program.name in args.program
        if wanted and program.launcher in KINDS[kind].ends:
            yield Attempt(program, kind, Random(f"{args.seed} {round_} {kind} {program.name}"))


def main() -> int:
    """Makes the attempts, and says how each ended and what was wrong."""
    todo, bad = list(plan(parse())), 0
    for i, attempt in enumerate(todo, 1):
        attempt.make()
        bad += bool(attempt.wrong)
        print(f"{i:>4}/{len(todo)}  {'WRONG  ' if attempt.wrong else ''}{attempt}", flush=True)
        if attempt.wrong:
            print("\n".join([*(f"           {line}" for line in attempt.wrong), attempt.said]))
    missed = sum(attempt.missed for attempt in todo)
    print(f"\n{len(todo)} attempts, {missed} missed, {bad} with violations")
    return int(bad > 0 or not todo)


if __name__ == "__main__":
    sys.exit(main())

"""Chaos: real runs are started, something happens to them, and what is left is inspected.

Each attempt starts a program with a tiny model, waits for a random moment (while its processes
import their libraries, while it trains, or as it ends), and does one thing to one random process.
Then the run must end in time, with the right status; the rank that failed first must be named and
its traceback printed once; and no process, port, shared memory or temporary file may be left.

    python -m tests.chaos                              everything once: 45 minutes
    python -m tests.chaos --rounds 10 --only kill --only stop
    python -m tests.chaos --program torchrun --seed 7
    python -m tests.chaos --only restart --rounds 5    killed again and again, equal in the end

An attempt whose run was over before it was struck is counted as missed, and not as tried. The
same --seed draws the same moments and victims; what they meet there depends on the machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from random import Random

from tests.chaos import restart
from tests.chaos.attempt import PHASES, Attempt, draw
from tests.chaos.kinds import KINDS
from tests.chaos.programs import PROGRAMS
from tests.chaos.restart import Restart

RESTART = "restart"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--rounds", type=int, default=1, help="attempts of each kind on each program (default 1)")
    add("--seed", type=int, default=0, help="of moments and victims (default 0)")
    names, programs = (
        [*(kind.name for kind in KINDS), RESTART],
        [program.name for program in PROGRAMS],
    )
    add("--only", action="append", metavar="KIND", choices=names, help="may be given repeatedly")
    add("--program", action="append", choices=programs, help="may be given repeatedly")
    add("--phase", choices=PHASES, help="strike only then")
    return parser.parse_args(argv)


def plan(args: argparse.Namespace) -> Iterator[Attempt | Restart]:
    """The attempts, round by round."""
    programs = [p for p in PROGRAMS if args.program is None or p.name in args.program]
    for round_ in range(args.rounds):
        for kind in (*KINDS, None):
            name = RESTART if kind is None else kind.name
            for program in programs:
                random = Random(f"{args.seed} {round_} {name} {program.name}")
                if args.only is not None and name not in args.only:
                    continue
                if kind is None:
                    if program.restarts:
                        yield Restart(program, random)
                elif program.launcher in kind.ends:
                    yield draw(program, kind, random, args.phase if kind.at_any_time else None)


def tally(attempts: Sequence[Attempt]) -> str:
    """A line for each program and kind."""
    lines = []
    for program, kind in dict.fromkeys((a.program, a.kind.name) for a in attempts):
        mine = [a for a in attempts if (a.program, a.kind.name) == (program, kind)]
        tried = [a for a in mine if not a.missed]
        slowest = max((a.seconds or 0.0 for a in tried), default=0.0)
        lines.append(
            f"{program.name:19}{kind:16}{len(tried):3} tried, {len(mine) - len(tried)} missed, "
            f"{sum(bool(a.wrong) for a in tried)} wrong, {sum(len(a.left) for a in mine)} left, "
            f"slowest end {slowest:.1f} s"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the attempts, and says how each ended and what was wrong."""
    args = parse(argv)
    todo = list(plan(args))
    start = time.monotonic()
    done: list[Attempt | Restart] = []
    for i, attempt in enumerate(todo, 1):
        attempt.make()
        done.append(attempt)
        print(f"{i:>4}/{len(todo)}  {'' if attempt.fine else 'WRONG  '}{attempt}", flush=True)
        for line in (*attempt.wrong, *(f"left: {what}" for what in attempt.left)):
            print(f"           {line}", flush=True)
        if not attempt.fine:
            print(attempt.said, flush=True)
    print(f"\n{tally([a for a in done if isinstance(a, Attempt)])}")
    if restarts := [a for a in done if isinstance(a, Restart)]:
        print(restart.tally(restarts))
    bad = sum(not attempt.fine for attempt in done)
    minutes = (time.monotonic() - start) / 60
    print(f"\n{len(done)} attempts in {minutes:.1f} minutes, {bad} with violations")
    return int(bad > 0 or not done)


if __name__ == "__main__":
    sys.exit(main())

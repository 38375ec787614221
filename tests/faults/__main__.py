"""Every fault, under every layout, on one host, two and three: the table in docs/faults.md.

    python -m tests.faults                                    an hour, on two cores
    python -m tests.faults --layout fsdp --hosts 2
    python -m tests.faults --only "rank killed" --only "host killed"

A run is struck after its fifth step of twelve; the last checkpoint is that of the fourth. Seconds
are from the fault to the next new step, with a time-out of 20. The weights after the last step are
compared with those of a run that was left alone. If hosts leave and join, the losses are compared
with those of one host.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

from tests.faults import faults
from tests.faults.faults import LAYOUTS, Fault, Found
from tests.faults.hosts import MissingError

# By name: the least number of hosts, and what happens to the last host and the last rank.
FAULTS: dict[str, tuple[int, Callable[[int, int], Sequence[Fault]]]] = {
    "rank killed": (1, lambda _, rank: [faults.kill(rank)]),
    "notice": (1, lambda *_: [faults.notice()]),
    "rank stopped": (1, lambda _, rank: [faults.stop(rank)]),
    "disk full": (1, lambda host, _: [faults.fill_disk(host, 8)]),
    "host killed": (2, lambda host, _: [faults.kill_host(host, 5)]),
    "link cut, less than the time-out": (2, lambda host, _: [faults.cut_link(host, 5)]),
    "link cut, more than the time-out": (2, lambda host, _: [faults.cut_link(host, 40)]),
    "host leaves, and is back": (2, lambda host, _: [faults.leave(host, 4), faults.join(host, 8)]),
}
LEAVES = "host leaves, and is back"  # and the run goes on with the others, under layouts whose dp
FOLLOW = ("evaluated", "pictures", "ddp", "fsdp", "3d")  # follows the number of hosts
HEAD = "| fault | layout | hosts | what happened | seconds | steps lost | weights equal |"


@dataclass(frozen=True)
class Case:
    """A fault, and where it strikes."""

    fault: str
    layout: str
    hosts: int

    def strike(self) -> Found:
        """Does it. Raises MissingError."""
        layout = LAYOUTS[self.layout]
        ranks = layout.alone if self.hosts == 1 else layout.each * self.hosts
        struck = FAULTS[self.fault][1](self.hosts - 1, ranks - 1)
        return faults.run(layout, self.hosts, *struck, elastic=self.fault == LEAVES)

    def row(self) -> tuple[str, bool, str]:
        """The row of the table, whether the run has come to the same end as undisturbed, and what
        it said."""
        where = f"| {self.fault} | {self.layout} | {self.hosts} |"
        try:
            hosts = 1 if self.fault == LEAVES else self.hosts
            found, alone = self.strike(), left_alone(self.layout, hosts)
        except MissingError as why:
            return f"{where} {why} | | | |", True, ""
        # With another number of ranks sums are taken in another order.
        pairs = zip_longest(found.losses, alone.losses, fillvalue=0.0)
        alike = all(math.isclose(loss, other, rel_tol=1e-6) for loss, other in pairs)
        same = alike if self.fault == LEAVES else found.weights == alone.weights
        fine, yes = same and not any(found.statuses), "losses" if self.fault == LEAVES else "yes"
        restarts = found.starts - 1
        happened = f"restarted, {restarts} times" if restarts > 1 else "restarted"
        if any(found.statuses):
            happened = f"ended with status {found.statuses}"
        elif not restarts:
            happened = "went on"
        left = f"; left: {found.left}" * bool(found.left)
        numbers = f"{found.seconds:.0f} | {found.lost} | {yes if fine else '**no**'} |"
        return f"{where} {happened}{left} | {numbers}", fine and not left, found.said


@cache
def left_alone(layout: str, hosts: int) -> Found:
    """The run that nothing happens to."""
    return faults.run(LAYOUTS[layout], hosts)


def cases() -> Iterator[Case]:
    """All of them: those that share an undisturbed run together."""
    for hosts in (1, 2, 3):
        for layout in LAYOUTS:
            for fault, (least, _) in FAULTS.items():
                if hosts >= least and (fault != LEAVES or layout in FOLLOW):
                    yield Case(fault, layout, hosts)


def main() -> int:
    """Prints the table; what the runs said goes to stderr where the weights differ."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--only", action="append", choices=FAULTS)
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--hosts", action="append", type=int, choices=(1, 2, 3))
    args = parser.parse_args()
    print(f"{HEAD}\n|{'---|' * 7}", flush=True)
    bad = 0
    for case in cases():
        if (
            case.fault in (args.only or FAULTS)
            and case.layout in (args.layout or LAYOUTS)
            and case.hosts in (args.hosts or (1, 2, 3))
        ):
            row, fine, said = case.row()
            bad += not fine
            print(row, flush=True)
            if not fine:
                print(said, file=sys.stderr, flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

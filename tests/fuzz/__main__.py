"""Random models under random layouts beside plain PyTorch on one process, until the time is over.

A case is drawn from one number: a model, a strategy and its options. After every step its losses
and gradients, and at the end its weights and outputs, must be those of plain training with the full
batch, in float64 and by name. The first difference, error or hang ends the run with status 1.

    python -m tests.fuzz --seconds 300                 every kind in turn
    python -m tests.fuzz --seconds 60 --only fsdp3 --seed 1000
    python -m tests.fuzz --seconds 0 --seed 4711       one case
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count

from tests.fuzz.cases import KINDS, TOLERANCE, WORLD_SIZE, Verdict, draw, kind_of, run
from tests.ranks import Ranks

LIMIT = 180.0  # seconds for a case: on a busy machine ranks need a minute to start


def wrong(verdicts: Sequence[Verdict | None]) -> list[str]:
    """What the ranks have found that differs; what is missing is infinitely far off."""
    said = [v for v in verdicts if v is not None]
    worst = {name: math.inf for v in said for name in v.expected}
    for name in sorted({name for v in said for name in v.differences}):
        worst[name] = max(v.differences.get(name, 0.0) for v in said)
    return [f"{name}: {d:.1e}" for name, d in worst.items() if not d <= TOLERANCE]


def fuzz(args: argparse.Namespace) -> int:
    """The exit status: 1 if a case has failed."""
    ranks, agreed = Ranks(WORLD_SIZE, LIMIT), Counter[str]()
    end = time.monotonic() + args.seconds
    try:
        for seed in (s for s in count(args.seed) if args.only in (None, kind_of(s))):
            try:
                found = wrong(ranks.run(run, seed))
            except (AssertionError, EOFError, OSError) as error:  # an error, a hang, an end
                found = [f"{type(error).__name__}: {error}"]
            if found:
                print(f"seed {seed}: {draw(seed)}\n{draw(seed).model()}\n" + "\n".join(found))
                return 1
            agreed[kind_of(seed)] += 1
            if time.monotonic() > end:
                break
    finally:
        ranks.close()
    print("agreed: " + ", ".join(f"{kind} {agreed[kind]}" for kind in KINDS if agreed[kind]))
    return 0


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--seconds", type=float, default=300.0, help="to go on for (default 300)")
    add("--seed", type=int, default=0, help="of the first case (default 0)")
    add("--only", choices=tuple(KINDS), metavar="KIND", help=", ".join(KINDS))
    return fuzz(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())

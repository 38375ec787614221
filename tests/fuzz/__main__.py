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
import time
from collections import Counter
from itertools import count

from tests.fuzz.cases import KINDS, WORLD_SIZE, draw, kind_of, run, wrong
from tests.ranks import Ranks

LIMIT = 180.0  # seconds for a case: on a busy machine ranks need a minute to start


def fuzz(args: argparse.Namespace) -> int:
    """The exit status: 1 if a case has failed."""
    ranks, agreed = Ranks(WORLD_SIZE, LIMIT), Counter[str]()
    end = time.monotonic() + args.seconds
    try:
        for seed in (s for s in count(args.seed) if args.only in (None, kind_of(s))):
            try:
                found = wrong(seed, ranks.run(run, seed))
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

"""Random models under random layouts beside plain PyTorch on one process, until the time is over.

A case is drawn from one number: a model, a strategy and its options. After every step its losses
and gradients, and at the end its weights and outputs, must be those of plain training with the full
batch, in float64 and by name. A ValueError or TypeError that names the layer or type is right where
the strategy may refuse a model; another error, a difference or a hang is a failure.

    python -m tests.fuzz --seconds 300                 every kind in turn
    python -m tests.fuzz --seconds 60 --only fsdp3 --seed 1000
    python -m tests.fuzz --case 4711                   one case, with all that is known of it
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from tests.fuzz.cases import KINDS, TOLERANCE, WORLD_SIZE, Verdict, draw, kind_of, run
from tests.ranks import Ranks

LIMIT = 180.0  # seconds for a case: on a busy machine ranks need a minute to start


@dataclass
class Outcome:
    """Of a case: agreed, refused or failed; the largest difference; what to print; whether ranks
    are left in the middle of something."""

    word: str
    difference: float = 0.0
    text: str = ""
    spoiled: bool = False


def judge(verdicts: Sequence[Verdict | None]) -> Outcome:
    """What the ranks say, together."""
    said = [v for v in verdicts if v is not None]
    errors = [v for v in said if v.error]
    causes = [v for v in errors if not v.error.startswith("PeerError")] or errors
    if errors and all(v.allowed for v in causes):
        return Outcome("refused", text=causes[0].error, spoiled=len(causes) < len(said))
    if errors:
        traces = "\n".join(dict.fromkeys(v.trace for v in causes if not v.allowed))
        return Outcome("failed", text=traces, spoiled=len(said) > 1)
    differences: dict[str, float] = {}
    for verdict in said:
        for name, d in verdict.differences.items():
            differences[name] = max(d, differences.get(name, 0.0))
    missing = {name for v in said for name in v.expected} - set(differences)
    wrong = [f"{name}: {d:.1e}" for name, d in differences.items() if d > TOLERANCE]
    wrong += [f"{name}: missing" for name in sorted(missing)]
    worst = max(differences.values())
    return Outcome("failed", worst, "; ".join(wrong)) if wrong else Outcome("agreed", worst)


class World:
    """Three ranks, made anew after a case that leaves them in the middle of something."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None

    def run(self, seed: int) -> Outcome:
        self._ranks = self._ranks or Ranks(WORLD_SIZE, LIMIT)
        try:
            verdicts = self._ranks.run(run, seed)
        except (AssertionError, EOFError, OSError) as error:  # a hang, or the end of a process
            self.close()
            return Outcome("failed", text=f"{type(error).__name__}: {error}")
        outcome = judge(verdicts)
        if outcome.spoiled:
            self.close()
        return outcome

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.broken = True  # ends them at once
            self._ranks.close()
        self._ranks = None


def fuzz(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """The exit status: 1 if a case has failed."""
    world = World()
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in KINDS if args.only in (None, kind)}
    end = time.monotonic() + args.seconds
    seeds = (s for s in count(args.seed) if kind_of(s) in outcomes)
    try:
        for seed in seeds if args.case is None else [args.case]:
            outcome = world.run(seed)
            outcomes.setdefault(kind_of(seed), []).append(outcome)
            if outcome.word == "failed" or args.case is not None:
                say(
                    f"seed {seed} {outcome.word}, largest difference {outcome.difference:.1e}\n"
                    f"  {draw(seed)}\n  {outcome.text}\n  python -m tests.fuzz --case {seed}"
                )
            if time.monotonic() > end:
                break
    except KeyboardInterrupt:
        say("interrupted")
    finally:
        world.close()
    words = ("agreed", "refused", "failed")
    say(f"{'kind':12}{'cases':>8}" + "".join(f"{w:>8}" for w in words) + "  largest difference")
    for kind, found in outcomes.items():
        numbers = [len(found), *([o.word for o in found].count(word) for word in words)]
        largest = max((o.difference for o in found if o.word == "agreed"), default=0.0)
        say(f"{kind:12}" + "".join(f"{k:8}" for k in numbers) + f"  {largest:.1e}")
    return int(any(o.word == "failed" for found in outcomes.values() for o in found))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--seconds", type=float, default=300.0, help="to go on for (default 300)")
    add("--seed", type=int, default=0, help="of the first case (default 0)")
    add("--case", type=int, metavar="SEED", help="this case only")
    add("--only", choices=tuple(KINDS), metavar="KIND", help=", ".join(KINDS))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(fuzz(parse(), lambda text: print(text, flush=True)))

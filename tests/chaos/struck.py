"""One of the faults of tests/faults, drawn at random, as is the step after which it strikes."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tests.faults.__main__ import cases
from tests.faults.faults import STEPS


@dataclass
class Struck:
    """The attempt, and what came of it; as `Attempt`."""

    random: Random
    wrong: list[str] = field(default_factory=list)
    said: str = ""
    missed: bool = False
    came: str = "not made"

    def make(self) -> None:
        """Does it, and fills in what came of it."""
        case, step = self.random.choice([*cases()]), self.random.randint(1, STEPS - 1)
        row, fine, self.said = case.row(step)
        self.came = f"after step {step} {row}"
        self.wrong = [] if fine else ["not as the run that was left alone"]

    def __str__(self) -> str:
        return self.came

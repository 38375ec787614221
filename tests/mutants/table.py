"""One-line mutants: wrong lines that would hurt, and the tests that must turn red.

The table is in the text files of this folder, one for each package. In them

    file training/loop.py                       the file that is broken
    test tests/training/test_x.py::test_y       the tests; several lines, several tests
    - loss_sum / count                          text that occurs once in the file
    + loss_sum * count                          what takes its place

`file` and `test` hold until the next; a line that begins with # is a comment. Several lines of - or
+ are one text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


@dataclass(frozen=True)
class Mutant:
    """A wrong line. `place` is where the table has it."""

    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]
    place: str

    def said(self) -> str:
        """In a line."""
        return f"{self.place} {self.file}: {self.text.strip()!r} -> {self.replacement.strip()!r}"

    def applied_to(self, source: str) -> str:
        """The file's text with the wrong line. Raises ValueError unless the text occurs once, and
        the result of a Python file is Python."""
        if (n := source.count(self.text)) != 1:
            raise ValueError(f"its text occurs {n} times in its file, and not once")
        wrong = source.replace(self.text, self.replacement)
        if not self.file.endswith(".py"):
            return wrong
        try:
            ast.parse(wrong)
        except SyntaxError as error:
            raise ValueError(f"it is no Python: {error}") from None
        return wrong


def mutants() -> list[Mutant]:
    """The whole table."""
    return [mutant for path in sorted(FOLDER.glob("*.txt")) for mutant in _read(path)]


def _read(path: Path) -> Iterator[Mutant]:
    file, tests, before = "", list[str](), ""
    lines: dict[str, list[str]] = {"-": [], "+": []}
    for number, line in enumerate([*path.read_text("utf-8").splitlines(), ""], 1):
        kind, _, rest = line.partition(" ")
        if before == "+" and kind != "+":
            text, replacement = ("\n".join(lines[sign]) for sign in "-+")
            yield Mutant(file, text, replacement, tuple(tests), f"{path.name}:{number - 1}")
            lines = {"-": [], "+": []}
        if kind == "file":
            file, tests = rest, []
        elif kind == "test":
            tests = [*tests, rest] if before == "test" else [rest]
        elif kind in lines:
            lines[kind].append(rest)
        elif kind and not kind.startswith("#"):
            raise ValueError(f"{path.name}:{number}: {line}")
        before = kind

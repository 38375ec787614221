"""docs/mathematics.md: every number in it is what the expression beside it gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import mathematics

PAGE = Path(__file__).resolve().parents[1] / "docs" / "mathematics.md"
UNITS = {
    "": 1.0, "GB": 1e9, "MB": 1e6, "s": 1.0, "ms": 1e-3, "%": 1.0, "x": 1.0, "billion": 1e9
}  # fmt: skip
NUMBER = re.compile(r"\*\*([\d.,]+)(?: (GB|MB|s|ms|%|x|billion))?\*\*")
PAIR = re.compile(NUMBER.pattern + r"[^*`]*?`([^`]+)`", re.DOTALL)
WITH_UNIT = re.compile(r"[\d.,]+ (?:GB|MB|s|ms|%|x|billion)\b")


def prose(text: str) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def constants(text: str) -> dict[str, Any]:
    """What the page's block of Python defines."""
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    return names


def wrong(text: str, names: dict[str, Any]) -> list[str]:
    """The numbers that are not what their expression gives, to the digits that are written; and
    those that have none."""
    page = prose(text)
    pairs = PAIR.findall(page)
    found = [f"{digits} {unit} has no expression" for digits, unit in NUMBER.findall(page)]
    for digits, unit, expression in pairs:
        found.remove(f"{digits} {unit} has no expression")
        value = float(eval(expression, names)) / UNITS[unit]
        decimals = len(digits.partition(".")[2])
        if f"{value:,.{decimals}f}" != digits:
            found.append(f"{expression} = {value} {unit}, not {digits}")
    return found


def test_every_number_is_computed() -> None:
    text = PAGE.read_text("utf-8")
    assert len(NUMBER.findall(prose(text))) > 40
    assert wrong(text, constants(text)) == []


def test_no_number_with_a_unit_hides_elsewhere() -> None:
    plain = re.sub(r"`[^`]*`", "", NUMBER.sub("", prose(PAGE.read_text("utf-8"))))
    assert WITH_UNIT.findall(plain) == ["1 GB"]  # which says what a GB is


def test_what_is_wrong_is_found() -> None:
    names = {"f": lambda x: 2e9 * x}
    assert wrong("**3 GB** (`f(1.5)`), and **2.0 GB**\n(`f(1)`)", names) == []
    assert wrong("| **3 GB** | `f(1)` |", names) == ["f(1) = 2.0 GB, not 3"]
    assert wrong("**2.01 GB** `f(1)`", names) == ["f(1) = 2.0 GB, not 2.01"]
    assert wrong("**2 GB** and **4 GB** `f(2)`", names) == ["2 GB has no expression"]
    assert wrong("**2 MB** `f(1)`", names) == ["f(1) = 2000.0 MB, not 2"]


def test_the_measured_table_has_the_predictions_of_today() -> None:
    """Its measured numbers are a machine's, but what they are compared with is computed."""
    (block,) = re.findall(r"^```text\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for line in block.rstrip().split("\n") if line != mathematics.HEADER]
    assert len(lines) == len(mathematics.claims())
    for line, claim in zip(lines, mathematics.claims().values(), strict=True):
        numbers = re.fullmatch(r"\s*([\d.,]+) \S*\s+([\d.,]+) \S*\s+([\d.]+)", line[85:])
        assert numbers, line
        predicted, measured, ratio = (float(number.replace(",", "")) for number in numbers.groups())
        if claim.predicted is not None:
            scale = mathematics._SCALE[claim.unit]
            again = mathematics.format_line(claim, claim.predicted, measured / scale)
            assert again.rpartition(" ")[0].split() == line.rpartition(" ")[0].split()
        assert ratio == pytest.approx(measured / predicted, abs=0.03)

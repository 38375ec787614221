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


def test_every_number_is_what_its_expression_gives() -> None:
    """To the digits that are written. The page's block of Python defines what expressions use."""
    text = PAGE.read_text("utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    pairs = PAIR.findall(prose)
    numbers = [f"{digits} {unit}" for digits, unit in NUMBER.findall(prose)]
    assert len(numbers) > 40
    assert numbers == [f"{digits} {unit}" for digits, unit, _ in pairs]  # each has its expression
    for digits, unit, expression in pairs:
        value = float(eval(expression, names)) / UNITS[unit]
        decimals = len(digits.partition(".")[2])
        assert f"{value:,.{decimals}f}" == digits, expression
    plain = re.sub(r"`[^`]*`", "", NUMBER.sub("", prose))
    assert WITH_UNIT.findall(plain) == ["1 GB"]  # which says what a GB is: no other is left


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

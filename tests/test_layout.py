"""The layout of the project, as a reader meets it: how much code each program brings in, which way
imports point, and that a file's name says which file is meant."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "runtime", "data_parallel", "pipeline", "tensor_parallel", "training", "planning", "project",
)  # fmt: skip
STRATEGIES = {"data_parallel", "pipeline", "tensor_parallel"}
MAY_IMPORT = {
    "runtime": set[str](),
    "data_parallel": {"runtime"},
    "pipeline": {"runtime"},
    "tensor_parallel": {"runtime"},
    "training": {"runtime", *STRATEGIES},
    "planning": {"pipeline"},
    "project": {"runtime", *STRATEGIES, "training", "planning", "tests"},  # verify.py
}


def imported(path: Path) -> set[Path]:
    """The files of this project that a file imports, also inside its functions."""
    package = path.relative_to(ROOT).parent.parts
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    candidates = (ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in names)
    return {file for file in candidates if file.is_file()}


def lines_of(program: str) -> int:
    """The lines of this project that a program brings in, directly or not."""
    seen: set[Path] = set()
    waiting = {ROOT / program}
    while waiting:
        path = waiting.pop()
        seen.add(path)
        waiting |= imported(path) - seen
    return sum(path.read_text("utf-8").count("\n") for path in seen)


@pytest.mark.parametrize(
    ("program", "most"), [("run_data_parallel", 7300), ("run_pipeline", 9900), ("train", 15800)]
)
def test_a_program_brings_in_no_more_code_than_it_did(program: str, most: int) -> None:
    assert lines_of(f"project/{program}.py") <= most


def test_imports_point_one_way() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {other.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for other in imported(path)
        if (there := other.relative_to(ROOT).parts[0]) != package
        and there not in MAY_IMPORT[package]
    ]
    assert wrong == []


def test_project_has_eleven_files_at_most_and_no_two_files_have_one_name() -> None:
    stems = Counter(path.stem for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert [name for name, n in stems.items() if n > 1 and name != "__init__"] == []
    assert len([*(ROOT / "project").glob("*.py")]) <= 11 + 1  # and __init__.py

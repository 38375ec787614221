"""The layout of the project, as a reader meets it: how much code each program brings in, which way
imports point, that no two files import each other, and that a name says which thing is meant."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "runtime", "data_parallel", "pipeline", "tensor_parallel", "context_parallel", "experts",
    "training", "planning", "project",
)  # fmt: skip
STRATEGIES = {"data_parallel", "pipeline", "tensor_parallel", "context_parallel", "experts"}
MAY_IMPORT = {
    "runtime": set[str](),
    "data_parallel": {"runtime"},
    "pipeline": {"runtime"},
    "tensor_parallel": {"runtime"},
    "context_parallel": {"runtime"},
    "experts": {"runtime"},
    "training": {"runtime", *STRATEGIES},
    "planning": {"pipeline"},
    # plan.py --machine this measures
    "project": {"runtime", *STRATEGIES, "training", "planning", "benchmarks"},
}
ROOMS_MAY_IMPORT = {  # of other rooms of the same package
    "training/launch": set[str](),
    "training/tasks": {"training/launch"},
    "training/layouts": {"training/launch", "training/tasks"},
    "pipeline/schedules": set[str](),
}
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def said(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    """What a file says."""
    return ast.parse(path.read_text("utf-8"))


@cache
def imported(path: Path) -> set[Path]:
    """The files of this project that a file imports, also inside its functions."""
    package = path.relative_to(ROOT).parent.parts
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    candidates = (ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in names)
    return {file for file in candidates if file.is_file()}


def brought_in(path: Path) -> set[Path]:
    """The files that a file imports, directly or not."""
    seen: set[Path] = set()
    waiting = set(imported(path))
    while waiting:
        file = waiting.pop()
        if file in FILES:  # not a test's
            seen.add(file)
            waiting |= imported(file) - seen
    return seen


@cache
def code_lines(path: Path) -> set[int]:
    """The numbers of lines that hold a statement, without docstrings, comments, blank lines and
    imports: a docstring or a comment that helps a reader costs nothing."""
    lines: set[int] = set()
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.stmt) or isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        body = getattr(node, "body", None)
        last = node.end_lineno if body is None else max(node.lineno, body[0].lineno - 1)
        first = min([d.lineno for d in getattr(node, "decorator_list", [])] + [node.lineno])
        lines.update(range(first, (last or first) + 1))
    text = path.read_text("utf-8").splitlines()
    return {n for n in lines if (line := text[n - 1].strip()) and not line.startswith("#")}


@pytest.mark.parametrize(
    ("program", "code"), [("run_data_parallel", 4900), ("run_pipeline", 6255), ("train", 9370)]
)
def test_a_program_brings_in_hardly_more_code_than_it_did(program: str, code: int) -> None:
    """A reader pays for what a program brings in: a new capability stands in a file that the others
    do not import."""
    path = ROOT / "project" / f"{program}.py"
    assert sum(len(code_lines(file)) for file in {path, *brought_in(path)}) <= 1.03 * code


def test_the_house_grows_hardly_either() -> None:
    """Before you add, look for what can go."""
    assert sum(len(code_lines(path)) for path in FILES) <= 1.03 * 12450 and len(FILES) <= 1.03 * 142


def test_imports_point_one_way() -> None:
    wrong = []
    for path in FILES:
        package, room = said(path).split("/")[0], said(path.parent)
        for other in imported(path):
            there, its_room = said(other).split("/")[0], said(other.parent)
            if there != package and there not in MAY_IMPORT[package]:
                wrong.append(f"{said(path)} imports {said(other)}")
            allowed = ROOMS_MAY_IMPORT.get(room)
            if allowed is None or there != package or its_room == package:
                continue
            if its_room not in {room, *allowed}:
                wrong.append(f"{said(path)} imports {said(other)}")
    assert wrong == []


def test_the_interface_of_a_layout_brings_in_no_layout_and_no_task() -> None:
    """When it runs: what it imports for its types alone is indented."""
    body = tree(ROOT / "training/layouts/layout.py").body
    imports = [ast.unparse(node) for node in body if hasattr(node, "names")]
    assert imports and not [
        said for said in imports if "tasks" in said or "layouts" in said or "from ." in said
    ]


def test_no_two_files_import_each_other() -> None:
    assert [said(path) for path in FILES if path in brought_in(path)] == []


def test_an_installed_copy_has_every_package_and_every_file() -> None:
    """And mypy checks them all. (tomllib is younger than the oldest Python.)"""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    tables = re.findall(r"^(packages|files) = (\[.*?\])", text, re.MULTILINE | re.DOTALL)
    listed = {name: set(ast.literal_eval(value)) for name, value in tables}
    assert listed["files"] >= {*PACKAGES, "benchmarks", "tests"}
    rooms = {
        path.parent for top in (*PACKAGES, "benchmarks") for path in (ROOT / top).rglob("*.py")
    }
    assert listed["packages"] == {".".join(room.relative_to(ROOT).parts) for room in rooms}
    data = re.findall(r"^\"?([\w.]+)\"? = \[\"([^\"]*)\"\]", text.split("package-data]")[1], re.M)
    installed = {path for room, glob in data for path in ROOT.joinpath(*room.split(".")).glob(glob)}
    paths = (path for top in (*PACKAGES, "benchmarks") for path in (ROOT / top).rglob("*.*"))
    made = {"__pycache__", "results"}  # here, and not of the project
    others = {p for p in paths if p.suffix != ".py" and p.is_file() and not made & {*p.parts}}
    assert others == installed


def test_a_name_means_one_thing() -> None:
    """Files, and what their top level defines: classes, public functions, constants and names of
    types, those in a branch too. `T`, which may be any type, means the same in every file."""
    defined: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        if path.stem not in ("__init__", "gpt2"):  # GPT-2 whole, and cut: the same idea
            defined[f"{path.stem}.py"].add(said(path))
        for node in tree(path).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name[0] != "_":
                defined[node.name].add(said(path))
            inner = [] if hasattr(node, "name") else ast.walk(node)
            names = [n for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            for name in (n.id for n in names if n.id[0].isupper()):  # not what a loop counts
                defined[name].add(said(path))
    del defined["main"], defined["T"]  # what every program has
    assert {name for name, where in defined.items() if len(where) > 1} == set()


def test_project_has_fifteen_files_at_most() -> None:
    assert len([*(ROOT / "project").glob("*.py")]) <= 15 + 1  # and __init__.py

"""Commands in README.md and on the pages of the courses exist, and have valid options. The files
and names that these pages give exist. (The commands of the courses are run, too: see
tests/project/test_courses.py.)"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from project import generate, plan, plot, report
from project.run_data_parallel import parse_data_parallel
from tests.project.programs import PROGRAMS, ROOT
from tests.which import see_gpus

pytestmark = pytest.mark.usefixtures("elsewhere")  # programs make their workdir there

PARSERS: dict[str, Callable[[list[str]], object]] = {
    **{f"project/{name}.py": parse for name, (_, parse) in PROGRAMS.items()},
    "project/plot.py": plot.parse_plot,
    "project/generate.py": generate.parse_generate,
    "project/report.py": report.parse_report,
    "project/plan.py": plan.parse_plan,
}
MARKED = {
    name
    for path in (ROOT / "tests").rglob("*.py")
    for name in re.findall(r"pytest\.mark\.(a[45]_\w+)", path.read_text("utf-8"))
}
BEGINNINGS = (
    "python project/", "torchrun ", "python -m benchmarks", "python -m pytest", "make"
)  # fmt: skip


def commands(text: str) -> list[str]:
    """The lines of the fenced `sh` blocks that this test understands; continued lines joined."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").split("\n")
    return [" ".join(line.split()) for line in lines if line.strip().startswith(BEGINNINGS)]


def check(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises where the command names what is not there, or options that are refused."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        assert [word for word in words[1:] if "=" not in word and word not in targets] == []
        return
    if words[1] == "-m":
        assert find_spec(words[2]), words[2]
        if words[2] == "pytest":
            assert words[words.index("-k") + 1] in MARKED
        if words[2] == "benchmarks":
            monkeypatch.setattr("sys.argv", ["benchmarks", *words[3:], "--list"])
            benchmarks.main()
        return
    program = next(word for word in words if word.endswith(".py"))
    assert (ROOT / program).is_file(), program
    see_gpus(8 if "cuda" in command else 0, monkeypatch)
    for folder in re.findall(r"\bworkdir\w*", command):
        Path(folder).mkdir(exist_ok=True)  # as a command before it has left it
    monkeypatch.setattr(generate, "folder", str)  # nothing was trained here
    PARSERS[program](words[words.index(program) + 1 :])


def test_the_map_has_every_file() -> None:
    section = (ROOT / "docs" / "map.md").read_text("utf-8")
    named: list[str] = []
    package = folder = ""
    for line in section.split("```")[1].splitlines():
        if start := re.match(r"(\w+)/", line):
            package = folder = start[1]
        elif room := re.match(r"  (\w+)/", line):
            folder = f"{package}/{room[1]}"
        named += [f"{folder}/{name}" for name in re.findall(r"\w+\.py", line)]
    there = {
        str(path.relative_to(ROOT))
        for folder in {name.partition("/")[0] for name in named}
        for path in (ROOT / folder).rglob("*.py")
        if path.stem != "__init__"
    }
    assert sorted(named) == sorted(there)


def test_the_files_to_read_are_as_long_as_the_page_says() -> None:
    """Within a tenth: a reader plans his hours by it."""
    rows = re.findall(
        r"^\| (`\S+/.*?) \| ([\d, ]+) \|", (ROOT / "docs/reading.md").read_text("utf-8"), re.M
    )
    said = [
        (path, int(lines))
        for paths, numbers in rows
        for path, lines in zip(QUOTED.findall(paths), numbers.split(", "), strict=True)
    ]
    assert len(said) > 25
    counted = {path: len((ROOT / path).read_text("utf-8").splitlines()) for path, _ in said}
    assert [row for row in said if abs(row[1] - counted[row[0]]) > 0.1 * counted[row[0]]] == []


def test_make_train_is_the_same_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The README shows what it prints, and its rate is that of a small model."""
    recipe = re.search(r"^RECIPE := (.*)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert recipe is not None
    see_gpus(8, monkeypatch)
    assert parse_data_parallel(recipe[1].split()).model == "gpt2-mini"


def test_make_clean_leaves_what_people_have_made(tmp_path: Path) -> None:
    """Also the folders in which the pages' own commands keep a trained model."""
    text = (ROOT / "docs" / "use.md").read_text("utf-8")
    theirs = {*re.findall(r"--workdir (\w+)", text), "my_runs", "workdir"}  # the default of runs
    assert "workdir_saved" in theirs
    of_targets = {*re.findall(r"workdir_\w+", (ROOT / "Makefile").read_text("utf-8"))}
    for name in theirs | of_targets | {"workdir_report"}:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    subprocess.run(["make", "-f", ROOT / "Makefile", "clean"], check=True, capture_output=True)
    assert {path.name for path in tmp_path.iterdir()} == theirs


QUOTED = re.compile(r"`([^`]+)`")
NAMES_ALONE = re.compile(r"(its head, )?`[A-Za-z_][\w.]*`(, `[A-Za-z_][\w.]*`)*")
FILE = re.compile(r"[\w*.]+(/[\w*.]+)+\.(py|png)")


def missing(text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the files that a page quotes and that are not there, and the names in a table's cell
    that no file in that cell defines or imports. It checks the commands."""
    found = []
    rows = re.findall(r"^\|.*", text, re.MULTILINE)
    paragraphs = re.sub(r"^\|.*", "", text, flags=re.MULTILINE).split("\n\n")
    for cell in [cell for row in rows for cell in row.split("|")] + paragraphs:
        code = ""
        quotes = [" ".join(quote.split()) for quote in QUOTED.findall(cell)]
        for path, *more in (quote.split() for quote in quotes if FILE.fullmatch(quote.split()[0])):
            files = list(ROOT.glob(path))
            code += "".join(file.read_text("utf-8") for file in files if file.suffix == ".py")
            found += [path] * (not files) + [word for word in more if f'"{word}"' not in code]
        for quote in quotes:
            if quote.startswith(("python ", *BEGINNINGS)):
                check(quote, monkeypatch)
            elif code and cell not in paragraphs and quote.isidentifier():
                known = re.search(rf"^ *(def|class|from .* import.*) {quote}\b", code, re.MULTILINE)
                found += [quote] * (known is None)
    return found + [name for row in rows for name in missing_names(row)]


def missing_names(row: str) -> list[str]:
    """The names that a table's row says of its files, in a cell of names alone behind them, and
    that none of the files defines."""
    files = [ROOT / quote for quote in QUOTED.findall(row) if quote.endswith(".py")]
    code = "".join(file.read_text("utf-8") for file in files if file.is_file())
    named = [
        cell for cell in row.partition(".py`")[2].split("|") if NAMES_ALONE.fullmatch(cell.strip())
    ]
    names = (
        {name for cell in named for name in re.findall(r"\w+", " ".join(QUOTED.findall(cell)))}
        if code
        else set()
    )
    begins = r"^( *(def|class|from .* import.*) )?"
    return [name for name in sorted(names) if not re.search(rf"{begins}{name}\b", code, re.M)]


NAMES = "architecture reading use debugging cmu_11868 brown_cs1390"
PAGES = [ROOT / "README.md", *(ROOT / f"docs/{name}.md" for name in NAMES.split())]


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_every_name_picture_and_command(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text("utf-8")
    found = commands(text)
    assert found or page.stem in ("reading", "architecture")
    for command in found:
        check(command, monkeypatch)
    words = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    assert len(QUOTED.findall(words)) >= 20
    assert missing(words, monkeypatch) == []


EVERY_PAGE = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def anchors(page: Path) -> set[str]:
    """What a link can name of a page: its headings, as web pages spell them."""
    headings = re.findall(r"^#+ (.*)", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", EVERY_PAGE, ids=[page.stem for page in EVERY_PAGE])
def test_every_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    words = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    wrong = []
    for path, heading in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", words):
        target = (page.parent / path) if path else page
        if not target.exists() or (heading and heading not in anchors(target)):
            wrong.append(f"{path}#{heading}")
    assert wrong == []


def test_the_site_has_every_page_chapter_and_package() -> None:
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    pages = {str(page.relative_to(ROOT)) for page in EVERY_PAGE}
    chapters = {f"tutorial/{path.stem}.md" for path in (ROOT / "tutorial").glob("[0-9]*.py")}
    packages = re.search(r"^PACKAGES = \((.*?)\)", (ROOT / "docs/site.py").read_text(), re.M | re.S)
    assert packages is not None
    code = {f"code/{name}.md" for name in re.findall(r'"(\w+)"', packages[1])}
    assert len(code) == 8 and listed == {*pages, *chapters, *code, "tutorial/index.md"}

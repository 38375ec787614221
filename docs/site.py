"""Builds the site: docs/, the tutorial, the docstrings of the packages, and the page of --explore.

    python docs/site.py            lays pages out in build/pages and makes the site in build/site

Pages keep their places relative to each other, so that links work in the repository and on the
site. A link that leads nowhere fails the build.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"
COPIED = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "docs", "submit_figures",
)  # fmt: skip
PACKAGES = (
    "data_parallel", "pipeline", "tensor_parallel", "context_parallel", "experts", "runtime",
    "training", "planning",
)  # fmt: skip


def title_of(source: str) -> str:
    """The first sentence of a docstring."""
    said = ast.get_docstring(ast.parse(source)) or ""
    return said.partition("\n")[0].rstrip(".")


def tutorial() -> None:
    """A page for each chapter: its code as it stands."""
    folder, pages = PAGES / "tutorial", []
    folder.mkdir()
    for chapter in sorted((ROOT / "tutorial").glob("[0-9]*.py")):
        source = chapter.read_text("utf-8")
        text = f"# {title_of(source)}\n\n```python\n{source}```\n"
        (folder / f"{chapter.stem}.md").write_text(text, "utf-8")
        pages.append(f"tutorial/{chapter.stem}.md")
    lines = [f"- [{Path(page).stem}]({Path(page).name})" for page in pages]
    (folder / "index.md").write_text("\n".join(["# Tutorial", "", *lines, ""]), "utf-8")


def code() -> None:
    """A page for each package: the docstrings of its modules, public classes and functions."""
    (PAGES / "code").mkdir()
    for package in PACKAGES:
        files = sorted((ROOT / package).rglob("*.py"))
        modules = [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files]
        entries = [f"::: {m}" for m in modules if not m.endswith("__init__")]
        text = "\n\n".join([f"# {package}", *entries, ""])
        (PAGES / "code" / f"{package}.md").write_text(text, "utf-8")


def main() -> int:
    """The exit status of mkdocs."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, PAGES / name)
    for page in [PAGES / "README.md", PAGES / "docs" / "reading.md"]:  # there a folder is no page
        text = page.read_text("utf-8").replace("tutorial)", "tutorial/index.md)")
        page.write_text(text, "utf-8")
    explore = [sys.executable, "project/report.py", "--explore", "--output", PAGES / "explore.html"]
    subprocess.run(explore, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    tutorial()
    code()
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    return subprocess.run(build, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())

"""Fixtures of these tests: texts, and what one process has learned."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.project.programs import PAIRS, PLAIN, TEXT, finish
from tests.ranks import Ranks


def write_pairs(folder: Path) -> None:
    """Parallel lines: 40, 9 and 7 pairs, and an empty one in train."""
    folder.mkdir()
    for split, n in (("train", 40), ("validation", 9), ("test", 7)):
        de = [f"Wir sehen {i} Häuser und {split}." for i in range(n)]
        en = [f"We see {i} houses and {split}." for i in range(n)]
        if split == "train":
            de, en = ["", *de], ["nothing", *en]
        (folder / f"{split}.de").write_text("\n".join(de), encoding="utf-8")
        (folder / f"{split}.en").write_text("\n".join(en), encoding="utf-8")


Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Calls what must end the program with status 2; gives the one line that it says."""

    def said(call: Callable[..., object], *args: object) -> str:
        with pytest.raises(SystemExit) as end:
            call(*args)
        line = capsys.readouterr().err
        assert (end.value.code, line.count("\n")) == (2, 1)
        return line

    return said


@dataclass(frozen=True)
class Learned:
    """What one process has learned: with which options, and its workdir."""

    line: str
    workdir: Path


Learn = Callable[[str], Learned]
WorldOf = Callable[[int], Ranks | None]  # tests/conftest.py


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learn:
    """By one process, the whole batch at once: pairs, with or without dropout, with experts, or
    plain text. Workers share it: who asks first, trains."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "learned"
    folder.mkdir(exist_ok=True)
    text = folder / "text.txt"
    lines = {
        "pairs": PAIRS + "--dropout 0",
        "dropout": PAIRS + "--dropout 0.1 --model_max_length 23",  # ranks do not divide it
        "text": f"--dataset {text} {PLAIN} --dropout 0",
        "experts": PAIRS + "--dropout 0.1 --experts 6 --shared_experts 1 --balance_by bias ",
    }  # fmt: skip

    @cache
    def learn(what: str) -> Learned:
        workdir = folder / what
        where = f"--num_microbatches 1 --workdir {workdir}"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not text.exists():
                text.write_text(TEXT, encoding="utf-8")
            if not (workdir / "summary.json").exists():
                finish(f"train single {lines[what]} {where}")
        return Learned(lines[what], workdir)

    return learn

"""Schedules that a user writes: files, functions, lists."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.schedules.catalogue import (
    SCHEDULES,
    chunks_of,
    find,
    load,
    refuse_other_sizes,
    validated,
)
from pipeline.schedules.printed import as_text
from pipeline.schedules.schedule import Action, in_order, stage_ranks, validate
from pipeline.schedules.written import label_of, read_schedule, write_schedule
from tests.pipeline.schedules.drawn import drawn

V = """# mine
stages on ranks: 0 1 1 0  # a V
rank 0: F0a . F0b I0b W0b I0a W0a
F0a F0b I0b I0a W0b W0a
"""


def test_what_is_written_reads_back() -> None:
    """Every schedule that has a name, and any that is drawn; and a table as it is printed."""
    for name in SCHEDULES:
        for n, m in ((1, 1), (2, 3), (3, 2), (4, 8)):
            lists = find(name)(n, m)
            assert read_schedule(write_schedule(lists, name), name) == lists
    for seed in range(30):
        for ranks in ([0, 1, 2], [0, 1, 1, 0], [0, 1, 1, 0, 1], [0, 1, 0, 1]):
            lists = drawn(ranks, 3, seed)
            validate(lists, 3)
            assert read_schedule(write_schedule(lists, "x"), "x") == lists
    for name in ("zb", "interleaved"):
        assert read_schedule(as_text(find(name)(3, 4)), "printed") == find(name)(3, 4)
    ranks = stage_ranks(read_schedule(V, "mine"))
    assert (ranks, label_of(V), chunks_of(V)) == ([0, 1, 1, 0], "mine", 2)
    assert label_of("zb") == "zb"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rank 0: F0 B0\nrank 1: F0 X0 B0", "line 2, column 12: X0 is no action; such are F0, B0"),
        ("rank 0: F0 B0\nrank 1: B0 F0", "line 1, column 12: deadlock: the next actions wait for"),
        ("F0 B0 # last\n\nF0", "line 3, column 1: stage 1: B0 is there 0 times, not 1"),
        ("F0 B0 F0", "line 1, column 7: stage 0: F0 is there 2 times, not 1"),
        ("F99999999 B99999999", "line 1, column 1: stage 0: B0 is there 0 times, not 1"),
        ("F1 B1", "line 1, column 1: stage 0: B0 is there 0 times, not 1"),
        ("F0 B0\nrank 2: F0 B0", "line 2, column 1: `rank 1:` comes next, not `rank 2:`"),
        ("ranks: F0 B0", "line 1, column 1: `rank 0:` comes next, not `ranks:`"),
        ("F0 B0 F0b", "line 1, column 1: stage 1: B0 is there 0 times, not 1"),
        ("stages on ranks: 0\nF0 B0 F0b", "line 2, column 7: F0b is no action"),
        ("stages on ranks: 0 0\nF0 B0", "line 2, column 1: rank 0 has no action of stage 1"),
        ("stages on ranks: 0 2\nF0 B0\nF0 B0", "it has lines of 2 ranks, such as `rank 0:"),
        ("stages on ranks: 0 x\nF0 B0\nF0 B0", "and stages on ranks [0, -1]"),
        ("# nothing", "it has lines of 0 ranks, such as `rank 0: F0 B0`"),
        ("F0a F0b B0b B0a\nF0a B0a", "line 2, column 1: rank 1 has no action of stage 3"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^my\.txt") as error:
        read_schedule(text, "my.txt")
    assert said in str(error.value)


def test_a_schedule_comes_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, a function in a file, a text, lists and a function are the same lists; what a run
    keeps is a text. Other numbers than its own are refused, but for a smaller batch."""
    monkeypatch.chdir(tmp_path)
    lists = find("zb")(2, 4)
    Path("my.txt").write_text(write_schedule(lists, "mine"), "utf-8")
    source = "from pipeline.schedules.schedule import zero_bubble as own"
    Path("module.py").write_text(source, "utf-8")
    text = write_schedule(load("my.txt"), "my.txt")
    assert label_of(text) == "my.txt" and load(text) == lists
    for given in ("my.txt", "module.py:own", text, lists, find("zb")):
        assert validated(given, (0, 1), 4) == (lists, in_order(lists))
    assert find(text)(2, 3) == [[a for a in row if a.microbatch < 3] for row in lists]
    validate(find(text)(2, 3), 3)
    has = "schedule my.txt has 2 ranks, 1 stages on each and 4 micro-batches; asked for are "
    for n, m, v, asked in ((3, 4, None, "3, 1 and 4"), (2, 8, 1, "2, 1 and 8"), (2, 4, 2, "2, 2")):
        with pytest.raises(ValueError, match=has + asked):
            refuse_other_sizes(lists, "my.txt", n, m, v)
        with pytest.raises(ValueError, match=has + asked):
            find(text, v)(n, m)
    with pytest.raises(ValueError, match="asked for are 2, 1 and 3: take the numbers of the sch"):
        refuse_other_sizes(lists, "my.txt", 2, 3)
    no_actions: Any = [["F0", "B0"]]
    no_kind: Any = [[Action("F", 0, 0)]]  # type: ignore[arg-type]
    said = r"schedule has ('F0'|Action.*) for an action: give a list of Action\("
    for wrong in (no_actions, lambda *_: no_actions, no_kind, lambda *_: no_kind):
        with pytest.raises(TypeError, match=said):
            validated(wrong, (0,), 1)
    once: Any = lambda n, m: iter(find("zb")(n, m))  # noqa: E731
    assert validated(once, (0, 1), 4) == (lists, in_order(lists))
    other = find("gpipe")(2, 4)
    Path("my.txt").write_text(write_schedule(other, "mine"), "utf-8")
    os.utime("my.txt", ns=(1, 1))  # edited since; a clock may be coarse
    assert validated("my.txt", (0, 1), 4) == (other, in_order(other))
    Path("mark.txt").write_text(text, "utf-8-sig")  # with a byte order mark
    assert load("mark.txt") == lists
    Path("wrong.py").write_text("def nothing(n, m): pass\ndef one(n): pass\n", "utf-8")
    for word, said in (
        ("wrong.py:nothing", r"TypeError.*; wrong.py needs a function nothing of the numbers of"),
        ("wrong.py:one", r"TypeError.*one\(\) takes 1 positional .*needs a function one of the"),
        ("none.txt", "schedule='none.txt': there is no such file; the names are gpipe, 1f1b"),
        ("module.py:none", "KeyError.'none'.; module.py needs a function none of the numbers"),
    ):
        with pytest.raises(ValueError, match=said):
            load(word)

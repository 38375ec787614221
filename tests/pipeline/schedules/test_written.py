"""Schedules of one's own: files, functions, lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.schedules.catalogue import SCHEDULES, chunks_of, find, text_of, validated
from pipeline.schedules.printed import as_text
from pipeline.schedules.schedule import in_order, stage_ranks, validate
from pipeline.schedules.written import label_of, read_schedule, write_schedule
from tests.pipeline.schedules.drawn import drawn

V = """# mine
stages on ranks 0 1 1 0  # a V
rank 0: F0a . F0b I0b W0b I0a W0a
F0a F0b I0b I0a W0b W0a
"""


def test_what_is_written_reads_back() -> None:
    """Every schedule that has a name, and any that is drawn; and a table as it is printed."""
    for name in SCHEDULES:
        for n, m in ((1, 1), (2, 3), (3, 2), (4, 8)):
            lists = find(name)(n, m)
            assert read_schedule(write_schedule(lists, name), name) == (lists, m)
    for seed in range(30):
        for ranks in ([0, 1, 2], [0, 1, 1, 0], [0, 1, 1, 0, 1], [0, 1, 0, 1]):
            lists = drawn(ranks, 3, seed)
            validate(lists, 3)
            assert read_schedule(write_schedule(lists, "x"), "x") == (lists, 3)
    for name in ("zb", "interleaved"):
        assert read_schedule(as_text(find(name)(3, 4)), "printed") == (find(name)(3, 4), 4)
    lists, m = read_schedule(V, "mine")
    assert (stage_ranks(lists), m, label_of(V), chunks_of(V)) == ([0, 1, 1, 0], 1, "mine", 2)
    assert label_of("zb") == "zb"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rank 0: F0 B0\nrank 1: F0 X0 B0", "line 2, column 12: X0 is no action; such are F0, B0"),
        ("rank 0: F0 B0\nrank 1: B0 F0", "line 1, column 12: deadlock: what comes first never can"),
        ("F0 B0 # last\n\nF0", "line 3, column 1: stage 1: B0 is there 0 times, not 1"),
        ("F0 B0 F0", "line 1, column 7: stage 0: F0 is there 2 times, not 1"),
        ("F1 B1", "line 1, column 1: stage 0: B0 is there 0 times, not 1"),
        ("F0 B0\nrank 2: F0 B0", "line 2, column 1: rank 1 comes next, not rank 2"),
        ("F0a B0a F0 B0", "line 1, column 1: F0a is no action"),
        ("stages on ranks 0 2\nF0 B0\nF0 B0", "it has lines of 2 ranks, and stages on ranks"),
        ("# nothing", "it has no actions, such as"),
        ("F0a F0b B0b B0a\nF0a B0a", "line 2, column 1: rank 1 does nothing of stage 3"),
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
    text = text_of("my.txt", 2, None, None)
    assert label_of(text) == "my.txt" and text_of(text, 2, 4, 1) == text
    assert label_of(text_of("module.py:own", 2, 4, None)) == "module.py:own"
    for given in ("my.txt", "module.py:own", text, lists, find("zb")):
        assert validated(given, (0, 1), 4) == (lists, in_order(lists))
    assert find(text)(2, 3) == [[a for a in row if a.microbatch < 3] for row in lists]
    validate(find(text)(2, 3), 3)
    for word, n, m, v, said in (
        ("my.txt", 3, 4, None, "of 2 ranks with 1 stages each and 4 micro-batches, and"),
        (text, 2, 8, None, "and the run has 2 ranks with 1 and 8"), (text, 2, 4, 2, "with 2 and 4"),
        ("none.txt", 2, 4, None, "there is no file none.txt"),
        ("module.py:none", 2, 4, None, "module.py has no function none"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^--schedule ") as error:
            text_of(word, n, m, v)
        assert said in str(error.value)
    with pytest.raises(ValueError, match="and the run has 2 ranks with 1 and 5"):
        find(text)(2, 5)

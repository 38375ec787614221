"""The page to learn with: its lists, formulas and puzzles are Python's, and a real browser shows,
moves and judges them. What breaks a schedule is said in the words of validate()."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.schedules.catalogue import SCHEDULES, V_SHAPED, find
from pipeline.schedules.printed import peak_alive
from pipeline.schedules.schedule import Schedule, ended_with, stage_ranks, validate
from pipeline.schedules.written import read_schedule, write_schedule
from planning.simulate import Simulator, Work, with_times
from project import report
from project.figures.pages import GRID
from tests.browser import Browser, browser
from tests.project.conftest import Refusal
from tests.project.programs import ROOT
from tests.which import in_node

PAGE = ROOT / "project" / "page"
SHIFT, CONTROL = 8, 2
WORDS = {
    "fill": "the order of the lists", "imbalance": "a slower rank",
    "transfer": "messages on their way",
}  # fmt: skip
Moves = list[tuple[int, str, int]]  # a rank, an action of its list, the place that it gets there
# A way to solve each puzzle.
SOLUTIONS: dict[str, Moves] = {
    "Break it": [(0, "B0", 0)],
    "Hold less than GPipe": [
        (2, "B0", 1), (2, "B1", 3), (2, "B2", 5), (1, "B0", 2), (1, "B1", 4), (0, "B0", 3)
    ],
    "Beat 1F1B": [(rank, f"W{i}", 23) for rank in (3, 2, 1) for i in range(rank)],
    "Hide the messages": [(0, "B0", 3), (0, "B1", 5)],
    "Interleave": [
        (rank, *move) for rank in (0, 1) for move in (("F1a", 1), ("F1b", 3), ("B1b", 5))
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explore") / "explore.html"
    report.main(["--explore", "--output", str(path)])
    return path


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests; each opens the page anew."""
    with browser(tmp_path_factory.mktemp("browser"), "project/page/explore.html") as window:
        window.resize(1200, 900)
        yield window


@pytest.fixture
def window(page: Path, opened: Browser) -> Iterator[Browser]:
    opened.open(page)
    yield opened
    assert opened.errors == []


def of_textbook(expression: str, given: Any = None) -> Any:
    """The value of an expression with what page/textbook.js exports, and what is given."""
    names = "decode, textbook, read, write, PUZZLES, FREE"
    script = f"""const {{ {names} }} = require(process.argv[1]);
        const given = JSON.parse(require("fs").readFileSync(0, "utf-8"));
        process.stdout.write(JSON.stringify({expression}));"""
    return in_node(script, PAGE / "textbook.js", given)


def simulated(lists: Schedule, F: float, I: float, W: float, message: float = 0) -> Any:  # noqa: E741
    """The step in Python; a chunk of a rank takes its part of the times."""
    stages = 1 + max(action.stage for row in lists for action in row)
    v = stages // len(lists)
    seconds = with_times(*([x / v] * stages for x in (F, I, W)))
    return Simulator(lists).run(Work(seconds, lambda _: message))


def test_the_lists_on_the_page_are_those_that_run(page: Path) -> None:
    """Each schedule for each number of ranks, micro-batches and chunks."""
    _, _, rest = page.read_text("utf-8").partition('id="catalogue">')
    given = json.loads(rest.partition("</script>")[0])
    found = of_textbook(
        """Object.fromEntries(Object.entries(given.lists).map(([name, chunks]) => [name,
        Object.entries(chunks).flatMap(([v, ranks]) => Object.entries(ranks).flatMap(([n, sizes]) =>
        Object.entries(sizes).map(([m, text]) => [[+v, +n, +m],
        decode(text, given.v_shaped.includes(name))])))]))""",
        given,
    )
    assert list(found) == list(SCHEDULES)
    for name, rows in found.items():
        chunks = GRID["chunks"] if name == "interleaved" else [2 if name in V_SHAPED else 1]
        sizes = [[v, n, m] for v in chunks for n in GRID["ranks"] for m in GRID["microbatches"]]
        assert [size for size, _ in rows] == sizes
        for (v, n, m), lists in rows:
            expected = [
                [[a.kind.value, a.stage, a.microbatch] for a in row] for row in find(name, v)(n, m)
            ]
            assert lists == expected, (name, v, n, m)


def test_a_file_is_the_same_to_python_and_to_the_page() -> None:
    """What one writes, the other reads: a stage per rank, a V, loops."""
    lists = [find(name)(3, 4) for name in ("zb", "zbv", "interleaved")]
    texts = [write_schedule(each, "own") for each in lists]
    given = [[text, stage_ranks(each)] for text, each in zip(texts, lists, strict=True)]
    read = "given.map(([text, ranks]) => ({ ranks, ...read(text) }))"
    for found, each in zip(of_textbook(read, given), lists, strict=True):
        assert found == {"lists": json.loads(json.dumps(each)), "ranks": stage_ranks(each), "m": 4}
    again = 'given.map(([text, ranks]) => write(read(text).lists, ranks, "own"))'
    assert of_textbook(again, given) == texts
    wrong = of_textbook("given.map((each) => read(each).wrong)", ["rank 1: F0 B0", "F0 X0", "F0b"])
    assert wrong[:2] == [
        "line 1: rank 0 comes next, not rank 1",
        "line 1: X0 is no action of rank 0",
    ]


def test_the_textbook_is_right_where_it_says_so() -> None:
    """Its formulas beside the simulator in Python, for all sizes and several times."""
    cases = [
        (name, n, m, v, {"F": F, "I": I, "W": W})
        for name in SCHEDULES
        for v in (GRID["chunks"] if name == "interleaved" else [2 if name in V_SHAPED else 1])
        for n in (2, 3, 4, 7)
        for m in (1, 2, 4, 8, 10, 16)
        for F, I, W in ((1, 1, 1), (2, 1.5, 0.5), (1, 3, 2))  # noqa: E741
    ]
    held_so = set()
    for (name, n, m, v, times), said in zip(
        cases, of_textbook("given.map((each) => textbook(...each))", cases), strict=True
    ):
        if not said["holds"] or not said["when"]:
            continue
        lists = find(name, v)(n, m)
        if said["idle"]:
            assert simulated(lists, **times).bubble == pytest.approx(said["idle"][0]), (
                name,
                n,
                m,
                v,
                times,
            )
        assert max(peak_alive(lists)) / v == pytest.approx(said["held"][0]), (name, n, m, v, times)
        held_so.add(name)
    assert held_so == {*SCHEDULES} - {"dualpipev"}


def named(lists: Schedule) -> list[list[str]]:
    """The actions as the page names them; stages in loops."""
    several = 1 + max(action.stage for row in lists for action in row) > len(lists)
    return [
        [f"{a}{'abcd'[a.stage // len(lists)] if several else ''}" for a in row] for row in lists
    ]


def start_of(puzzle: dict[str, Any]) -> Schedule:
    """The lists with which a puzzle begins."""
    chunks = puzzle["chunks"] if puzzle["schedule"] == "interleaved" else None
    lists = find(puzzle["schedule"], chunks)(puzzle["ranks"], puzzle["m"])
    if puzzle["split"]:
        halves = [[ended_with(a)[1:] or [a] for a in row] for row in lists]
        lists = [[half for both in row for half in both] for row in halves]
    if puzzle.get("alone"):
        lists = [sorted(row, key=lambda action: action.microbatch) for row in lists]
    return lists


def is_solved(puzzle: dict[str, Any], lists: Schedule) -> bool:
    """Whether the lists reach the puzzle's goals, by Python."""
    try:
        validate(lists, puzzle["m"])
    except ValueError as error:
        return str(error).startswith(puzzle.get("breaks", "nothing"))
    if "breaks" in puzzle:
        return False
    step = simulated(lists, *(puzzle[name] for name in ("F", "I", "W", "message")))
    held = max(peak_alive(lists)) / (len(step.simulator.ranks) // len(lists))
    return bool(step.seconds <= puzzle["seconds"] and held <= puzzle.get("held", held))


@pytest.mark.parametrize("name", SOLUTIONS)
def test_a_puzzle_is_solved_by_its_last_move(name: str, page: Path, window: Browser) -> None:
    """And not before, say Python and the page alike. Near moves are made with the keyboard, far
    ones with the mouse."""
    puzzles = {
        each["name"]: each for each in of_textbook("PUZZLES.map((p) => ({ ...FREE, ...p }))")
    }
    assert list(puzzles) == list(SOLUTIONS)
    lists = start_of(puzzles[name])
    window.open(page, f"#start={name.replace(' ', '+')}")
    assert window.text("#solved") == "" and not is_solved(puzzles[name], lists)
    for number, (rank, action, to) in enumerate(SOLUTIONS[name], 1):
        at = named(lists)[rank].index(action)
        button = f'[data-rank="{rank}"] [data-k="{at}"]'
        if abs(to - at) > 6:
            window.drag(button, f'[data-rank="{rank}"] [data-k="{to}"]', 9)
        else:
            window.click(button)
            for _ in range(abs(to - at)):
                window.press("ArrowRight" if to > at else "ArrowLeft", SHIFT)
        lists[rank].insert(to, lists[rank].pop(at))
        shown = window.js(
            "[...document.querySelectorAll('.lane[data-rank]')].map((lane) =>"
            "[...lane.querySelectorAll('[data-k]')].map((each) => each.textContent))"
        )
        assert shown == named(lists)
        solved = number == len(SOLUTIONS[name])
        assert (
            window.text("#solved").startswith("Solved") == solved == is_solved(puzzles[name], lists)
        )


def test_an_action_is_dragged_and_the_page_says_what_that_breaks(window: Browser) -> None:
    window.choose("ranks", 3)
    window.choose("m", GRID["microbatches"].index(4))
    assert (
        "1f1b, 3 ranks, 4 micro-batches: a step takes 18, and ranks are idle 33.3"
        in window.text("#result")
    )
    lists = find("1f1b")(3, 4)
    window.drag('[data-rank="1"] [data-k="3"]', '[data-rank="1"] [data-k="2"]', -9)
    lists[1].insert(2, lists[1].pop(3))  # F2 before B0
    assert simulated(lists, 1, 1, 1).seconds == 18 and peak_alive(lists) == [3, 3, 1]
    assert window.text("#said") == (
        "F2 is now number 3 of 8 on rank 1. The step takes 18, as before; rank 1 now holds at "
        "most 3, not 2."
    )
    # A backward before the forwards that it needs; then an action on another rank.
    window.drag('[data-rank="0"] [data-k="3"]', '[data-rank="0"] [data-k="0"]', -9)
    lists[0].insert(0, lists[0].pop(3))
    with pytest.raises(ValueError, match="deadlock: ") as deadlock:
        validate(lists, 4)
    assert window.text("#broken") == str(deadlock.value)
    assert window.js("document.querySelectorAll('.never').length") == sum(map(len, lists))
    window.press("z", CONTROL)
    assert "It runs again: a step takes" in window.text("#said")
    lists = find("1f1b")(3, 4)
    lists[1].insert(2, lists[1].pop(3))
    window.drag('[data-rank="2"] [data-k="0"]', '[data-rank="0"] [data-k="0"]', -9)
    lists[0].insert(0, lists[2].pop(0))
    with pytest.raises(ValueError, match="each stage, counted from 0, has one rank") as places:
        validate(lists, 4)
    assert window.text("#broken") == str(places.value)


def test_changes_are_made_once_more_reloaded_saved_and_opened(window: Browser, page: Path) -> None:
    """What is saved is Python's file of the lists; opened, it is on the page as it was. A file that
    is none changes nothing."""
    window.open(page, "#schedule=1f1b&ranks=2&m=3")
    shown = "[...document.querySelectorAll('[data-k]')].map((each) => each.ariaLabel)"
    may = "['undo', 'redo'].map((name) => !document.querySelector(`[name=${name}]`).disabled)"
    plain = window.js(shown)
    window.click('[data-rank="0"] [data-k="2"]')
    window.press("ArrowRight", SHIFT)  # F2 after B0
    lists = [list(row) for row in find("1f1b")(2, 3)]
    lists[0].insert(3, lists[0].pop(2))
    changed = window.js(shown)
    assert changed != plain and window.js(may) == [True, False]
    window.press("z", CONTROL)
    assert window.js(shown) == plain and window.js(may) == [False, True]
    window.press("y", CONTROL)
    assert window.js(shown) == changed and window.js(may) == [True, False]
    window.click("[name=undo]")
    window.click("[name=redo]")
    assert window.js(shown) == changed
    window.click("[name=undo]")
    window.click('[data-rank="1"] [data-k="0"]')
    window.press("Delete")  # another change: the first one cannot be made again
    assert window.js(may) == [True, False]
    window.click("[name=undo]")
    window.click('[data-rank="0"] [data-k="2"]')
    window.press("ArrowRight", SHIFT)
    window.open(page, window.js("location.hash"))  # as a reload
    assert window.js(shown) == changed and window.js(may) == [False, False]
    window.js("HTMLAnchorElement.prototype.click = function () { window.link = this }")
    window.click("[name=save]")
    kind, _, text = window.js("decodeURIComponent(link.href)").partition(",")
    assert (kind, window.js("link.download")) == ("data:text/plain", "my_schedule.txt")
    assert read_schedule(text, "my_schedule.txt") == lists
    window.open(page)

    def give(name: str, content: str) -> None:
        window.js(
            f"""{{ const given = new DataTransfer(), input = document.querySelector('[name=open]');
            given.items.add(new File([{json.dumps(content)}], {json.dumps(name)}));
            input.files = given.files;
            input.dispatchEvent(new Event('input', {{ bubbles: true }})) }}"""
        )

    give("my_schedule.txt", text)
    window.until("document.querySelector('#result').innerText.startsWith('1f1b, changed by you')")
    assert window.js(shown) == changed
    for wrong, words in (
        ("F0 X0", "X0 is no action"),
        ("rank 0: B0 F0\nrank 1: F0 B0", "deadlock"),
    ):
        give("other.txt", wrong)
        window.until(f"document.querySelector('#said').innerText.includes('{words}')")
        assert window.text("#said").startswith("This file cannot be opened: ")
        assert window.js(shown) == changed


def test_gaps_are_explained_and_the_schedules_compared(window: Browser, page: Path) -> None:
    """A message of 0.5 and a last rank that takes twice as long."""
    window.open(page, "#schedule=gpipe&ranks=2&m=3&message=0.5&last=2")
    slow = Work(with_times([1, 2], [1, 2], [1, 2]), lambda _: 0.5)
    step = Simulator(find("gpipe")(2, 3)).run(slow)
    said = window.js("[...document.querySelectorAll('#gaps li')].map((each) => each.textContent)")
    expected = []
    for gap in step.gaps:
        what = f"before {gap.before}" if gap.before else "after its last action"
        if gap.waits_for:
            what += f", which needs {gap.waits_for} of stage {gap.waits_for.stage}"
        parts = [f"{part:g} because of {WORDS[cause]}" for cause, part in gap.causes.items()]
        about = f"rank {gap.rank} is idle from {gap.start:g} to {gap.end:g}"
        expected.append(f"{about}, {what}: {', '.join(parts)}")
    assert said == expected
    assert {cause for gap in step.gaps for cause in gap.causes} == {*WORDS}
    rows = window.js(
        "[...document.querySelectorAll('#all tbody tr')].map((row) => row.innerText.split('\\t'))"
    )
    assert [row[0] for row in rows] == list(SCHEDULES)
    zb = Simulator(find("zb")(2, 3)).run(slow)
    held = max(peak_alive(find("zb")(2, 3)))
    assert rows[2][1:] == [f"{zb.seconds:g}", f"{100 * zb.bubble:.1f}\u00a0%", f"{held:g}"]
    window.click("#all tbody tr:nth-child(3) a")
    window.until("document.querySelector('#result').innerText.startsWith('zb')")
    assert window.text("#result").startswith(
        f"zb, 2 ranks, 3 micro-batches: a step takes {zb.seconds:g}"
    )
    assert "last=2" in window.js("location.hash") and "schedule=zb" in window.js("location.hash")
    assert "(n-1)(F+I-W)" not in window.text(
        "#textbook"
    ) and "(n-1)/(3m+n-1) = 10.0" in window.text("#textbook")
    assert window.text("#when").endswith("Here that is not so.")


def test_a_keyboard_reaches_everything(window: Browser) -> None:
    """One stop of the tabulator for all actions; arrows walk, and with shift they move."""
    window.js("document.querySelector('#lanes').scrollIntoView()")
    window.js("document.querySelector('[name=split]').focus()")
    window.press("Tab")
    focused = (
        "[document.activeElement.textContent, document.activeElement.parentElement.dataset.rank]"
    )
    assert window.js(focused) == ["F0", "0"]
    window.press("ArrowDown")
    window.press("ArrowRight")
    assert window.js(focused) == ["F1", "1"]
    window.press("ArrowRight", SHIFT)
    assert window.js(focused) == ["F1", "1"] and window.text("#said").startswith(
        "F1 is now number 3 of 16"
    )
    window.press("Tab")
    assert window.js("document.activeElement.name") == "earlier"
    window.click("[name=earlier]")
    assert window.text("#said").startswith("F1 is now number 2 of 16 on rank 1.")


def test_it_fits_a_phone_and_a_finger(window: Browser, page: Path) -> None:
    """In the dark: nothing is wider than the window, and a tapped action can be dragged."""
    window.resize(360, 740, mobile=True, dark=True)
    try:
        window.open(page, "#ranks=2&m=2")
        assert window.js("document.documentElement.scrollWidth") == 360
        assert window.js("getComputedStyle(document.body).backgroundColor") == "rgb(21, 25, 30)"
        window.touch(window.show('[data-rank="0"] [data-k="1"]'))
        goal = window.middle('[data-rank="0"] [data-k="3"]')
        x, y = point = window.middle('[data-rank="0"] [data-k="1"]')
        window.touch(point, (x + 10, y), (x + 30, y), (goal[0] + 2, y))
        assert window.text("#said").startswith("F1 is now number 4 of 4 on rank 0.")
    finally:
        window.resize(1200, 900)


def test_it_is_whole_and_needs_no_run(page: Path, refusal: Refusal) -> None:
    text = page.read_text("utf-8")
    assert len(text) < 200_000 and "http" not in text and "{{" not in text.partition("<script")[0]
    said = refusal(report.main, [])
    assert "RUN is missing; `report.py workdir` or `report.py --explore` works" in said
    for words in (["workdir"], ["--machine", "t4"], ["--template", "x.html"]):
        said = f"--explore needs no {words[0].replace('workdir', 'RUN')}; "
        assert said in refusal(report.main, ["--explore", *words])


def test_what_was_removed_whole_is_missing(window: Browser, page: Path) -> None:
    """All actions of a stage, and then all of the page. To take back the last one works."""
    window.open(page, "#start=Hide+the+messages")

    def empty(rank: int) -> None:
        window.click(f'[data-rank="{rank}"] [data-k="0"]')
        for _ in range(8):
            window.press("Delete")
        assert window.js("document.querySelector('#solved').textContent") == ""

    empty(1)
    assert window.text("#broken") == "stage 1: F0 is there 0 times, not 1"
    window.click("[name=restart]")
    empty(0)
    empty(1)
    assert window.text("#broken") == "stage 0: F0 is there 0 times, not 1"
    focused = "document.activeElement.ariaLabel ?? document.activeElement.name"
    window.press("z", CONTROL)
    assert window.js(focused).startswith("B3, stage 1, ")
    window.press("Delete")
    window.click("[name=undo]")
    window.press("Tab", SHIFT)  # from the buttons
    assert window.js(focused).startswith("B3, stage 1, ")


def test_lists_are_changed_only_while_they_differ(window: Browser) -> None:
    """From those of the schedule: by halves, by a move, and not after the move back."""
    same, others = "Here that is so.", "Here the lists are different."
    window.choose("split", True)
    assert window.text("#when").endswith(others) and "split=true" in window.js("location.hash")
    window.choose("schedule", "zb")  # has no whole backward
    assert window.text("#when").endswith(same) and window.js("location.hash") == "#schedule=zb"
    window.click('[data-rank="1"] [data-k="1"]')
    window.press("ArrowRight", SHIFT)
    assert window.text("#result").startswith("zb, changed by you, ")
    assert window.text("#when").endswith(others)
    window.press("ArrowLeft", SHIFT)
    assert window.text("#result").startswith("zb, 4 ranks, ")
    assert window.text("#when").endswith(same)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("#F=0&I=-3&W=9&message=-1&last=7", "#F=0.5&I=0.5&W=4&last=2"),
        ("#ranks=99&m=11&chunks=0", "#ranks=8&m=10"),
        ("#ranks=-1&m=0&F=x", "#ranks=2&m=1"),
        ("#start=foo&ranks=3", "#ranks=3"),
    ],
)
def test_values_of_the_url_are_those_of_the_controls(
    given: str, kept: str, window: Browser, page: Path
) -> None:
    """One that no control can have becomes one near it, or the usual one."""
    window.open(page, given)
    assert window.js("location.hash") == kept
    assert "NaN" not in window.text("body")


def test_every_label_can_be_read(window: Browser, page: Path) -> None:
    """Also of the most and the shortest actions."""
    window.open(page, "#schedule=interleaved&chunks=4&ranks=8&m=16&last=2")
    buttons = "[...document.querySelectorAll('[data-k]')]"
    assert window.js(f"{buttons}.length") == 8 * 4 * 16 * 2
    assert window.js(f"{buttons}.filter((b) => b.scrollWidth > b.clientWidth).length") == 0

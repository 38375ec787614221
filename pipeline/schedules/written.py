"""A schedule as a file that a person writes, draws on the page of `report.py --explore`, or has
found (`plan.py schedule`).

    # Two ranks, two chunks each, in a V.
    stages on ranks 0 1 1 0
    rank 0: F0a F0b I0b W0b I0a W0a
    rank 1: F0a F0b I0b I0a W0b W0a

A line for each rank, with its actions as they are printed: F forward, B backward, or its halves I
and W; the micro-batch; and of a rank with several stages a letter, a for its first. `stages on
ranks` says which rank has stage 0, 1, ...; without it the stages go round: 0 1 0 1. What begins a
line, `rank 0:` or `stage 0:`, may be left out, and a dot, an idle clock, is passed over, so a
printed table can be read as well. # begins a comment; that of a first line is the schedule's name.

The numbers of ranks, stages and micro-batches follow from the file.
"""

from __future__ import annotations

import re
from functools import lru_cache

from .printed import name_of
from .schedule import Action, Kind, Schedule, ScheduleError, stage_ranks, validate

_ACTION = re.compile(r"([FBIW])(\d+)([a-z]?)")
_LABEL = re.compile(r"\s*(?:rank|stage)\s+(\d+)\s*:")
_RANKS = re.compile(r"\s*stages on ranks((?:\s+\d+)+)\s*")


def write_schedule(schedule: Schedule, name: str) -> str:
    """The text of a file. What it reads back is equal."""
    ranks = stage_ranks(schedule)
    lines = [f"# {name}"]
    if len(ranks) > len(schedule):
        lines.append(f"stages on ranks {' '.join(map(str, ranks))}")
    for r, actions in enumerate(schedule):
        lines.append(f"rank {r}: {' '.join(name_of(action, ranks) for action in actions)}")
    return "\n".join(lines) + "\n"


def label_of(schedule: str) -> str:
    """The name of a schedule, or what the first line of its text calls it."""
    first, newline, _ = schedule.partition("\n")
    comment = first.removeprefix("#").strip() if first.startswith("#") else ""
    return (comment or "a schedule of your own") if newline else schedule


@lru_cache(maxsize=64)  # all callers get the same lists, and only read them
def read_schedule(text: str, source: str) -> tuple[Schedule, int]:
    """The validated lists of a file's text, and how many micro-batches they have. `source`: what
    messages call it. Raises ValueError, with line and column."""

    def wrong(line: int, column: int, sentence: str) -> ValueError:
        return ValueError(f"{source}, line {line}, column {column}: {sentence}")

    rows: list[tuple[int, list[re.Match[str]]]] = []  # of each rank: the line, its words
    ranks: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0]
        if found := _RANKS.fullmatch(line):
            ranks = [int(word) for word in found[1].split()]
            continue
        label = _LABEL.match(line)
        if label and int(label[1]) != len(rows):
            raise wrong(number, 1, f"rank {len(rows)} comes next, not rank {label[1]}")
        words = [*re.compile(r"[^\s.]+").finditer(line, label.end() if label else 0)]
        if label or words:
            rows.append((number, words))
    n, letters = len(rows), {word[0][-1] for _, words in rows for word in words}
    chunks = max((ord(each) - ord("a") + 1 for each in letters if each.isalpha()), default=1)
    ranks = ranks or [*range(n)] * max(1, chunks)
    if [*dict.fromkeys(ranks)] != [*range(n)]:
        raise ValueError(
            f"{source}: it has lines of {n} ranks, and stages on ranks {ranks}; ranks are numbered "
            "in the order of their first stages"
        )
    schedule, places = list[list[Action]](), dict[Action, tuple[int, int]]()
    for r, (number, words) in enumerate(rows):
        own = [s for s, rank in enumerate(ranks) if rank == r]
        schedule.append([])
        for word in words:
            found = _ACTION.fullmatch(word[0])
            chunk = ord(found[3]) - ord("a") if found and found[3] else 0
            if not found or chunk >= len(own) or (len(own) > 1) != bool(found[3]):
                usual = (
                    "F0a: rank's stages are a, b, ..." if len(own) > 1 else "F0, B0, or I0 and W0"
                )
                raise wrong(number, word.start() + 1, f"{word[0]} is no action; such are {usual}")
            action = Action(Kind(found[1]), own[chunk], int(found[2]))
            places[action] = number, word.start() + 1
            schedule[-1].append(action)
    listed = {action.stage for action in places}
    for s, r in enumerate(ranks):
        if places and s not in listed:
            raise wrong(rows[r][0], 1, f"rank {r} does nothing of stage {s}")
    if not places:
        raise ValueError(f"{source}: it has no actions, such as `rank 0: F0 B0`")
    m = 1 + max(action.microbatch for action in places)
    try:
        validate(schedule, m)
    except ScheduleError as error:
        line_of_rank = rows[ranks[error.action.stage]][0], 1  # of what is missing
        raise wrong(*places.get(error.action, line_of_rank), str(error)) from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    return schedule, m

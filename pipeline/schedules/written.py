"""A schedule as a file that a person writes, draws on the page of `report.py --explore`, or has
found (`plan.py schedule`).

    # Two ranks, two chunks each, in a V.
    stages on ranks: 0 1 1 0
    rank 0: F0a F0b I0b W0b I0a W0a
    rank 1: F0a F0b I0b I0a W0b W0a

A line for each rank lists its actions as they are printed: F forward, B backward, or its halves I
and W; then the micro-batch; then a letter for the stage, if a rank has several: a for its first.
`stages on ranks` says which rank has stage 0, 1, ...; without it the stages go round: 0 1 0 1. The
label before the colon may be left out. A dot is an idle clock and is passed over, so that a printed
table can be read, too. # begins a comment.

The numbers of ranks, stages and micro-batches follow from the file.
"""

from __future__ import annotations

import re
from functools import lru_cache
from string import ascii_lowercase as letters

from .printed import name_of
from .schedule import Action, Kind, Schedule, ScheduleError, stage_ranks, validate

_ACTION = re.compile(r"([FBIW])(\d+)([a-z]?)")


def write_schedule(schedule: Schedule, name: str) -> str:
    """The text of a file. What it reads back is equal."""
    ranks = stage_ranks(schedule)
    lines = [f"# {name}"]
    if len(ranks) > len(schedule):
        lines.append(f"stages on ranks: {' '.join(map(str, ranks))}")
    for r, actions in enumerate(schedule):
        lines.append(f"rank {r}: {' '.join(name_of(action, ranks) for action in actions)}")
    return "\n".join(lines) + "\n"


def label_of(schedule: str) -> str:
    """A name as it is; of a text the first line, which `write_schedule` makes its name."""
    return schedule.partition("\n")[0].removeprefix("# ")


def count_microbatches(schedule: Schedule) -> int:
    """How many the lists have, counted from 0."""
    return 1 + max(action.microbatch for actions in schedule for action in actions)


@lru_cache(maxsize=64)  # all callers get the same lists, and only read them
def read_schedule(text: str, source: str) -> Schedule:
    """The validated lists of a file's text. `source`: what messages call it.

    Raises ValueError, with line and column.
    """

    def wrong(place: tuple[int, int], sentence: str) -> ValueError:
        return ValueError(f"{source}, line {place[0]}, column {place[1]}: {sentence}")

    rows: list[tuple[int, list[re.Match[str]]]] = []  # of each rank: the line, its words
    ranks: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0]
        label, colon, _ = line.rpartition(":")
        words = [*re.compile(r"[^\s.]+").finditer(line, len(label + colon))]
        if label.split() == ["stages", "on", "ranks"]:
            ranks = [int(word[0]) if word[0].isdecimal() else -1 for word in words]
        elif label.split() not in ([], ["rank", f"{len(rows)}"], ["stage", f"{len(rows)}"]):
            raise wrong((number, 1), f"`rank {len(rows)}:` comes next, not `{label.strip()}:`")
        elif words or colon:
            rows.append((number, words))
    chunks = max((letters.find(word[0][-1]) for _, words in rows for word in words), default=0) + 1
    ranks = ranks or [*range(len(rows))] * max(1, chunks)
    if not rows or [*dict.fromkeys(ranks)] != [*range(len(rows))]:
        raise ValueError(
            f"{source}: it has lines of {len(rows)} ranks, such as `rank 0: F0 B0`, and stages on "
            f"ranks {ranks}; ranks are numbered in the order of their first stages"
        )
    places = dict[Action, tuple[int, int]]()
    schedule: Schedule = [[] for _ in rows]
    for r, (number, words) in enumerate(rows):
        stages = dict(zip(letters, (s for s, rank in enumerate(ranks) if rank == r), strict=False))
        for word in words:
            place = number, word.start() + 1
            found = _ACTION.fullmatch(word[0])
            if not found or (found[3] or "a") not in stages:
                known = f"F0, B0, or I0 and W0; stages of a rank are {', '.join(stages)}"
                raise wrong(place, f"{word[0]} is no action; such are {known}")
            action = Action(Kind(found[1]), stages[found[3] or "a"], int(found[2]))
            places[action] = place
            schedule[r].append(action)
    for s in set(range(len(ranks))) - {action.stage for action in places}:
        raise wrong((rows[ranks[s]][0], 1), f"rank {ranks[s]} has no action of stage {s}")
    try:
        # A mistyped number would make a list of all micro-batches below it.
        validate(schedule, min(count_microbatches(schedule), 1 + len(places)))
    except ScheduleError as error:
        missing = rows[ranks[error.action.stage]][0], 1
        raise wrong(places.get(error.action, missing), str(error)) from None
    return schedule

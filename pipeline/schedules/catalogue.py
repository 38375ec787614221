"""All schedules by name, and what a run needs: the lists of actions and the ranks of the stages.

    gpipe 1f1b zb sequential   one stage per rank                        schedule.py
    interleaved                v stages per rank, in loops: --chunks v   chunks.py
    zbv vhalf vmin dualpipev   two stages per rank, in a V

A name means what the paper of that name says: backwards are whole in `gpipe`, `1f1b` and
`interleaved`, and in two halves in the others. `sequential` is a baseline in which no two stages
ever work at once. Threads and processes run these lists, which are validated, and drawn beside what
was measured.

Whoever takes a schedule takes, in place of a name: a file that somebody wrote (written.py), a
function as `module.py:function` or itself, of the numbers of ranks and micro-batches, or lists. All
become lists here, and are validated before they run. A run keeps the text of a schedule that is not
one of these, so that its folder and its checkpoints have it.
"""

from __future__ import annotations

import runpy
from functools import lru_cache, partial
from pathlib import Path

from .chunks import dual_pipe_v, interleaved_1f1b, v_half, v_min, zb_v
from .schedule import (
    Action,
    BuildSchedule,
    Schedule,
    gpipe,
    in_order,
    one_f_one_b,
    sequential,
    stage_ranks,
    validate,
    zero_bubble,
)
from .written import label_of, read_schedule, write_schedule

AnySchedule = str | BuildSchedule | Schedule

SCHEDULES: dict[str, BuildSchedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb": zero_bubble,
    "sequential": sequential,
    "interleaved": interleaved_1f1b,
    "zbv": zb_v,
    "vhalf": v_half,
    "vmin": v_min,
    "dualpipev": dual_pipe_v,
}
V_SHAPED = ("zbv", "vhalf", "vmin", "dualpipev")
ONE_EACH = tuple(name for name in SCHEDULES if name not in ("interleaved", *V_SHAPED))


def is_own(schedule: str) -> bool:
    """Whether it is no name: a text, a file, or a function in a file."""
    return "\n" in schedule or Path(schedule.partition(":")[0]).suffix != ""


def text_of(word: str, num_ranks: int, num_microbatches: int | None, chunks: int | None) -> str:
    """A name as it is; of a file, or of a function in a file, the text of its lists.

    Raises ValueError, with the reason, if it has none for these numbers. A file says itself how
    many micro-batches there are, unless they are given.
    """
    if not is_own(word):
        return word
    if "\n" not in word:
        path, _, function = word.partition(":")
        if not Path(path).is_file():
            raise ValueError(f"--schedule {word}: there is no file {path}")
        if not function:
            lists, _ = read_schedule(Path(path).read_text("utf-8"), path)
        elif function not in (found := runpy.run_path(path)):
            raise ValueError(f"--schedule {word}: {path} has no function {function}")
        else:
            lists = found[function](num_ranks, num_microbatches or 4)
        word = write_schedule(lists, word)
    lists, m = read_schedule(word, label_of(word))
    own, given = (len(lists), m), (num_ranks, num_microbatches or m)
    if own != given or chunks not in (None, chunks_of(word)):
        raise ValueError(
            f"--schedule {label_of(word)}: it is of {own[0]} ranks with {chunks_of(word)} stages "
            f"each and {m} micro-batches, and the run has {given[0]} ranks with "
            f"{chunks or chunks_of(word)} and {given[1]}; take the numbers of the schedule"
        )
    return word


def sizes_of(schedule: str, usual: tuple[int, int] = (4, 8)) -> tuple[int, int]:
    """The numbers of ranks and micro-batches of a file; of what has no own ones the usual."""
    if not is_own(schedule) or ":" in schedule:
        return usual
    lists, m = read_schedule(Path(schedule).read_text("utf-8"), schedule)
    return len(lists), m


def microbatches_of(schedule: str) -> int | None:
    """How many a text has; of a name any."""
    return read_schedule(schedule, label_of(schedule))[1] if "\n" in schedule else None


def chunks_of(schedule: str, chunks: int | None = None) -> int:
    """The stages per rank of a schedule, a name or a text: `chunks`, or its own number.

    Raises ValueError, with a value that works, if its number differs, or if the name is unknown.
    """
    if is_own(schedule):
        if "\n" not in schedule:
            return chunks or 1
        lists, _ = read_schedule(schedule, label_of(schedule))
        return len(stage_ranks(lists)) // len(lists)
    if schedule not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise ValueError(
            f"schedule={schedule!r}: choose one of {known}, e.g. '1f1b', or a file of your own"
        )
    if schedule == "interleaved":
        return chunks or 2
    own = 1 if schedule in ONE_EACH else 2
    if chunks not in (None, own):
        raise ValueError(
            f"schedule {schedule} with {chunks} chunks: a rank has {own} stage{'s' * (own > 1)} "
            "there; schedule interleaved takes any number of chunks"
        )
    return own


def find(schedule: AnySchedule, chunks: int | None = None) -> BuildSchedule:
    """The function of a schedule, of the numbers of ranks and micro-batches.

    It, or this, raises ValueError like `text_of` and `chunks_of`.
    """
    if callable(schedule):
        return schedule
    if isinstance(schedule, list):
        schedule = write_schedule(schedule, "lists")
    if is_own(schedule):
        return partial(_lists_of, schedule)
    chunks = chunks_of(schedule, chunks)
    if schedule == "interleaved":
        return partial(interleaved_1f1b, chunks=chunks)
    return SCHEDULES[schedule]


def _lists_of(schedule: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """Without the micro-batches that a smaller batch lacks, such as the last of an epoch."""
    m = num_microbatches if ":" in schedule and "\n" not in schedule else None
    text = text_of(schedule, num_ranks, m, None)
    lists, most = read_schedule(text, label_of(text))
    if num_microbatches > most:
        text_of(text, num_ranks, num_microbatches, None)  # refuses
    return [[a for a in actions if a.microbatch < num_microbatches] for actions in lists]


def ranks_of_stages(schedule: str, num_ranks: int, chunks: int | None = None) -> list[int]:
    """The rank of each stage. Raises ValueError like `find`."""
    return stage_ranks(find(schedule, chunks)(num_ranks, microbatches_of(schedule) or 1))


def validated(
    schedule: AnySchedule, ranks: tuple[int, ...], num_microbatches: int
) -> tuple[Schedule, list[Action]]:
    """The validated lists of a schedule, and its actions `in_order`. `ranks[s]` has stage s."""
    if isinstance(schedule, list):
        schedule = write_schedule(schedule, "lists")
    if not isinstance(schedule, str) and not callable(schedule):
        raise TypeError(
            f"schedule is a {type(schedule).__name__}: give a name, e.g. '1f1b', a file, lists, or "
            "a function of the numbers of ranks and micro-batches"
        )
    return _validated(schedule, ranks, num_microbatches)


@lru_cache(maxsize=256)  # all callers get the same lists, and only read them
def _validated(
    schedule: str | BuildSchedule, ranks: tuple[int, ...], num_microbatches: int
) -> tuple[Schedule, list[Action]]:
    num_ranks = len(set(ranks))
    lists = find(schedule, len(ranks) // num_ranks)(num_ranks, num_microbatches)
    if (listed := stage_ranks(lists)) != list(ranks):
        raise ValueError(
            f"the schedule has its stages on the ranks {listed}, and the pipeline on "
            f"{list(ranks)}: make the pipeline with the ranks of the schedule"
        )
    validate(lists, num_microbatches)
    return lists, in_order(lists)

"""All schedules by name, and what a run needs: the lists of actions and the ranks of the stages.

    gpipe 1f1b zb sequential   one stage per rank                        schedule.py
    interleaved                v stages per rank, in loops: --chunks v   chunks.py
    zbv vhalf vmin dualpipev   two stages per rank, in a V

A name means what the paper of that name says: backwards are whole in `gpipe`, `1f1b` and
`interleaved`, and in two halves in the others. `sequential` is a baseline in which no two stages
ever work at once. Threads and processes run these lists, which are validated, and drawn next to
what was measured.

In place of a name a schedule may be a file that somebody wrote (written.py); a function of the
numbers of ranks and micro-batches, itself or as `module.py:function`; or lists. All become lists
here, and are validated before they run. If the schedule has no name, a run keeps its text, so that
the run's folder and checkpoints have it.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from .chunks import dual_pipe_v, interleaved_1f1b, v_half, v_min, zb_v
from .schedule import (
    Action,
    BuildSchedule,
    Kind,
    Schedule,
    gpipe,
    in_order,
    one_f_one_b,
    sequential,
    stage_ranks,
    validate,
    zero_bubble,
)
from .written import count_microbatches, label_of, read_schedule, write_schedule

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


def load(schedule: str, num_ranks: int = 4, num_microbatches: int = 8) -> Schedule:
    """The lists of a text, of a file, or of a function in a file, which gets the numbers.

    Raises ValueError, with line and column, if they are no schedule; OSError.
    """
    path, _, function = schedule.partition(":")
    if "\n" in schedule:
        return read_schedule(schedule, f"schedule {label_of(schedule)}")
    if not Path(path).is_file():
        raise ValueError(
            f"schedule={schedule!r}: there is no such file; the names are {', '.join(SCHEDULES)}"
        )
    if not function:
        try:
            text = Path(path).read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"schedule={schedule!r}: {error}") from None
        return read_schedule(text, f"schedule {path}")
    try:
        lists = runpy.run_path(path)[function](num_ranks, num_microbatches)
        text = write_schedule(lists, schedule)
    except Exception as error:  # of a user's code, or of what it has returned
        raise ValueError(
            f"schedule={schedule!r}: {error!r}; {path} needs a function {function} of the numbers "
            "of ranks and micro-batches, which returns a list of actions per rank"
        ) from error
    return read_schedule(text, f"schedule {schedule}")


def refuse_other_sizes(
    lists: Schedule, label: str, n: int, m: int | None = None, chunks: int | None = None
) -> None:
    """Raises ValueError unless a schedule has these numbers of ranks, micro-batches and stages per
    rank; None: any."""
    own = len(lists), len(stage_ranks(lists)) // len(lists), count_microbatches(lists)
    asked = n, chunks or own[1], m or own[2]
    if own != asked:
        raise ValueError(
            f"schedule {label} has %s ranks, %s stages on each and %s micro-batches; asked for are "
            "%s, %s and %s: take the numbers of the schedule" % (*own, *asked)
        )


def _loaded(schedule: str, chunks: int | None, n: int, m: int) -> Schedule:
    """The lists without the micro-batches that a smaller batch lacks, such as an epoch's last."""
    lists = load(schedule, n, m)
    refuse_other_sizes(lists, label_of(schedule), n, max(m, count_microbatches(lists)), chunks)
    return [[a for a in actions if a.microbatch < m] for actions in lists]


def sizes_of(schedule: str, n: int | None, m: int | None) -> tuple[int, int]:
    """The numbers of ranks and micro-batches: as they are given; or those of a schedule without a
    name; or 4 and 8."""
    if schedule not in SCHEDULES:
        lists = load(schedule, n or 4, m or 8)
        return n or len(lists), m or count_microbatches(lists)
    return n or 4, m or 8


def chunks_of(schedule: str, chunks: int | None = None) -> int:
    """The stages per rank of a schedule, a name or a text: `chunks`, or its own number.

    Raises ValueError, with a value that works, if its number differs, or if the name is unknown.
    """
    if schedule == "interleaved":
        return chunks or 2
    if schedule in SCHEDULES:
        own = 2 if schedule in V_SHAPED else 1
    else:
        lists = load(schedule)
        own = len(stage_ranks(lists)) // len(lists)
    if chunks not in (None, own):
        raise ValueError(
            f"schedule {label_of(schedule)} with {chunks} chunks: a rank has {own} "
            f"stage{'s' * (own > 1)} there; schedule interleaved takes any number of chunks"
        )
    return own


def find(schedule: str | BuildSchedule, chunks: int | None = None) -> BuildSchedule:
    """The function of a schedule, of the numbers of ranks and micro-batches.

    The function, or this, raises ValueError like `load` and `chunks_of`.
    """
    if callable(schedule):
        return schedule
    if schedule not in SCHEDULES:
        return partial(_loaded, schedule, chunks)
    chunks = chunks_of(schedule, chunks)
    if schedule == "interleaved":
        return partial(interleaved_1f1b, chunks=chunks)
    return SCHEDULES[schedule]


def ranks_of_stages(schedule: str, num_ranks: int, chunks: int | None = None) -> list[int]:
    """The rank of each stage. Raises ValueError like `find`."""
    return stage_ranks(find(schedule, chunks)(num_ranks, 1))


def validated(
    schedule: AnySchedule, ranks: tuple[int, ...], num_microbatches: int
) -> tuple[Schedule, list[Action]]:
    """The validated lists of a schedule, and its actions `in_order`. `ranks[s]` has stage s."""
    if isinstance(schedule, list):
        schedule = write_schedule(_of_actions(schedule), "lists")
    if not isinstance(schedule, str) and not callable(schedule):
        raise TypeError(
            f"schedule is a {type(schedule).__name__}: give a name, e.g. '1f1b', a file, lists, or "
            "a function of the numbers of ranks and micro-batches"
        )
    edited = None
    if isinstance(schedule, str) and schedule not in SCHEDULES and "\n" not in schedule:
        file = Path(schedule.partition(":")[0])
        edited = file.stat().st_mtime_ns if file.is_file() else None
    return _validated(schedule, ranks, num_microbatches, edited)


def _of_actions(lists: Iterable[Iterable[Any]]) -> Schedule:
    """The same as lists of actions. Raises TypeError if something else is among them."""
    schedule = [[*actions] for actions in lists]
    for action in (action for actions in schedule for action in actions):
        if not (isinstance(action, Action) and isinstance(action.kind, Kind)):
            raise TypeError(
                f"schedule has {action!r} for an action: give a list of Action(kind, stage, "
                "microbatch) for each rank, or a file with a line for each, such as F0 B0"
            )
    return schedule


@lru_cache(maxsize=256)  # all callers get the same lists, and only read them
def _validated(
    schedule: str | BuildSchedule,
    ranks: tuple[int, ...],
    num_microbatches: int,
    edited: int | None,  # noqa: ARG001 (when the schedule's file was: a part of the cache's key)
) -> tuple[Schedule, list[Action]]:
    num_ranks = len(set(ranks))
    lists = _of_actions(find(schedule, len(ranks) // num_ranks)(num_ranks, num_microbatches))
    if (listed := stage_ranks(lists)) != list(ranks):
        raise ValueError(
            f"the schedule has its stages on the ranks {listed}, and the pipeline on "
            f"{list(ranks)}: make the pipeline with the ranks of the schedule"
        )
    validate(lists, num_microbatches)
    return lists, in_order(lists)

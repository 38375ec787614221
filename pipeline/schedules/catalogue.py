"""All schedules by name, and what a run needs: the lists of actions and the ranks of the stages.

    gpipe 1f1b zb sequential   one stage per rank                        schedule.py
    interleaved                v stages per rank, in loops: --chunks v   chunks.py
    zbv vhalf vmin dualpipev   two stages per rank, in a V

A name means what the paper of that name says: backwards are whole in `gpipe`, `1f1b` and
`interleaved`, and in two halves in the others. `sequential` is a baseline in which no two stages
ever work at once. Threads and processes run these lists, which are validated, and drawn beside what
was measured; a schedule that is given as a function runs as it is, too.
"""

from __future__ import annotations

from functools import lru_cache, partial

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


def chunks_of(name: str, chunks: int | None = None) -> int:
    """The stages per rank of the schedule called `name`: `chunks`, or its own number.

    Raises ValueError, with a value that works, if its number differs, or if the name is unknown.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r}: choose one of {', '.join(SCHEDULES)}, e.g. '1f1b'")
    if name == "interleaved":
        return chunks or 2
    own = 1 if name in ONE_EACH else 2
    if chunks not in (None, own):
        raise ValueError(
            f"schedule {name} with {chunks} chunks: a rank has {own} stage{'s' * (own > 1)} there; "
            "schedule interleaved takes any number of chunks"
        )
    return own


def find(name: str, chunks: int | None = None) -> BuildSchedule:
    """The schedule called `name`, a function of the numbers of ranks and micro-batches.

    Raises ValueError like `chunks_of`.
    """
    chunks = chunks_of(name, chunks)
    return partial(interleaved_1f1b, chunks=chunks) if name == "interleaved" else SCHEDULES[name]


def ranks_of_stages(name: str, num_ranks: int, chunks: int | None = None) -> list[int]:
    """The rank of each stage. Raises ValueError like `chunks_of`."""
    return stage_ranks(find(name, chunks)(num_ranks, 1))


def validated(
    schedule: str | BuildSchedule, ranks: tuple[int, ...], num_microbatches: int
) -> tuple[Schedule, list[Action]]:
    """The validated lists of a schedule, a name or a function, and its actions `in_order`.

    `ranks[s]` has stage s.
    """
    if not isinstance(schedule, str) and not callable(schedule):
        raise TypeError(
            f"schedule is a {type(schedule).__name__}: give a name, e.g. '1f1b', or a function of "
            "the numbers of ranks and micro-batches, e.g. lambda ranks, microbatches: lists"
        )
    return _validated(schedule, ranks, num_microbatches)


@lru_cache(maxsize=256)  # all callers get the same lists, and only read them
def _validated(
    schedule: str | BuildSchedule, ranks: tuple[int, ...], num_microbatches: int
) -> tuple[Schedule, list[Action]]:
    num_ranks = len(set(ranks))
    if isinstance(schedule, str):
        schedule = find(schedule, len(ranks) // num_ranks)  # stages per rank
    lists = schedule(num_ranks, num_microbatches)
    if (listed := stage_ranks(lists)) != list(ranks):
        raise ValueError(
            f"the schedule has its stages on the ranks {listed}, and the pipeline on "
            f"{list(ranks)}: make the pipeline with the ranks of the schedule"
        )
    validate(lists, num_microbatches)
    return lists, in_order(lists)

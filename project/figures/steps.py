"""Where the time of a step went: the numbers, and the picture of a timeline beside its ideal.

The ideal runs the same schedule with the measured mean times, but every stage takes equally long
for every micro-batch, and transfers take no time. Its idle time is the schedule's own; any more
that is measured comes from the cut, the batches and the machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from pipeline.schedules.catalogue import SCHEDULES, find, in_words
from pipeline.schedules.schedule import (
    BACKWARD,
    FORWARD,
    Action,
    Schedule,
    as_text,
    bubble,
    clocks,
    name_of,
    peak_alive,
    stage_ranks,
)
from planning.simulate import simulate
from training.launch.errors import UserError
from training.timeline import COMMUNICATION, KINDS, Event

from .bars import COLOURS, legend, text_colour, unit_of
from .perfetto import without_crossings
from .style import FAINT, INK, picture, readable

MEANING = {  # of the names in a clock table
    "F": "forward", "B": "backward", "I": "backward, gradient of the input",
    "W": "backward, gradients of the weights",
}  # fmt: skip
ACTIONS = ("F", "B", "I", "W", "R")  # a schedule's actions, and recomputation
Workers = Mapping[str, Sequence[Event]]  # the events of each worker, by its name


def steps_of(workers: Workers) -> list[int]:
    """The recorded steps but the first, which is slower; the first, if it is the only one."""
    steps = sorted({event.step for events in workers.values() for event in events})
    return steps[1:] or steps


def in_step(workers: Workers, step: int) -> dict[str, list[Event]]:
    """What each worker did in one step."""
    return {name: [e for e in events if e.step == step] for name, events in workers.items()}


def actions_of(workers: Workers) -> dict[str, list[Event]]:
    """The actions of a schedule: forwards, backwards and recomputation."""
    return {name: [e for e in events if e.kind in ACTIONS] for name, events in workers.items()}


def duration(workers: Workers) -> float:
    """Seconds from the first start to the last end."""
    events = [event for row in workers.values() for event in row]
    return max((e.end for e in events), default=0.0) - min((e.start for e in events), default=0.0)


def spent(events: Iterable[Event]) -> float:
    """Seconds in which at least one of the events was in progress."""
    total, until = 0.0, -math.inf
    for start, end in sorted((event.start, event.end) for event in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def bubbles(workers: Workers) -> dict[str, float]:
    """Per worker, the share of a step in which it runs no action (F, B, I, W, R): it may wait, send
    or receive. The step lasts from the first action of any worker to the last. Under GPipe and 1F1B
    the ideal share is 2(n-1)/(3m+2(n-1)) for n stages, m micro-batches."""
    actions = actions_of(workers)
    total = duration(actions) or 1.0
    return {name: 1 - spent(events) / total for name, events in actions.items()}


def shares(workers: Workers) -> dict[str, float]:
    """Seconds of one step by category, the mean over the workers; they add up to its duration.

    If two things happen at once, the earlier category counts, so `communication` is the part that
    no computation hides.
    """
    kinds = {"recompute": "R", "forward": "F", "backward": "BIW", "optimizer": ["optimizer"]}
    total, rows = duration(workers), []
    for events in workers.values():
        row, before, claimed = {}, 0.0, list[Event]()
        for category, its in {**kinds, "communication": KINDS}.items():
            claimed += [event for event in events if event.kind in its]
            row[category], before = spent(claimed) - before, spent(claimed)
        rows.append(row | {"idle": total - before})
    return {category: fmean(row[category] for row in rows) for category in rows[0]}


def plot_schedule(
    name: str, num_ranks: int, num_microbatches: int, chunks: int | None, path: Path
) -> Path:
    """Prints the clock table of a schedule and draws it.

    Raises:
        UserError: the schedule has another number of chunks.
    """
    try:
        schedule = find(name, chunks)(num_ranks, num_microbatches)
    except ValueError as error:
        raise UserError(str(error)) from None
    print(as_text(schedule), explained(schedule), sep="\n")
    ranks = stage_ranks(schedule)
    chunks = len(ranks) // num_ranks
    place, each = ("rank", "chunks") if chunks > 1 else ("stage", "")
    places = [f"{place} {r}" for r in range(num_ranks)]
    takes = clocks(schedule)
    table = simulated(schedule, places, lambda action: float(takes[action.kind]))
    held = ", ".join(map(str, peak_alive(schedule)))
    return draw_timeline(
        path, {"": table}, "clock", ranks,
        title=f"{name}: {in_words(num_ranks, chunks)}, {num_microbatches} micro-batches, "
        f"{duration(table):.0f} clocks, {float(bubble(schedule)):.0%} idle",
        foot=f"activations held, at most, by each {place}: {held} {each or 'micro-batches'}",
    )  # fmt: skip


def explained(schedule: Schedule) -> str:
    """What the names in its clock table mean."""
    kinds = {action.kind.value for actions in schedule for action in actions}
    meant = {kind: words for kind, words in MEANING.items() if kind in kinds}
    if "B" in meant and clocks(schedule)[BACKWARD] == 2:
        meant["B"] += ", two clocks"
    letters = len(stage_ranks(schedule)) > len(schedule)
    names = [f"{kind}0{'a' * letters} {words}" for kind, words in meant.items()]
    names += ["a, b: the rank's chunks"] if letters else []
    return f"{'; '.join(names)}; 0: the micro-batch; . idle"


def draw_step(
    path: Path, workers: Workers, about: Mapping[str, Any], run: str, step: int | None = None
) -> Path:
    """Draws one step, by default one of median duration, and below it the ideal of its schedule.

    Args:
        workers, about: as `project.figures.recorded.read_timelines` returns them.
        run: describes the run, for the foot of the picture.
        step: its number in the recording, from 0; pictures and options count from 1.

    Raises:
        UserError: the step was not recorded.
    """
    steps = sorted(steps_of(workers), key=lambda k: duration(in_step(workers, k)))
    step = steps[(len(steps) - 1) // 2] if step is None else step
    measured = in_step(workers, step)
    if not any(measured.values()):
        recorded = [event.step for events in workers.values() for event in events]
        raise UserError(
            f"--step {step + 1}: it was not recorded; take {min(recorded) + 1} to "
            f"{max(recorded) + 1}"
        )
    ranks = about.get("ranks")
    ideal = ideal_of(measured, about.get("schedule"), ranks)
    title = str(about.get("strategy", "run")).replace("_", " ")
    panels: dict[str, Workers] = {"": measured}
    if ideal:
        panels = {"measured": measured, "ideal": ideal}
        idle, least = (fmean(bubbles(panel).values()) for panel in panels.values())
        n = len(measured)
        title += f", {about['schedule']}, {in_words(n, len(ranks or measured) // n)}: "
        title += f"{idle:.1%} idle, ideal {least:.1%}"
    else:
        times, total = shares(measured), duration(measured)
        kinds = [kind for kind in ("optimizer", "communication", "idle") if times[kind]]
        title += f", {len(measured)} worker{'s' * (len(measured) > 1)}: "
        title += ", ".join(f"{kind} {times[kind] / total:.0%}" for kind in kinds)
    layers = not ranks and any(map(by_layer, measured.values()))
    numbers = f"numbers: {'layers' if layers else 'micro-batches'}"
    foot = "; ".join(filter(None, [run, f"step {step + 1}", numbers]))
    return draw_timeline(path, panels, "time", ranks, title=title, foot=foot)


def ideal_of(
    workers: Workers, schedule: str | None, ranks: Sequence[int] | None = None
) -> dict[str, list[Event]] | None:
    """The same step under the same schedule, if every stage took the mean time for every
    micro-batch and transfers took none; None if the schedule is not known. ``ranks``: the worker of
    each stage; None: one stage per worker."""
    rows = list(actions_of(workers).values())
    actions = [event for row in rows for event in row]
    n, num_stages = len(workers), len(ranks or workers)
    if schedule not in SCHEDULES or n < 2 or len({e.stage for e in actions}) < num_stages:
        return None  # none was used, or several workers share a stage
    table = find(schedule, num_stages // n)(n, len({event.microbatch for event in actions}))
    seconds = {}
    # Per action: the events to count, and the events whose time it takes. A whole backward is both
    # halves and its recomputation.
    for kind, (counted, own) in {"F": ("F", "F"), "B": ("BI", "BIWR"), "W": ("W", "W")}.items():
        total = sum(spent(event for event in row if event.kind in own) for row in rows)
        seconds[kind] = total / max(1, sum(event.kind in counted for event in actions))
    seconds["I"] = seconds["B"] - seconds["W"]
    return simulated(table, list(workers), lambda action: seconds[action.kind.value])


def simulated(
    schedule: Schedule, names: Sequence[str], seconds: Callable[[Action], float]
) -> dict[str, list[Event]]:
    """The events of a schedule's workers, of these names, from the duration of each action."""
    return {
        name: [Event(t.action.kind.value, *t.action[1:], t.start, t.end) for t in row]
        for name, row in zip(names, simulate(schedule, seconds), strict=True)
    }


def draw_timeline(
    path: Path,
    panels: Mapping[str, Workers],
    unit: str,
    ranks: Sequence[int] | None,
    *,
    title: str,
    foot: str,
) -> Path:
    """Draws panels by their headings, one below the other, on one scale, with a row per worker. The
    `unit` is `time` for seconds, or `clock`. `ranks`: of the stages of a schedule."""
    total = max(map(duration, panels.values())) or 1.0
    factor, name = unit_of(total) if unit == "time" else (1.0, "")
    size = (13.33, 2.3 + sum(0.65 * len(panel) + 0.4 for panel in panels.values()))
    found = {"idle"}
    with picture(path, title, foot, size, nrows=len(panels), sharex=True) as (fig, axes):
        for ax, (heading, workers) in zip(axes, panels.items(), strict=True):
            labels, idle = list(workers), bubbles(workers)
            if heading:
                labels = [f"{worker}\n{idle[worker]:.0%} idle" for worker in workers]
                seconds = readable(duration(actions_of(workers)) * factor)
                heading += f": {seconds} {name}, {fmean(idle.values()):.0%} idle"
            begin = min(event.start for events in workers.values() for event in events)
            for y, events in enumerate(workers.values()):
                ax.barh(y, duration(workers) * factor, 0.86, color=FAINT)
                draw_row(ax, y, events, begin, factor, 72 * 11.5 / total, ranks)
                found |= {KINDS[event.kind][0] for event in events}
            ax.grid(visible=False)
            ax.spines["bottom"].set_visible(ax is axes[-1])
            ax.set_title(heading, size=13, weight="bold")
            ax.set_yticks(range(len(workers)), labels, color=INK)
            ax.set(ylim=(len(workers) - 0.5, -0.5), xlim=(0, total * factor))
        if unit == "clock":  # a clock is a span, not a moment: its number is in its middle
            clocks = range(0, round(total), -(-round(total) // 32))
            axes[-1].set_xticks([k + 0.5 for k in clocks], [str(k) for k in clocks])
        axes[-1].set_xlabel(f"{unit} ({name})" if name else unit)
        legend(fig, found)
    return path


def by_layer(events: Sequence[Event]) -> bool:
    """Whether a worker's actions differ by their layer or stage number."""
    return len({event.stage for event in events if event.kind in ACTIONS}) > 1


def draw_row(
    ax: Axes,
    y: float,
    events: Sequence[Event],
    begin: float,
    factor: float,
    points: float,
    ranks: Sequence[int] | None,
) -> None:
    """Draws a box per event, `points` of the page per second. If they are legible there, an action
    has the number of its micro-batch, with the letter of its chunk if there are several; or of its
    layer, if a worker has several and no stages. Transfers are thinner, at the foot of the row, one
    below the other if they overlap."""
    strips = without_crossings([event for event in events if event.lane == COMMUNICATION])
    work = [event for event in events if event.lane != COMMUNICATION]
    height, thin = 0.62 if strips else 0.86, 0.22 / max(1, len(strips))
    boxes = [(event, y - 0.43, height) for event in sorted(work, key=lambda e: e.kind == "R")]
    boxes += [(event, y + 0.21 + k * thin, thin) for k, row in enumerate(strips) for event in row]
    layers = by_layer(events)
    for event, top, high in boxes:
        left, width = (event.start - begin) * factor, event.end - event.start
        colour = COLOURS[KINDS[event.kind][0]]
        ax.barh(
            top, width * factor, high, left, align="edge", color=colour, edgecolor="white",
            linewidth=min(1.2, width * points / 8, high * 40 / 8),  # a row has 40 points or more
        )  # fmt: skip
        if event.kind not in ACTIONS:
            continue
        number = str(event.stage if layers else event.microbatch)
        if ranks:
            number = name_of(Action(FORWARD, event.stage, event.microbatch), ranks)[1:]
        size = min(14, 1.2 * width * points / max(2, len(number)))
        if size >= 6:
            ax.text(
                left + width * factor / 2, top + high / 2, number, size=size,
                color=text_colour(colour), ha="center", va="center_baseline",
            )  # fmt: skip

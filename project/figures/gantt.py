"""Pictures of a step: a row per worker, a box per action, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from pipeline.schedules.catalogue import find, sizes_of
from pipeline.schedules.printed import as_text, name_of, peak_alive
from pipeline.schedules.schedule import FORWARD, Action
from pipeline.schedules.written import label_of
from planning.simulate import Simulation, Simulator, Work
from training.launch.errors import UserError, counted
from training.timeline import COMMUNICATION, EVENT_KINDS, Event

from .compared import Compared
from .runs import ACTIONS, Workers, bubbles, duration
from .style import COLOURS, FAINT, legend, picture

CHARACTERS = 1000  # that fit side by side into a picture, if their size is one point
MEANING = (
    "F0 forward; B0 backward, or its halves: I0, gradient of the input, and W0, gradients of the "
    "weights; 0: the micro-batch; a, b: the rank's chunks; . idle"
)


def plot_schedule(
    name: str, num_ranks: int | None, num_microbatches: int | None, chunks: int | None, path: Path
) -> Path:
    """Prints the clock table of a schedule and draws it. `sizes_of` chooses numbers that are None.

    Raises:
        UserError: there is no such schedule, or it has a different number of chunks.
    """
    try:
        num_ranks, num_microbatches = sizes_of(name, num_ranks, num_microbatches)
        schedule = find(name, chunks)(num_ranks, num_microbatches)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None
    print(as_text(schedule), MEANING, sep="\n")
    step = Simulator(schedule).run(Work(lambda _: 1.0))
    ranks, chunks = step.simulator.ranks, len(step.simulator.ranks) // num_ranks
    stages = counted(len(ranks), "stage")
    if chunks > 1:
        stages = f"{counted(num_ranks, 'rank')}, {chunks} chunks each, {stages}"
    title = f"{label_of(name)}: {stages}, {num_microbatches} micro-batches, {step.bubble:.0%} idle"
    held = ", ".join(f"{peak / chunks:.3g}" for peak in peak_alive(schedule))
    foot = f"micro-batches whose activations a rank holds, at most: {held}"
    return draw_gantt(path, {"": events_of(step)}, ranks, title, foot, "clock")


def draw_step(path: Path, step: Compared, below: str, foot: str = "") -> Path:
    """Draws a recorded step and below it a simulated one, which is `ideal` or `predicted`."""
    simulated = step.predicted.equal() if below == "ideal" else step.predicted
    panels: dict[str, Workers] = {"measured": step.events}
    title = f"step {step.step + 1}: measured {1e3 * step.measured:.1f} ms, {step.bubble:.1%} idle"
    if below == "predicted" or len(step.ranks) > 1:  # without stages, the ideal is just the mean
        rows = events_of(simulated)
        same = len(rows) == len(step.events)  # else a simulated row is that of several replicas
        panels[below] = dict(zip(step.events, rows.values(), strict=True)) if same else rows
        title += f"; {below} {1e3 * simulated.seconds:.1f} ms, {simulated.bubble:.1%} idle"
    foot = "; ".join(filter(None, [foot, "idle: of the time from the first action to the last"]))
    if "ideal" in panels:
        foot += "; ideal: every action takes the mean of its kind, messages take no time"
    return draw_gantt(path, panels, step.ranks, title, foot)


def events_of(step: Simulation) -> dict[str, list[Event]]:
    """A simulated step as if it had been recorded: its events by rank."""
    place = "stage" if len(step.simulator.ranks) == len(step.rows) else "rank"
    workers = {}
    for r, row in enumerate(step.rows):
        events = []
        for (kind, stage, i), start, end, idle, _ in row:
            if kind.value in ("B", "I"):
                ready = start - idle
                events.append(Event("R", stage, i, ready - step.work.recompute(stage), ready))
            events.append(Event(kind.value, stage, i, start, end))
        events.append(Event("all_reduce", -1, -1, row[-1].end, step.exchanged[r]))
        events.append(Event("optimizer", -1, -1, step.exchanged[r], step.updated[r]))
        name = f"{place} {r}" if len(step.rows) > 1 else "each rank"
        workers[name] = [event for event in events if event.end > event.start]
    return workers


def draw_gantt(
    path: Path,
    panels: Mapping[str, Workers],
    ranks: Sequence[int],
    title: str,
    foot: str,
    unit: str = "s",
) -> Path:
    """Draws panels one below the other, each under its heading, on one time scale, with a row per
    worker. `ranks` has the rank of each stage of the schedule."""
    total = max(map(duration, panels.values())) or 1.0
    heights = [0.65 * len(workers) + 0.4 for workers in panels.values()]
    grid = {"nrows": len(panels), "height_ratios": heights, "sharex": True}
    kinds = {"idle"}
    with picture(path, title, foot, (13.33, 2.3 + sum(heights)), **grid) as (fig, axes):
        for ax, (heading, workers) in zip(axes, panels.items(), strict=True):
            idle = bubbles(workers)
            for y, events in enumerate(workers.values()):
                ax.barh(y, duration(workers), 0.86, color=FAINT)
                draw_row(ax, y, events, total, ranks)
                seen = total / CHARACTERS  # a point
                kinds |= {EVENT_KINDS[e.kind][0] for e in events if e.end - e.start > seen}
            ax.grid(visible=False)
            ax.set_title(heading if len(panels) > 1 else "", weight="bold")
            labels = [f"{worker}\n{idle[worker]:.0%} idle" for worker in workers]
            ax.set_yticks(range(len(workers)), labels)
            ax.set(ylim=(len(workers) - 0.5, -0.5), xlim=(0, total))
        axes[-1].set_xlabel(unit)
        legend(fig, kinds)
    return path


def draw_row(
    ax: Axes, y: float, events: Sequence[Event], total: float, ranks: Sequence[int]
) -> None:
    """Draws a box per event, and recomputation over the backward that it is a part of. The label of
    an action is the number of its micro-batch, with the letter of its chunk if there are several.
    Boxes too short to read it have none; of the layers of an action, one has it. Messages are
    thinner, at the foot of the row."""
    labelled = set()
    for event in sorted(events, key=lambda e: (e.lane == COMMUNICATION, e.kind == "R")):
        sent = event.lane == COMMUNICATION
        width, colour = event.end - event.start, COLOURS[EVENT_KINDS[event.kind][0]]
        box = ax.barh(
            y + 0.3 if sent else y, width, 0.22 if sent else 0.86, left=event.start, color=colour,
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        number = str(event.microbatch)
        if len(ranks) > 1:
            number = name_of(Action(FORWARD, max(0, event.stage), event.microbatch), ranks)[1:]
        size = min(10, CHARACTERS * width / total / len(number))  # in points
        if event.kind in ACTIONS and size > 5 and (event.kind, number) not in labelled:
            labelled.add((event.kind, number))
            ax.bar_label(box, [number], label_type="center", size=size)

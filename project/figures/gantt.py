"""Pictures of a step: a row per worker, a box per action, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from pipeline.schedules.catalogue import find
from pipeline.schedules.printed import as_text, bubble, in_words, name_of, peak_alive
from pipeline.schedules.schedule import FORWARD, Action, clocks
from planning.simulate import Simulation, Simulator, Work
from training.launch.errors import UserError
from training.timeline import COMMUNICATION, EVENT_KINDS, Event

from .bars import COLOURS, legend, text_colour
from .compared import Compared, action_of
from .perfetto import without_overlaps
from .steps import ACTIONS, Workers, bubbles, duration
from .style import FAINT, INK, picture

Longer = Mapping[Action, float]  # by how much it took longer than predicted: 0.1 is 10 %

MEANING = (
    "F0 forward; B0 backward, two clocks beside I and W; I0 backward, gradient of the input; W0 "
    "backward, gradients of the weights; 0: the micro-batch; a, b: the rank's chunks; . idle"
)


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
    print(as_text(schedule), MEANING, sep="\n")
    takes = clocks(schedule)
    step = Simulator(schedule).run(Work(lambda action: float(takes[action.kind])))
    title = f"{name}: {in_words(num_ranks, len(step.simulator.ranks) // num_ranks)}, "
    title += f"{num_microbatches} micro-batches, {float(bubble(schedule)):.0%} idle"
    held = ", ".join(map(str, peak_alive(schedule)))
    foot = f"activations of a rank, at most, in micro-batches of a stage: {held}"
    panels = {"": events_of(step)}
    return draw_gantt(path, panels, step.simulator.ranks, title=title, foot=foot, unit="clock")


def draw_step(path: Path, step: Compared, below: str, *, foot: str) -> Path:
    """Draws a recorded step and below it a simulated one, which is `ideal` or `predicted`. Beside
    the predicted one, colours show how far each action is from its prediction."""
    simulated = step.predicted.equal() if below == "ideal" else step.predicted
    panels: dict[str, Workers] = {"measured": step.events}
    title = f"step {step.step + 1}: measured {1e3 * step.measured:.1f} ms, {step.bubble:.1%} idle"
    if below == "predicted" or len(step.ranks) > 1:  # without stages, the ideal is just the mean
        panels[below] = events_of(simulated)
        title += f"; {below} {1e3 * simulated.seconds:.1f} ms, {simulated.bubble:.1%} idle"
    foot = "; ".join(filter(None, [foot, "idle: of the time from the first action to the last"]))
    longer = step.longer if below == "predicted" else {}
    return draw_gantt(path, panels, step.ranks, title=title, foot=foot, longer=longer)


def events_of(step: Simulation) -> dict[str, list[Event]]:
    """A simulated step as if it had been recorded: its events by rank."""
    again = step.work.recompute
    place = "stage" if len(step.simulator.ranks) == len(step.rows) else "rank"
    found = {}
    for r, row in enumerate(step.rows):
        events = []
        for (kind, stage, i), start, end, idle, _ in row:
            if kind.value in ("B", "I"):
                ready = start - idle
                events.append(Event("R", stage, i, ready - again(stage), ready))
            events.append(Event(kind.value, stage, i, start, end))
        events.append(Event("all_reduce", -1, -1, row[-1].end, step.exchanged[r]))
        events.append(Event("optimizer", -1, -1, step.exchanged[r], step.updated[r]))
        found[f"{place} {r}"] = [event for event in events if event.end > event.start]
    return found


def draw_gantt(
    path: Path,
    panels: Mapping[str, Workers],
    ranks: Sequence[int],
    *,
    title: str,
    foot: str,
    unit: str = "s",
    longer: Mapping[str, Longer] | None = None,
) -> Path:
    """Draws panels by their headings, one below the other, on one scale, with a row per worker.
    `ranks`: of the stages of the schedule; `longer`: of the workers of a measured panel."""
    total = max(map(duration, panels.values())) or 1.0
    scale = EngFormatter(unit if unit == "s" else "")
    heights = [0.65 * len(workers) + 0.4 for workers in panels.values()]
    grid = {"nrows": len(panels), "height_ratios": heights, "sharex": True}
    found, num_stages = {"idle"}, len(ranks)
    with picture(path, title, foot, (13.33, 2.3 + sum(heights)), **grid) as (fig, axes):
        for ax, (heading, workers) in zip(axes, panels.items(), strict=True):
            idle = bubbles(workers)
            labels = [f"{worker}\n{idle[worker]:.0%} idle" for worker in workers]
            coloured = longer if longer and heading == "measured" else {}
            for y, (worker, events) in enumerate(workers.items()):
                ax.barh(y, duration(workers), 0.86, color=FAINT)
                far = coloured.get(worker, {})
                draw_row(ax, y, events, 72 * 11.5 / total, ranks, far)
                found |= {name_of_colour(event, far, num_stages) for event in events}
            ax.grid(visible=False)
            ax.set_title(heading, size=13, weight="bold")
            ax.set_yticks(range(len(workers)), labels, color=INK)
            ax.set(ylim=(len(workers) - 0.5, -0.5), xlim=(0, total))
            ax.xaxis.set_major_formatter(scale)
        axes[-1].set_xlabel("" if unit == "s" else unit)
        legend(fig, found)
    return path


def name_of_colour(event: Event, longer: Longer, num_stages: int) -> str:
    """What an event is in the legend: its kind, or how far it is from its prediction."""
    if event.kind not in ("F", "B", "I", "W") or not longer:
        return EVENT_KINDS[event.kind][0]
    far = longer.get(action_of(event, num_stages), 0.0)
    if abs(far) <= 0.1:
        return "within 10 % of predicted"
    if abs(far) <= 0.25:
        return f"over 10 % {'longer' if far > 0 else 'shorter'}"
    return f"over 25 % {'longer' if far > 0 else 'shorter'} than predicted"


def draw_row(
    ax: Axes, y: float, events: Sequence[Event], points: float, ranks: Sequence[int], longer: Longer
) -> None:
    """Draws a box per event, `points` of the page per second. If it is legible there, an action has
    the number of its micro-batch, with the letter of its chunk if there are several; or of its
    layer, if a worker has several and no stages. If colours show how much `longer` it took, the
    letter of its kind comes first, and its upper edge has the colour of its kind. Transfers are
    thinner, at the foot of the row, one below the other if they overlap."""
    strips = without_overlaps(event for event in events if event.lane == COMMUNICATION)
    height, thin = 0.62 if strips else 0.86, 0.22 / max(1, len(strips))
    work = [event for event in events if event.lane != COMMUNICATION]
    boxes = [(event, y - 0.43, height) for event in sorted(work, key=lambda e: e.kind == "R")]
    boxes += [(event, y + 0.21 + k * thin, thin) for k, row in enumerate(strips) for event in row]
    layers = len({event.stage for event in events if event.kind in ACTIONS}) > 1
    for event, top, high in boxes:
        width = event.end - event.start
        colour = COLOURS[name_of_colour(event, longer, len(ranks))]
        box = ax.barh(
            top, width, high, event.start, align="edge", color=colour, edgecolor="white",
            linewidth=min(1.2, width * points / 8, high * 40 / 8),  # a row has 40 points or more
        )  # fmt: skip
        if event.kind not in ACTIONS:
            continue
        number = str(event.stage if layers else event.microbatch)
        if len(ranks) > 1:
            number = name_of(Action(FORWARD, event.stage, event.microbatch), ranks)[1:]
        if longer:
            number = event.kind + number
            kind = COLOURS[EVENT_KINDS[event.kind][0]]
            ax.barh(top, width, 0.1, event.start, align="edge", color=kind)
        size = min(14, 1.2 * width * points / max(2, len(number)))
        if size >= 6:
            ink = text_colour(colour)
            ax.bar_label(box, [number], label_type="center", color=ink, size=size)

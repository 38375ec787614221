"""Schedules: which stage runs which action, in which order. Pure: no torch, threads or clocks.

Problem. A model is cut into stages. A batch, cut into m micro-batches, flows forward through
the stages and its gradients flow back. Which work does stage s do next? The answer decides how
long the stages idle (the bubble) and how many activations they hold.

Idea. A schedule is a list of actions per rank. It fixes only the order *on each rank*; the start
of an action follows from its dependencies: F(i) on stage s needs F(i) on stage s-1, B(i) on
stage s needs B(i) on stage s+1 (on the last stage: its own F(i)). Threads and processes run
the same lists that are timed, drawn and checked. (A process may run a B in its two halves, to send
the gradient in between: `early_gradients` in process.py.)

Here rank s has stage s and no other. In chunks.py a rank has several stages; `ranks_of` reads the
rank of each stage off the lists. All schedules by name: catalogue.py.

GPipe (Huang et al., 2019): all forwards, then all backwards. Every stage holds m micro-batches.

    GPipe, 3 stages, 4 micro-batches                    bubble = (n-1)/(m+n-1) = 2/6
    stage 0: F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
    stage 1: .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
    stage 2: .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

1F1B (PipeDream-Flush, Narayanan et al., 2021; Megatron-LM): after a warm-up of n-s-1 forwards a
stage alternates F and B. The bubble is the same; a stage holds at most min(m, n-s) micro-batches.

    1F1B, 3 stages, 4 micro-batches                     bubble = (n-1)/(m+n-1) = 2/6
    stage 0: F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1: .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    stage 2: .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

Zero bubble (Qi et al., 2023, ZB-H1): backward has two halves. The previous stage waits for I, the
gradient of the input; no stage waits for W, the gradient of the weights, so W fills the gaps. With
one clock each for F, I and W, 1F1B takes 3m + 3(n-1) clocks and ZB-H1 3m + n-1 (if m >= n). Every
stage holds as much as 1F1B's first, min(m, n) micro-batches. zero_bubble.py splits backward.

    Zero bubble, 3 stages, 4 micro-batches              bubble = (n-1)/(3m+n-1) = 2/14
    stage 0: F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    stage 1: .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    stage 2: .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

In every schedule backwards, and both halves, run in the order of the micro-batches. So every
schedule adds the gradients in the same order and gives the same bits.

Glossary: m micro-batches, n ranks, i micro-batch, r rank, s stage, k clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from fractions import Fraction
from typing import NamedTuple


class Kind(str, Enum):
    """What a stage does with a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


FORWARD = Kind.FORWARD
BACKWARD = Kind.BACKWARD
BACKWARD_INPUT = Kind.BACKWARD_INPUT
BACKWARD_WEIGHT = Kind.BACKWARD_WEIGHT


class Action(NamedTuple):
    """One entry of a schedule."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


Schedule = list[list[Action]]  # per rank, its actions in order
BuildSchedule = Callable[[int, int], Schedule]  # (ranks, micro-batches) -> lists

_HALVES = (BACKWARD_INPUT, BACKWARD_WEIGHT)
_BORN = {FORWARD: 1, BACKWARD: -1, BACKWARD_WEIGHT: -1}  # change in live micro-batches


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: the clocks of `clock_cycles` up the stages, then the same
    clocks down."""
    check_sizes(num_stages, num_microbatches)
    schedule: Schedule = [[] for _ in range(num_stages)]
    clocks = list(clock_cycles(num_microbatches, num_stages))  # per clock, its (i, s)
    for clock in clocks:
        for i, s in clock:
            schedule[s].append(Action(FORWARD, s, i))
    for clock in clocks:
        # mirrored: here s counts from the last stage
        for i, s in clock:
            schedule[-1 - s].append(Action(BACKWARD, num_stages - 1 - s, i))
    return schedule


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """One forward, one backward: the least activations at GPipe's bubble."""
    check_sizes(num_stages, num_microbatches)
    schedule = []
    for s in range(num_stages):
        warm_up = min(num_microbatches, num_stages - s - 1)  # forwards ahead of the pairs F, B
        actions = [Action(FORWARD, s, i) for i in range(warm_up)]
        for i in range(warm_up, num_microbatches):  # steady state
            actions += [Action(FORWARD, s, i), Action(BACKWARD, s, i - warm_up)]
        cool_down = range(num_microbatches - warm_up, num_microbatches)  # their forwards are done
        schedule.append(actions + [Action(BACKWARD, s, i) for i in cool_down])
    return schedule


def sequential(num_stages: int, num_microbatches: int) -> Schedule:
    """One micro-batch at a time through all stages and back: no two stages ever work at once.

    This is naive model parallelism, the baseline for a pipeline.
    """
    check_sizes(num_stages, num_microbatches)
    return [  # the same list for every stage: F0 B0 F1 B1 ...
        [Action(kind, s, i) for i in range(num_microbatches) for kind in (FORWARD, BACKWARD)]
        for s in range(num_stages)
    ]


def zero_bubble(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with backward in two halves, the second one s micro-batches late on stage s (ZB-H1)."""
    schedule = []
    for s, actions in enumerate(one_f_one_b(num_stages, num_microbatches)):
        halves: list[Action] = []
        for kind, _, i in actions:
            halves.append(Action(BACKWARD_INPUT if kind is BACKWARD else kind, s, i))
            if kind is BACKWARD and i >= s:  # W: s micro-batches late
                halves.append(Action(BACKWARD_WEIGHT, s, i - s))
        rest = range(max(num_microbatches - s, 0), num_microbatches)  # the last s, or all if m < s
        schedule.append(halves + [Action(BACKWARD_WEIGHT, s, i) for i in rest])
    return schedule


def forwards(ranks: Sequence[int], num_microbatches: int) -> Schedule:
    """Forwards only, for evaluation; ``ranks[s]`` has stage s. A rank's stages run in sequence."""
    schedule: Schedule = [[] for _ in range(max(ranks) + 1)]
    for s, r in enumerate(ranks):
        schedule[r] += [Action(FORWARD, s, i) for i in range(num_microbatches)]
    return schedule


def ranks_of(schedule: Schedule) -> list[int]:
    """The rank of each stage. ValueError unless each stage is on exactly one rank."""
    ranks: dict[int, int] = {}  # by stage
    for r, actions in enumerate(schedule):
        for action in actions:
            if ranks.setdefault(action.stage, r) != r:
                raise ValueError(
                    f"rank {r}: {action!r} does not belong here: rank {ranks[action.stage]} has "
                    "that stage"
                )
    if sorted(ranks) != list(range(len(ranks))):
        raise ValueError(
            f"the lists have the stages {sorted(ranks)}: they are counted from 0, none left out"
        )
    return [ranks[s] for s in sorted(ranks)]


def clock_cycles(num_batches: int, num_partitions: int) -> Iterator[list[tuple[int, int]]]:
    """Per clock, the (micro-batch, partition) pairs of a forward pass: m + n - 1 clocks.

    m = 3, n = 3 (torchgpipe, Kim et al., 2020):

        k (i,j) (i,j) (i,j)
        - ----- ----- -----
        0 (0,0)
        1 (1,0) (0,1)
        2 (2,0) (1,1) (0,2)
        3       (2,1) (1,2)
        4             (2,2)
    """
    for k in range(num_batches + num_partitions - 1):
        first = max(0, k - num_batches + 1)  # partitions before it have had all batches
        yield [(k - j, j) for j in range(first, min(k + 1, num_partitions))]


def clock_table(schedule: Schedule) -> list[list[Action | None]]:
    """Row k: each rank's action in clock k, None if idle, if every action takes one clock.

    Raises ValueError, naming a waiting action, if the schedule deadlocks.
    """
    num_stages = len(ranks_of(schedule))
    position = [0] * len(schedule)  # by rank: the index of its next action
    done: set[Action] = set()  # ended before this clock
    rows: list[list[Action | None]] = []
    while any(p < len(actions) for p, actions in zip(position, schedule, strict=True)):
        row: list[Action | None] = []
        for p, actions in zip(position, schedule, strict=True):
            ready = p < len(actions) and all(
                needed in done for needed in dependencies(actions[p], num_stages)
            )
            row.append(actions[p] if ready else None)
        if not any(row):  # nobody can start, now or ever
            raise ValueError(_deadlock(schedule, position, done))
        for r, action in enumerate(row):  # after the row: its actions start at the same time
            if action is not None:
                position[r] += 1
                done.add(action)
        rows.append(row)
    return rows


def dependencies(action: Action, num_stages: int) -> list[Action]:
    """The actions that must have ended before ``action`` can start."""
    kind, s, i = action
    if kind is FORWARD:
        return [Action(FORWARD, s - 1, i)] if s > 0 else []
    if kind is BACKWARD_WEIGHT:
        return [Action(BACKWARD_INPUT, s, i)]
    own = Action(FORWARD, s, i)
    return [own, Action(kind, s + 1, i)] if s + 1 < num_stages else [own]  # B waits for B, I for I


def validate(schedule: Schedule, num_microbatches: int) -> None:
    """Raise ValueError, naming the action, unless ``schedule`` can run and does all the work.

    Each stage is on one rank, which runs F(i), and either B(i) or I(i) and W(i), exactly once for
    each micro-batch. Nothing deadlocks (B waits for B and I for I, so all stages must split a
    micro-batch alike).
    """
    ranks = ranks_of(schedule)
    for r, actions in enumerate(schedule):
        halved = {(s, i) for kind, s, i in actions if kind in _HALVES}  # backward is in two halves
        expected = {  # what rank r must do, each once
            Action(kind, s, i)
            for s in range(len(ranks))
            if ranks[s] == r
            for i in range(num_microbatches)
            for kind in (FORWARD, *(_HALVES if (s, i) in halved else (BACKWARD,)))
        }
        seen: set[Action] = set()
        for action in actions:
            if action not in expected:
                raise ValueError(f"rank {r}: {action!r} does not belong here")
            if action in seen:
                raise ValueError(f"stage {action.stage}: {action} is there twice")
            seen.add(action)
        for action in sorted(expected - seen):  # the first one raises
            raise ValueError(f"stage {action.stage}: {action} is missing")
    clock_table(schedule)  # raises if the lists deadlock


def peak_alive(schedule: Schedule) -> list[int]:
    """Per rank, the most micro-batches whose activations (F until B or W) it holds at once, counted
    once for each of its stages."""
    peaks = []
    for actions in schedule:
        alive = peak = 0
        for action in actions:
            alive += _BORN.get(action.kind, 0)  # I frees nothing: W still needs its operands
            peak = max(peak, alive)
        peaks.append(peak)
    return peaks


def bubble(schedule: Schedule) -> Fraction:
    """The idle share of all ranks' clocks, with one clock per action, be it B or I."""
    slots = [action for row in clock_table(schedule) for action in row]  # ranks x clocks
    return Fraction(slots.count(None), len(slots))


def draw(schedule: Schedule) -> str:
    """The clock table as text, one line per rank, as at the top of this file. If a rank has several
    stages, a letter names the stage: see chunks.py."""
    ranks = ranks_of(schedule)
    word = "stage" if len(ranks) == len(schedule) else "rank"
    lines = []
    for r, column in enumerate(zip(*clock_table(schedule), strict=True)):  # the clocks of rank r
        cells = ["." if action is None else name_of(action, ranks) for action in column]
        width = max(len(name_of(action, ranks)) for action in schedule[r])
        lines.append(f"{word} {r}: " + " ".join(f"{cell:{width}}" for cell in cells).rstrip())
    return "\n".join(lines)


def name_of(action: Action, ranks: Sequence[int]) -> str:
    """F0; if its rank, from `ranks_of`, has several stages: F0a, F0b, ..."""
    mine = [s for s, r in enumerate(ranks) if r == ranks[action.stage]]  # its rank's: a, b, ...
    return str(action) + (chr(ord("a") + mine.index(action.stage)) if len(mine) > 1 else "")


def in_order(schedule: Schedule) -> list[Action]:
    """The actions of all ranks in order of their clocks: each comes after its dependencies. So one
    worker can do the actions of several ranks in this order without deadlock."""
    return [action for row in clock_table(schedule) for action in row if action is not None]


def _deadlock(schedule: Schedule, position: Sequence[int], done: set[Action]) -> str:
    stuck, num_stages = [], len(ranks_of(schedule))
    for p, actions in zip(position, schedule, strict=True):
        if p < len(actions):
            needed = next(a for a in dependencies(actions[p], num_stages) if a not in done)
            stuck.append(f"{actions[p]} on stage {actions[p].stage} waits for {needed} on stage "
                         f"{needed.stage}")  # fmt: skip
    return "deadlock: " + "; ".join(stuck)


def check_sizes(num_stages: int, num_microbatches: int) -> None:
    """ValueError unless there is at least one of each."""
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"{num_stages} stages, {num_microbatches} micro-batches: at least 1 of each, e.g. 2, 4"
        )

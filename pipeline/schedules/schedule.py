"""Schedules: which stage runs which action, in which order. Pure: no torch, threads or clocks.

Problem. A model is cut into stages. A batch, cut into m micro-batches, flows forward through
the stages and its gradients flow back. Which work does stage s do next? The answer decides how
long the stages idle (the bubble) and how many activations they hold.

Idea. A schedule is a list of actions per rank. It fixes only the order *on each rank*; the start
of an action follows from its dependencies: F(i) on stage s needs F(i) on stage s-1, B(i) on
stage s needs B(i) on stage s+1 (on the last stage: its own F(i)). Threads and processes run
the same lists that are timed, drawn and checked.

Here rank s has stage s and no other. In chunks.py a rank has several stages; `stage_ranks` reads
the rank of each stage off the lists. All schedules by name: catalogue.py.

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
stage holds as much as 1F1B's first, min(m, n) micro-batches. runtime/linear.py splits the
backward.

    Zero bubble, 3 stages, 4 micro-batches              bubble = (n-1)/(3m+n-1) = 2/14
    stage 0: F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    stage 1: .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    stage 2: .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

In every schedule backwards, and both halves, run in the order of the micro-batches. So every
schedule adds the gradients in the same order and gives the same bits.

Glossary: m micro-batches, n ranks, i micro-batch, r rank, s stage, k clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
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


class ScheduleError(ValueError):
    """What is wrong with a schedule, and with which action of it."""

    def __init__(self, action: Action, sentence: str) -> None:
        super().__init__(sentence)
        self.action = action


Schedule = list[list[Action]]  # per rank, its actions in order
BuildSchedule = Callable[[int, int], Schedule]  # (ranks, micro-batches) -> lists

_HALVES = (BACKWARD_INPUT, BACKWARD_WEIGHT)
# How many more micro-batches a stage holds after an action. I frees nothing: W needs its operands.
HELD_MORE = {FORWARD: 1, BACKWARD: -1, BACKWARD_INPUT: 0, BACKWARD_WEIGHT: -1}


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    return _whole_backwards(num_microbatches, [num_microbatches] * num_stages)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """One forward, one backward: the least activations at GPipe's bubble."""
    return _whole_backwards(num_microbatches, [num_stages - s - 1 for s in range(num_stages)])


def sequential(num_stages: int, num_microbatches: int) -> Schedule:
    """One micro-batch at a time through all stages and back: no two stages ever work at once.

    This is naive model parallelism, the baseline for a pipeline.
    """
    return _whole_backwards(num_microbatches, [0] * num_stages)


def _whole_backwards(num_microbatches: int, warm_ups: Sequence[int]) -> Schedule:
    """Stage s starts with `warm_ups[s]` forwards."""
    numbers = range(num_microbatches)
    return [
        alternate(
            [Action(FORWARD, s, i) for i in numbers], [Action(BACKWARD, s, i) for i in numbers], w
        )
        for s, w in enumerate(warm_ups)
    ]


def alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """The order of one rank: `warm_up` forwards, then a forward and a backward in turn until the
    forwards end, then the other backwards."""
    steady = zip(forwards[warm_up:], backwards, strict=False)
    pairs = [action for pair in steady for action in pair]
    return forwards[:warm_up] + pairs + backwards[len(pairs) // 2 :]


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
    """Forwards only, for evaluation; `ranks[s]` has stage s. A rank's stages run in sequence."""
    schedule: Schedule = [[] for _ in range(max(ranks) + 1)]
    for s, r in enumerate(ranks):
        schedule[r] += [Action(FORWARD, s, i) for i in range(num_microbatches)]
    return schedule


def stage_ranks(schedule: Schedule) -> list[int]:
    """The rank of each stage. ValueError unless each stage is on exactly one rank."""
    places = sorted({(action.stage, r) for r, actions in enumerate(schedule) for action in actions})
    for s in range(len({s for s, _ in places})):
        on = [r for stage, r in places if stage == s]
        if len(on) != 1:
            where = f"on ranks {' and '.join(map(str, on))}" if on else "on no rank"
            raise ValueError(f"stage {s} is {where}; each stage, counted from 0, has one rank")
    return [r for _, r in places]


def clock_cycles(num_batches: int, num_partitions: int) -> Iterator[list[tuple[int, int]]]:
    """Per clock, the (micro-batch, partition) pairs of a forward pass: m + n - 1 clocks, or none
    if there is no micro-batch.

    m = 3, n = 3 (torchgpipe, Kim et al., 2020):

        k (i,j) (i,j) (i,j)
        - ----- ----- -----
        0 (0,0)
        1 (1,0) (0,1)
        2 (2,0) (1,1) (0,2)
        3       (2,1) (1,2)
        4             (2,2)

    Raises ValueError, when it is called, if there are fewer than 0 micro-batches or 1 partition.
    """
    m, n = num_batches, num_partitions
    if m < 0 or n < 1:
        raise ValueError(f"{m} micro-batches, {n} partitions: at least 0 and 1 are needed")
    # Before partition k - m + 1 all partitions have had all micro-batches.
    return (
        [(k - j, j) for j in range(max(0, k - m + 1), min(k + 1, n))]
        for k in range(m + n - 1 if m else 0)
    )


def clock_table(schedule: Schedule) -> list[list[Action | None]]:
    """Row k: each rank's action in clock k, None if idle. An action takes a clock.

    Raises ValueError, naming a waiting action, if the schedule deadlocks.
    """
    num_stages = len(stage_ranks(schedule))
    waiting = [deque(actions) for actions in schedule]  # by rank
    done: set[Action] = set()  # ended before this clock
    rows: list[list[Action | None]] = []
    while any(waiting):
        ready = [rest and done.issuperset(dependencies(rest[0], num_stages)) for rest in waiting]
        if not any(ready):  # nobody can start, now or ever
            stuck = [rest[0] for rest in waiting if rest]
            said = ", ".join(f"{action} on stage {action.stage}" for action in stuck)
            raise ScheduleError(stuck[0], f"deadlock: the next actions wait for ever: {said}")
        row = [rest.popleft() if now else None for rest, now in zip(waiting, ready, strict=True)]
        done.update(end for action in row if action for end in ended_with(action))
        rows.append(row)
    return rows


def dependencies(action: Action, num_stages: int) -> list[Action]:
    """What must have ended (`ended_with`) before `action` can start."""
    kind, s, i = action
    if kind is FORWARD:
        return [Action(FORWARD, s - 1, i)] if s > 0 else []
    if kind is BACKWARD_WEIGHT:
        return [Action(BACKWARD_INPUT, s, i)]
    own = Action(FORWARD, s, i)
    # the gradient of the next stage's input, whether an I or a B has it
    return [own, Action(BACKWARD_INPUT, s + 1, i)] if s + 1 < num_stages else [own]


def ended_with(action: Action) -> list[Action]:
    """What is done when `action` ends: a whole backward is both halves, too."""
    halves = _HALVES if action.kind is BACKWARD else ()
    return [action, *(action._replace(kind=half) for half in halves)]


def validate(schedule: Schedule, num_microbatches: int) -> None:
    """Raises ValueError, naming the action, unless `schedule` can run and does all the work.

    Each stage is on one rank, which runs F(i), and either B(i) or I(i) and W(i), exactly once for
    each micro-batch. Nothing deadlocks.
    """
    counts = Counter(action for actions in schedule for action in actions)
    halved = {(s, i) for kind, s, i in counts if kind in _HALVES}  # backward is in two halves
    expected = {
        Action(kind, s, i)
        for s in range(len(stage_ranks(schedule)))
        for i in range(num_microbatches)
        for kind in (FORWARD, *(_HALVES if (s, i) in halved else (BACKWARD,)))
    }
    for action in sorted(expected | counts.keys()):
        if counts[action] != (times := int(action in expected)):
            sentence = f"{action} is there {counts[action]} times, not {times}"
            raise ScheduleError(action, f"stage {action.stage}: {sentence}")
    clock_table(schedule)  # raises if the lists deadlock


def in_order(schedule: Schedule) -> list[Action]:
    """The actions of all ranks in order of their clocks: each comes after its dependencies. So one
    worker can do the actions of several ranks in this order without deadlock."""
    return [action for row in clock_table(schedule) for action in row if action is not None]

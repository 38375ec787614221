"""Schedules in which a rank has several stages, its chunks of the model.

Problem. The last of n ranks waits for n-1 others before it can start, and a rank's work on a
micro-batch is long: the bubble is n-1 times that work. And 1F1B's first rank holds n micro-batches.

Idea. Cut the model into more stages than ranks. A stage takes 1/v of the time, so the first
micro-batch reaches the last rank v times as early. The lists show which rank has a stage. Nothing
else changes: an action names its stage, and depends on the stages before and after it, on any rank.
Letters are chunks: F0b is the forward of micro-batch 0 on a rank's second stage.

Interleaved 1F1B (Narayanan et al., 2021; Megatron-LM): stage s is on rank s mod n. n micro-batches
pass through a rank's first stage, then the same n through its second, and so on. Per micro-batch a
rank sends v times as many messages, and it holds up to (n-1)/v more micro-batches than 1F1B.

    Interleaved, 2 ranks with 2 chunks, 4 micro-batches      bubble = (n-1)/(vm+n-1) = 1/9
    rank 0: F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a .   B2b .   B3b B2a B3a
    rank 1: .   F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a .

V-shaped (Qi et al., 2024, "Pipeline Parallelism with Controllable Memory"): two chunks per rank,
the stages going up the ranks and down again, and backward in halves I and W. A rank's memory
depends on how long its two chunks wait for their backwards. Where one waits long, the other waits
briefly, so all ranks hold equally much. Every six clocks a rank does F, I and W of both chunks for
one micro-batch. The clocks from a rank's action to the same action of its neighbour, on the way up
and on the way down, decide the memory:

    clocks from rank to rank   F up   F down   I up   I down    held at most, in whole ranks' layers
    ZB-V                       4      2        4      2         n        as 1F1B's first rank
    V-Half                     2      1        2      1         (n+1)/2, rounded up
    V-Min                      1      1        1      1         (n+2)/3, rounded up

    ZB-V, 2 ranks, 3 micro-batches                      bubble = (n-1)/(6m+n-1) = 1/19
    rank 0: F0a F1a F2a F0b I0b W0b F1b I1b I0a W1b W0a F2b I2b I1a W2b I2a W1a W2a .
    rank 1: .   F0a F0b F1a F1b I0b I0a W0b W0a F2a F2b I1b I1a I2b I2a W1b W1a W2b W2a

The clocks are those of an endlessly repeating pattern, which would leave gaps at the beginning and
the end of a step. `_close_up` fills them with actions that are ready, as far as memory allows.

DualPipeV (DeepSeek, "DualPipe", 2024; DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024): the same
V, made for a runtime that computes a forward and a backward at the same time, so that the messages
of one hide behind the other. Here they run one after the other, and what remains is its order:
backwards are whole in the middle of a step and in halves at both ends. Without the overlap it gains
nothing over ZB-V: with one clock for each of F, I and W it idles as long, and with the times of
GPT-2 longer (8 ranks, 32 micro-batches: 5.3 % of a step; ZB-V 4.3 %, 1F1B 17.9 %), since whole
backwards leave nothing to fill gaps with. It holds 2n + 1 chunks, one more than ZB-V.

    DualPipeV, 2 ranks, 4 micro-batches
    rank 0: F0a F1a F2a F0b I0b W0b F1b F3a B1b F2b B0a B2b F3b B1a B3b I2a W2a I3a W3a
    rank 1: .   F0a F0b F1a F1b F2a B0b F2b B0a F3a B1b F3b B1a B2b B2a I3b I3a W3b W3a

Here too a stage adds its gradients in the order of the micro-batches, so the bits are the same as
under every other schedule.

Glossary: m micro-batches, n ranks, v chunks per rank, i micro-batch, r rank, s stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count, pairwise, permutations

from .schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    HELD_MORE,
    Action,
    Kind,
    Schedule,
    alternate,
    dependencies,
)

_PERIOD = 6  # clocks for F, I and W of a rank's two chunks
Clocks = tuple[int, ...]
Pattern = list[tuple[int, Action]]  # a rank's actions for micro-batch 0, with their clocks


def interleaved_1f1b(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B over `chunks` stages per rank, stage s on rank s mod n. One chunk: 1F1B.

    Micro-batches pass in groups of n. If n does not divide their number, the groups are fewer and
    larger, their sizes at most one apart: no rank waits longer, but it holds up to n - 1 more.
    """
    n, m = num_ranks, num_microbatches
    count = max(1, m // n)  # groups
    edges = [m * k // count for k in range(count + 1)]  # group k: from edges[k] to edges[k + 1]
    groups = [range(a, b) for a, b in pairwise(edges)]
    largest = max(map(len, groups))  # micro-batches
    ups = [(c, i) for group in groups for c in range(chunks) for i in group]  # (chunk, micro-batch)
    downs = [(c, i) for group in groups for c in reversed(range(chunks)) for i in group]
    schedule = []
    for r in range(n):
        # While a micro-batch travels to the last rank and its gradient comes back, a rank does one
        # forward per rank on the way. With one chunk this is not needed: it would only hold more.
        warm_up = (chunks - 1) * largest + (n - r - 1) * (2 if chunks > 1 else 1)
        forwards = [Action(FORWARD, c * n + r, i) for c, i in ups]
        backwards = [Action(BACKWARD, c * n + r, i) for c, i in downs]
        schedule.append(alternate(forwards, backwards, warm_up))
    return schedule


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """The least idle time, with the memory of 1F1B's first rank on every rank."""
    return _v_shaped(num_ranks, num_microbatches, (4, 2, 4, 2), (0, 0, 0), 2 * num_ranks)


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Half the memory of `zb_v`, with somewhat less idle time than 1F1B."""
    waits = (0, 0 if num_ranks % 2 else 3, min(1, num_ranks - 1))
    return _v_shaped(num_ranks, num_microbatches, (2, 1, 2, 1), waits, 2 * (num_ranks // 2 + 1))


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """A third of the memory of `zb_v`, with about the idle time of 1F1B."""
    waits = (0, 0 if num_ranks % 3 else 2, 0)
    return _v_shaped(num_ranks, num_microbatches, (1, 1, 1, 1), waits, 2 * ((num_ranks + 4) // 3))


def dual_pipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV. Fewer micro-batches than stages run in the order that they have among 2 n."""
    n, m = num_ranks, max(num_microbatches, 2 * num_ranks)
    schedule = []
    for r in range(n):
        after = n - 1 - r  # ranks: the larger, the later comes this rank's first gradient
        order = [
            *["Fa"] * (2 * after),
            *["Fa", "Fb"] * (r + 1),
            *["Ib", "W", "Fb"] * after,
            *["Fa", "Bb", "Fb", "Ba"] * (m - 2 * n + r + 1),  # the steady state
            *["Bb", "Fb", "Ba"] * after,
            *(("B" if k <= r else "I") + "ba"[k % 2] for k in range(2 * (r + 1))),
            *["W", "Ia"] * after,
            *["W"] * (r + 1),
        ]
        numbers = {kind + chunk: count() for kind in "FB" for chunk in "ab"}
        actions, waiting = [], deque[Action]()  # I whose W has not come yet
        for name in order:
            if name == "W":
                actions.append(waiting.popleft()._replace(kind=BACKWARD_WEIGHT))
                continue
            kind, chunk = Kind(name[0]), name[1]
            number = next(numbers["F" + chunk if kind is FORWARD else "B" + chunk])
            actions.append(Action(kind, r if chunk == "a" else 2 * n - 1 - r, number))
            if kind is BACKWARD_INPUT:
                waiting.append(actions[-1])
        schedule.append([action for action in actions if action.microbatch < num_microbatches])
    return schedule


def _v_shaped(
    num_ranks: int, num_microbatches: int, steps: Clocks, waits: Clocks, most: int
) -> Schedule:
    """The pattern repeated, sorted by clock, and closed up. A rank holds `most` chunks."""
    lists = []
    for pattern in _patterns(num_ranks, steps, waits):
        clocks = [  # micro-batch i: _PERIOD clocks after i - 1
            (clock + _PERIOD * i, action._replace(microbatch=i))
            for i in range(num_microbatches)
            for clock, action in pattern
        ]
        lists.append([action for _, action in sorted(clocks)])
    return _close_up(lists, 2 * num_ranks, most)


def _patterns(num_ranks: int, steps: Clocks, waits: Clocks) -> Iterator[Pattern]:
    """Per rank, the clocks of a micro-batch's actions. `steps`: clocks from rank to rank. `waits`:
    extra clocks before the last rank's second F, rank 0's first I, and the last rank's second I.
    They are the fewest with which no two actions of a rank fall on one clock of the period and,
    among those, it holds least."""
    n, (up, down, back_up, back_down) = num_ranks, steps
    turn = (n - 1) * up + 1 + waits[0]  # clock of the last rank's second F
    loss = turn + (n - 1) * down + 1 + waits[1]  # of rank 0's first I: it has the last stage
    end = loss + (n - 1) * back_up + 1 + waits[2]  # of the last rank's second I
    for r in range(n):
        first, second = r, 2 * n - 1 - r  # stages: on the way up, on the way down
        pattern = [
            (up * r, Action(FORWARD, first, 0)),
            (turn + down * (n - 1 - r), Action(FORWARD, second, 0)),
            (loss + back_up * r, Action(BACKWARD_INPUT, second, 0)),
            (end + back_down * (n - 1 - r), Action(BACKWARD_INPUT, first, 0)),
        ]
        free = {*range(_PERIOD)} - {clock % _PERIOD for clock, _ in pattern}  # for the two W
        # The weights' halves take the two remaining clocks, as early as possible.
        starts = [clock + 1 for clock, _ in pattern[2:]]  # after the two I, which W must follow
        ways = permutations(sorted(free))  # which W takes which clock
        each = ([s + (p - s) % _PERIOD for p, s in zip(way, starts, strict=True)] for way in ways)
        ends = min(each, key=sum)
        pattern += [
            (ends[0], Action(BACKWARD_WEIGHT, second, 0)),
            (ends[1], Action(BACKWARD_WEIGHT, first, 0)),
        ]
        yield pattern


def _close_up(lists: Schedule, num_stages: int, most: int) -> Schedule:
    """The same actions; at every clock each rank does the first action of its list that is ready.

    A rank without forwards left does W only if nothing else is ready. Before that, W keeps its
    place: I takes longer than F and W, so an I moved before a W, as early as clocks of one length
    allow, would wait for its gradient in every period. A forward may overtake other actions of the
    list if the rank, doing them later, never holds more than `most`. So the rest of the list
    always stays feasible.
    """
    rest = [list(actions) for actions in lists]  # by rank; so are the next two
    closed: Schedule = [[] for _ in lists]
    alive = [0] * len(lists)  # chunks of micro-batches held
    done: set[Action] = set()
    while any(rest):
        started = []  # in this clock: `done` changes only after it
        for r, actions in enumerate(rest):
            near = actions[: 2 * _PERIOD * len(lists)]  # two periods per rank: bounds the search
            late = all(action.kind is not FORWARD for action in actions)  # no forward is left
            k = _next(near, num_stages, done, alive[r], most, late)
            if k is not None:
                started.append((r, actions.pop(k)))
        if not started:
            raise ValueError(f"no rank can go on within {most} chunks: {[a[:3] for a in rest]}")
        for r, action in started:
            alive[r] += HELD_MORE[action.kind]
            closed[r].append(action)
            done.add(action)
    return closed


def _next(
    actions: list[Action], num_stages: int, done: set[Action], alive: int, most: int, late: bool
) -> int | None:
    """The index of the action to do now; None: wait. `late`: W only if nothing else is ready."""
    peak, weight = alive, None  # peak: the most held if the list is followed up to k
    for k, action in enumerate(actions):
        born = HELD_MORE[action.kind]
        if all(needed in done for needed in dependencies(action, num_stages)):
            if action.kind is BACKWARD_WEIGHT and late:  # only if nothing after it is ready
                weight = k if weight is None else weight
            elif peak + born <= most:  # done before the others, it adds to what they hold
                return k
        alive += born
        peak = max(peak, alive)
    return weight

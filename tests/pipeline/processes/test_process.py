"""Stages in threads and in processes, one per rank or several: the same bits under every schedule,
and what one process computes, by name."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeline.pipe import Pipe
from pipeline.processes.process import ProcessPipe
from pipeline.replicas import place_layers
from pipeline.schedules import catalogue
from pipeline.schedules import schedule as sched
from runtime.mesh import message_groups
from tests.pipeline.pipeline_models import (
    as_between_gpus,
    assert_close,
    assert_same_bits,
    batch,
    gradients,
    in_one_process,
    square_error,
    take_gradients,
    tower,
)
from tests.pipeline.schedules.drawn import ONE_EACH, drawn
from tests.ranks import Ranks
from tests.remote import on_ranks

SIZES = {1: (6,), 2: (2, 4), 3: (2, 1, 3), 4: (1, 2, 1, 2), 6: (1,) * 6}
EVERY = [(name, 1) for name in ONE_EACH] + [
    ("interleaved", 2), ("interleaved", 3), ("zbv", 2), ("vhalf", 2), ("vmin", 2),
    ("dualpipev", 2),
]  # fmt: skip
NUMBERS = (1, 3, 4)  # of micro-batches: fewer than ranks, a multiple of them, and neither
Found = dict[str, Any]


@on_ranks(2)
def test_layers_of_another_rank_take_no_memory(rank: int, _: int) -> None:
    with torch.device("meta"):
        layers = tower()
    with ProcessPipe(layers, [2, 4], initialize=lambda _, p: p.fill_(1)):
        for stage, part in enumerate((layers[:2], layers[2:])):
            assert {p.is_meta for p in part.parameters()} == {stage != rank}


def merged(per_rank: Sequence[dict[Any, Found]]) -> dict[Any, Found]:
    """Per case what all ranks found, by name; what several have must be the same bits."""
    result: dict[Any, Found] = {case: {} for case in per_rank[0]}
    assert result  # or nothing would be compared
    for found in per_rank:
        for case, values in found.items():
            for name, value in values.items():
                before: Any = result[case].setdefault(name, value)
                assert (before is value is None) or torch.equal(before, value), (case, name)
    return result


SHARED = "1.2.0.weight"  # of `model`: that of three layers


def schedules(n: int) -> list[tuple[str, int]]:
    return [(name, v) for name, v in EVERY if n * v in SIZES]


def model() -> nn.Sequential:
    """A tower with dropout in nested layers, whose number seeds what they draw; and with a weight
    that three layers share, on up to three ranks."""
    layers, shared = tower(), nn.Linear(8, 8, dtype=torch.float64)
    inner = nn.Sequential(shared, nn.Dropout(0.3))
    layers[1] = nn.Sequential(nn.Dropout(0.3), nn.Sequential(), inner)
    layers[4] = nn.Linear(8, 8, dtype=torch.float64)
    layers[2].weight = layers[4].weight = shared.weight
    layers[5] = nn.Linear(8, 3, dtype=torch.float64)
    return layers


def in_threads(n: int, name: str, v: int, m: int) -> tuple[Found, sched.Schedule]:
    """Loss, gradients and the next random number, and what the workers did. Nine examples:
    micro-batches of unequal sizes."""
    x, y = batch(9)
    same, sizes = model(), SIZES[n * v]
    ranks = catalogue.ranks_of_stages(name, n, v)
    placed, replicas = place_layers(list(same), sizes, [f"cpu:{r}" for r in ranks])
    ran: list[list[sched.Action]] = [[] for _ in range(n)]  # by rank

    def note(kind: str, s: int, i: int, *_: float) -> None:
        ran[ranks[s]].append(sched.Action(sched.Kind(kind), s, i))

    with Pipe(placed, recorder=note, replicas=replicas, sizes=sizes) as pipe:
        torch.manual_seed(5)
        loss = pipe.train_step(x, y, square_error, name, m, scale=0.125)
        found = take_gradients(same) | {"loss": loss, "next": torch.rand(())}
        return found, ran


@cache
def one_f_one_b(num_stages: int, m: int) -> Found:
    """The results of the same stages, each on a worker of its own."""
    return in_threads(num_stages, "1f1b", 1, m)[0]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_threads_give_the_bits_of_1f1b_and_do_what_the_schedule_says(n: int) -> None:
    for (name, v), m in product(schedules(n), NUMBERS):
        found, ran = in_threads(n, name, v, m)
        assert_same_bits(found, one_f_one_b(n * v, m))
        assert ran == catalogue.find(name, v)(n, m), (name, v, m)


def _on_ranks(rank: int, n: int, apart: bool) -> dict[Any, Found]:
    """By case, loss and gradients of this rank, and its next random number; the output of an
    evaluation."""
    x, y = batch(9)
    x = x if rank == 0 else x.to("meta")  # the others only look at the shape
    results: dict[Any, Found] = {}
    for name, v in EVERY[:5] if apart else schedules(n):
        ranks = catalogue.ranks_of_stages(name, n, v)
        target = y if rank == ranks[-1] else y.to("meta")  # nobody else reads it
        with ProcessPipe(model(), SIZES[n * v], ranks=ranks) as pipe:
            if apart:
                as_between_gpus(pipe, rank)
            for m in NUMBERS:
                seen = list[tuple[str, Any]]()

                def ready(parameters: Any, seen: Any = seen, own: Any = pipe) -> None:
                    whole = {*parameters}
                    names = own.named_parameters().items()
                    seen += [(name, deepcopy(p.grad)) for name, p in names if p in whole]

                torch.manual_seed(5)
                loss = pipe.train_step(x, target, square_error, name, m, 0.125, ready)
                found = gradients(pipe)
                assert len(seen) == len(found)  # each once, and whole, but for other ranks' part
                assert_same_bits(dict(seen), found)
                pipe.sum_tied(pipe.named_parameters())
                found = take_gradients(pipe)
                found |= {"next": torch.rand(())} | ({"loss": loss} if rank == ranks[-1] else {})
                assert loss == 0 or rank == ranks[-1]
                results[name, v, m] = found
            state = torch.get_rng_state()
            pipe.module.eval()
            output = pipe.forward(batch(9)[0])
            assert torch.equal(torch.get_rng_state(), state)  # draws nothing
            assert (output is not None) == (rank == ranks[-1])
            results[name, v, "eval"] = {} if output is None else {"y": output}
    return results


def check(found: dict[Any, Found], n: int) -> None:
    output = model().eval()(batch(9)[0])
    for (_, v, m), values in found.items():
        if m == "eval":
            assert_close(values, {"y": output})
            continue
        wanted = one_f_one_b(n * v, m)
        if v > 1:  # a rank first adds up what its own stages have for the weight of three layers
            wanted = dict(wanted)
            assert_close({"shared": values.pop(SHARED)}, {"shared": wanted.pop(SHARED)})
        assert_same_bits(values, wanted)


@pytest.mark.parametrize("apart", [False, True])
def test_two_processes_give_the_same_bits_and_draw_equally_often(ranks: Ranks, apart: bool) -> None:
    check(merged(ranks.run(_on_ranks, apart)), 2)


def test_three_processes_and_one_do_too(three_ranks: Ranks) -> None:
    check(merged(three_ranks.run(_on_ranks, False)), 3)
    check(merged([_on_ranks(0, 1, False)]), 1)  # no process group, nothing is sent


RECORDED = {  # on the first stage and on the second
    "1f1b": [
        "F0 send0 F1 send1 receive0 B0 F2 send2 receive1 B1 receive2 ready2 B2",
        "receive0 F0 B0 send0 receive1 F1 B1 send1 receive2 F2 ready2 ready2 ready2 B2 send2",
    ],
    "zb": [
        "F0 send0 F1 send1 receive0 I0 W0 F2 send2 receive1 I1 W1 receive2 I2 ready2 W2",
        "receive0 F0 I0 send0 receive1 F1 I1 send1 W0 receive2 F2 I2 send2 W1 "
        "ready2 ready2 ready2 W2",
    ],
}


@pytest.mark.parametrize("schedule", RECORDED)
@on_ranks(2)
def test_the_recorder_sees_what_a_rank_did_and_only_zero_bubble_sends_before_weights_are_done(
    rank: int, _: int, schedule: str
) -> None:
    """And what is ready, two parameters of a layer, while the last backward runs: replicas can
    exchange it meanwhile."""
    x, y = batch(8)
    events: list[Any] = []
    with ProcessPipe(tower(), [2, 4]) as pipe:
        pipe.recorder = lambda *event: events.append(event)

        def ready(parameters: Any) -> None:
            if parameters:
                events.append(("ready", rank, len(parameters)))

        pipe.train_step(x, y, square_error, schedule, 3, ready=ready)
        pipe.recorder = Mock(spec=["recording"], recording=False, side_effect=AssertionError)
        pipe.train_step(x, y, square_error)
    assert {event[1] for event in events} == {rank}
    times = [t for event in events for t in event[3:]]
    assert times == sorted(times)
    assert " ".join(f"{kind}{i}" for kind, _, i, *_ in events) == RECORDED[schedule][rank]


@on_ranks(2)
def test_memory_of_messages_does_not_grow_with_the_micro_batches(rank: int, _: int) -> None:
    """However bodies travel. The first stage holds two micro-batches; a third message of a kind is
    kept while one is waited for."""
    for apart in (False, True):
        with ProcessPipe(tower(), [2, 4]) as pipe:
            if apart:
                as_between_gpus(pipe, rank)
            for m in (4, 16):
                kept = {channel: _Counting() for channel in pipe._neighbours._channels}
                for channel, sends in kept.items():
                    channel.sends = sends
                pipe.train_step(*batch(16), square_error, "1f1b", m)
                assert max(sends.most for sends in kept.values()) == 3, (apart, m)


class _Counting(deque[Any]):
    """`most`: the most entries it had."""

    most = 0

    def append(self, entry: Any) -> None:
        super().append(entry)
        self.most = max(self.most, len(self))


def any_order(n: int, m: int, seed: int) -> sched.Schedule:
    return drawn(range(n), m, seed)


def _random_schedules(_: int, world_size: int) -> dict[Any, Found]:
    results = {}
    with ProcessPipe(tower(), SIZES[world_size]) as pipe:
        for seed in range(20):
            schedule = partial(any_order, seed=seed)
            loss = pipe.train_step(*batch(10), square_error, schedule, seed % 5 + 1)
            results[seed] = take_gradients(pipe) | ({"loss": loss} if loss else {})
    return results


def test_random_schedules_never_wait_for_each_other_in_a_circle(
    ranks: Ranks, three_ranks: Ranks
) -> None:
    expected = in_one_process(tower(), *batch(10))
    for world in (ranks, three_ranks):
        for found in merged(world.run(_random_schedules)).values():
            assert_close(found, expected)


@pytest.mark.parametrize("unused", [False, True])
@on_ranks(2)
def test_a_second_step_adds_to_the_gradients_of_the_first(
    _: int, _world_size: int, unused: bool
) -> None:
    """Of a weight on both stages, too, whose gradient is then a sum over the stages. If no stage
    uses it in the second step, the gradient of the first stays."""
    layers, shared = tower(), "2.weight"
    layers[4] = nn.Linear(8, 8, dtype=torch.float64)
    layers[4].weight = layers[2].weight
    layers[5] = nn.Linear(8, 3, dtype=torch.float64)
    with ProcessPipe(layers, [3, 3]) as pipe:
        pipe.train_step(*batch(8), square_error)
        want = {name: 2 * gradient for name, gradient in gradients(pipe).items()}
        if unused:
            want = {shared: want[shared] / 2}
            layers[2].forward = layers[4].forward = torch.sin
        pipe.train_step(*batch(8), square_error)
        assert_same_bits({name: gradients(pipe)[name] for name in want}, want)


@on_ranks(2)
def test_weights_on_stages_of_one_rank_or_of_two_begin_alike_and_have_one_gradient(
    rank: int, _: int
) -> None:
    """Each rank has drawn its own values: the shared weight's are those of its first rank."""
    x, _target = batch(8)
    torch.manual_seed(rank)
    layers = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)))
    layers[2].bias = layers[0].bias  # of one rank
    layers[3].weight = layers[0].weight  # of both
    with ProcessPipe(layers, [1, 1, 1, 1], ranks=[0, 1, 0, 1]) as pipe:
        pipe.train_step(x, x, square_error, "interleaved", 4)
        found: Any = [gradients(pipe), {n: p.detach() for n, p in pipe.named_parameters().items()}]
    both: list[Any] = [None, None]
    dist.all_gather_object(both, found)
    assert_same_bits({"0.weight": both[0][1]["0.weight"]}, {"0.weight": both[1][1]["0.weight"]})
    layers.load_state_dict(both[0][1] | both[1][1], strict=False)
    wanted = in_one_process(layers, x, x)
    assert_close(found[0], {name: wanted[name] for name in found[0]})


@on_ranks(3)
def test_pipes_of_some_ranks_are_made_one_after_another_and_hold_nothing(rank: int, _: int) -> None:
    """Of the last two. The first pipe opens files that stay, and sockets close a moment later."""
    group, wanted = dist.new_group([1, 2]), in_one_process(tower(), *batch(8))
    held = []
    for _again in range(3):
        messages = message_groups([1, 2], 20.0)  # all three ranks make them
        if rank == 0:
            continue
        with pytest.raises(ValueError, match=r"^a pipeline of 2 of 3 ranks: .* give messages="):
            ProcessPipe(tower(), [2, 4], group=group)
        with ProcessPipe(tower(), [2, 4], group=group, messages=messages) as pipe:
            loss = pipe.train_step(*batch(8), square_error, "1f1b", 4)
            found = take_gradients(pipe) | ({"loss": loss} if rank == 2 else {})
        assert_close(found, {name: wanted[name] for name in found})
        dist.barrier(group)
        gc.collect()
        held.append(len(list(Path("/proc/self/fd").iterdir())))
    if rank > 0:
        dist.destroy_process_group(group)
        assert held[2] <= held[1]

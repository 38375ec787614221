"""Stages in threads and in processes, one per rank or several: one bit pattern under every
schedule, and what one process computes, by name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline import catalogue
from pipeline import schedule as sched
from pipeline.partition import place
from pipeline.pipe import Pipe
from pipeline.process import ProcessPipe
from pipeline.schedule import Action, Kind
from tests.pipeline.pipeline_models import (
    assert_close,
    assert_same_bits,
    batch,
    cut,
    gradients,
    in_one_process,
    square_error,
    take_gradients,
    tower,
)
from tests.ranks import Ranks
from tests.recorder import Paused

SIZES = {1: (6,), 2: (2, 4), 3: (1, 2, 3), 4: (1, 2, 1, 2), 6: (1,) * 6}
EVERY = [(name, 1) for name in catalogue.ONE_EACH] + [
    ("interleaved", 2), ("interleaved", 3), ("zbv", 2), ("vhalf", 2), ("vmin", 2),
]  # fmt: skip
TRANSPORTS = [True, False]  # shared memory, or process groups
Found = dict[str, Any]


def merged(per_rank: Sequence[dict[Any, Found]]) -> dict[Any, Found]:
    """Per case what all ranks found, by name; what several have must be the same bits."""
    result: dict[Any, Found] = {case: {} for case in per_rank[0]}
    for found in per_rank:
        for case, values in found.items():
            for name, value in values.items():
                before: Any = result[case].setdefault(name, value)
                assert (before is value is None) or torch.equal(before, value), (case, name)
    return {case: dict(sorted(values.items())) for case, values in result.items()}


def ordered(found: Found) -> Found:
    return dict(sorted(found.items()))


def of(pipe: ProcessPipe) -> Found:
    return {name: p.grad for name, p in pipe.named_parameters().items()}


# Every schedule, number of micro-batches, cut and transport


def model() -> nn.Sequential:
    """A tower with dropout, also in nested layers, whose number seeds what they draw; and with a
    weight that its third layer and its last but one share."""
    layers = tower()
    layers[1] = nn.Sequential(nn.Dropout(0.3), nn.Sequential(), nn.Sequential(nn.Dropout(0.3)))
    layers[4] = nn.Linear(8, 8, dtype=torch.float64)
    layers[4].weight = layers[2].weight
    layers[5] = nn.Linear(8, 3, dtype=torch.float64)
    return layers


def cases(n: int) -> list[tuple[str, int, int]]:
    """Schedule, chunks, micro-batches: fewer than ranks, a multiple of them, and neither."""
    return [(name, v, m) for name, v in EVERY if n * v in SIZES for m in (1, 3, 4)]


def in_threads(n: int, name: str, v: int, m: int) -> tuple[Found, list[int]]:
    """Loss and gradients, and what the workers held. Nine examples: micro-batches of unequal
    sizes."""
    x, y = batch(9)
    same, sizes = model(), SIZES[n * v]
    ranks = catalogue.places(name, n, v)
    placed, replicas = place(list(same), sizes, [f"cpu:{r}" for r in ranks])
    with Pipe(placed, replicas=replicas, sizes=sizes) as pipe:
        torch.manual_seed(5)
        loss = pipe.train_step(x, y, square_error, name, m, scale=0.125)
        return ordered(take_gradients(same) | {"loss": loss}), pipe.peak_alive


@cache
def one_f_one_b(num_stages: int, m: int) -> Found:
    """Of the same stages, each on a worker of its own."""
    return in_threads(num_stages, "1f1b", 1, m)[0]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_threads_give_the_bits_of_1f1b_and_hold_what_the_schedule_says(n: int) -> None:
    for name, v, m in cases(n):
        found, held = in_threads(n, name, v, m)
        assert_same_bits(found, one_f_one_b(n * v, m))
        assert held == sched.peak_alive(catalogue.find(name, v)(n, m)), (name, v, m)


def _on_ranks(rank: int, n: int, share: bool) -> dict[Any, Found]:
    """By case, loss and gradients of this rank; and the output of an evaluation."""
    x, y = batch(9)
    x = x if rank == 0 else x.to("meta")  # the others only look at the shape
    results: dict[Any, Found] = {}
    every = dict.fromkeys((name, v) for name, v, _ in cases(n))  # in one order on all ranks
    for name, v in every if share else EVERY[:5]:
        ranks = catalogue.places(name, n, v)
        with ProcessPipe(
            model(), SIZES[n * v], ranks=ranks, share_memory=share, timeout=20
        ) as pipe:
            for m in (1, 3, 4):
                pipe.module.zero_grad()
                torch.manual_seed(5)
                loss = pipe.train_step(x, y, square_error, name, m, scale=0.125)
                results[name, v, m] = of(pipe) | {"loss": loss}
                held = sched.peak_alive(catalogue.find(name, v)(n, m))
                assert pipe.peak_alive == held[rank], (name, v, m)
            output = pipe.eval(batch(9)[0])
            assert pipe.layers.training
            assert (output is not None) == (rank == ranks[-1])
            results[name, v, "eval"] = {} if output is None else {"y": output}
    return results


def check(found: dict[Any, Found], n: int) -> None:
    output = model().eval()(batch(9)[0])
    assert found
    for (_, v, m), values in found.items():
        if m == "eval":
            assert_close(values, {"y": output})
        else:
            assert_same_bits(values, one_f_one_b(n * v, m))


@pytest.mark.parametrize("share", TRANSPORTS)
def test_two_processes_give_the_same_bits(ranks: Ranks, share: bool) -> None:
    check(merged(ranks.run(_on_ranks, share)), 2)


def test_three_processes_do_too(three_ranks: Ranks) -> None:
    check(merged(three_ranks.run(_on_ranks, True)), 3)


def test_stages_of_one_rank_alone() -> None:
    """No process group, nothing is sent."""
    check(merged([_on_ranks(0, 1, True)]), 1)


def _heads_and_bodies(rank: int, _: int) -> dict[Any, Found]:
    """As between GPUs, where bodies go through groups of their own: here those are gloo's too."""
    ways = [dist.new_group() for _ in range(2)]
    with ProcessPipe(model(), SIZES[2], share_memory=False, timeout=20) as pipe:
        link: Any = pipe._neighbours._links[1 - rank]
        link._bodies = ways if rank == 0 else ways[::-1]
        torch.manual_seed(5)
        loss = pipe.train_step(*batch(9), square_error, "1f1b", 4, scale=0.125)
        return {("1f1b", 1, 4): of(pipe) | {"loss": loss}}


def test_heads_and_bodies_may_go_apart(ranks: Ranks) -> None:
    check(merged(ranks.run(_heads_and_bodies)), 2)


# What passes between stages


class Fork(nn.Module):
    """To a tuple: a part that is used, one that is not, integers, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Any:
        return {"h": self.used(x), "rest": (self.unused(x), (x > 0).sum(1), None, "constant")}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3).double()

    def forward(self, value: Any) -> Tensor:
        aside, count, nothing, text = value["rest"]
        assert aside.requires_grad and count.dtype == torch.int64
        assert (nothing, text) == (None, "constant")
        return self.last(value["h"]) * count[:, None]


def fork_and_join() -> nn.Sequential:
    torch.manual_seed(0)
    join = Join()
    join.last.bias.requires_grad_(False)
    return nn.Sequential(Fork(), nn.Identity(), join)


def _forked(_: int, __: int, share: bool) -> dict[Any, Found]:
    results = {}
    for schedule in ("1f1b", "zb"):
        with ProcessPipe(fork_and_join(), [1, 2], share_memory=share, timeout=20) as pipe:
            loss = pipe.train_step(*batch(7), square_error, schedule, 3)
            results[schedule] = of(pipe) | {"loss": loss}
    return results


@pytest.mark.parametrize("share", TRANSPORTS)
def test_a_stage_hands_on_tuples_integers_and_what_nobody_needs(ranks: Ranks, share: bool) -> None:
    """What has no gradient in one process has none in threads and none in processes."""
    x, y = batch(7)
    expected = ordered(in_one_process(fork_and_join(), x, y))
    assert expected["0.unused.weight"] is expected["2.last.bias"] is None
    for found in merged(ranks.run(_forked, share)).values():
        assert_close(found, expected)
    same = fork_and_join()
    with Pipe(cut(same, (1, 2)), split_size=3) as pipe:
        square_error(pipe(x), y).backward()
        assert_close(ordered(take_gradients(same) | {"loss": expected["loss"]}), expected)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Messages of some bytes, and of some that no buffer has had room for."""
    return [batch(rows) for rows in (5, 300, 20, 900, 3)]


def _other_lengths(_: int, __: int) -> dict[Any, Found]:
    results = {}
    for share in TRANSPORTS:
        with ProcessPipe(tower(), SIZES[2], share_memory=share, timeout=20) as pipe:
            for x, y in batches():
                pipe.train_step(x, y, square_error, "1f1b", 3)
            results[share] = of(pipe)
    return results


def test_other_lengths_in_every_step(ranks: Ranks) -> None:
    plain = tower()
    for x, y in batches():
        square_error(plain(x), y).backward()
    for found in merged(ranks.run(_other_lengths)).values():
        assert_close(found, ordered(gradients(plain)))


# Order


def _recorded(rank: int, _: int, early: bool) -> str:
    x, y = batch(8)
    events: list[Any] = []
    with ProcessPipe(tower(), [2, 4], early_gradients=early, timeout=20) as pipe:
        pipe.recorder = lambda *event: events.append(event)
        pipe.train_step(x, y, square_error, "1f1b", 3)
        pipe.recorder = Paused()
        pipe.train_step(x, y, square_error)
    assert {event[1] for event in events} == {rank}
    times = [t for event in events for t in event[3:]]
    assert times == sorted(times)
    return " ".join(f"{kind}{i}" for kind, _, i, _, _ in events)


def test_the_recorder_sees_what_a_rank_did_and_gradients_leave_before_weights_are_done(
    ranks: Ranks,
) -> None:
    first = "F0 send0 F1 send1 receive0 B0 F2 send2 receive1 B1 receive2 B2 receive-1"
    halves = "receive0 F0 I0 send0 W0 receive1 F1 I1 send1 W1 receive2 F2 I2 send2 W2 send-1"
    whole = "receive0 F0 B0 send0 receive1 F1 B1 send1 receive2 F2 B2 send2 send-1"
    assert ranks.run(_recorded, True) == [first, halves]
    assert ranks.run(_recorded, False) == [first, whole]


def random_schedule(n: int, m: int, seed: int) -> sched.Schedule:
    """Any order that can run: also other orders of micro-batches on every stage."""
    chooser = random.Random(seed)
    while True:
        plan = []
        for s in range(n):
            order = chooser.sample(range(m), m) if chooser.random() < 0.5 else list(range(m))
            actions = [Action(Kind.FORWARD, s, i) for i in order]
            for i in order if chooser.random() < 0.7 else chooser.sample(order, m):
                after = actions.index(Action(Kind.FORWARD, s, i)) + 1
                place_at = chooser.randint(after, len(actions))
                actions.insert(place_at, Action(Kind.BACKWARD, s, i))
            plan.append(actions)
        try:
            sched.validate(plan, m)
        except ValueError:
            continue
        return plan


def _random_schedules(_: int, world_size: int) -> dict[Any, Found]:
    results = {}
    for share in TRANSPORTS:
        with ProcessPipe(tower(), SIZES[world_size], share_memory=share, timeout=20) as pipe:
            for seed in range(20):
                pipe.module.zero_grad()
                schedule = partial(random_schedule, seed=seed)
                loss = pipe.train_step(*batch(10), square_error, schedule, seed % 5 + 1)
                results[share, seed] = of(pipe) | {"loss": loss}
    return results


def test_random_schedules_never_wait_for_each_other_in_a_circle(
    ranks: Ranks, three_ranks: Ranks
) -> None:
    expected = ordered(in_one_process(tower(), *batch(10)))
    for world in (ranks, three_ranks):
        for found in merged(world.run(_random_schedules)).values():
            assert_close(found, expected)


def _one_pipe_after_another(rank: int, _: int) -> dict[Any, Found]:
    """Of the last two of three ranks, of which one is in a group more."""
    alone = dist.new_group([1], use_local_synchronization=True) if rank == 1 else None
    group = dist.new_group([1, 2])
    found: dict[Any, Found] = {k: {} for k in range(3)}
    for k in found if rank > 0 else ():
        with ProcessPipe(tower(), [2, 4], group=group, share_memory=False, timeout=20) as pipe:
            loss = pipe.train_step(*batch(8), square_error, "1f1b", 4)
            found[k] = of(pipe) | {"loss": loss}
    for made in (alone, group):
        if rank > 0 and made is not None:
            dist.destroy_process_group(made)
    return found


def test_pipes_of_some_ranks_are_made_one_after_another(three_ranks: Ranks) -> None:
    """Groups that were closed left their traces in the store; ranks are in several groups."""
    expected = ordered(in_one_process(tower(), *batch(8)))
    for found in merged(three_ranks.run(_one_pipe_after_another)).values():
        assert_close(found, expected)

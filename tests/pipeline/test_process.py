"""A rank per stage: what threads compute, to the bit, and what one process computes, by name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline import schedule as sched
from pipeline.catalogue import ONE_EACH
from pipeline.microbatch import MicroBatches
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
    square_error,
    tower,
)
from tests.pipeline.test_gpt2_pipeline import gpt2, plain_loss, sentences
from tests.ranks import Ranks
from tests.recorder import Paused
from training.model import gpt2_layers, loss_of_targets

NAMES = list(ONE_EACH)
TRANSPORTS = ["shared memory", "groups"]
SIZES = {1: (6,), 2: (2, 4), 3: (1, 2, 3)}
Found = dict[str, Any]


def _merge(per_rank: Sequence[dict[Any, Found]]) -> dict[Any, Found]:
    """Per case what all ranks found, by name; what several have must be the same bits."""
    merged: dict[Any, Found] = {case: {} for case in per_rank[0]}
    for found in per_rank:
        for case, values in found.items():
            for name, value in values.items():
                before: Any = merged[case].setdefault(name, value)
                assert (before is value is None) or torch.equal(before, value), (case, name)
    return merged


def _of(pipe: ProcessPipe) -> Found:
    return {name: p.grad for name, p in pipe.named_parameters().items()}


def _in_order(found: Found, names: Sequence[str]) -> Found:
    assert sorted(found) == sorted(names)
    return {name: found[name] for name in names}


# Every schedule, number of micro-batches, cut and transport


def _towers(rank: int, world_size: int, transport: str, ms: Sequence[int]) -> dict[Any, Found]:
    x, y = batch(9)
    x, y = (x if rank == 0 else x.to("meta")), y  # the others only look at the shape
    results = {}
    with ProcessPipe(
        tower(), SIZES[world_size], share_memory=transport == "shared memory", timeout=20
    ) as pipe:
        for name in NAMES:
            for m in ms:
                pipe.module.zero_grad()
                loss = pipe.train_step(x, y, square_error, name, m, scale=0.125)
                results[name, m] = _of(pipe) | {"loss": loss}
    return results


def _check_towers(found: dict[Any, Found], n: int) -> None:
    x, y = batch(9)
    plain = tower()
    expected = square_error(plain(x), y) * 0.125
    expected.backward()
    names = [*gradients(plain), "loss"]
    for (name, m), values in found.items():
        values = _in_order(values, names)
        assert_close(values, gradients(plain) | {"loss": expected.detach()})
        threads = tower()
        with Pipe(cut(threads, SIZES[n], [f"cpu:{s}" for s in range(n)])) as pipe:
            loss = pipe.train_step(x, y, square_error, name, m, scale=0.125)
        assert_same_bits(values, gradients(threads) | {"loss": loss})


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_ranks_compute_what_threads_and_one_process_compute(
    ranks: Ranks, transport: str
) -> None:
    """Nine examples: micro-batches of unequal sizes; a cut of unequal stages; the loss on both."""
    _check_towers(_merge(ranks.run(_towers, transport, (1, 2, 3, 4, 5))), 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_three_ranks_do_too(three_ranks: Ranks, transport: str) -> None:
    _check_towers(_merge(three_ranks.run(_towers, transport, (1, 2, 4))), 3)


def _heads_and_bodies(rank: int, _: int) -> dict[Any, Found]:
    """As between GPUs, where bodies go through groups of their own: here those are gloo's too."""
    x, y = batch(9)
    ways = [dist.new_group() for _ in range(2)]
    with ProcessPipe(tower(), SIZES[2], share_memory=False, timeout=20) as pipe:
        link: Any = pipe._neighbours._all[1 - rank].link
        link._together, link._bodies = False, ways if rank == 0 else ways[::-1]
        loss = pipe.train_step(x, y, square_error, "1f1b", 4, scale=0.125)
        return {("1f1b", 4): _of(pipe) | {"loss": loss}}


def test_heads_and_bodies_may_go_apart(ranks: Ranks) -> None:
    _check_towers(_merge(ranks.run(_heads_and_bodies)), 2)


# GPT-2: tuples, integers, tied weights, dropout


def _model(dropout: float) -> Any:
    """On the meta device, as every rank has it; `_initial` gives the values."""
    with torch.device("meta"):
        return gpt2(dropout)


def _initial(name: str, tensor: Tensor) -> None:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    tensor.normal_(0.0, 0.3, generator=generator)


def _real(dropout: float) -> Any:
    model = gpt2(dropout)
    with torch.no_grad():
        for name, p in model.named_parameters():
            _initial(name, p)
    return model


def _gpt2_pipe(dropout: float, sizes: Sequence[int], **options: Any) -> ProcessPipe:
    model = _model(dropout)
    layers = nn.Sequential(*gpt2_layers(model))
    return ProcessPipe(layers, sizes, model=model, initialize=_initial, timeout=20, **options)


def _gpt2_with_dropout(rank: int, _: int, sizes: Sequence[int]) -> dict[Any, Found]:
    ids, labels, weights = sentences()
    results = {}
    with _gpt2_pipe(0.2, sizes) as pipe:
        pipe.train()
        for name in NAMES:
            pipe.module.zero_grad()
            torch.manual_seed(5)
            losses = [
                pipe.train_step(
                    (ids, weights), (labels, weights), loss_of_targets, name, 4, 1 / weights.sum()
                )
                for _ in range(2)
            ]
            results[name] = _of(pipe) | {"losses": torch.stack(losses)}
            results[name] = {k: v.clone() for k, v in results[name].items()}
    assert torch.initial_seed() == 5
    del rank
    return results


@pytest.mark.parametrize("sizes", [[1, 7], [7, 1], [1, 3, 4]])
def test_gpt2_with_dropout_and_tied_weights_gives_the_bits_of_threads(
    ranks: Ranks, three_ranks: Ranks, sizes: list[int]
) -> None:
    """Two steps, so also the seed of the second. `wte` is on two ranks, with the same gradient."""
    world = ranks if len(sizes) == 2 else three_ranks
    found = _merge(world.run(_gpt2_with_dropout, sizes))
    ids, labels, weights = sentences()
    for name in NAMES:
        model = _real(0.2).train()
        module, _ = place(gpt2_layers(model), sizes, [f"cpu:{s}" for s in range(len(sizes))])
        torch.manual_seed(5)
        with Pipe(module) as pipe:
            losses = [
                pipe.train_step(
                    (ids, weights), (labels, weights), loss_of_targets, name, 4, 1 / weights.sum()
                )
                for _ in range(2)
            ]
        expected = gradients(model) | {"losses": torch.stack(losses)}
        assert_same_bits(_in_order(found[name], list(expected)), expected)


def _who_holds_what(rank: int, _: int) -> list[str]:
    model = _model(0.0)
    layers = nn.Sequential(*gpt2_layers(model))
    with ProcessPipe(layers, [3, 5], model=model, initialize=_initial) as pipe:
        for name, p in pipe.named_parameters().items():
            expected = torch.empty(p.shape, dtype=p.dtype)
            _initial(name, expected)
            assert torch.equal(p.detach(), expected), name
    real = [name for name, p in layers.named_parameters() if not p.is_meta]
    del rank
    return sorted({name.split(".")[0] for name in real})


def test_a_rank_gives_memory_to_its_own_stage_only(ranks: Ranks) -> None:
    assert ranks.run(_who_holds_what) == [["0", "1", "2"], ["3", "4", "5", "6", "7"]]


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


def _fork_and_join() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Fork(), nn.Identity(), Join())


def _forked(_: int, __: int, transport: str) -> dict[Any, Found]:
    x, y = batch(7)
    share = transport == "shared memory"
    results = {}
    for schedule in ("1f1b", "zb"):
        with ProcessPipe(_fork_and_join(), [1, 2], share_memory=share, timeout=20) as pipe:
            pipe.train_step(x, y, square_error, schedule, 3)
            results[schedule] = _of(pipe)
    return results


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stage_hands_on_tuples_integers_and_what_nobody_needs(
    ranks: Ranks, transport: str
) -> None:
    """What has no gradient in one process has none here."""
    x, y = batch(7)
    for found in _merge(ranks.run(_forked, transport)).values():
        model = _fork_and_join()
        with Pipe(cut(model, (1, 2))) as pipe:
            pipe.train_step(x, y, square_error, "1f1b", 3)
        expected = gradients(model)
        assert [name for name, g in expected.items() if g is None] == [
            "0.unused.weight", "0.unused.bias",
        ]  # fmt: skip
        assert_close(_in_order(found, list(expected)), expected)


def _lengths(step: int) -> tuple[MicroBatches, MicroBatches, Tensor]:
    """Sentences of other numbers and lengths in every step, and in each micro-batch."""
    chooser = random.Random(step)
    generator = torch.Generator().manual_seed(step)
    inputs, targets, total = MicroBatches(), MicroBatches(), torch.zeros((), dtype=torch.float64)
    for _ in range(3):
        B, T = chooser.randint(1, 5), chooser.randint(2, 12)
        ids = torch.randint(40, (B, T + 1), generator=generator)
        weights = torch.rand(B, T, generator=generator, dtype=torch.float64)
        inputs.append((ids[:, :-1], weights))
        targets.append((ids[:, 1:], weights))
        total += weights.sum()
    return inputs, targets, total


def _many_lengths(_: int, __: int, share: bool) -> dict[Any, Found]:
    results = {}
    with _gpt2_pipe(0.0, [3, 5], share_memory=share) as pipe:
        for step in range(12):
            inputs, targets, total = _lengths(step)
            pipe.train_step(inputs, targets, loss_of_targets, "1f1b", scale=1 / total)
        results["all"] = _of(pipe)
    return results


@pytest.mark.parametrize("share", [False, True])
def test_other_lengths_in_every_step(ranks: Ranks, share: bool) -> None:
    """36 micro-batches of about 30 shapes."""
    model = _real(0.0)
    for step in range(12):
        inputs, targets, total = _lengths(step)
        for (ids, weights), (labels, _) in zip(inputs, targets, strict=True):
            (plain_loss(model, ids, labels, weights) * weights.sum() / total).backward()
    found = _merge(ranks.run(_many_lengths, share))["all"]
    assert_close(_in_order(found, list(gradients(model))), gradients(model))


# Evaluation


def _evaluated(_: int, __: int) -> list[Any]:
    x, y = batch(9)
    layers = nn.Sequential(*tower(), nn.Dropout(0.5))
    with ProcessPipe(layers, [2, 5], timeout=20) as pipe:
        loss, output = pipe.eval(x, y, square_error, 4, scale=0.5)
        nothing, same = pipe.eval(x, num_microbatches=20)
        assert nothing is None and (same is None) == (output is None)
        assert all(layer.training for layer in layers)
        assert {p.grad for p in pipe.parameters()} == {None}
        for _step in range(5):  # the first rank runs ahead of the last, as far as it is let
            pipe.eval(x, y, square_error, 9)
        return [loss, output, same]


def test_evaluation_gives_loss_and_output(ranks: Ranks) -> None:
    x, y = batch(9)
    with torch.no_grad():
        output = tower()(x)
    first, last = ranks.run(_evaluated)
    assert first[1:] == [None, None]
    for found in (last[1], last[2]):
        assert_close({"output": found}, {"output": output})
    for found in (first[0], last[0]):
        assert_close({"loss": found}, {"loss": square_error(output, y) * 0.5})


# Order


def _recorded(rank: int, _: int, early: bool) -> list[str]:
    x, y = batch(8)
    events: list[tuple[str, int, int, float, float]] = []
    with ProcessPipe(
        tower(), [2, 4], recorder=lambda *event: events.append(event), early_gradients=early,
        timeout=20,
    ) as pipe:  # fmt: skip
        pipe.train_step(x, y, square_error, "1f1b", 3)
        assert pipe.peak_alive == [2, 1][rank]
        pipe.recorder = Paused()
        pipe.train_step(x, y, square_error)
    assert {event[1] for event in events} == {rank}
    times = [t for event in events for t in event[3:]]
    assert times == sorted(times)
    return [f"{kind} {i}" for kind, _, i, _, _ in events]


def test_the_recorder_sees_what_a_rank_did_and_gradients_leave_before_weights_are_done(
    ranks: Ranks,
) -> None:
    first = [
        "F 0", "send 0", "F 1", "send 1", "receive 0", "B 0", "F 2", "send 2",
        "receive 1", "B 1", "receive 2", "B 2", "receive -1",
    ]  # fmt: skip
    assert ranks.run(_recorded, True) == [
        first,
        [
            "receive 0", "F 0", "I 0", "send 0", "W 0", "receive 1", "F 1", "I 1", "send 1", "W 1",
            "receive 2", "F 2", "I 2", "send 2", "W 2", "send -1",
        ],
    ]  # fmt: skip
    assert ranks.run(_recorded, False) == [
        first,
        [
            "receive 0", "F 0", "B 0", "send 0", "receive 1", "F 1", "B 1", "send 1",
            "receive 2", "F 2", "B 2", "send 2", "send -1",
        ],
    ]  # fmt: skip


def _random_schedule(n: int, m: int, seed: int) -> sched.Schedule:
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


def _random_schedules(_: int, world_size: int, transport: str) -> list[Found]:
    x, y = batch(10)
    results = []
    share = transport == "shared memory"
    with ProcessPipe(tower(), SIZES[world_size], share_memory=share, timeout=20) as pipe:
        for seed in range(40):
            pipe.module.zero_grad()
            schedule = partial(_random_schedule, seed=seed)
            pipe.train_step(x, y, square_error, schedule, seed % 5 + 1)
            results.append(_of(pipe))
    return results


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_schedules_never_wait_for_each_other_in_a_circle(
    ranks: Ranks, three_ranks: Ranks, transport: str
) -> None:
    x, y = batch(10)
    plain = tower()
    square_error(plain(x), y).backward()
    for world in (ranks, three_ranks):
        per_rank = world.run(_random_schedules, transport)
        for step in zip(*per_rank, strict=True):
            found = {name: g for values in step for name, g in values.items()}
            assert_close(_in_order(found, list(gradients(plain))), gradients(plain))


def _nested() -> nn.Sequential:
    """Layers that draw, before, inside and after others in Sequentials."""
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Sequential(nn.Dropout(0.3)))
    layers = (nn.Dropout(0.3), inner, nn.Sequential(), nn.Dropout(0.3), nn.Linear(4, 3))
    return nn.Sequential(*layers, nn.Sequential(nn.Dropout(0.3))).double()


def _nested_layers(_: int, __: int, sizes: Sequence[int], by_layer: bool) -> dict[Any, Found]:
    x, y = batch(8)
    with ProcessPipe(_nested(), sizes, by_layer=by_layer, timeout=20) as pipe:
        torch.manual_seed(5)
        loss = pipe.train_step(x, y, square_error, "1f1b", 4)
        return {"all": _of(pipe) | {"loss": loss}}


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("sizes", [[2, 4], [1, 1, 4], [2, 1, 3]])
def test_layers_inside_sequentials_draw_as_under_threads(
    ranks: Ranks, three_ranks: Ranks, sizes: list[int], by_layer: bool
) -> None:
    """The number of a layer seeds what it draws, so both count the layers alike. A stage may be an
    empty Sequential."""
    world = ranks if len(sizes) == 2 else three_ranks
    found = _merge(world.run(_nested_layers, sizes, by_layer))["all"]
    model = _nested()
    with Pipe(cut(model, (2, 4))) as pipe:
        torch.manual_seed(5)
        loss = pipe.train_step(*batch(8), square_error, "1f1b", 4)
    expected = gradients(model) | {"loss": loss}
    assert_same_bits(_in_order(found, list(expected)), expected)


def _one_pipe_after_another(rank: int, _: int) -> list[Found]:
    """Of the last two of three ranks, of which one is in a group more."""
    alone = dist.new_group([1], use_local_synchronization=True) if rank == 1 else None
    group = dist.new_group([1, 2])
    found = []
    for _ in range(3 if rank > 0 else 0):
        with ProcessPipe(tower(), [2, 4], group=group, share_memory=False, timeout=20) as pipe:
            pipe.train_step(*batch(8), square_error, "1f1b", 4)
            found.append(_of(pipe))
    for made in (alone, group):
        if rank > 0 and made is not None:
            dist.destroy_process_group(made)
    return found


def test_pipes_of_some_ranks_are_made_one_after_another(three_ranks: Ranks) -> None:
    """Groups that were closed left their traces in the store; ranks are in several groups."""
    _, first, second = three_ranks.run(_one_pipe_after_another)
    assert len(first) == len(second) == 3
    plain = tower()
    x, y = batch(8)
    square_error(plain(x), y).backward()
    for one, other in zip(first, second, strict=True):
        assert_close(one | other, gradients(plain))

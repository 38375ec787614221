"""A Pipe on devices, one or two, and mixed with the CPU, computes what its Sequential computes on
the CPU. (On the device without hardware: tests/device.)"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.pipe import Pipe
from pipeline.replicas import place_layers
from runtime.graph import memory_of
from tests.data_parallel.sharded_models import tied
from tests.device.seen import watch
from tests.odd_layers import ON_DEVICES
from tests.pipeline.pipeline_models import (
    STEPS,
    Step,
    assert_trains_as_alone,
    batch,
    square_error,
    tower,
)
from tests.pipeline.test_plain_programs import trains_as_in_plain_pytorch
from tests.remote import on_device

PLACES = (
    ("cuda:0",), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0", "cuda:1"), ("cpu:0", "cuda:0"),
    ("cuda:1", "cpu:0"), ("cpu:0", "cuda:0", "cpu:1"),
)  # fmt: skip


def split(model: nn.Sequential, devices: tuple[str, ...]) -> tuple[nn.Sequential, Any]:
    """As many layers on each device; a tied parameter has a copy on each other device."""
    return place_layers([*model], [len(model) // len(devices)] * len(devices), devices)


@pytest.mark.parametrize("devices", PLACES, ids="-".join)
@on_device
def test_loss_and_gradients_are_those_of_the_sequential(devices: tuple[str, ...]) -> None:
    """Also of the input, on whichever device it is; and the output is on the last one."""
    for home in ("cpu", devices[0]):
        loss = assert_trains_as_alone(lambda tower: Pipe(split(tower, devices)[0], 3), home)
        assert loss.device == memory_of(torch.device(devices[-1]))


@on_device
def test_a_copy_of_a_tied_weight_follows_it_and_belongs_to_no_stage() -> None:
    """In a clock on its own, too, after the original has changed. An optimizer would update the
    copy apart from it."""
    model = tied()
    ids = torch.arange(6).view(2, 3)
    layers, replicas = split(model, ("cuda:0", "cuda:1"))
    ((copy, original),) = replicas.items()
    with Pipe(layers, replicas=replicas) as pipe, torch.no_grad():
        original += 1
        pipe.compute([ids.to("cuda:0")], [(0, 0)])
        assert copy.cpu().equal(original.cpu())
        owned = [p for parameters in pipe.stage_parameters() for p in parameters]
    assert set(owned) == {*model.parameters()} - {copy} and len(owned) == len(set(owned))


@pytest.mark.parametrize("name", ["one tensor twice, in place", "what nobody needs", *ON_DEVICES])
@on_device
def test_odd_layers_train_and_what_they_hand_on_is_copied(name: str) -> None:
    """One tensor at two places stays one, which gets both gradients. What layers compute again,
    they do inside of backward."""
    trains_as_in_plain_pytorch(name, ("cuda:0", "cuda:1"))


@pytest.mark.parametrize("step", STEPS)
@on_device
def test_what_is_handed_over_is_copied_on_streams_of_its_own(step: Step) -> None:
    """In both directions; and all that computes is on the caller's streams, the backward too."""
    x, y = batch(8)
    callers = [torch.cuda.Stream(0), torch.cuda.Stream(1)]
    layers, _ = split(tower(), ("cuda:0", "cuda:1"))
    x, y = x.to("cuda:0"), y.to("cuda:1")
    with (
        Pipe(layers, split_size=2) as pipe, torch.cuda.stream(callers[0]),
        torch.cuda.stream(callers[1]), watch() as seen,
    ):  # fmt: skip
        step(pipe, x, y)
    ours = {k: callers[k].stream_id for k in (0, 1)}
    moved = Counter((c.source, c.target, *c.streams) for c in seen.copies)
    (up, forth), (down, back) = sorted(moved.items())
    assert (up[:2], forth) == (("cuda:0", "cuda:1"), 4)  # micro-batches
    assert (down[:2], back) == (("cuda:1", "cuda:0"), 4)
    assert len({(0, up[2]), (1, up[3]), (1, down[2]), (0, down[3]), *ours.items()}) == 6
    assert set(seen.streams) == set(ours.items())
    assert seen.waits == []


@on_device
def test_a_backward_called_on_other_streams_computes_on_the_forwards() -> None:
    """And run_on_stages on those of its caller; nothing of it stays in the workers."""
    x, y = batch(4)
    layers, _ = split(tower(), ("cuda:0", "cuda:1"))
    side, other = ([torch.cuda.Stream(k) for k in (0, 1)] for _ in range(2))

    def streams(_: int) -> list[int]:
        return [torch.cuda.current_stream(k).stream_id for k in (0, 1)]

    with Pipe(layers, split_size=2) as pipe:
        with torch.cuda.stream(side[0]), torch.cuda.stream(side[1]):
            output = pipe(x)
            loss = square_error(output, y)
        with torch.cuda.stream(other[0]), torch.cuda.stream(other[1]), watch() as seen:
            loss.backward()
            assert pipe.run_on_stages(streams) == [[s.stream_id for s in other]] * 2
        assert pipe.run_on_stages(streams) == [[0, 0]] * 2
    by_stream = Counter(k.stream for k in seen.kernels if "mm" in k.operator)  # of the layers
    # two micro-batches; two layers each, of which the first has no gradient of its input
    assert by_stream == {side[0].stream_id: 2 * 3, side[1].stream_id: 2 * 4}


@on_device
def test_draws_are_of_the_seed_and_leave_the_generators_of_devices_as_they_were() -> None:
    torch.manual_seed(3)
    torch.cuda.manual_seed_all(3)
    before = [torch.cuda.get_rng_state(k) for k in (0, 1)]
    layers, _ = split(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), ("cuda:0", "cuda:1"))
    outputs = []
    with Pipe(layers, split_size=2) as pipe:
        for seed in (5, 5, 6):
            torch.manual_seed(seed)
            torch.cuda.set_rng_state(before[0], 0)
            torch.cuda.set_rng_state(before[1], 1)
            outputs.append(pipe(torch.ones(4, 64, device="cuda:0")).cpu())
            assert [torch.cuda.get_rng_state(k).tolist() for k in (0, 1)] == [
                state.tolist() for state in before
            ]
    assert outputs[0].equal(outputs[1]) and not outputs[0].equal(outputs[2])

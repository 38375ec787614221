"""Forward again in backward: the bits of forward once, in less memory; or a reason why not."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data_parallel.fsdp import FullyShardedDataParallel
from pipeline.pipe import Pipe
from pipeline.stage import Stage
from runtime.recompute import SameDraws, segments, unchanged
from tests.pipeline.pipeline_models import (
    Call,
    assert_same_bits,
    batch,
    cut,
    square_error,
    take_gradients,
)
from tests.ranks import Ranks
from training.replicated import Recomputed

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("mode", "found"),
    [
        ("always", [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]),
        ("sqrt", [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]),
        ("layers", [[0], [1], [2], [3], [4], [5], [6], [7], [8], [9]]),
    ],
)
def test_segments(mode: str, found: list[list[int]]) -> None:
    assert segments(range(10), mode) == found


def test_a_mode_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="recompute='often': one of never, always, except_last"):
        Pipe(cut(layers()), recompute="often").train_step(*batch(), square_error)


def layers(runs: list[int] | None = None) -> nn.Sequential:
    """Six layers that draw, write to their input, and have a product that autocast casts. ``runs``
    gets the number of those that ran."""
    torch.manual_seed(0)

    def noted(k: int, layer: nn.Module) -> nn.Module:
        if runs is not None:
            layer.register_forward_pre_hook(lambda *_: runs.append(k))
        return layer

    every: list[nn.Module] = [
        nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.4), nn.Dropout(0.3, inplace=True),
        Call(lambda x: F.conv1d(x[:, None], kernel)[:, 0].float()), nn.Linear(6, 3),
    ]  # fmt: skip
    kernel = nn.Parameter(torch.randn(1, 1, 3))
    every[4].kernel = kernel
    return nn.Sequential(*(noted(k, layer) for k, layer in enumerate(every)))


def floats() -> tuple[Tensor, Tensor]:
    x, y = batch()
    return x.float(), y.float()


def step(schedule: str, mode: str, bf16: bool = False) -> dict[str, Any]:
    """Loss and gradients by name."""
    model, (x, y) = layers(), floats()
    with Pipe(cut(model, (3, 3)), 2, recompute=mode) as pipe:
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            if schedule == "forward and backward":
                loss = square_error(pipe(x), y)
                loss.backward(retain_graph=True)
                loss.backward()
            else:
                loss = pipe.train_step(x, y, square_error, schedule)
    return {**take_gradients(model), "loss": loss.detach()}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("mode", ["always", "except_last", "sqrt", "layers"])
def test_stages_have_the_same_bits(mode: str, bf16: bool) -> None:
    for schedule in ("forward and backward", "gpipe", "1f1b", "zb"):
        found = step(schedule, mode, bf16)
        assert all(g is not None for g in found.values())
        assert_same_bits(found, step(schedule, "never", bf16))


# Two stages of three layers; sqrt makes two segments of each: 0 | 1 2, 3 | 4 5.
@pytest.mark.parametrize(
    ("mode", "again"),
    [
        ("never", [0, 0, 0, 0, 0, 0]),
        ("always", [3, 3, 3, 3, 3, 3]),
        ("except_last", [2, 2, 2, 2, 2, 2]),
        ("sqrt", [3, 3, 3, 3, 3, 3]),
        ("layers", [3, 3, 3, 3, 3, 0]),
    ],
)
def test_how_often_a_layer_runs(mode: str, again: list[int]) -> None:
    runs: list[int] = []
    with Pipe(cut(layers(runs), (3, 3)), recompute=mode) as pipe:
        pipe.train_step(*floats(), square_error, "gpipe", 3)
    assert [runs.count(k) - 3 for k in range(6)] == again


def test_what_is_forgotten_is_freed() -> None:
    """Of three micro-batches, between forward and backward."""
    held: dict[str, list[int]] = {}
    for mode in ("never", "always", "except_last", "sqrt"):
        seen: list[weakref.ref[Tensor]] = []

        def note(x: Tensor, seen: list[weakref.ref[Tensor]] = seen) -> Tensor:
            y = x.sin()  # autograd keeps x for it
            seen.append(weakref.ref(x.untyped_storage()))  # type: ignore[arg-type]
            return y

        model = nn.Sequential(nn.Linear(4, 4), *(Call(note) for _ in range(3))).double()
        stage = Stage(0, model, CPU, recompute=mode)
        stage.num_microbatches = 3
        for i in range(3):
            stage.forward(i, batch(4)[0])
        held[mode] = [sum(ref() is not None for ref in seen[k::3]) for k in range(3)]
        # Not the whole stage at once either: one segment after the other.
        stage.backward(0, [torch.ones(4, 4, dtype=torch.float64)])
        assert stage.alive == 2
    assert held["never"] == [3, 3, 3]
    assert held["always"] == [0, 0, 0]
    assert held["except_last"] == [1, 1, 1]
    assert held["sqrt"] == [0, 0, 0]


def test_it_is_done_while_the_gradient_is_on_its_way() -> None:
    events: list[str] = []
    with Pipe(cut(layers(), (3, 3)), recompute="always") as pipe:
        pipe.recorder = lambda kind, s, i, *_: events.append(f"{kind}{i}") if s == 0 else None
        pipe.train_step(*floats(), square_error, "gpipe", 2)
    assert events == ["F0", "F1", "R0", "B0", "R1", "B1"]


@pytest.mark.parametrize(("number", "last"), [(2, 3), (6, 5)])
def test_a_whole_model_has_the_same_bits(number: int, last: int) -> None:
    """All but the last segment run twice."""
    found, (x, y) = [], floats()
    for recompute in (False, True):
        runs: list[int] = []
        model = layers(runs)
        for layer in (model[1], model[3]):
            layer.inplace = False  # type: ignore[assignment]
        net = Recomputed(list(model), number) if recompute else model
        assert list(net.state_dict()) == list(model.state_dict())
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16):
            loss = square_error(net(x), y)
        torch.rand(3)  # others draw meanwhile
        loss.backward()
        found.append({**take_gradients(model), "loss": loss.detach(), "draws": torch.rand(3)})
        assert [runs.count(k) for k in range(6)] == [1 + (recompute and k < last) for k in range(6)]
    assert_same_bits(found[1], found[0])


def test_the_same_numbers_are_drawn_and_others_go_on() -> None:
    draws = SameDraws(CPU)
    with draws:
        first = torch.rand(2)
    torch.rand(5)
    state = torch.get_rng_state()
    for _ in range(2):
        with draws:
            assert torch.equal(torch.rand(2), first)
        assert torch.equal(torch.get_rng_state(), state)


SAYS = r"layer 1 \(BatchNorm1d\) changes its buffer running_mean in forward"


def test_a_layer_with_state_is_refused_in_stages() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    with Pipe(cut(model, (2, 1)), 4, recompute="always") as pipe:
        with pytest.raises(ValueError, match=SAYS):
            pipe.train_step(*batch(), square_error)
        pipe.eval()
        pipe.train_step(*batch(), square_error)


def _shards_of_a_batch_norm(_: int, __: int) -> str:
    model = [nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)]
    fsdp = FullyShardedDataParallel(model, torch.optim.SGD, recompute=True)
    with pytest.raises(ValueError, match="changes its buffer") as error:
        fsdp.forward(batch()[0].float())
    return str(error.value)


def test_a_layer_with_state_is_refused_in_shards(ranks: Ranks) -> None:
    found = ranks.run(_shards_of_a_batch_norm)
    assert [text.startswith(SAYS.replace("\\", "")) for text in found] == [True, True]


def test_an_input_that_was_written_to_is_not_computed_from() -> None:
    with Pipe(cut(layers(), (3, 3)), recompute="always") as pipe:
        x = batch()[0].float()
        output = pipe(x)
        x.zero_()
        with pytest.raises(RuntimeError, match="the input was written to between forward and"):
            output.sum().backward()


def test_backward_inside_autocast_computes_again_without() -> None:
    """As forward did, outside of it."""
    found = []
    for mode in ("never", "always"):
        net = layers().eval()
        with Pipe(cut(net, (3, 3)), recompute=mode) as pipe:
            loss = pipe(batch()[0].float()).sum()
            with torch.autocast("cpu", torch.bfloat16):
                loss.backward()
        found.append(take_gradients(net))
    assert_same_bits(*found)


def test_a_buffer_that_holds_nan_is_not_changed() -> None:
    layer = nn.Linear(3, 3)
    layer.register_buffer("nothing", torch.tensor([float("nan")]))
    with unchanged(layer, "layer 0"):
        layer(torch.ones(2, 3))

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
from runtime.recompute import segments
from tests.pipeline.pipeline_models import (
    STEPS,
    Call,
    assert_same_bits,
    batch,
    cut,
    gpipe,
    square_error,
    take_gradients,
)
from tests.ranks import Ranks
from training.replicated import Recomputed

CPU = torch.device("cpu")
MODES = ["always", "except_last", "sqrt", "layers"]


def test_segments() -> None:
    assert segments(range(10), "always") == [[*range(10)]]
    assert segments(range(10), "sqrt") == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert segments(range(3), "layers") == [[0], [1], [2]]
    with pytest.raises(ValueError, match="recompute='often': one of never, always, except_last"):
        Pipe(cut(layers()), recompute="often").train_step(*batch(), square_error)


def layers(runs: list[int] | None = None) -> nn.Sequential:
    """Six layers that draw, write to their input, and have a product that autocast casts. ``runs``
    gets the number of those that ran."""
    torch.manual_seed(0)
    every: list[nn.Module] = [
        nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.4), nn.Dropout(0.3, inplace=True),
        Call(lambda x: F.conv1d(x[:, None], kernel)[:, 0].float()), nn.Linear(6, 3),
    ]  # fmt: skip
    kernel = nn.Parameter(torch.randn(1, 1, 3))
    every[4].kernel = kernel
    for k, layer in enumerate(every if runs is not None else ()):
        layer.register_forward_pre_hook(lambda *_, k=k: runs.append(k))  # type: ignore[union-attr]
    return nn.Sequential(*every)


def floats() -> tuple[Tensor, Tensor]:
    x, y = batch()
    return x.float(), y.float()


def bf16(enabled: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if enabled else nullcontext()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_stages_have_the_same_bits(mode: str, autocast: bool) -> None:
    for step in [*STEPS, gpipe]:
        found = []
        for recompute in (mode, "never"):
            model = layers()
            with Pipe(cut(model, (3, 3)), 2, recompute=recompute) as pipe:
                torch.manual_seed(5)
                with bf16(autocast):
                    loss = step(pipe, *floats())
            found.append({**take_gradients(model), "loss": loss})
        assert all(g is not None for g in found[0].values())
        assert_same_bits(*found)


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
    """In the first stage, while the gradient is on its way."""
    runs: list[int] = []
    events: list[str] = []
    with Pipe(cut(layers(runs), (3, 3)), 3, recompute=mode) as pipe:
        pipe.recorder = lambda kind, s, i, *_: events.append(f"{kind}{i}") if s == 0 else None
        gpipe(pipe, *floats())
    assert [runs.count(k) - 3 for k in range(6)] == again
    if mode == "always":
        assert events == ["F0", "F1", "F2", "R0", "B0", "R1", "B1", "R2", "B2"]


@pytest.mark.parametrize(
    ("mode", "each"), [("never", 3), ("always", 0), ("except_last", 1), ("sqrt", 0)]
)
def test_what_is_forgotten_is_freed(mode: str, each: int) -> None:
    """Of three micro-batches, between forward and backward, each of three layers holds so many."""
    seen: list[Any] = []

    def note(x: Tensor) -> Tensor:
        y = x.sin()  # autograd keeps x for it
        seen.append(weakref.ref(x.untyped_storage()))
        return y

    model = nn.Sequential(nn.Linear(4, 4), *(Call(note) for _ in range(3))).double()
    stage = Stage(0, model, CPU, recompute=mode)
    stage.num_microbatches = 3
    for i in range(3):
        stage.forward(i, batch(4)[0])
    held = [sum(ref() is not None for ref in seen[k::3]) for k in range(3)]
    assert held == [each] * 3
    stage.backward(0, [torch.ones(4, 4, dtype=torch.float64)])
    assert stage.alive == 2


@pytest.mark.parametrize(("number", "last"), [(2, 3), (6, 5)])
def test_a_whole_model_has_the_same_bits(number: int, last: int) -> None:
    """All but the last segment run twice."""
    found, (x, y) = [], floats()
    for recompute in (False, True):
        runs: list[int] = []
        model: Any = layers(runs)
        model[1].inplace = model[3].inplace = False
        net = Recomputed(list(model), number) if recompute else model
        assert list(net.state_dict()) == list(model.state_dict())
        torch.manual_seed(5)
        with bf16(True):
            loss = square_error(net(x), y)
        torch.rand(3)  # others draw meanwhile
        loss.backward()
        found.append({**take_gradients(model), "loss": loss.detach(), "draws": torch.rand(3)})
        assert [runs.count(k) for k in range(6)] == [1 + (recompute and k < last) for k in range(6)]
    assert_same_bits(found[1], found[0])


SAYS = r"layer 1 \(BatchNorm1d\) changes its buffer running_mean in forward"


def with_state() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))


def test_a_layer_with_state_is_refused_in_stages() -> None:
    with Pipe(cut(with_state(), (2, 1)), 4, recompute="always") as pipe:
        with pytest.raises(ValueError, match=SAYS):
            gpipe(pipe, *floats())
        pipe.eval()
        gpipe(pipe, *floats())


def _shards_of_a_batch_norm(_: int, __: int) -> None:
    fsdp = FullyShardedDataParallel([*with_state()], torch.optim.SGD, recompute=True)
    with pytest.raises(ValueError, match=SAYS):
        fsdp.forward(floats()[0])


def test_a_layer_with_state_is_refused_in_shards(ranks: Ranks) -> None:
    ranks.run(_shards_of_a_batch_norm)


def test_an_input_that_was_written_to_is_not_computed_from() -> None:
    with Pipe(cut(layers(), (3, 3)), recompute="always") as pipe:
        x, _ = floats()
        output = pipe(x)
        x.zero_()
        with pytest.raises(RuntimeError, match="the input was written to between forward and"):
            output.sum().backward()


def test_a_second_backward_and_one_inside_autocast_compute_again_as_forward_did() -> None:
    found = []
    for mode in ("never", "always"):
        net = layers()
        with Pipe(cut(net, (3, 3)), recompute=mode) as pipe:
            torch.manual_seed(5)
            loss = pipe(floats()[0]).sum()
            loss.backward(retain_graph=True)
            with bf16(True):
                loss.backward()
        found.append(take_gradients(net))
    assert_same_bits(*found)

"""Recomputation gives the bits of a step without it, in less memory; or says why it cannot. More
layouts: tests/equivalence."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.gathered_layer import SameDraws
from pipeline.pipe import Pipe
from pipeline.processes.process import ProcessPipe
from pipeline.stage import Stage
from runtime.recompute import segments
from tests.pipeline.pipeline_models import (
    Call,
    assert_same_bits,
    batch,
    cut,
    gpipe,
    square_error,
    take_gradients,
)
from tests.remote import on_ranks
from training.layouts.replicated import Recomputed


def test_sqrt_keeps_about_as_many_inputs_as_a_segment_has_layers() -> None:
    assert segments(range(10), "sqrt") == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_a_second_forward_draws_the_same_and_the_generator_goes_on() -> None:
    torch.manual_seed(0)
    first, later, last = (torch.rand(3) for _ in range(3))
    torch.manual_seed(0)
    draws, found = SameDraws(torch.device("cpu")), []
    for between in (True, False):
        with draws.entered():
            found.append(torch.rand(3))
        if between:
            found.append(torch.rand(3))
    found.append(torch.rand(3))
    assert torch.equal(torch.stack(found), torch.stack([first, later, first, last]))


def layers(runs: list[int] | None = None) -> nn.Sequential:
    """Six layers that draw, write to their input, and have a product that autocast casts. `runs`
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


@pytest.mark.parametrize("forward_in_bf16", [True, False])
@pytest.mark.parametrize("mode", ["always", "except_last", "sqrt", "layers"])
def test_stages_have_the_same_bits(mode: str, forward_in_bf16: bool) -> None:
    """Backward computes again under the autocast of forward, and twice if it is called twice."""
    found = []
    for recompute in (mode, "never"):
        net = layers()
        with Pipe(cut(net, (3, 3)), 2, recompute=recompute) as pipe:
            torch.manual_seed(5)
            with torch.autocast("cpu", torch.bfloat16, forward_in_bf16):
                loss = square_error(pipe(floats()[0]), floats()[1])
            with torch.autocast("cpu", torch.bfloat16, not forward_in_bf16):
                loss.backward(retain_graph=True)
            loss.backward()
        found.append({**take_gradients(net), "loss": loss.detach()})
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


@on_ranks(2)
def test_each_rank_computes_its_stage_again(rank: int, _: int) -> None:
    """Equal numbers would not show it."""
    runs: list[int] = []
    with ProcessPipe(layers(runs), [3, 3], recompute="always") as pipe:
        pipe.train_step(*floats(), square_error, "1f1b", 3)
    assert [runs.count(k) for k in range(6)] == ([0] * 3 + [6] * 3 if rank else [6] * 3 + [0] * 3)


@pytest.mark.parametrize(("number", "last"), [(2, 3), (6, 5)])
def test_all_but_the_last_segment_of_a_whole_model_run_twice(number: int, last: int) -> None:
    runs: list[int] = []
    model: Any = layers(runs)
    model[1].inplace = model[3].inplace = False
    Recomputed(list(model), number)(floats()[0]).sum().backward()
    assert [runs.count(k) for k in range(6)] == [1 + (k < last) for k in range(6)]


@pytest.mark.parametrize(
    ("mode", "each"), [("never", 3), ("always", 0), ("except_last", 1), ("sqrt", 0)]
)
def test_what_is_forgotten_is_freed(mode: str, each: int) -> None:
    """Between forward and backward each of three layers holds so many of three micro-batches."""
    seen: list[Any] = []

    def note(x: Tensor) -> Tensor:
        y = x.sin()  # autograd keeps x for it
        seen.append(weakref.ref(x.untyped_storage()))
        return y

    model = nn.Sequential(nn.Linear(4, 4), *(Call(note) for _ in range(3))).double()
    stage = Stage(0, model, torch.device("cpu"), recompute=mode, num_microbatches=3)
    for i in range(3):
        stage.forward(i, batch(4)[0])
    held = [sum(ref() is not None for ref in seen[k::3]) for k in range(3)]
    assert held == [each] * 3


@on_ranks(2)
def test_a_layer_with_state_is_refused_in_stages_and_in_shards(_: int, __: int) -> None:
    says = r"layer 1 \(BatchNorm1d\) changes its buffer running_mean in forward"
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    with Pipe(cut(model, (2, 1)), 4, recompute="always") as pipe:
        with pytest.raises(ValueError, match=says):
            gpipe(pipe, *floats())
        pipe.eval()
        gpipe(pipe, *floats())
    fsdp = FullyShardedDataParallel([*model.train()], torch.optim.SGD, recompute=True)
    with pytest.raises(ValueError, match=says):
        fsdp.forward(floats()[0])


@torch.no_grad()
def change(what: str, x: Tensor, model: nn.Module) -> None:
    if what == "the input":
        x.zero_()
    elif what == "a parameter":
        next(model.parameters()).zero_()
    else:
        model.eval()


WRITTEN = "the input, a parameter or the mode .* was changed between forward and backward"


@pytest.mark.parametrize("what", ["the input", "a parameter", "the mode"])
def test_what_would_be_computed_wrongly_is_refused(what: str) -> None:
    model, (x, _) = layers(), floats()
    with Pipe(cut(model, (3, 3)), recompute="always") as pipe:
        output = pipe(x)
        change(what, x, model)
        with pytest.raises(RuntimeError, match=WRITTEN):
            output.sum().backward()
        # Not a gradient of nothing the second time. Each stage refuses; the first to do so is told.
        with pytest.raises(RuntimeError, match=rf"{WRITTEN}|holds no graph on"):
            output.sum().backward()


@on_ranks(2)
def test_shards_in_another_mode_are_not_computed_again(_: int, __: int) -> None:
    draws = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    fsdp = FullyShardedDataParallel([draws, nn.Linear(4, 3)], torch.optim.SGD, recompute=True)
    output = fsdp.forward(floats()[0])
    fsdp.layers[0].module.eval()
    with pytest.raises(RuntimeError, match=WRITTEN):
        fsdp.backward(output.sum())


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="recompute='often': one of never, always, except_last"):
        Pipe(cut(layers()), recompute="often").train_step(*batch(), square_error)

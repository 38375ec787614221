"""Sharded training is that of one process, whatever layers pass to each other; or it is refused.

The rows of tests/equivalence/table.py and the random models of tests/fuzz check this for every
stage of ZeRO, division of a batch and optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.shards import Unit
from tests.data_parallel.sharded_models import (
    DTYPE,
    HALVES,
    SGD,
    batch,
    fill,
    filled,
    loss_of,
    one_process,
    sharded,
    tied,
    whole,
)
from tests.odd_layers import FEATURES, ODD, in_one_memory, linear
from tests.pipeline.pipeline_models import Around, Call, assert_close, gradients
from tests.ranks import sharing
from tests.remote import on_ranks


@on_ranks(2)
def test_the_calls_of_the_course(rank: int, _: int) -> None:
    """Without train_step; an evaluation in between. A cache line holds 8 numbers of a block: norm 6
    and 6 at 0 and 8, wide.weight 222 at 16, wide.bias 37 at 240, narrow.weight 222 at 280,
    narrow.bias 6 at 504: 512, cut at 256."""
    fsdp, (x, target), first = sharded(), batch(0, HALVES[rank]), dict(tied().named_parameters())
    (output,), (wanted,), weights = one_process(steps=1)
    local = fsdp.get_local_info(1)
    for piece in local:
        begin, end = piece.offset, piece.offset + len(piece.tensor)
        assert piece.shape == first[piece.name].shape
        assert torch.equal(piece.tensor, first[piece.name].flatten()[begin:end])
    with torch.no_grad():
        before = fsdp.forward(batch(0)[0])  # the whole batch, on both
        assert fsdp.forward(None) is None
    torch.testing.assert_close(before, output, rtol=1e-12, atol=1e-12)
    fsdp.backward(loss_of(fsdp.forward(x), target))
    assert_close(whole(fsdp, "gradients"), wanted)
    fsdp.optimizer_step()
    fsdp.optimizer_step()  # without gradients: nothing happens
    assert_close(whole(fsdp, "parameters"), weights)
    by_rank = [
        [
            ("1.norm.weight", 0, 6), ("1.norm.bias", 0, 6),
            ("1.wide.weight", 0, 222), ("1.wide.bias", 0, 16),
        ],
        [("1.wide.bias", 16, 21), ("1.narrow.weight", 0, 222), ("1.narrow.bias", 0, 6)],
    ]  # fmt: skip
    assert [(piece.name, piece.offset, len(piece.tensor)) for piece in local] == by_rank[rank]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@on_ranks(2)
def test_buffers_are_those_of_rank_0_or_filled_by_name(rank: int, _: int, device: str) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(DTYPE).to(device)
    want = {name: b.clone() for name, b in layers.named_buffers()}
    for name, b in layers.named_buffers():
        if device == "meta":
            want[name] = torch.empty_like(b, device="cpu")
            fill(name, want[name])
        b.add_(rank)  # other values on the second rank
    FullyShardedDataParallel(layers, SGD, init=fill)
    torch.testing.assert_close(dict(layers.named_buffers()), want, rtol=0, atol=0)
    assert all(p.is_meta for p in layers.parameters())  # no rank keeps a parameter whole


class Own(nn.Module):
    """Hands on its parameter itself, after those of the layers before, and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))

    def forward(self, given: Any) -> tuple[Tensor, ...]:
        x, *weights = given if isinstance(given, tuple) else (given,)
        return x.mul_(2), *weights, self.weight


class Matrix(nn.Module):
    """Multiplies by the weight of an embedding, and looks nothing up in it: it is not gathered
    again for backward, and what that needs of it is kept instead."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table.weight


class Seen(nn.Module):
    """Multiplies by a view of its weight, or by what is computed from it; backward needs that."""

    def __init__(self, see: Callable[[Tensor], Tensor], weight: Tensor) -> None:
        super().__init__()
        self.bias, self.see = nn.Parameter(torch.ones(3)), see
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.see(self.weight) * self.bias.sum()
        return torch.view_as_real(y).sum(-1) if y.is_complex() else y


REAL, COMPLEX = torch.ones(FEATURES), torch.ones(FEATURES, dtype=torch.complex128)
VIEWS: Mapping[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "conjugate": (Tensor.conj, COMPLEX),
    "adjoint": (lambda w: w.mH[0], torch.ones(FEATURES, 2, dtype=torch.complex128)),
    "conjugate's imaginary part": (lambda w: w.conj().imag, COMPLEX),
    "negative": (torch._neg_view, REAL),
    "imaginary part": (lambda w: w.imag, COMPLEX),
    "as real": (lambda w: torch.view_as_real(w).prod(-1), COMPLEX),
    "as complex": (torch.view_as_complex, torch.ones(FEATURES, 2)),
    "as complex, conjugate": (lambda w: torch.view_as_complex(w).conj(), torch.ones(FEATURES, 2)),
    "rotary": (lambda w: torch.view_as_complex(w[1:, 2:]), torch.ones(FEATURES + 1, 4)),
    "sparse": (lambda w: torch.sparse.mm(w.to_sparse(), w).sum(0), torch.ones(FEATURES, FEATURES)),
    "expanded": (lambda w: w.expand(2, FEATURES), torch.ones(1)),
    "windows": (lambda w: w.unfold(0, 2, 1).prod(-1), torch.ones(FEATURES + 1)),
    "copy": (lambda w: w.flip(0), REAL),
    "rounded": (lambda w: w.float().double(), REAL),
}


class Keeps(nn.Module):
    """Keeps its parameter in a place of its own, too, as recurrent layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.lstm = nn.Parameter(torch.ones(FEATURES)), nn.LSTM(FEATURES, FEATURES)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["kept"] = value

    def forward(self, x: Tensor) -> Any:
        kept: Any = self.kept
        return self.lstm(x * kept)[0]


class Laid(nn.Module):
    """Parameters that do not lie row by row: a transposed matrix, a convolution's with its channels
    last, a conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.conv = linear(), nn.Conv2d(1, 3, 2, padding="same")
        self.fc.weight = nn.Parameter(torch.ones(FEATURES, FEATURES).t())
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.factor = nn.Parameter(torch.ones(FEATURES, dtype=torch.complex128).conj())

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.conv(x[:, None]).prod(1) * (self.factor * 1j).real


class Sometimes(nn.Module):
    """Has a parameter that rank 0 does not use, or all do: there its memory may hold another
    layer's gradient."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.ones(FEATURES)) for _ in "12")
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        return x * self.one * (self.two if self.always or len(x) > 2 else 1)  # more: on rank 1


LAYERS: Mapping[str, Callable[[], list[nn.Module]]] = {
    "parameter": lambda: [Own(), Own(), Call(lambda given: given[0] * given[1] * given[2])],
    "unused": lambda: [Sometimes(False), *(Sometimes(True) for _ in range(3))],
    "matrix": lambda: [Matrix(), nn.Linear(FEATURES, 1, bias=False)],
    "kept": lambda: [Keeps(), linear(), Keeps()],
    "laid": lambda: [Laid(), linear(), Laid()],
    "closed": lambda: [
        Call(lambda x: SimpleNamespace(hidden=torch.tanh(x), skip=x)),  # torch cannot look inside
        Call(lambda box: box.hidden * box.skip),
    ],
    "view": lambda: [Call(lambda x: (x, x[:, :1])), Call(lambda pair: pair[0].mul_(2) + pair[1])],
    "written": lambda: [Call(lambda x: (x > 0).long()), nn.Embedding(2, 3, max_norm=0.1)],
    "saved": lambda: [linear(), Call(lambda x: torch.tanh(x).mul_(2))],
    **ODD,
    **{
        name: partial(lambda see, w: [Seen(see, w), linear(), Seen(see, w)], *view)
        for name, view in VIEWS.items()
    },
}
REFUSED = {
    "closed": "layer 2 (Call) uses a tensor that requires grad",
    "view": "layer 1 (Call) hands on tensors that share memory",
    "written": "layer 2 (Embedding) writes to its parameters in forward",
    "saved": "a ({}, 2, 4) tensor that backward needs has been modified in place",
    "torch.func": "torch.func.{{grad, vjp, jacrev, hessian}} don't yet support saved tensor hooks",
}


@pytest.mark.parametrize("kind", LAYERS)
@on_ranks(2)
def test_what_layers_hand_on_has_its_gradient_or_is_refused(rank: int, _: int, kind: str) -> None:
    """The gradients are those of one process, or there is an error."""
    models: list[Any] = [filled(nn.Sequential(linear(), *LAYERS[kind]())) for _ in range(2)]
    shapes = [(2 + r, 2, FEATURES) for r in range(2)]  # B T C, by rank
    inputs = [torch.full(shape, 1.0 + r, dtype=DTYPE) for r, shape in enumerate(shapes)]
    with sharing(kind != "no features"):
        fsdp = FullyShardedDataParallel(models[0], SGD)
    if kind in REFUSED:
        said = REFUSED[kind].format(len(inputs[rank]))
        with pytest.raises((RuntimeError, ValueError), match=f"^{re.escape(said)}"):
            fsdp.backward(fsdp.forward(inputs[rank]).sum())
        return
    fsdp.backward(fsdp.forward(inputs[rank].clone()).sum())  # layers may write to it
    for x in inputs:
        models[1](x).sum().backward()
    want = gradients(models[1])  # no rank holds a part of what is frozen, or empty
    wanted = {n: g for n, g in want.items() if g is not None and g.numel()}
    assert_close(whole(fsdp, "gradients"), wanted)


@on_ranks(2)
def test_a_loss_may_write_to_the_output(_: int, _world: int) -> None:
    layer, x = filled(nn.Sequential(nn.Linear(2, 2))), torch.ones(1, 2, dtype=DTYPE)
    fsdp = FullyShardedDataParallel([deepcopy(layer[0])], SGD)
    fsdp.train_step([x], [x], lambda y, t: y.sub_(t).square().sum())
    (2 * (layer(x) - x).square().sum()).backward()  # of two ranks
    assert_close(whole(fsdp, "gradients"), gradients(layer))


def test_integers_are_not_gathered_in_another_type() -> None:
    numbers = [torch.ones(3, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.cfloat)]
    made = [Unit(0, (), [("w", nn.Parameter(n, False))], 2, torch.bfloat16) for n in numbers]
    assert [u.compute_dtype for u in made] == [torch.bfloat16, torch.int32, torch.cfloat]


@on_ranks(2)
def test_mistakes(_: int, _world: int) -> None:
    def make(layer: nn.Module, **options: Any) -> Any:
        return FullyShardedDataParallel([layer], SGD, **options)

    first, hooked, hooked_after, given = (nn.Linear(2, 2) for _ in range(4))
    hooked.weight.register_hook(lambda g: g * 2)
    hooked_after.weight.register_post_accumulate_grad_hook(lambda _: None)
    fsdp, x, lost = make(first), torch.ones(1, 2), "requires grad, and its gradient would be"
    watched = nn.Sequential(given)
    watched.register_forward_hook(lambda *_: None)
    of_a_hook = r"^the parameter 0\.weight has a hook on its grad"
    for call, said in (
        (lambda: fsdp.backward(None), r"^call forward\(\) with gradients enabled before"),
        (lambda: make(nn.Linear(2, 2, device="meta")), "is on the meta device: give the function"),
        (lambda: make(nn.Tanh()), "the layers have no parameter that requires a gradient"),
        (lambda: make(first, zero=1), r"^zero must be 2 or 3, and is 1"),
        (lambda: fsdp.forward(given(x)), f"the input {lost}"),
        (lambda: fsdp.train_step([given(x)], [None], Tensor.sum), f"the input {lost}"),
        (lambda: fsdp.train_step([x], [None], Tensor.sum, given.bias.sum()), f"scale {lost}"),
        (lambda: make(hooked), of_a_hook),
        (lambda: make(hooked_after), of_a_hook),
        (lambda: FullyShardedDataParallel(Around(given), SGD), r"^a Around in place of layers"),
        (lambda: FullyShardedDataParallel(in_one_memory(), SGD), r"^0\.weight and 1\.weight share"),
        (lambda: make(Alias()), r"^0\.weight and 0\.now share memory, and each"),
        (lambda: FullyShardedDataParallel(watched, SGD), r"^a Sequential has a hook that would"),
    ):
        with pytest.raises((RuntimeError, TypeError, ValueError), match=said):
            call()
    with torch.no_grad():
        fsdp.forward(given(x))
    fsdp.layers[0].module.weight.register_hook(lambda g: g * 2)
    with pytest.raises(ValueError, match=of_a_hook):
        fsdp.forward(x)
    for key, trained in (("weight", False), ("bias", True)):
        half = nn.Linear(2, 2)
        half.bias.requires_grad_(False)
        fsdp = make(half)
        for _ in range(3):  # so that no step is checked any more
            fsdp.train_step([x], [None], lambda y, _: y.sum())
            fsdp.optimizer_step()
        getattr(fsdp.layers[0].module, key).requires_grad_(trained)
        with pytest.raises(
            ValueError, match=rf"^0\.{key} was .*, frozen or unfrozen after it .* anew"
        ):
            fsdp.forward(x)


def replaced(layer: nn.Linear) -> None:
    layer.load_state_dict(nn.Linear(2, 2).state_dict(), assign=True)


@pytest.mark.filterwarnings("ignore:for weight. copying from a non-meta")
@pytest.mark.parametrize(
    "change",
    [replaced, nn.Linear.reset_parameters, nn.Linear.half, nn.utils.parametrizations.weight_norm],
)
@on_ranks(2)
def test_what_a_module_is_given_later_is_not_lost_in_silence(
    _: int, _world: int, change: Callable[[nn.Linear], Any]
) -> None:
    """Its values are in the shards."""
    layer = nn.Linear(2, 2)
    fsdp = FullyShardedDataParallel([layer], SGD)
    change(layer)
    with torch.no_grad(), pytest.raises(ValueError, match=r"^0\.(weight|bias) was replaced, wr"):
        fsdp.forward(torch.ones(1, 2))


class Alias(nn.Module):
    """A buffer that follows the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("now", self.weight.data)


@pytest.mark.parametrize("update", ["optimizer_step", "parameters_changed"])
@on_ranks(2)
def test_no_backward_takes_the_values_after_an_update(_: int, _world: int, update: str) -> None:
    fsdp = FullyShardedDataParallel([nn.Linear(2, 2), nn.Linear(2, 2)], SGD)
    loss = fsdp.forward(torch.ones(1, 2)).sum()
    getattr(fsdp, update)()
    with pytest.raises(RuntimeError, match=r"^call forward\(\) .* and after an update"):
        fsdp.backward(loss)


@on_ranks(2)
def test_an_evaluation_in_inference_mode_leaves_nothing_that_training_cannot_use(
    rank: int, _: int
) -> None:
    fsdp, (x, target) = sharded(), batch(0, HALVES[rank])
    with torch.inference_mode():
        fsdp.gather_param_data(1)
        fsdp.forward(x)
    fsdp.backward(loss_of(fsdp.forward(x), target))
    assert_close(whole(fsdp, "gradients"), one_process(steps=1)[1][0])


@pytest.mark.parametrize("share", [False, True])
@on_ranks(2)
def test_replicas_begin_alike_and_add_up_gradients_once(rank: int, _: int, share: bool) -> None:
    """Each rank has a copy. Two backwards add up here, and once over the replicas; what is added
    afterwards would be added to those of all."""
    model, (x, target) = tied(), batch(0, HALVES[rank])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)  # other values on the second rank
    alone = [dist.new_group([r]) for r in range(2)][rank]
    with sharing(share):
        fsdp = FullyShardedDataParallel(model, SGD, group=alone, replicas=dist.group.WORLD)
    for factor in (0.25, 0.75):
        fsdp.backward(loss_of(fsdp.forward(x), target) * factor)
    for _again in range(2):
        found = {
            s.name: s.tensor.view(s.shape) for k in range(4) for s in fsdp.get_local_grad_shard(k)
        }
        assert_close(found, one_process(steps=1)[1][0])
    fsdp.forward(x)
    with pytest.raises(RuntimeError, match=r"^the gradients are already summed over all replicas"):
        fsdp.backward(None)
    fsdp.optimizer_step()
    assert_close(whole(fsdp, "parameters"), one_process(steps=1)[2])


@on_ranks(2)
def test_a_layer_that_turns_wrong_later_is_found_in_a_checked_step(_: int, _world: int) -> None:
    """From its third step on it uses a tensor of its caller."""
    foreign, x, steps = torch.ones(2, requires_grad=True), torch.ones(1, 2), 0
    late = Call(lambda x: x * foreign if steps > 2 else x)
    fsdp = FullyShardedDataParallel([nn.Linear(2, 2), late], SGD)
    with pytest.raises(RuntimeError, match=r"^layer 1 \(Call\) uses a tensor that requires grad"):
        while steps < 20:
            fsdp.backward(fsdp.forward(x).sum())
            fsdp.optimizer_step()
            steps += 1
    assert steps == 16

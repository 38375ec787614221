"""What a rank holds, and when: bytes between steps, and which layers are whole at each moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data_parallel.exchange import Pool, SharedExchange
from data_parallel.fsdp import FullyShardedDataParallel, HeldBytes
from tests.data_parallel.sharded_models import SGD
from tests.ranks import Ranks

LAYERS, WIDTH = 6, 32
LAYER = WIDTH * WIDTH * 4  # bytes of its parameters in fp32
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def _layers(device: str = "meta") -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(LAYERS)]


def _init(_: str, tensor: Tensor) -> None:
    nn.init.eye_(tensor)


def _make(
    layers: Sequence[nn.Module] = (), optimizer: Any = SGD, **options: Any
) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(layers or _layers(), optimizer, **{"init": _init} | options)


def _step(fsdp: FullyShardedDataParallel) -> None:
    fsdp.backward(fsdp.forward(torch.ones(1, WIDTH)).sum())
    fsdp.optimizer_step()


def _held(_: int, _world: int, options: dict[str, Any]) -> tuple[HeldBytes, int]:
    """And the bytes that were allocated to be lent."""
    fsdp = _make(optimizer=ADAMW, **options)
    for _again in range(3):
        _step(fsdp)
    exchange = fsdp.exchange
    pools = {exchange.parameters, exchange.gradients}  # may be the same one
    idle = [memory for pool in pools for same in pool._idle.values() for memory in same]
    if isinstance(exchange, SharedExchange):
        idle += exchange._being_read
    return fsdp.held_bytes(), sum(memory.nbytes for memory in idle)


ALL = LAYERS * LAYER


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "lent"),
    [(1, ALL, ALL, 0), (2, ALL, ALL // 2, 1), (3, ALL // 2, ALL // 2, 3)],
)
def test_bytes(
    ranks: Ranks, zero: int, parameters: int, gradients: int, lent: int, share: bool
) -> None:
    """On two ranks. AdamW has two moments, and a number per unit: its steps. Lent are layers:
    gathered, on its way, gradients on their way. In shared memory none is on its way, but others
    read the gradients of the layer before."""
    if share and zero == 2:
        lent = 2
    want = HeldBytes(parameters, gradients, optimizer=ALL + 4 * LAYERS), lent * LAYER
    assert ranks.run(_held, {"zero": zero, "share_memory": share}) == [want] * 2


def _in_bf16(_: int, _world: int) -> tuple[HeldBytes, set[torch.dtype], Tensor, Tensor]:
    fsdp = _make(optimizer=ADAMW, compute_dtype=torch.bfloat16)
    seen = set()
    for layer in fsdp.layers:
        layer.module.register_forward_hook(lambda m, _x, y: seen.update({m.weight.dtype, y.dtype}))
    _step(fsdp)
    held = fsdp.held_bytes()
    first = fsdp.units[0]
    assert first.gradient is not None
    return held, seen, first.gradient.clone(), first.shard.data.clone()


def test_computing_in_bf16(ranks: Ranks) -> None:
    """Parameters travel in half the bytes; shards, gradients and moments stay in fp32. All layers
    are identities, so each gradient is 1, from two ranks 2; AdamW's first step is -lr."""
    half = LAYERS * WIDTH * WIDTH // 2
    for rank, (held, seen, gradient, shard) in enumerate(ranks.run(_in_bf16)):
        assert seen == {torch.bfloat16}
        assert (held.parameters, held.gradients) == (half * 6, half * 4)
        assert gradient.dtype == torch.float32 and set(gradient.tolist()) == {2.0}
        start = torch.eye(WIDTH).chunk(2)[rank].flatten()
        assert torch.allclose(shard, start * (1 - 1e-5) - 1e-3, rtol=0, atol=1e-6)


Event = tuple[str, int]


class _Watch:
    """Notes gathers, reductions and passes in their order, and what is whole at each pass."""

    recording = False

    def __init__(self, fsdp: FullyShardedDataParallel) -> None:
        self.events: list[Event] = []
        self.whole: list[list[int]] = []
        self.units = fsdp.units
        index = {u.published.data_ptr(): u.unit.index for u in fsdp.units}
        gather, reduce = fsdp.exchange.start_gather, fsdp.exchange.start_reduce

        def start_gather(shard: Tensor, whole: Tensor) -> Callable[[], None]:
            self.events.append(("gather", index[shard.data_ptr()]))
            return gather(shard, whole)

        def start_reduce(reductions: Any) -> Callable[[], None]:
            self.events += [("reduce", r.unit.index) for r in reductions]
            return reduce(reductions)

        fsdp.exchange.start_gather = start_gather  # type: ignore[method-assign]
        fsdp.exchange.start_reduce = start_reduce  # type: ignore[method-assign]
        fsdp.recorder = self  # type: ignore[assignment]

    def around(self, kind: str, layer: int, *_: int) -> AbstractContextManager[None]:
        if kind in ("F", "B"):
            self.events.append((kind, layer))
            self.whole.append([u.unit.index for u in self.units if u.whole is not None])
        return nullcontext()


def _order(_: int, _world: int, share: bool) -> tuple[list[Event], list[list[int]]]:
    fsdp = _make(_layers()[:3], share_memory=share)
    watch = _Watch(fsdp)
    assert isinstance(fsdp.exchange, SharedExchange) == share
    fsdp.backward(fsdp.forward(torch.ones(1, WIDTH)).sum())
    return watch.events, watch.whole


AHEAD = [
    ("gather", 0), ("gather", 1), ("F", 0), ("gather", 2), ("F", 1), ("F", 2),
    ("gather", 1), ("B", 2), ("reduce", 2), ("gather", 0), ("B", 1), ("reduce", 1),
    ("B", 0), ("reduce", 0),
]  # fmt: skip
WHEN_NEEDED = [
    ("gather", 0), ("F", 0), ("gather", 1), ("F", 1), ("gather", 2), ("F", 2),
    ("B", 2), ("reduce", 2), ("gather", 1), ("B", 1), ("reduce", 1),
    ("gather", 0), ("B", 0), ("reduce", 0),
]  # fmt: skip


@pytest.mark.parametrize(("share", "order"), [(False, AHEAD), (True, WHEN_NEEDED)])
def test_the_next_layer_is_sent_for_before_this_one_computes(
    ranks: Ranks, share: bool, order: list[Event]
) -> None:
    """Forward and backward; gradients leave before the backward of the layer below. One layer is
    whole at a time, the next is on its way. Shared memory is read when it is needed."""
    for events, whole in ranks.run(_order, share):
        assert events == order
        assert whole == [[0], [1], [2], [2], [1], [0]]


def _regathered(rank: int, _: int, tied: bool) -> list[Event]:
    """An embedding, and two or three layers, of which the last may have its weight."""
    layers = [nn.Embedding(WIDTH, WIDTH, device="meta"), *_layers()[: 3 if tied else 2]]
    if tied:
        layers[-1].weight = layers[0].weight
    fsdp = _make(layers)
    watch = _Watch(fsdp)
    output = fsdp.forward(torch.tensor([1]) if rank else None)
    fsdp.backward(output.sum() if rank else None)
    return [event for event in watch.events if event[0] == "gather"]


@pytest.mark.parametrize(("tied", "units"), [(False, (0, 1, 2, 1)), (True, (0, 1, 2, 0, 2, 1))])
def test_backward_does_not_gather_embeddings(
    ranks: Ranks, tied: bool, units: tuple[int, ...]
) -> None:
    """Nor does a rank without examples. A tied one is gathered for the first layer and for the
    last, whose backward follows at once."""
    assert ranks.run(_regathered, tied) == [[("gather", k) for k in units]] * 2


def _asked_for(_: int, _world: int) -> tuple[list[str], int, int]:
    peak, names = 0, []

    def init(name: str, tensor: Tensor) -> None:
        nonlocal peak
        names.append(name)
        peak = max(peak, tensor.untyped_storage().nbytes())
        tensor.zero_()

    layers = [nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(2)]
    held = sum(_make(layers, init=init).held_bytes())
    return names, peak, held


def test_no_rank_makes_the_whole_model(ranks: Ranks) -> None:
    """A rank asks for the parameters it has a part of, one at a time: the weight's 1024 elements,
    with the bias 1056, are cut at 528."""
    shards = 2 * 528 * 4
    assert ranks.run(_asked_for) == [
        (["0.weight", "1.weight"], LAYER, shards),
        (["0.weight", "0.bias", "1.weight", "1.bias"], LAYER, shards),
    ]


def _recorded(_: int, _world: int, share: bool) -> list[tuple[str, int, int]]:
    seen: list[tuple[str, int, int]] = []
    fsdp = _make(
        _layers()[:2], recorder=lambda *event: seen.append(event[:3]), share_memory=share
    )  # fmt: skip
    x = torch.ones(1, WIDTH)
    fsdp.train_step([x, x], [x, x], lambda output, _: output.sum())
    fsdp.optimizer_step()
    return seen


@pytest.mark.parametrize("share", [True, False])
def test_recorder(ranks: Ranks, share: bool) -> None:
    """All that a rank works on or waits for."""
    step = [
        ("all_gather", 0), ("F", 0), ("all_gather", 1), ("F", 1),
        ("B", 1), ("reduce_scatter", 1), ("all_gather", 0), ("B", 0), ("reduce_scatter", 0),
    ]  # fmt: skip
    want = [(kind, layer, i) for i in range(2) for kind, layer in step]
    around = ["reduce_scatter", "barrier", "optimizer", "barrier"]
    update = [(kind, -1, -1) for kind in (around if share else around[::2])]
    assert ranks.run(_recorded, share) == [[("all_reduce", -1, -1), *want, *update]] * 2


def _gathered(_: int, _world: int) -> tuple[int, int, bool]:
    plain, fsdp = _make(share_memory=False), _make(share_memory=False)
    _step(plain)
    made: list[Tensor] = []

    def allocate(nbytes: int) -> Tensor:
        made.append(torch.empty(nbytes, dtype=torch.uint8))
        return made[-1]

    fsdp.exchange.parameters = fsdp.exchange.gradients = Pool(allocate, keep=False)
    output = fsdp.forward(torch.ones(1, WIDTH))
    held = sum(memory.untyped_storage().nbytes() for memory in made)
    fsdp.backward(output.sum())
    fsdp.optimizer_step()
    shards = [torch.cat([u.shard for u in each.units]) for each in (plain, fsdp)]
    return held, len(made), torch.equal(*shards)


def test_on_a_gpu_a_graph_keeps_no_gathered_layer(ranks: Ranks) -> None:
    """Memory is not pooled there. The last layer stays, since its backward comes next; the others
    are gathered twice, and each has a gradient."""
    assert ranks.run(_gathered) == [(LAYER, 3 * LAYERS - 1, True)] * 2


def test_the_pool_lends_what_was_given_back() -> None:
    pool = Pool(lambda n: torch.empty(n, dtype=torch.uint8))
    large, small = pool.take(1 << 20), pool.take(3 << 10)
    pool.give(large)
    pool.give(small)
    assert pool.take(1 << 10) is not large  # or every buffer would become large
    assert pool.take((1 << 19) + 1) is large and pool.take(4 << 10) is small

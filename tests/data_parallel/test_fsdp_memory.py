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
from data_parallel.fsdp import FullyShardedDataParallel
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


def _held(_: int, _world: int, options: dict[str, Any]) -> tuple[dict[str, int], int]:
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
    held = {"parameters": parameters, "gradients": gradients, "optimizer": ALL + 4 * LAYERS}
    found = ranks.run(_held, {"zero": zero, "share_memory": share})
    assert found == [(held, lent * LAYER)] * 2


def _in_bf16(_: int, _world: int) -> tuple[list[int], set[torch.dtype], Tensor, Tensor]:
    fsdp = _make(optimizer=ADAMW, compute_dtype=torch.bfloat16)
    seen = set()
    for layer in fsdp.layers:
        layer.module.register_forward_hook(lambda m, _x, y: seen.update({m.weight.dtype, y.dtype}))
    _step(fsdp)
    first = fsdp.units[0]
    assert first.gradient is not None
    return list(fsdp.held_bytes().values()), seen, first.gradient.clone(), first.shard.data.clone()


def test_computing_in_bf16(ranks: Ranks) -> None:
    """Parameters travel in half the bytes; shards, gradients and moments stay in fp32. All layers
    are identities, so each gradient is 1, from two ranks 2; AdamW's first step is -lr."""
    half = LAYERS * WIDTH * WIDTH // 2
    for rank, (held, seen, gradient, shard) in enumerate(ranks.run(_in_bf16)):
        assert seen == {torch.bfloat16}
        assert held[:2] == [half * 6, half * 4]
        assert gradient.dtype == torch.float32 and set(gradient.tolist()) == {2.0}
        start = torch.eye(WIDTH).chunk(2)[rank].flatten()
        assert torch.allclose(shard, start * (1 - 1e-5) - 1e-3, rtol=0, atol=1e-6)


Event = tuple[str, int]


class _Watch:
    """Notes starts of gathers and reductions, of units, and what a rank works on or waits for, of
    layers, in their order; and which units are whole at each pass."""

    recording = False

    def __init__(self, fsdp: FullyShardedDataParallel) -> None:
        self.events: list[Event] = []
        self.whole: list[list[int]] = []
        self.units = fsdp.units
        index = {u.published.data_ptr(): u.unit.index for u in fsdp.units}
        gather, reduce = fsdp.exchange.start_gather, fsdp.exchange.start_reduce

        def start_gather(shard: Tensor, whole: Tensor) -> Callable[[], None]:
            self.events.append(("send for", index[shard.data_ptr()]))
            return gather(shard, whole)

        def start_reduce(reductions: Any) -> Callable[[], None]:
            self.events += [("send off", r.unit.index) for r in reductions]
            return reduce(reductions)

        fsdp.exchange.start_gather = start_gather  # type: ignore[method-assign]
        fsdp.exchange.start_reduce = start_reduce  # type: ignore[method-assign]
        fsdp.recorder = self  # type: ignore[assignment]

    def around(self, kind: str, layer: int, *_: int) -> AbstractContextManager[None]:
        self.events.append((kind, layer))
        if kind in ("F", "B"):
            self.whole.append([u.unit.index for u in self.units if u.whole is not None])
        return nullcontext()


def _order(rank: int, _: int, share: bool) -> tuple[list[Event], list[list[int]]]:
    """An embedding and three layers, of which the last has its weight: three units. The first rank
    has no example."""
    layers = [nn.Embedding(WIDTH, WIDTH, device="meta"), *_layers()[:3]]
    layers[-1].weight = layers[0].weight
    fsdp = _make(layers, share_memory=share)
    watch = _Watch(fsdp)
    assert isinstance(fsdp.exchange, SharedExchange) == share
    inputs = [torch.tensor([1])] * rank
    fsdp.train_step(inputs, inputs, lambda output, _: output.sum())
    fsdp.optimizer_step()
    return watch.events, watch.whole


AHEAD = """
all_reduce -1
send for 0, all_gather 0, send for 1, F 0
all_gather 1, send for 2, F 1
all_gather 2, send for 0, F 2
all_gather 3, F 3
send for 2, B 3, reduce_scatter 3, send off 0
all_gather 2, send for 1, B 2, reduce_scatter 2, send off 2
all_gather 1, B 1, reduce_scatter 1, send off 1
B 0, reduce_scatter 0, send off 0
reduce_scatter -1, optimizer -1"""
WHEN_NEEDED = """
all_reduce -1
send for 0, all_gather 0, F 0
send for 1, all_gather 1, F 1
send for 2, all_gather 2, F 2
send for 0, all_gather 3, F 3
B 3, reduce_scatter 3, send off 0
send for 2, all_gather 2, B 2, reduce_scatter 2, send off 2
send for 1, all_gather 1, B 1, reduce_scatter 1, send off 1
B 0, reduce_scatter 0, send off 0
reduce_scatter -1, barrier -1, optimizer -1, barrier -1"""


def _events(text: str) -> list[Event]:
    words = [event.rsplit(" ", 1) for event in text.strip().replace("\n", ", ").split(", ")]
    return [(what, int(number)) for what, number in words]


@pytest.mark.parametrize(("share", "text"), [(False, AHEAD), (True, WHEN_NEEDED)])
def test_the_next_layer_is_sent_for_before_this_one_computes(
    ranks: Ranks, share: bool, text: str
) -> None:
    """Forward and backward; gradients leave before the backward of the layer below. One layer is
    whole at a time, the next is on its way. Shared memory is read when it is needed. Backward does
    not gather the embedding. A rank without examples does all but compute."""
    order = _events(text)
    (idle, nothing), (events, whole) = ranks.run(_order, share)
    assert events == order
    assert idle == [event for event in order if event[0] not in ("F", "B")]
    assert whole == [[0], [1], [2], [0], [0], [2], [1], []] and nothing == []


def _asked_for(_: int, _world: int) -> tuple[list[str], int, int]:
    peak, names = 0, []

    def init(name: str, tensor: Tensor) -> None:
        nonlocal peak
        names.append(name)
        peak = max(peak, tensor.untyped_storage().nbytes())
        tensor.zero_()

    layers = [nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(2)]
    held = sum(_make(layers, init=init).held_bytes().values())
    return names, peak, held


def test_no_rank_makes_the_whole_model(ranks: Ranks) -> None:
    """A rank asks for the parameters it has a part of, one at a time: the weight's 1024 elements,
    with the bias 1056, are cut at 528."""
    shards = 2 * 528 * 4
    assert ranks.run(_asked_for) == [
        (["0.weight", "1.weight"], LAYER, shards),
        (["0.weight", "0.bias", "1.weight", "1.bias"], LAYER, shards),
    ]


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

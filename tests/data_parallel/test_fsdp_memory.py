"""What a rank holds, and when: bytes between steps, and which layers are whole at each moment."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data_parallel.fsdp import FullyShardedDataParallel
from runtime.pool import Pool
from tests.pipeline.pipeline_models import Operators
from tests.ranks import sharing
from tests.remote import on_ranks

LAYERS, WIDTH = 6, 32
LAYER = WIDTH * WIDTH * 4  # bytes of its parameters in fp32
ALL = LAYERS * LAYER


def _layers(number: int = LAYERS) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(number)]


def _make(layers: Sequence[nn.Module], **options: Any) -> FullyShardedDataParallel:
    """All layers are identities."""
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    options = {"init": lambda _, tensor: nn.init.eye_(tensor)} | options
    return FullyShardedDataParallel(layers, adamw, **options)


def _step(fsdp: FullyShardedDataParallel) -> None:
    fsdp.backward(fsdp.forward(torch.ones(1, WIDTH)).sum())
    fsdp.optimizer_step()


@pytest.mark.parametrize(
    ("zero", "share", "parameters", "gradients", "layers_lent"),
    [
        (2, True, ALL, ALL // 2, 2),
        (2, False, ALL, ALL // 2, 1),
        (3, True, ALL // 2, ALL // 2, 3),
        (3, False, ALL // 2, ALL // 2, 3),
    ],
)
@on_ranks(2)
def test_bytes(
    _: int, _world: int, zero: int, share: bool, parameters: int, gradients: int, layers_lent: int
) -> None:
    """AdamW has two moments, and a number per unit: its steps. Lent are layers: gathered, on its
    way, gradients on their way. In shared memory none is on its way, but others read the gradients
    of the layer before."""
    with sharing(share):
        fsdp = _make(_layers(), zero=zero)
    for _again in range(3):
        _step(fsdp)
    pools = fsdp.units[0].pool, fsdp.communicator._pool_of(torch.device("cpu"))
    lent = [memory for pool in pools for same in pool._idle.values() for memory in same]
    lent += [memory for pool in pools for memory in pool._lent.values()]  # which others may read
    assert list(fsdp.held_bytes().values()) == [parameters, gradients, ALL + 4 * LAYERS]
    assert sum(memory.nbytes for memory in lent) == layers_lent * LAYER


@on_ranks(2)
def test_a_shard_that_is_sent_in_16_bits_is_not_kept_in_16_bits(_: int, _world: int) -> None:
    """In shared memory others read it there."""
    shards = []
    for share in (True, False):
        with sharing(share):
            fsdp = _make(_layers(), compute_dtype=torch.bfloat16)
        for _again in range(3):
            _step(fsdp)
        assert next(iter(fsdp.held_bytes().values())) == ALL // 2 + share * ALL // 4
        shards.append([unit.shard.detach().clone() for unit in fsdp.units])
    assert all(torch.equal(*pair) for pair in zip(*shards, strict=True))


class _Watch:
    """Notes starts of gathers and reductions, of units, and what a rank works on or waits for, of
    layers, in their order."""

    recording = False

    def __init__(self, fsdp: FullyShardedDataParallel) -> None:
        self.events: list[str] = []
        self.microbatches: list[int] = []
        index = {u.published.data_ptr(): u.unit.index for u in fsdp.units}
        ranks = fsdp.communicator
        gather, reduce_scatter = ranks.start_gather, ranks.start_reduce_scatter

        def start_gather(shard: Tensor, whole: Tensor) -> Callable[[], None]:
            self.events.append(f"send for {index[shard.data_ptr()]}")
            return gather(shard, whole)

        def sum_up(x: Tensor, dim: int, into: Tensor, accumulate: bool) -> Callable[[], Tensor]:
            owners = {id(u.gradient): u.unit.index for u in fsdp.units}
            self.events.append(f"send off {owners[id(into)]}")
            return reduce_scatter(x, dim, into, accumulate)

        ranks.start_gather = start_gather  # type: ignore[method-assign]
        ranks.start_reduce_scatter = sum_up  # type: ignore[method-assign,assignment]
        fsdp.recorder = self  # type: ignore[assignment]

    def around(self, kind: str, layer: int, i: int, _: int) -> AbstractContextManager[None]:
        self.events.append(f"{kind} {layer}")
        self.microbatches.append(i)
        return nullcontext()


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
reduce_scatter -1, barrier -1, optimizer -1, barrier -1"""
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


@pytest.mark.parametrize(("share", "text"), [(False, AHEAD), (True, WHEN_NEEDED)])
@on_ranks(2)
def test_the_next_layer_is_sent_for_before_this_one_computes(
    rank: int, _: int, share: bool, text: str
) -> None:
    """Two micro-batches: gradients leave before the backward of the layer below. Shared memory
    is read when it is needed. An embedding and three layers, of which the last has its weight:
    three units; backward does not gather the embedding. The first rank has no example, and does all
    but compute."""
    layers = [nn.Embedding(WIDTH, WIDTH, device="meta"), *_layers(3)]
    layers[-1].weight = layers[0].weight
    with sharing(share):
        fsdp = _make(layers)
    watch = _Watch(fsdp)
    assert fsdp.communicator.overlaps(fsdp.device) is not share
    inputs = [torch.tensor([1])] * 2 * rank
    fsdp.train_step(inputs, inputs, lambda output, _: output.sum())
    fsdp.optimizer_step()
    assert [i for i, _ in groupby(watch.microbatches)] == [-1, 0, 1, -1]
    first, *microbatch, last = text.strip().split("\n")
    order = ", ".join([first, *microbatch, *microbatch, last]).split(", ")
    assert watch.events == [event for event in order if rank or event[0] not in "FB"]


@on_ranks(2)
def test_no_rank_makes_the_whole_model(rank: int, _: int) -> None:
    """A rank asks for the parameters it has a part of, one at a time: the weight's 1024 elements,
    with the bias 1056, are cut at 528."""
    asked: dict[str, int] = {}  # bytes of what is filled, by name

    def init(name: str, tensor: Tensor) -> None:
        asked[name] = tensor.untyped_storage().nbytes()
        tensor.zero_()

    fsdp = _make([nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(2)], init=init)
    assert fsdp.held_bytes()["parameters"] == 2 * 528 * 4
    first = {"0.weight": LAYER, "1.weight": LAYER}
    assert asked == (first | {"0.bias": WIDTH * 4, "1.bias": WIDTH * 4} if rank else first)


@on_ranks(2)
def test_on_a_gpu_a_graph_keeps_no_gathered_layer(_: int, _world: int) -> None:
    """What is lent has memory only meanwhile: at most two layers and a gradient. The last layer
    stays, since its backward comes next; nothing stays after a step."""
    made: list[Tensor] = []

    def allocate(nbytes: int) -> Tensor:
        made.append(torch.empty(nbytes, dtype=torch.uint8))
        return made[-1]

    with sharing(False):
        plain, fsdp = (_make(_layers()) for _ in range(2))
    _step(plain)
    pool = fsdp.communicator._pools[fsdp.device] = Pool(allocate, keeps=False)
    for u in fsdp.units:
        u.pool = pool
    output = fsdp.forward(torch.ones(1, WIDTH))
    assert sum(memory.untyped_storage().nbytes() for memory in made) == LAYER
    fsdp.backward(output.sum())
    fsdp.optimizer_step()
    assert [memory.untyped_storage().nbytes() for memory in made] == [0, 0, 0]
    for unit, other in zip(fsdp.units, plain.units, strict=True):
        assert torch.equal(unit.shard, other.shard)


@on_ranks(2)
def test_activations_of_a_layer_are_gone_before_its_gradients_travel(_: int, _world: int) -> None:
    """Else a rank would hold those of one layer more while it waits."""
    fsdp = _make(_layers())
    output = fsdp.forward(torch.ones(1, WIDTH))
    graphs = [weakref.ref(graph) for graph in fsdp._graphs]
    assert None not in [graph() for graph in graphs]
    alive, start = [], fsdp._start_reduce

    def start_reduce(*args: Any) -> None:
        alive.append(sum(graph() is not None for graph in graphs))
        start(*args)

    fsdp._start_reduce = start_reduce  # type: ignore[method-assign,assignment]
    fsdp.backward(output.sum())
    assert alive == [*reversed(range(LAYERS))]


@pytest.mark.parametrize("recompute", [False, True])
@on_ranks(2)
def test_as_many_products_as_one_process_makes(_: int, _world: int, recompute: bool) -> None:
    """None for the gradient of a frozen weight; computed again are all layers but the last, whose
    backward is next."""

    def layers() -> list[nn.Module]:
        made = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        made[2].requires_grad_(False)
        return [*made]

    x, plain = torch.ones(2, WIDTH), nn.Sequential(*layers())
    with Operators() as wanted:
        plain(x).sum().backward()
    fsdp = _make(layers(), recompute=recompute)
    with Operators() as made:
        fsdp.backward(fsdp.forward(x).sum())
    assert made.products == wanted.products + 3 * recompute == 4 + 3 + 3 + 3 * recompute

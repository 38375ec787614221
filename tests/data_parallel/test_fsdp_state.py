"""How the parameters of layers are laid out, and which part of them a rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from data_parallel.sharding import Unit, make_units
from tests.data_parallel.sharded_models import batch, loss_of, one_process, sharded, tied
from tests.ranks import Ranks


def test_layout() -> None:
    """In float32 a cache line is 16 elements. Two layers share a weight; one bias is frozen."""
    first, second = nn.Linear(3, 5), nn.Linear(3, 5)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    layers = [first, second]
    names: dict[Tensor, str] = {p: n for n, p in nn.Sequential(*layers).named_parameters()}
    units, parameters, places = make_units(layers, names, world_size=3)
    assert [[names[p] for p in ps] for ps in parameters] == [["0.weight"], ["0.bias"], ["1.bias"]]
    assert [
        (u.layers, [tuple(e) for e in u.entries], u.numel, u.shard_numel, u.trainable)
        for u in units
    ] == [
        ((0, 1), [("0.weight", (5, 3), 0, 15)], 48, 16, True),
        ((0,), [("0.bias", (5,), 0, 5)], 48, 16, True),
        ((1,), [("1.bias", (5,), 0, 5)], 48, 16, False),
    ]
    assert [[(p.attribute, p.unit, p.entry) for p in of_layer] for of_layer in places] == [
        [("weight", 0, 0), ("bias", 1, 0)], [("weight", 0, 0), ("bias", 2, 0)],
    ]  # fmt: skip


def test_pieces_and_gaps() -> None:
    """Parameters of 40 and 5 elements at 0 and 48, cut at 32."""
    parameters = [("a", nn.Parameter(torch.empty(4, 10))), ("b", nn.Parameter(torch.empty(5)))]
    unit = Unit(0, (0,), parameters, world_size=2)
    assert (unit.numel, unit.gaps) == (64, [slice(40, 48), slice(53, 64), slice(64, 64)])
    flat = torch.arange(64.0)
    pieces = [unit.pieces(rank, flat[unit.part(rank)]) for rank in range(2)]
    found = [[(p.name, tuple(p.shape), p.offset, p.tensor.tolist()) for p in ps] for ps in pieces]
    assert found == [
        [("a", (4, 10), 0, [*range(32)])],
        [("a", (4, 10), 32, [*range(32, 40)]), ("b", (5,), 0, [*range(48, 53)])],
    ]  # fmt: skip


def _info(rank: int, _: int) -> list[Any]:
    fsdp = sharded()
    info = [(p.name, tuple(p.shape), p.offset, p.tensor.numel()) for p in fsdp.get_local_info(1)]
    gathered = {n: t.clone() for n, t in fsdp.gather_param_data(1).items()}
    x, target = batch(0, slice(rank, None, 2))
    fsdp.train_step([x], [target], loss_of)
    shard = [(p.name, p.offset, p.tensor.clone()) for p in fsdp.get_local_grad_shard(1)]
    return [info, gathered, shard]


def test_what_a_rank_holds_of_a_layer(ranks: Ranks) -> None:
    """A block, float64, 8 elements a cache line: norm 6 and 6 at 0 and 8, wide.weight 222 at 16,
    wide.bias 37 at 240, narrow.weight 222 at 280, narrow.bias 6 at 504: 512, cut at 256."""
    got = ranks.run(_info)
    assert [info for info, _, _ in got] == [
        [
            ("1.norm.weight", (6,), 0, 6), ("1.norm.bias", (6,), 0, 6),
            ("1.wide.weight", (37, 6), 0, 222), ("1.wide.bias", (37,), 0, 16),
        ],
        [
            ("1.wide.bias", (37,), 16, 21), ("1.narrow.weight", (6, 37), 0, 222),
            ("1.narrow.bias", (6,), 0, 6),
        ],
    ]  # fmt: skip
    want = {n: p for n, p in tied().named_parameters() if n.startswith("1.")}
    (gradients,) = one_process(1).gradients
    for _, gathered, shard in got:
        assert set(gathered) == set(want)
        assert all(torch.equal(gathered[n], p) for n, p in want.items())
        for name, offset, tensor in shard:
            part = gradients[name].flatten()[offset : offset + len(tensor)]
            assert torch.allclose(tensor, part, rtol=1e-10, atol=1e-14), name

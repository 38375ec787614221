"""Sharded state by name: pieces to save and load, norms, and the layout they come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data_parallel.sharding import Unit, plan
from tests.data_parallel.sharded_models import (
    OPTIMIZERS,
    Result,
    batch,
    build,
    check,
    my_part,
    one_process,
    scale,
    sharded,
    summed_loss,
    train,
    whole,
)
from tests.ranks import Ranks

Saved = dict[str, list[tuple[str, int, Tensor]]]
STEPS = 4


def test_layout() -> None:
    """In float32 a cache line is 16 elements. Two layers share a weight; one bias is frozen."""
    first, second = nn.Linear(3, 5), nn.Linear(3, 5)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    units, places = plan([first, second], None, world_size=3)
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
    assert (unit.numel, unit.gaps) == (64, [slice(40, 48), slice(53, 64)])
    flat = torch.arange(64.0)
    pieces = [unit.pieces(rank, flat[unit.part(rank)]) for rank in range(2)]
    found = [[(p.name, tuple(p.shape), p.offset, p.tensor.tolist()) for p in ps] for ps in pieces]
    assert found == [
        [("a", (4, 10), 0, [*range(32)])],
        [("a", (4, 10), 32, [*range(32, 40)]), ("b", (5,), 0, [*range(48, 53)])],
    ]  # fmt: skip


def _info(_: int, _world: int) -> list[Any]:
    fsdp = sharded("tied")
    info = [(p.name, tuple(p.shape), p.offset, p.tensor.numel()) for p in fsdp.get_local_info(1)]
    gathered = {n: t.clone() for n, t in fsdp.gather_param_data(1).items()}
    fsdp.free_param_data(1)
    x, target, factor = my_part("tied", 0, fsdp.rank, fsdp.world_size)
    fsdp.train_step(x, target, summed_loss, factor)
    shard = [(p.name, p.offset, p.tensor.clone()) for p in fsdp.get_local_grad_shard(1)]
    return [info, gathered, shard]


def test_what_a_rank_holds_of_a_layer(ranks: Ranks) -> None:
    """A block, float64, 8 elements a cache line: norm 6 and 6 at 0 and 8, wide.weight 222 at 16,
    wide.bias 37 at 240, narrow.weight 222 at 280, narrow.bias 6 at 504: 512, cut at 256."""
    got = ranks.run(_info)
    block = "blocks.0."
    assert [info for info, _, _ in got] == [
        [
            (block + "norm.weight", (6,), 0, 6), (block + "norm.bias", (6,), 0, 6),
            (block + "wide.weight", (37, 6), 0, 222), (block + "wide.bias", (37,), 0, 16),
        ],
        [
            (block + "wide.bias", (37,), 16, 21), (block + "narrow.weight", (6, 37), 0, 222),
            (block + "narrow.bias", (6,), 0, 6),
        ],
    ]  # fmt: skip
    want = {n: p for n, p in build("tied").named_parameters() if n.startswith(block)}
    gradients = one_process("tied", "adamw", STEPS)[0].gradients
    for _, gathered, shard in got:
        assert set(gathered) == set(want)
        assert all(torch.equal(gathered[n], p) for n, p in want.items())
        for name, offset, tensor in shard:
            part = gradients[name].flatten()[offset : offset + len(tensor)]
            assert torch.allclose(tensor, part, rtol=1e-10, atol=1e-14), name


def _save(rank: int, _: int, zero: int) -> tuple[list[Result], Saved, dict[str, Tensor]]:
    del rank
    fsdp = sharded("tied", zero=zero)
    results = train(fsdp, "tied", range(2))
    kinds = {"parameters": fsdp.parameter_pieces(), **fsdp.optimizer_pieces()}
    saved = {
        kind: [(p.name, p.offset, p.tensor.clone()) for p in pieces]
        for kind, pieces in kinds.items()
    }
    return results, saved, fsdp.optimizer_scalars()


def _resume(
    _: int, _world: int, zero: int, state: dict[str, dict[str, Tensor]], scalars: dict[str, Tensor]
) -> list[Result]:
    fsdp = sharded("tied", zero=zero)
    pieces = fsdp.new_optimizer_state([k for k in state if k != "parameters"], scalars)
    for kind, of_kind in {"parameters": fsdp.parameter_pieces(), **pieces}.items():
        for piece in of_kind:
            flat = state[kind][piece.name].flatten()
            piece.tensor.copy_(flat[piece.offset : piece.offset + len(piece.tensor)])
    fsdp.parameters_changed()
    return train(fsdp, "tied", range(2, STEPS))


@pytest.mark.parametrize("zero", [1, 3])
def test_state_saved_by_two_ranks_is_resumed_by_three(
    ranks: Ranks, three_ranks: Ranks, zero: int
) -> None:
    saved = ranks.run(_save, zero)
    want = one_process("tied", "adamw", STEPS)
    shapes = {n: p.shape for n, p in build("tied").named_parameters()}
    state: dict[str, dict[str, Tensor]] = {}
    for kind in ("parameters", "exp_avg", "exp_avg_sq"):
        parts: dict[str, list[tuple[int, Tensor]]] = {}
        for _, pieces, _ in saved:
            for name, offset, tensor in pieces[kind]:
                parts.setdefault(name, []).append((offset, tensor))
        state[kind] = {
            n: torch.cat([t for _, t in sorted(ps, key=lambda p: p[0])]).view(shapes[n])
            for n, ps in parts.items()
        }
    assert set(state["exp_avg"]) == set(shapes)
    assert saved[0][2]["step"].item() == 2
    resumed = three_ranks.run(_resume, zero, state, saved[0][2])
    check(resumed, want[2:])


def _clip(rank: int, _: int, max_norm: float) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    fsdp = sharded("tied")
    x, target, factor = my_part("tied", 0, rank, fsdp.world_size)
    fsdp.train_step(x, target, summed_loss, factor)
    norm = fsdp.clip_gradients(max_norm).item()
    gradients = whole(fsdp, "gradients")
    fsdp.optimizer_step()
    return norm, gradients, whole(fsdp, "exp_avg")


def test_clipping_uses_the_norm_of_the_whole_gradient(three_ranks: Ranks) -> None:
    model = build("tied")
    x, target = batch("tied", 0)
    (summed_loss(nn.Sequential(*model.layers())(x), target) * scale(target)).backward()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    want = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
    optimizer.step()
    assert want > 0.2  # it does clip
    for rank, (norm, gradients, moments) in enumerate(three_ranks.run(_clip, 0.1)):
        assert abs(norm - want) < 1e-12 * want
        for name, p in model.named_parameters() if rank == 0 else ():
            assert p.grad is not None
            assert torch.allclose(gradients[name], p.grad, rtol=1e-9, atol=1e-13), name
            assert torch.allclose(
                moments[name], optimizer.state[p]["exp_avg"], rtol=1e-9, atol=1e-13
            ), name

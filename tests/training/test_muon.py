"""Muon: which rank holds which pieces and computes which matrix, and torch's own Muon beside it.
(tests/equivalence checks that every layout trains as one process does.)"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy

import pytest
import torch
from torch import nn

from tests.equivalence.compare import KINDS, compare, resumed, same_places
from tests.equivalence.plain import plain
from tests.equivalence.problems import Sentences
from tests.equivalence.table import find
from tests.remote import on_ranks
from training.launch.world import World
from training.layouts.layout import Held
from training.muon import Matrix, Muon, Piece, is_matrix_of_block, owners_of, pieces_of

CPU = torch.device("cpu")


def made(weights: dict[str, torch.Tensor], dtype: torch.dtype, decay: float = 0.1) -> Muon:
    """Muon of these weights alone, in one process."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights.values()]
    muon = Muon(parameters, [{"params": []}], 0.02, decay, 0.95, dtype)
    held = [Held.whole(name, p) for name, p in zip(weights, parameters, strict=True)]
    muon.arrange(held, CPU)
    return muon


def test_a_stack_is_computed_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large matrices are, of which a cache holds few."""
    torch.manual_seed(0)
    weights = {f"h.{k}.mlp.c_fc.weight": torch.randn(8, 24, dtype=torch.float64) for k in range(5)}
    updated = []
    for elements in (1 << 19, 1):
        monkeypatch.setattr("training.muon.IN_CACHE", elements)
        muon = made(weights, torch.float64)
        matrices = muon.param_groups[0]["params"]
        for p, gradient in zip(matrices, weights.values(), strict=True):
            p.grad = gradient.clone()
        muon.step()
        updated.append(torch.stack([*matrices]))
    torch.testing.assert_close(*updated)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_in_bf16_it_is_that_of_torch(shape: tuple[int, int]) -> None:
    """Whose products are bf16 whatever the weights are. The same steps of the same matrices, up to
    rounding: 2^-9 of an element in each of 15 products, and a few times that in the update."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    muon = made({"h.0.mlp.c_fc.weight": weight}, torch.bfloat16)
    theirs = nn.Parameter(weight.clone())
    beside = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    (ours,) = muon.param_groups[0]["params"]
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        muon.step()
        beside.step()
    moved = (theirs - weight).norm()
    assert (ours - theirs).norm() < 0.02 * moved and moved > 0.05
    assert [*muon.state[ours]] == [*beside.state[theirs]] == ["momentum_buffer"]


def test_query_key_value_and_every_expert_are_matrices_of_their_own() -> None:
    """Another gradient of one moves no other: its size would, in one matrix of all of them."""
    torch.manual_seed(0)
    for name, shape in (("attn.c_attn.weight", (4, 12)), ("experts.c_proj.weight", (3, 4, 4))):
        moved = []
        for size in (1.0, 100.0):
            muon = made({name: torch.zeros(shape)}, torch.float64, decay=0.0)
            (p,) = muon.param_groups[0]["params"]
            p.grad = torch.arange(48.0).view(shape).sin()
            first = p.grad[:, :4] if p.dim() == 2 else p.grad[0]
            first.mul_(size).add_(torch.eye(4) * (size - 1))
            muon.step()
            moved.append(p.detach()[:, 4:] if p.dim() == 2 else p.detach()[1:])
        torch.testing.assert_close(*moved, rtol=0, atol=0)


def test_it_has_the_matrices_of_blocks_and_nothing_else() -> None:
    names = dict(Sentences(experts=2).task(World(), torch.float32).skeleton().named_parameters())
    of_muon = {name.partition(".h.")[2][2:] for name in names if is_matrix_of_block(name)}
    assert of_muon == {
        "attn.c_attn.weight", "attn.c_proj.weight", "mlp.experts.c_fc.weight",
        "mlp.experts.c_proj.weight",
    }  # fmt: skip


def test_the_pieces_of_a_rectangle() -> None:
    """Of c_attn [4, 12]: rows 1 and 2, columns 3 to 9, are of query, key and value."""
    whole = torch.arange(48.0).view(4, 12)
    x = Held("attn.c_attn.weight", whole[1:3, 3:10], (1, 3), (4, 12))
    pieces = pieces_of(x)
    assert [(p.matrix.number, p.rows, p.columns) for p in pieces] == [
        (0, (1, 3), (3, 4)), (1, (1, 3), (0, 4)), (2, (1, 3), (0, 2)),
    ]  # fmt: skip
    for piece, place in pieces.items():
        of_matrix = whole.chunk(3, 1)[piece.matrix.number][piece.place]
        assert torch.equal(x.tensor[place], of_matrix) and of_matrix.shape == piece.shape
    experts = Held("experts.c_fc.weight", torch.zeros(2, 3, 4), (1, 0, 0), (4, 3, 4))
    assert [p.matrix.number for p in pieces_of(experts)] == [1, 2]


def test_the_work_is_dealt_out_evenly_and_to_those_that_hold_it() -> None:
    matrices = [Matrix(f"w{k}", 0, 4, 16 if k < 4 else 4) for k in range(12)]
    total = sum(matrix.work for matrix in matrices)

    def pieces(of_rank: list[Matrix]) -> list[Piece]:
        return [Piece(m, (0, m.rows), (0, m.columns)) for m in of_rank]

    def loads(owners: dict[Matrix, int]) -> list[int]:
        by_rank: Counter[int] = Counter()
        for matrix, rank in owners.items():
            by_rank[rank] += matrix.work
        return [by_rank[rank] for rank in sorted(by_rank)]

    everything = owners_of([pieces(matrices)] * 4)  # as under data parallelism
    assert loads(everything) == [total / 4] * 4
    apart = [[m for k, m in enumerate(matrices) if k // 2 % 2 == rank] for rank in range(2)]
    assert owners_of([*map(pieces, apart)]) == {
        matrix: rank for rank, of_rank in enumerate(apart) for matrix in of_rank
    }
    crowded = owners_of([pieces(matrices), []])  # who holds all does not compute all
    assert loads(crowded) == [total / 2] * 2


def test_all_of_it_goes_on_from_a_state_dict() -> None:
    """AdamW's moments and rate, too, and those of a group that came later."""

    def steps(of: list[nn.Parameter], muon: Muon, first: int, rate: float) -> None:
        for group in muon.param_groups:
            group["lr"] = rate
        for step in range(first, first + 2):
            for k, p in enumerate(of):
                p.grad = torch.arange(p.numel(), dtype=p.dtype).add(k + 7 * step).sin().view_as(p)
            muon.step()

    def of(values: list[torch.Tensor]) -> tuple[list[nn.Parameter], Muon]:
        parameters = [nn.Parameter(value.detach().clone()) for value in values]
        matrix, bias, later = parameters
        muon = Muon([matrix], [{"params": [bias]}], 0.1, 0.1, 0.9, torch.float64)
        muon.arrange([Held.whole("h.0.mlp.c_fc.weight", matrix)], CPU)
        muon.add_param_group({"params": [later], "weight_decay": 0.5})
        return parameters, muon

    start = [torch.zeros(shape, dtype=torch.float64) for shape in ((3, 4), (5,), (2,))]
    parameters, muon = of(start)
    steps(parameters, muon, 0, 0.1)
    again, other = of([p.detach() for p in parameters])
    other.load_state_dict(deepcopy(muon.state_dict()))  # else both have one state
    steps(parameters, muon, 2, 0.01)
    steps(again, other, 2, 0.01)
    assert [*map(torch.equal, again, parameters)] == [True] * 3
    assert [bool(p.all()) for p in parameters] == [True] * 3


def test_what_it_cannot_do_is_said() -> None:
    muon = Muon([nn.Parameter(torch.ones(2, 2))], [{"params": []}], 0.1, 0.1, 0.9, torch.float32)
    with pytest.raises(RuntimeError, match=r"call arrange\(\) before the first step"):
        muon.step()
    with pytest.raises(TypeError, match=r"load this one's state_dict\(\)"):
        deepcopy(muon)


@on_ranks(2)
def test_a_run_goes_on_under_any_other_layout(rank: int, world_size: int) -> None:
    """A step under each of four, every one from the checkpoint of the one before: momentum is saved
    by name and place, whoever held it."""
    names = ["ddp2-muon", "fsdp2-zero3-muon", "mesh2-1x1x2-muon", "fsdp2-zero1-muon"]
    rows = [*map(find, names)]
    found = resumed(rows, World(rank, world_size), torch.float64, [1] * 4)
    reference = plain(rows[0].problem, 4, torch.float64)
    differences = compare(found, same_places(reference, found), reference, "")
    assert {*differences} == {*KINDS} and max(d.value for d in differences.values()) < 1e-10

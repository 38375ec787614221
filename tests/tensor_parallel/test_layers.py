"""Cut matrices in a pipeline: each leaves its weight's gradient for W, and zero bubble gains by it.
tests/equivalence checks that a cut model trains as a whole one does."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.schedules.schedule import one_f_one_b, zero_bubble
from pipeline.stage import Stage
from planning.simulate import Simulator, Work
from runtime.communicator import Communicator
from tensor_parallel.collectives import gather
from tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.pipeline.pipeline_models import Operators, act
from tests.remote import on_ranks


def pair(ranks: Communicator, sequence: bool) -> nn.Sequential:
    """A matrix cut by columns, and one cut by rows: 8 to 4 features of each rank, to 8."""
    weights = [nn.Parameter(torch.rand(shape, dtype=torch.float64)) for shape in ((8, 4), (4, 8))]
    biases = [nn.Parameter(torch.rand(n, dtype=torch.float64)) for n in (4, 8)]
    columns = ColumnParallelLinear(weights[0], ranks, sequence, biases[0])
    return nn.Sequential(
        columns, nn.Tanh(), RowParallelLinear(weights[1], ranks, sequence, biases[1])
    )


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2)
def test_each_cut_matrix_leaves_its_gradient_for_w_and_zero_bubble_gains(
    rank: int, _: int, sequence: bool
) -> None:
    """A stage with four matrices, two micro-batches, by halves and by whole backwards; forwards run
    in both ways. If an action takes as long as its products, a step of four stages takes as long as
    57 and 51 forwards."""
    torch.manual_seed(rank)
    ranks = Communicator(torch.distributed.group.WORLD)
    layers = nn.Sequential(pair(ranks, sequence), pair(ranks, sequence))
    torch.manual_seed(rank if sequence else 0)
    x, dy = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    counts, sums = Counter[str](), []
    for order in (["F0", "F1", "I0", "I1", "W0", "W1"], ["F0", "B0", "F1", "B1"]):
        stage = Stage(1, layers, torch.device("cpu"), deliver=dict.clear, num_microbatches=3)
        for action in order:
            with Operators() as operators:
                act(stage, action, x, dy)
            counts[action[0]] += operators.products
        sums.append(list(stage.take_gradients().values()))
    assert counts == {"F": 16, "I": 8, "W": 8, "B": 16}
    assert [len(gradients) for gradients in sums] == [8, 8] and all(map(torch.equal, *sums))
    each = {kind: count / (4 if kind == "F" else 2) for kind, count in counts.items()}
    work = Work(lambda action: each[action.kind.value])
    assert Simulator(one_f_one_b(4, 16)).run(work).span == 57 * each["F"]
    assert Simulator(zero_bubble(4, 16)).run(work).span == 51 * each["F"]


@on_ranks(2)
def test_a_frozen_cut_matrix_costs_no_product_for_its_gradient(_rank: int, _world: int) -> None:
    weight = nn.Parameter(torch.rand(8, 4), requires_grad=False)
    ranks, bias = Communicator(torch.distributed.group.WORLD), nn.Parameter(torch.rand(4))
    y = ColumnParallelLinear(weight, ranks, False, bias)(torch.rand(2, 6, 8, requires_grad=True))
    with Operators() as operators:
        y.sum().backward()
    assert operators.products == 1  # of the input
    assert bias.grad is not None and bias.grad.tolist() == [12.0] * 4


@pytest.mark.parametrize(
    ("sequence", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.complex64)]
)
@on_ranks(2)
def test_a_pair_of_matrices_without_biases(
    _rank: int, _world: int, sequence: bool, dtype: torch.dtype
) -> None:
    """As Llama has them: the sum over the ranks' parts of x w v."""
    torch.manual_seed(0)
    ranks, sizes = Communicator(torch.distributed.group.WORLD), ((2, 6, 8), (8, 4), (4, 8))
    x, w, v = (torch.randn(*size, dtype=dtype, requires_grad=True) for size in sizes)
    w_here, v_here = (nn.Parameter(ranks.shard_of(t, d)) for t, d in ((w, 1), (v, 0)))
    first, second = (
        ColumnParallelLinear(w_here, ranks, sequence), RowParallelLinear(v_here, ranks, sequence),
    )  # fmt: skip
    wanted: Any = x @ w @ v
    wanted.abs().square().sum().backward()
    part: Any = partial(ranks.shard_of, dim=1) if sequence else lambda t: t
    x_here = part(x).detach().requires_grad_()
    y = second(first(x_here))
    y.abs().square().sum().backward()
    torch.testing.assert_close(y, part(wanted))
    gradients: list[Any] = [t.grad for t in (x, w, v)]
    dx, dw, dv = gradients
    wanted = part(dx), ranks.shard_of(dw, 1), ranks.shard_of(dv, 0)
    torch.testing.assert_close((x_here.grad, w_here.grad, v_here.grad), wanted)


@on_ranks(2)
def test_exchanges_have_second_derivatives(_rank: int, _world: int) -> None:
    """Each rank has half of the sum over ranks of x^3, of which it has some: 3 x^2, then 6 x."""
    ranks = Communicator(torch.distributed.group.WORLD)
    x = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    half = gather(x, ranks, 1).pow(3).sum() / 2
    (first,) = torch.autograd.grad(half, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, 3 * x.square())
    torch.testing.assert_close(second, 6 * x)

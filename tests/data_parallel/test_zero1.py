"""ZeRO 1 by itself; tests/equivalence has it under every layout."""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from data_parallel import zero1
from data_parallel.buckets import in_backward_order
from data_parallel.fsdp import FullyShardedDataParallel
from runtime.communicator import Communicator
from tests.data_parallel.sharded_models import HALVES, SGD, batch, loss_of, one_process, tied
from tests.odd_layers import in_one_memory
from tests.pipeline.pipeline_models import assert_close
from tests.ranks import nan_in_new_memory, sharing
from tests.remote import on_ranks


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@on_ranks(3)
def test_buckets_of_any_size_are_one_update(
    rank: int, _: int, bucket_bytes: int, share: bool
) -> None:
    """A bucket has one parameter, or all of its kind. Two steps of the plain model, of which the
    third rank has no part; and a parameter without gradient. Gaps between parameters count in
    norms, so they are zero. All begin with the values of the first rank."""
    parameters = dict((model := tied()).named_parameters())
    for p in parameters.values():
        p.data += rank
    parameters["unused"] = nn.Parameter(torch.ones(3, dtype=torch.float64))
    in_order = partial(in_backward_order, bucket_bytes=bucket_bytes)
    with (
        patch.object(zero1, "in_backward_order", in_order), sharing(share), nan_in_new_memory()
    ):  # fmt: skip
        ranks = Communicator(dist.group.WORLD)
        sharded = zero1.ShardedOptimizer(
            parameters, SGD, ranks, kind=lambda name: name.endswith("bias")
        )
        sharded.buckets.watch()
        for step in range(2):
            x, target = batch(step, HALVES[min(rank, 1)])
            loss = loss_of(model(x), target)
            if rank < 2:
                loss.backward()
            sharded.buckets.finish()
            assert all(p.grad is None for p in parameters.values())
            gradients = [x.parameter.grad for x in sharded.slices if x.parameter is not None]
            assert all(g is not None and g.isfinite().all() for g in gradients)
            sharded.optimizer.step()
    weights = {name: p.detach() for name, p in parameters.items()}
    assert weights.pop("unused").tolist() == [1.0, 1.0, 1.0]
    assert_close(weights, one_process(steps=2)[2])


@on_ranks(2)
def test_shards_are_summed_while_backward_runs(_rank: int, _: int) -> None:
    """As `test_buckets_leave_while_backward_runs`: a bucket has one parameter of three layers."""
    net, told = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3))), list[Any]()
    in_order = partial(in_backward_order, bucket_bytes=1)
    with patch.object(zero1, "in_backward_order", in_order), sharing(False):
        sharded = zero1.ShardedOptimizer(
            dict(net.named_parameters()), SGD, Communicator(dist.group.WORLD),
            recorder=lambda *e: told.append(e),
        )  # fmt: skip
        sharded.buckets.watch()
        net(torch.ones(2, 5)).sum().backward()
        middle = time.perf_counter()
        sharded.buckets.finish()
        sharded.optimizer.step()
    assert [event[:2] for event in told] == [
        ("reduce_scatter", 0), ("reduce_scatter", 1), ("reduce_scatter", 2), ("barrier", -1),
        ("all_gather", -1),
    ]  # fmt: skip
    assert [start < middle for *_, start, _ in told] == [True] * 3 + [False] * 2


@on_ranks(2)
def test_other_parameters_on_other_ranks_are_refused_everywhere(rank: int, _: int) -> None:
    """Their parts would be of other parameters."""
    layer = nn.Linear(3, 3)
    names = [["weight", "bias"], ["bias", "weight"]][rank]
    with pytest.raises(ValueError, match=r"^ranks \[1\] have a module unlike rank 0's"):
        zero1.ShardedOptimizer(
            {name: getattr(layer, name) for name in names}, SGD, Communicator(dist.group.WORLD)
        )
    with pytest.raises(ValueError, match=r"^ranks \[1\] have a module unlike rank 0's"):
        FullyShardedDataParallel([nn.Linear(3, 3 + rank)], SGD)


def test_data_that_were_replaced_are_refused() -> None:
    layer = nn.Linear(2, 2)
    sharded = zero1.ShardedOptimizer(dict(layer.named_parameters()), SGD, Communicator())
    nn.utils.vector_to_parameters(torch.ones(6), layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"or its data were replaced, and would miss the upd"):
        sharded.buckets.finish()


def test_a_parameter_that_is_frozen_later_is_refused() -> None:
    """Momentum would move it."""
    layer = nn.Linear(2, 2)
    sharded = zero1.ShardedOptimizer(dict(layer.named_parameters()), SGD, Communicator())
    layer.bias.requires_grad_(False)
    layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^a parameter was frozen, and would still be updated"):
        sharded.buckets.finish()


def test_parameters_in_one_memory_are_refused() -> None:
    said = (
        r"^0\.weight and 1\.weight share memory, and each would move .*: let the "
        r"modules have one Parameter, as in head\.weight = embedding\.weight$"
    )
    with pytest.raises(ValueError, match=said):
        zero1.ShardedOptimizer(dict(in_one_memory().named_parameters()), SGD, Communicator())


def test_a_frozen_parameter_is_refused() -> None:
    """Decay would change it."""
    p = nn.Parameter(torch.ones(3), requires_grad=False)
    with pytest.raises(ValueError, match=r"^bias is frozen"):
        zero1.ShardedOptimizer({"bias": p}, SGD, Communicator(), kind=len)

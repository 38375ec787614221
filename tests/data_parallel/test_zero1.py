"""ZeRO 1 by itself; tests/equivalence has it under every layout."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from data_parallel import zero1
from runtime.communicator import Communicator
from tests.data_parallel.sharded_models import HALVES, SGD, batch, loss_of, one_process, tied
from tests.pipeline.pipeline_models import assert_close
from tests.ranks import nan_in_new_memory, sharing
from tests.remote import on_ranks


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("at_once", [2 * 8 * 7, zero1.BYTES_AT_ONCE])
@on_ranks(2)
def test_stretches_of_any_length_are_one_update(
    rank: int, _: int, at_once: int, share: bool
) -> None:
    """Stretches have seven numbers of each rank, the last fewer; or one stretch has all. Two steps
    of the plain model, each rank with its part of the batch; and a parameter without gradient. Gaps
    between parameters count in norms, so they are zero."""
    parameters = dict((model := tied()).named_parameters())
    parameters["unused"] = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    with patch.object(zero1, "BYTES_AT_ONCE", at_once), sharing(share), nan_in_new_memory():
        ranks = Communicator(dist.group.WORLD)
        sharded = zero1.ShardedOptimizer(
            parameters, SGD, ranks, kind=lambda name: name.endswith("bias")
        )
        for step in range(2):
            x, target = batch(step, HALVES[rank])
            loss_of(model(x), target).backward()
            sharded.reduce()
            assert all(p.grad is None for p in parameters.values())
            assert all(
                s.grad is not None and s.grad.isfinite().all() for s in sharded.shards.values()
            )
            sharded.optimizer.step()
    weights = {name: p.detach() for name, p in parameters.items()}
    assert weights.pop("unused").tolist() == [1.0, 1.0, 1.0]
    assert_close(weights, one_process(steps=2)[2])


def test_a_frozen_parameter_is_refused() -> None:
    """Decay would change it."""
    p = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    with pytest.raises(ValueError, match=r"^bias is frozen"):
        zero1.ShardedOptimizer({"bias": p}, SGD, Communicator(), kind=len)

"""What wrapping a model adds to the averaging of gradients: all ranks begin as rank 0.

That training is then that of one process, the rows of tests/equivalence/table.py say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from data_parallel.ddp import DistributedDataParallel
from tests.ranks import Ranks


def _net(rank: int) -> nn.Module:
    """A tied weight, a frozen bias, and a buffer that is an integer."""
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False))
    net[2].weight = net[0].weight
    net[0].bias.requires_grad_(False)
    for buffer in net.buffers():
        buffer.add_(rank)
    return net


def _wrapped(rank: int, _: int) -> dict[str, Tensor]:
    net = _net(rank)
    DistributedDataParallel(net)
    return dict(net.state_dict())


def test_all_ranks_begin_with_the_values_of_rank_0(three_ranks: Ranks) -> None:
    for state in three_ranks.run(_wrapped):
        torch.testing.assert_close(state, dict(_net(0).state_dict()), rtol=0, atol=0)


def _unequal(rank: int, _: int) -> list[str]:
    longer = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(1 + rank)])
    said = []
    for net in (nn.Linear(2, 3 + rank), longer):
        with pytest.raises(ValueError, match="rank 1 has another module") as error:
            DistributedDataParallel(net)
        said.append(str(error.value))
    return said


def test_other_modules_on_other_ranks_are_refused_everywhere(ranks: Ranks) -> None:
    for other_shape, longer in ranks.run(_unequal):
        assert "than rank 0, see bias, weight" in other_shape
        assert "than rank 0, see 1.weight; all ranks must construct the same one" in longer

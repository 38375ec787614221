"""A model wrapped for data parallelism trains as one process does, by parameter name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data_parallel.ddp import DistributedDataParallel
from tests.ranks import Ranks

EXAMPLES = torch.Generator().manual_seed(5)
X = torch.randn(11, 6, generator=EXAMPLES, dtype=torch.float64)
Y = torch.randn(11, 3, generator=EXAMPLES, dtype=torch.float64)
RATE = 0.1


class Net(nn.Module):
    """A tied weight, a buffer that is a number, a frozen parameter, and one of a single element."""

    def __init__(self, seed: int, hidden: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, hidden, bias=False)
        self.middle = nn.Linear(hidden, 6)
        self.again = nn.Linear(6, hidden, bias=False)
        self.again.weight = self.first.weight
        self.last = nn.Linear(hidden, 3)
        self.scale = nn.Parameter(torch.rand(()))
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.register_buffer("seen", torch.tensor(seed))
        self.double()
        self.seen = torch.tensor(seed)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(self.again(x)) * self.scale + self.frozen


def loss_sum(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def plain(steps: int) -> dict[str, Tensor]:
    """One process, all examples."""
    net = Net(seed=0)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        (loss_sum(net(X), Y) / len(X)).backward()
        optimizer.step()
    return dict(net.state_dict())


def train(
    rank: int, world_size: int, steps: int, cut: int, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Rank 0 has 6 of the 11 examples, rank 1 five, in micro-batches of `cut`."""
    net = Net(seed=rank)  # different weights: construction must make them rank 0's
    ddp = DistributedDataParallel(net, **options)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], RATE)
    x, y = X[rank::world_size], Y[rank::world_size]
    for _ in range(steps):
        optimizer.zero_grad()
        parts = list(zip(x.split(cut), y.split(cut), strict=True))
        with ddp.no_sync():
            for a, b in parts[:-1]:
                (loss_sum(ddp(a), b) * world_size / len(X)).backward()
        a, b = parts[-1]
        (loss_sum(ddp(a), b) * world_size / len(X)).backward()
        ddp.average_gradients()
        optimizer.step()
    ddp.close()
    return {name: t.clone() for name, t in net.state_dict().items()}


@pytest.mark.parametrize(
    "options", [{}, {"bucket_bytes": 1}, {"share_memory": False}], ids=["", "small", "gloo"]
)
@pytest.mark.parametrize("cut", [6, 2])
def test_weights_are_those_of_one_process(ranks: Ranks, cut: int, options: dict[str, Any]) -> None:
    """After three steps, in float64: sums in another order, 11 terms of size 1, leave 1e-14."""
    want = plain(3)
    for got in ranks.run(train, 3, cut, options):
        assert list(got) == list(want)
        for name, tensor in want.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-12, atol=1e-13, msg=name)


def three(rank: int, world_size: int) -> dict[str, Tensor]:
    return train(rank, world_size, 2, 4, {})


def test_on_three_ranks_all_hold_the_same_bits(three_ranks: Ranks) -> None:
    first, *others = three_ranks.run(three)
    for name, tensor in plain(2).items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-12, atol=1e-13, msg=name)
    for other in others:
        assert [name for name in first if not torch.equal(first[name], other[name])] == []


def unequal(rank: int, _: int) -> list[str]:
    longer = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(1 + rank)])
    said = []
    for net in (Net(seed=0, hidden=5 + rank), longer):
        with pytest.raises(ValueError, match="rank 1 has another module") as error:
            DistributedDataParallel(net)
        said.append(str(error.value))
    return said


def test_other_modules_on_other_ranks_are_refused_everywhere(ranks: Ranks) -> None:
    for other_shape, longer in ranks.run(unequal):
        assert other_shape == (
            "rank 1 has another module than rank 0: ('first.weight', (6, 6), 'torch.float64') "
            "where that has ('first.weight', (5, 6), 'torch.float64'); all ranks must construct "
            "the same one"
        )
        assert "('1.weight', (2, 2), 'torch.float32') where that has no more" in longer

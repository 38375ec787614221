"""What wrapping a model adds to the averaging of gradients: all ranks begin as rank 0."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from data_parallel.ddp import DistributedDataParallel
from tests.ranks import Ranks

EXAMPLES = torch.Generator().manual_seed(5)
X = torch.randn(11, 6, generator=EXAMPLES, dtype=torch.float64)
Y = torch.randn(11, 3, generator=EXAMPLES, dtype=torch.float64)
STEPS, RATE = 2, 0.1


class Net(nn.Module):
    """A tied weight, a buffer that is a number, a frozen parameter, and one of a single element."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 5, bias=False)
        self.middle = nn.Linear(5, 6)
        self.again = nn.Linear(6, 5, bias=False)
        self.again.weight = self.first.weight
        self.last = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.rand(()))
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.register_buffer("seen", torch.tensor(seed))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(self.again(x)) * self.scale + self.frozen


def trained(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], RATE)


def plain() -> dict[str, Tensor]:
    """One process, all examples."""
    net = Net(seed=0)
    optimizer = trained(net)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ((net(X) - Y).square().sum() / len(X)).backward()
        optimizer.step()
    return dict(net.state_dict())


def train(rank: int, world_size: int) -> dict[str, Tensor]:
    """Each rank has three or four of the examples, in micro-batches of two."""
    net = Net(seed=rank)
    ddp = DistributedDataParallel(net)
    optimizer = trained(net)
    parts = list(zip(X[rank::world_size].split(2), Y[rank::world_size].split(2), strict=True))
    for _ in range(STEPS):
        optimizer.zero_grad()
        for x, y in parts:
            with nullcontext() if x is parts[-1][0] else ddp.no_sync():
                ((ddp(x) - y).square().sum() * world_size / len(X)).backward()
        ddp.average_gradients()
        optimizer.step()
    ddp.close()
    return {name: t.clone() for name, t in net.state_dict().items()}


def test_three_ranks_are_one_process(three_ranks: Ranks) -> None:
    """And hold the same bits. In float64 sums of 11 terms in another order leave 1e-14."""
    want, (first, *others) = plain(), three_ranks.run(train)
    assert list(first) == list(want)
    for name, tensor in want.items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-12, atol=1e-13, msg=name)
    for other in others:
        assert [name for name in first if not torch.equal(first[name], other[name])] == []


def unequal(rank: int, _: int) -> list[str]:
    longer = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(1 + rank)])
    said = []
    for net in (nn.Linear(2, 3 + rank), longer):
        with pytest.raises(ValueError, match="rank 1 has another module") as error:
            DistributedDataParallel(net)
        said.append(str(error.value))
    return said


def test_other_modules_on_other_ranks_are_refused_everywhere(ranks: Ranks) -> None:
    for other_shape, longer in ranks.run(unequal):
        assert "than rank 0, see bias, weight" in other_shape
        assert "than rank 0, see 1.weight; all ranks must construct the same one" in longer

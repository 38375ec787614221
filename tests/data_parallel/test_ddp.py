"""What wrapping a model adds to the averaging of gradients: all ranks begin as rank 0.

The rows of tests/equivalence/table.py check that training is then that of one process."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from data_parallel.gradients import DistributedDataParallel
from tests.remote import on_ranks


def _net(rank: int) -> nn.Module:
    """A tied weight, a frozen bias, and buffers of types that gloo sends, and of others."""
    torch.manual_seed(rank)
    net: Any = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False))
    net[2].weight = net[0].weight
    net[0].bias.requires_grad_(False)
    for buffer in net.buffers():
        buffer.add_(rank)
    for dtype in (torch.int16, torch.float8_e4m3fn, torch.bool, torch.complex64):
        net.register_buffer(str(dtype)[6:], torch.tensor([[rank], [1]]).to(dtype))
    net.register_buffer("strided", (torch.arange(4.0) + rank)[::2])
    net.register_buffer("conjugate", torch.tensor([1j * rank]).conj())
    return net


@on_ranks(2)
def test_all_ranks_begin_with_the_values_of_rank_0(rank: int, _: int) -> None:
    net = _net(rank)
    DistributedDataParallel(net)
    got, want = ({n: t.tolist() for n, t in x.state_dict().items()} for x in (net, _net(0)))
    assert got == want


@on_ranks(2)
def test_other_modules_on_other_ranks_are_refused_everywhere(rank: int, _: int) -> None:
    longer = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(1 + rank)])
    frozen = nn.Linear(2, 2)
    frozen.bias.requires_grad_(rank == 0)
    for net in nn.Linear(2, 3 + rank), longer, frozen:
        with pytest.raises(ValueError, match=r"^ranks \[1\] have a module unlike rank 0's"):
            DistributedDataParallel(net)


@on_ranks(2)
def test_a_backward_may_be_recorded(rank: int, _world: int) -> None:
    """For second derivatives, which are this rank's own."""
    ddp: Any = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    nn.init.ones_(ddp.module.weight)
    ddp(torch.full((1, 2), 1.0 + rank)).square().sum().backward(create_graph=True)
    ddp.average_gradients()
    assert ddp.module.weight.grad.tolist() == [[10, 10]]


@on_ranks(2)
def test_what_is_unfrozen_or_replaced_later_is_refused(_rank: int, _world: int) -> None:
    """What is frozen later has no gradient, and is left out."""
    ddp: Any = DistributedDataParallel(_net(0))
    for frozen in (False, True):
        ddp.module[0].weight.requires_grad_(not frozen)
        ddp.zero_grad()
        ddp(torch.rand(3, 6)).sum().backward()
        ddp.average_gradients()
        assert (ddp.module[0].weight.grad is None) == frozen
    ddp.module[0].bias.requires_grad_()
    ddp(torch.rand(3, 6)).sum().backward()
    with pytest.raises(ValueError, match=r"^0\.bias was unfrozen, replaced or added after .* anew"):
        ddp.average_gradients()
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    ddp.module.load_state_dict(nn.Linear(2, 2).state_dict(), assign=True)
    ddp(torch.rand(3, 2)).sum().backward()
    with pytest.raises(ValueError, match=r"^weight was unfrozen, replaced or added after .* anew"):
        ddp.average_gradients()


@on_ranks(2)
def test_complex_gradients_travel_as_they_are(_rank: int, _world: int) -> None:
    """`comm_dtype` would drop their imaginary parts."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.complex64)
    ddp = DistributedDataParallel(model, comm_dtype=torch.bfloat16)
    ddp(torch.tensor([[1 + 1j]])).imag.sum().backward()
    ddp.average_gradients()
    assert model.weight.grad is not None and model.weight.grad.item() == 1 + 1j


@on_ranks(2)
def test_a_copy_of_what_is_inside_is_wrapped_and_averages(rank: int, world_size: int) -> None:
    ddp: Any = DistributedDataParallel(nn.Linear(2, 1).double())
    with pytest.raises(TypeError, match=r"cannot be copied or pickled, .*: copy the model"):
        deepcopy(ddp)
    ddp = DistributedDataParallel(deepcopy(ddp.module))
    ddp(torch.full((1, 2), 1.0 + rank, dtype=torch.float64)).sum().backward()
    ddp.average_gradients()
    mean = (world_size + 1) / 2  # of 1, 2, ...
    assert ddp.module.weight.grad.tolist() == [[mean, mean]]

"""Gradients have the strides of their parameters, as autograd makes them: fused optimizers take
both by address. A convolution whose weight lies channels last, and a transposed matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from data_parallel.gradients import (
    DistributedDataParallel,
    average_gradients,
    average_gradients_flat,
)
from data_parallel.zero1 import ShardedOptimizer
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.processes.process import ProcessPipe
from pipeline.step import hand_over
from runtime.communicator import Communicator
from tests.pipeline.pipeline_models import square_error
from tests.ranks import sharing
from tests.remote import on_ranks

X = torch.linspace(-1, 1, 4 * 2 * 5 * 5, dtype=torch.float64).view(4, 2, 5, 5).sin()
Y = torch.linspace(-1, 1, 4 * 3, dtype=torch.float64).view(4, 3).cos()


def odd_layers() -> nn.Sequential:
    torch.manual_seed(0)
    convolution, product = nn.Conv2d(2, 4, 3).double(), nn.Linear(36, 3).double()
    convolution.weight = nn.Parameter(
        convolution.weight.detach().contiguous(memory_format=torch.channels_last)
    )
    product.weight = nn.Parameter(torch.randn(36, 3, dtype=torch.float64).t())
    assert not convolution.weight.is_contiguous() and not product.weight.is_contiguous()
    return nn.Sequential(convolution, nn.Flatten(), product, nn.Linear(3, 3).double())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def after_backward(average: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    def train(net: nn.Module) -> None:
        optimizer = adamw(net.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            square_error(net(X), Y).backward()
            average(net)
            optimizer.step()

    return train


def in_buckets(net: nn.Module) -> None:
    ddp = DistributedDataParallel(net)
    after_backward(lambda _: ddp.average_gradients())(net)


def in_shards(net: nn.Module) -> None:
    parameters = dict(net.named_parameters())
    sharded = ShardedOptimizer(parameters, adamw, Communicator(dist.group.WORLD))
    sharded.buckets.watch()
    for _ in range(2):
        (square_error(net(X), Y) / 2).backward()
        sharded.buckets.finish()
        sharded.optimizer.step()


def in_threads(net: nn.Sequential) -> None:
    placed = [WithDevice(layer, torch.device("cpu", k // 2)) for k, layer in enumerate(net)]
    with Pipe(nn.Sequential(*placed), split_size=2) as pipe:
        optimizer = adamw(net.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            pipe.train_step(X, Y, square_error, "1f1b", 2)
            optimizer.step()


def in_processes(net: nn.Sequential) -> None:
    with ProcessPipe(net, [2, 2]) as pipe:
        optimizer = adamw(pipe.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            pipe.train_step(X, Y, square_error, "zb", 2)
            optimizer.step()
        for part, rank in ((net[0], 0), (net[2:], 1)):
            for p in part.parameters():
                dist.broadcast(whole := p.detach().contiguous(), rank)
                p.data.copy_(whole)


WAYS: dict[str, Callable[..., None]] = {
    "buckets": in_buckets,
    "per parameter": after_backward(average_gradients),
    "flat": after_backward(average_gradients_flat),
    "ZeRO 1": in_shards,
    "threads": in_threads,
    "processes": in_processes,
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_fused_update_is_that_of_one_process(_: int, _world_size: int, way: str) -> None:
    """Both ranks have the same examples."""
    wanted, net = odd_layers(), odd_layers()
    after_backward(lambda _: None)(wanted)
    for share in (True, False):
        net = odd_layers()
        with sharing(share):
            WAYS[way](net)
        for p, want in zip(net.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(p, want)


@on_ranks(2)
def test_a_module_that_lies_otherwise_on_another_rank_is_refused(rank: int, _: int) -> None:
    """Buckets hold gradients in the order of the memory."""
    layer = nn.Linear(2, 3)
    if rank == 1:
        layer.weight = nn.Parameter(torch.randn(2, 3).t())
    with pytest.raises(ValueError, match="a module unlike rank 0's"):
        DistributedDataParallel(layer)


def test_what_a_message_brings_is_handed_over_with_its_parameter_s_strides() -> None:
    p = nn.Parameter(torch.zeros(3, 4).t())
    hand_over({p: torch.ones(4, 3)})
    assert p.grad is not None and p.grad.stride() == p.stride() and p.grad.eq(1).all()

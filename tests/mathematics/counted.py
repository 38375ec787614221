"""Steps whose bytes are counted: what a rank sends, and what it holds.

Linux keeps a count of the bytes sent per TCP connection (TCP_INFO, `tcpi_bytes_sent`, since 4.19).
The sum over the connections of a process is exactly what it sent: unlike the counters of a network
interface, it excludes other programs. Retransmissions, which a busy machine causes, do not count.
The models are stacks of feed-forward halves of blocks.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from data_parallel.buckets import GradientBuckets, SummedBucket, in_backward_order
from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.zero1 import ShardedOptimizer
from experts.layer import Experts, share_experts
from pipeline.executor import LocalChannel
from runtime.communicator import Communicator
from runtime.mesh import make_mesh
from tests.ranks import sharing
from training.layouts.layout import state_bytes
from training.tasks.gpt2 import gpt2_config

LAYERS = 8
Bytes = dict[str, float]  # by what was done
_SENT = struct.Struct("QQ")  # tcpi_bytes_sent, and of those tcpi_bytes_retrans
_OFFSET = 200  # of these in struct tcp_info
_LISTENING = 10


def bytes_sent() -> int:
    """Bytes of payload sent so far over the TCP connections that are open.

    Raises:
        OSError: this system does not count them.
    """
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            number = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(number))
        except OSError:  # closed meanwhile
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                total += _sent_over(sock)
    return total


def _sent_over(sock: socket.socket) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if info[0] == _LISTENING:
        return 0
    if len(info) < _OFFSET + _SENT.size:
        raise OSError("this kernel does not count the bytes of a connection; Linux 4.19 does")
    sent, again = _SENT.unpack_from(info, _OFFSET)
    return int(sent - again)


def mlp(width: int) -> GPT2MLP:
    """The feed-forward half of a block, of 8 H^2 + 5 H parameters."""
    return GPT2MLP(4 * width, gpt2_config("gpt2-mini", 64, 8, n_layer=1, n_embd=width, n_head=2))


def make_layers(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(mlp(width) for _ in range(LAYERS)))


def sent_by(action: Callable[[], Any]) -> int:
    """Bytes that this rank sends for it, without the barriers around it."""
    gc.collect()  # a connection that closes meanwhile would take its bytes along
    dist.barrier()
    start = bytes_sent()
    dist.barrier()
    before = bytes_sent()
    action()
    dist.barrier()
    return bytes_sent() - before - (before - start)


def steps(_rank: int, world_size: int, width: int) -> Bytes:
    """What a rank sends in a step, and what it holds, as ranks of several machines do. Two share a
    copy; four have two copies."""
    mesh = make_mesh({"dp": world_size // 2, "shards": 2}, 60.0)
    groups = mesh["shards"].group, mesh["dp"].group
    with sharing(False):
        found = data_parallel_step(width) | zero1_step(width, *groups)
        return found | sharded_step(2, width, *groups) | sharded_step(3, width, *groups)


def data_parallel_step(width: int) -> Bytes:
    model, x = make_layers(width), torch.randn(4, width)
    communicator = Communicator(dist.group.WORLD)
    groups = in_backward_order(model.parameters())
    buckets = GradientBuckets([SummedBucket(group, communicator) for group in groups])
    buckets.watch()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        buckets.finish()
        optimizer.step()

    sent = sent_by(step)
    return {"sent 0": sent, "held 0": sum(state_bytes(model.parameters(), [optimizer]).values())}


def zero1_step(
    width: int, group: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None
) -> Bytes:
    model, x = make_layers(width), torch.randn(4, width)
    ranks, others = Communicator(group), Communicator(replicas)
    for communicator in (ranks, others):
        communicator.all_reduce(torch.ones(1))  # finds out what the ranks share
    parameters = dict(model.named_parameters())
    sharded = ShardedOptimizer(parameters, torch.optim.AdamW, ranks, replicas=others)
    sharded.buckets.watch()

    def step() -> None:
        model(x).sum().backward()
        sharded.buckets.finish()
        sharded.optimizer.step()

    sent = sent_by(step)
    model(x).sum().backward()  # before the update every rank has all gradients
    held = state_bytes(model.parameters(), [sharded.optimizer])
    return {"sent 1": sent, "held 1": sum(held.values())}


def sharded_step(
    zero: int, width: int, group: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None
) -> Bytes:
    fsdp = FullyShardedDataParallel(
        make_layers(width), torch.optim.AdamW, zero=zero, group=group, replicas=replicas
    )
    x, held = torch.randn(4, width), list[int]()

    def step() -> None:
        fsdp.backward(fsdp.forward(x).sum())
        fsdp.optimizer_step()

    step()  # the first backward gathers everything; in it ranks agree on what later ones need
    sent = sent_by(step)
    # Before the update, which uses the gradients up.
    fsdp.optimizer.register_step_pre_hook(lambda *_: held.append(sum(fsdp.held_bytes().values())))
    step()
    return {f"sent {zero}": sent, f"held {zero}": held[-1]}


def expert_layer(_rank: int, _world_size: int, positions: int, width: int) -> int:
    """Bytes that a rank sends in a layer of four experts, forward and backward. Position i chooses
    the experts i and i + 1 modulo 4."""
    layer = Experts(mlp(width), num_experts=4, top_k=2)
    for p in layer.parameters():
        nn.init.normal_(p, 0, 0.02)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4, width))
    number = torch.arange(positions)
    x = torch.zeros(positions, width).requires_grad_()
    x.data[number, number % 4], x.data[number, (number + 1) % 4] = 9, 8
    with sharing(False):
        ranks = Communicator(dist.group.WORLD)
        ranks.all_reduce(torch.ones(1))  # finds out what the ranks share
        share_experts(layer, ranks)
        return sent_by(lambda: layer(x)[0].sum().backward())


def boundary_traffic(step: Callable[[], Any]) -> int:
    """Bytes of all tensors that the stages of one process pass to each other during the step."""
    handed: list[int] = []
    put = LocalChannel.put

    def counting(self: LocalChannel, i: int, value: Any) -> None:
        if threading.current_thread() is not threading.main_thread():  # that one feeds the batch
            handed.extend(t.nbytes for t in pytree.tree_leaves(value) if isinstance(t, Tensor))
        put(self, i, value)

    with patch.object(LocalChannel, "put", counting):
        step()
    return sum(handed)

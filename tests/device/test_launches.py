"""How many kernels cut layers launch on the device, and how often the host waits."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from experts.layer import Experts, share_experts
from runtime.communicator import Communicator
from runtime.mesh import make_mesh
from runtime.meta import materialize, names_of
from tensor_parallel import loss
from tests.device.seen import watch
from tests.device.session import NCCL, ranks
from tests.equivalence.problems import Sentences
from tests.remote import on_device
from training.launch.world import World
from training.layouts.cut import TensorCutTask
from training.layouts.layout import Setup
from training.options import Options
from training.tasks.gpt2 import gpt2_config

N, ROWS, C = 64, 32, 8
SUMS = ("all_reduce", "reduce_scatter_single")
POSITIONS, VOCABULARY = 32 << 10, 50257


def head(rank: int, _: int) -> tuple[dict[int, int], Counter[str], list[str]]:
    """Kernels of the head and its loss by the number of chunks; waits of that, and of `measure`."""
    torch.cuda.set_device(rank)
    hidden, weight = (torch.randn(n, C, requires_grad=True, device="cuda") for n in (N, ROWS))
    labels = torch.randint(2 * ROWS, (N,)).cuda()
    args = hidden, weight, labels, Communicator(dist.group.WORLD), rank * ROWS
    kernels, waits = {}, Counter[str]()
    for chunks in (1, 2, 4):
        with (
            patch.dict(loss.LOGITS_AT_ONCE, cuda=N * ROWS // chunks),
            torch.autocast("cuda", torch.bfloat16),
            watch() as seen,
        ):
            loss.head_loss(*args).backward()
            kernels[chunks] = len(seen.kernels)
            waits.update(w.why for w in seen.waits)
            with watch() as of_measure:
                loss.measure(*args)
    return kernels, waits, [w.why for w in of_measure.waits]


@on_device
def test_head_and_loss_launch_at_most_300_kernels_and_never_wait() -> None:
    """At 32k positions and 50,257 tokens. As many for each chunk."""
    rows = torch.empty(-(-VOCABULARY // 2), 0, device="cuda")
    chunks = len(loss._chunks(POSITIONS, rows, Communicator(), 0))
    for kernels, waits, of_measure in ranks(2, NCCL).run(head):
        each = (kernels[4] - kernels[2]) / 2

        assert each > 0  # the number of chunks is that of the device
        assert kernels[1] + (chunks - 1) * each <= 300
        assert waits == {} and of_measure == ["copy to the CPU"]


def routed(rank: int, _: int, empty: bool) -> tuple[list[str], Counter[str], list[float]]:
    """A layer of experts in 16 bits, forward and backward: what the host waits for, its kernels by
    name, and how far its gradients are from those of the CPU, each as a part of its largest.
    `empty`: expert 0 gets no row."""
    torch.cuda.set_device(rank)
    ranks = Communicator(dist.group.WORLD)
    mlp = GPT2MLP(4 * C, gpt2_config("gpt2-mini", 64, 8, n_embd=C, n_head=2))
    layers = [Experts(mlp, 4, 2) for _ in range(2)]
    x, gradients = torch.randn(2, 9, C), []
    for device, layer in zip(("cpu", "cuda"), layers, strict=True):
        generator = torch.Generator().manual_seed(1)
        for p in layer.parameters():
            nn.init.normal_(p, generator=generator)
        layer.router.weight.data[0] = -9.0 * empty  # of positive numbers: never chosen
        layer.to(device)
        share_experts(layer, ranks)
        own = x.abs().to(device).requires_grad_()
        with torch.autocast(device, torch.bfloat16), watch() as seen:
            y, _ = layer(own)
            y.square().sum().backward()
        gradients.append([p.grad.cpu() for p in layer.parameters() if p.grad is not None])
    off = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(*gradients, strict=True)]
    return [wait.why for wait in seen.waits], seen.operators, off


@pytest.mark.parametrize("empty", [False, True])
@on_device
def test_a_layer_of_experts_waits_once_and_multiplies_all_of_them_at_once(empty: bool) -> None:
    """Two matrices: y, dx and dw of each."""
    for waits, operators, off in ranks(2, NCCL).run(routed, empty):
        assert waits == ["copy to the CPU"] and operators["_grouped_mm"] == 6
        assert operators["mm"] + operators["addmm"] < 6
        assert all(a < 2**-6 for a in off)  # also if it is no number


def types_sent(rank: int, _: int, sequence: bool) -> set[torch.dtype]:
    """In which types the sums of a column-parallel and a row-parallel matrix travel in 16 bits."""
    torch.cuda.set_device(rank)
    args: Any = Options(sequence_parallel=sequence)
    problem = Sentences()
    task = TensorCutTask(
        problem.task(World(), torch.float32), Setup(args, Mock()), make_mesh({"tp": 2}, 60.0)
    )
    block = task.model.transformer.h[0]
    materialize(block, names_of(block), torch.device("cuda", rank), lambda _, p: nn.init.ones_(p))
    x = torch.ones(2, 4, problem.n_embd, device="cuda", requires_grad=True)
    sums = [patch.object(dist, name, wraps=getattr(dist, name)) for name in SUMS]
    with torch.autocast("cuda", torch.bfloat16), sums[0] as one, sums[1] as other:
        block.mlp.c_proj(block.mlp.c_fc(x)).sum().backward()
    return {call.args[0].dtype for call in (*one.mock_calls, *other.mock_calls) if call.args}


@pytest.mark.parametrize("sequence", [False, True])
@on_device
def test_sums_of_16_bit_activations_over_tensor_ranks_travel_in_16_bits(sequence: bool) -> None:
    """As those of Megatron-LM; twice the bytes otherwise."""
    assert ranks(2, NCCL).run(types_sent, sequence) == [{torch.bfloat16}] * 2

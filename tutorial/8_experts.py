"""Chapter 8: experts. A block has E MLPs instead of one, and two processes share them.

    python tutorial/8_experts.py

What differs from chapter 2: a block has E MLPs, the experts, and a router chooses K of them for
each position. That is E times the parameters of one MLP, but only K times its arithmetic. Each rank
holds half of the experts, so positions travel to the experts chosen for them, and back:

    rank 0    its rows ─ router ─┐            ┌─▸ experts 0 1 ─┐            ┌─▸ weighted sum
                                 ├─ all-to-all┤                ├─ all-to-all┤
    rank 1    its rows ─ router ─┘            └─▸ experts 2 3 ─┘            └─▸ weighted sum

Backward goes through the same exchanges in reverse. An expert sees the positions of all ranks, so
its gradient is complete on its own rank. Everything else is replicated, and its gradients are
averaged as in chapter 2. No position is dropped, so the losses are those of one process with the
same model. Left out: the loss term that makes the router use all experts equally.

Full versions: experts/ (layer.py, dispatch.py, and routing.py with the loss term left out here) and
training/layouts/stages.py (who averages which gradients).
"""

import importlib
from typing import Any

import environment  # isort: skip  # noqa: F401
import torch
import torch.distributed as dist
from torch import Tensor, nn

one = importlib.import_module("1_one_process")
two = importlib.import_module("2_data_parallel")
W, C, E, K = two.W, one.C, 4, 2  # ranks, width, experts of a block, experts that see a position


class Experts(nn.Module):
    """Replaces a block's MLP: (B, T, C) -> (B, T, C). Every rank has all experts here."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(C, E)
        self.experts = nn.ModuleList(one.Block().mlp for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x.flatten(0, 1)).softmax(-1).topk(K)  # (N, K) each, N = B T
        order = chosen.flatten().argsort(stable=True)  # (N K,), by expert
        rows = x.flatten(0, 1)[order // K]  # each position K times
        rows = self.compute(rows, chosen.flatten().bincount(minlength=E))
        rows = torch.empty_like(rows).index_copy(0, order, rows)  # by position again
        return (rows.unflatten(0, (-1, K)) * weights[..., None]).sum(1).view_as(x)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The experts' outputs for their rows: the first counts[0] rows are for expert 0."""
        parts = zip(self.experts, rows.split(counts.tolist()), strict=True)
        return torch.cat([expert(part) for expert, part in parts])


class AllToAll(torch.autograd.Function):
    """Rank r gets the r-th part of every rank's rows; `send` and `receive` count rows by rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.send, ctx.receive = send, receive
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive, send)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return AllToAll.apply(gradient, ctx.receive, ctx.send), None, None


class SharedExperts(Experts):
    """Experts of which this rank has only some: rows travel to their experts, and back."""

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        incoming = torch.empty_like(counts)  # (E,): by sender, then by expert of this rank
        dist.all_to_all_single(incoming, counts)
        send, receive = (n.view(W, -1).sum(1).tolist() for n in (counts, incoming))
        rows = AllToAll.apply(rows, send, receive)  # ordered by sender, then by expert
        expert = torch.arange(E // W).repeat(W).repeat_interleave(incoming)  # of each row
        order = expert.argsort(stable=True)
        rows = super().compute(rows[order], expert.bincount(minlength=E // W))
        rows = torch.empty_like(rows).index_copy(0, order, rows)  # by sender again
        return AllToAll.apply(rows, receive, send)


def build_model(V: int, kind: type[Experts] = Experts) -> nn.Sequential:
    """Chapter 1's model with experts. The seed is the same in all processes."""
    model = one.build_model(V)
    for block in model[1:-1]:
        block.mlp = kind().double()
    return model


def main(rank: int) -> None:
    text, V = one.read_text()
    model = build_model(V, SharedExperts)
    for block in model[1:-1]:  # all were made, so that all ranks draw the same numbers
        block.mlp.experts = block.mlp.experts[rank * E // W : (rank + 1) * E // W]
    own = {p for block in model[1:-1] for p in block.mlp.experts.parameters()}
    replicated = nn.ParameterList(p for p in model.parameters() if p not in own)
    optimizer, losses = torch.optim.AdamW(model.parameters(), one.LEARNING_RATE), []
    for step in range(one.STEPS):
        inputs, targets = (x.chunk(W)[rank] for x in one.get_batch(text, step))
        loss = one.loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        two.average_gradients(replicated)
        for p in own:
            p.grad /= W  # a sum over all ranks' losses, each a mean over B/W rows
        optimizer.step()
        mean = loss.detach() / W
        dist.all_reduce(mean)
        losses.append(mean.item())
    if rank == 0:
        one.compare(build_model, expert_parallel=losses)


if __name__ == "__main__":
    two.launch(main)

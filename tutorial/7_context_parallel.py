"""Chapter 7: context parallelism. Two processes, each with half of the positions of every row.

    python tutorial/7_context_parallel.py

What differs from chapter 2: the ranks divide each row, not the batch. This is for long rows: a rank
holds the activations of T/W positions. A block works position by position, except in attention,
where a query needs the keys and values of all earlier positions. So keys and values travel in a
ring, and each rank adds up what its queries take from those that reach it:

    positions   0-7  8-15  16-23  24-31                   rank 0         rank 1
    rank         0    1      1      0        turn 0       own keys       own keys
                                             turn 1       rank 1's       rank 0's

The placement is a zigzag because later queries see more keys. Rank 0 has the cheapest and the most
expensive stretch, so both ranks have equally much to compute. A softmax needs the sum over all
keys. For each query a rank keeps the largest score so far, and rescales its sums when a larger one
comes (online softmax). In backward, autograd sends the gradients of keys and values back the way
these came.

Left out: skipping the quarters of the scores that are masked; sending while computing; rows of any
length. Here autograd keeps the keys and scores of every turn; context_parallel/ring.py keeps none.
Its backward sends the keys round once more, and their gradients follow them to the keys' own rank.

Full versions: context_parallel/ring.py (rows of any length, on any number of ranks),
context_parallel/heads.py (the other way: positions are exchanged for heads) and
training/layouts/context.py (labels and positions).
"""

import importlib
from typing import Any

import environment  # isort: skip  # noqa: F401
import torch
import torch.distributed as dist
from torch import Tensor

one = importlib.import_module("1_one_process")
two = importlib.import_module("2_data_parallel")
W, T = two.W, one.T


def positions_of(rank: int) -> Tensor:
    """This rank's places in the whole row, (T/W,): one stretch from each half."""
    stretches = torch.arange(T).chunk(2 * W)
    return torch.cat([stretches[rank], stretches[2 * W - 1 - rank]])


def shift(x: Tensor, by: int) -> Tensor:
    """Sends x to the rank `by` ahead, and returns what the rank `by` behind has sent."""
    rank, x, received = dist.get_rank(), x.contiguous(), torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, (rank + by) % W)
    receive = dist.P2POp(dist.irecv, received, (rank - by) % W)
    for message in dist.batch_isend_irecv([send, receive]):
        message.wait()
    return received


class PassOn(torch.autograd.Function):
    """Sends x to the next rank; backward sends the gradient to the one before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return shift(x, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return shift(gradient, -1)


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of this rank's queries over all keys; q, k, v: (B, H, T/W, C/H) each."""
    rank = dist.get_rank()
    largest = torch.full((*q.shape[:-1], 1), -torch.inf, dtype=q.dtype)  # score of a query so far
    total, mixed = torch.zeros_like(largest), torch.zeros_like(q)
    for turn in range(W):
        owner = (rank - turn) % W  # whose keys and values are here now
        seen = positions_of(rank)[:, None] >= positions_of(owner)  # in the whole row
        scores = (q @ k.transpose(-1, -2) / q.size(-1) ** 0.5).masked_fill(~seen, -torch.inf)
        # Needs no gradient: the result is the same whatever is subtracted. Finite in every turn,
        # because turn 0 has each query's own key.
        larger = torch.maximum(largest, scores.detach().amax(-1, keepdim=True))
        shares, smaller = (scores - larger).exp(), (largest - larger).exp()
        total = total * smaller + shares.sum(-1, keepdim=True)
        mixed = mixed * smaller + shares @ v
        largest = larger
        if turn < W - 1:
            k, v = PassOn.apply(torch.stack([k, v]))
    return mixed / total


def main(rank: int) -> None:
    text, V = one.read_text()
    model = one.build_model(V)
    embedding, *blocks, _ = model
    embedding.positions = positions_of(rank)  # places in the whole row
    for block in blocks:
        block.attend = ring_attention
    optimizer, losses = torch.optim.AdamW(model.parameters(), one.LEARNING_RATE), []
    for step in range(one.STEPS):
        # A target stays with its input: a stretch's last target is the next stretch's first word.
        inputs, targets = (x[:, positions_of(rank)] for x in one.get_batch(text, step))
        loss = one.loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        two.average_gradients(model)  # every rank has the whole model, as in chapter 2
        optimizer.step()
        mean = loss.detach() / W
        dist.all_reduce(mean)
        losses.append(mean.item())
    if rank == 0:
        one.compare(context_parallel=losses)


if __name__ == "__main__":
    two.launch(main)

"""Chapter 7: context parallelism. Two processes, each with half of the positions of every row.

    python tutorial/7_context_parallel.py

What differs from chapter 2: the ranks share each row, not the batch. It is for long rows: a rank
holds the activations of T/W positions. A block works position by position, except in attention,
where a query needs the keys and values of all earlier positions. So keys and values travel in a
ring, and each rank adds up what its queries take from the keys that have come to it:

    positions   0-7  8-15  16-23  24-31                   rank 0         rank 1
    rank         0    1      1      0        turn 0       own keys       own keys
                                             turn 1       rank 1's       rank 0's

The placement is a zigzag, because later queries see more keys: rank 0 has the cheapest stretch and
the dearest, so both ranks compute equally much. A softmax needs the sum over all keys; it is kept
with the largest score so far, and both are corrected when a larger one comes (online softmax).
In backward autograd sends the gradients of keys and values back the way these came.

Left out: skipping the quarters that no query sees; sending while computing; rows of any length. And
autograd keeps the keys and scores of every turn: context_parallel/ring.py keeps none of them. Its
backward sends the keys round once more, their gradients behind them, the same way round, home.

It grows into context_parallel/ring.py (rows of any length, on any number of ranks),
context_parallel/heads.py (the other way) and training/layouts/context.py (labels and positions).
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
    """Two stretches of the row, one from each end: (T/W,) places in the whole row."""
    stretches = torch.arange(T).chunk(2 * W)
    return torch.cat([stretches[rank], stretches[2 * W - 1 - rank]])


def shift(x: Tensor, by: int) -> Tensor:
    """Sends x that many ranks ahead, and returns what comes from behind."""
    rank, x, received = dist.get_rank(), x.contiguous(), torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, (rank + by) % W)
    receive = dist.P2POp(dist.irecv, received, (rank - by) % W)
    for message in dist.batch_isend_irecv([send, receive]):
        message.wait()
    return received


class PassOn(torch.autograd.Function):
    """To the next rank; the gradient goes back to the one before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return shift(x, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return shift(gradient, -1)


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of this rank's queries over all keys; each is (B, H, T/W, C/H)."""
    rank = dist.get_rank()
    largest = torch.full((*q.shape[:-1], 1), -torch.inf, dtype=q.dtype)  # score of each query
    total, mixed = torch.zeros_like(largest), torch.zeros_like(q)
    for turn in range(W):
        owner = (rank - turn) % W  # whose keys and values are here now
        seen = positions_of(rank)[:, None] >= positions_of(owner)  # in the whole row
        scores = (q @ k.transpose(-1, -2) / q.size(-1) ** 0.5).masked_fill(~seen, -torch.inf)
        # No gradient flows through it: the result is the same whatever is subtracted. Turn 0 has
        # each query's own key, so it is finite from then on.
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
        # A target moves with its input: that of a stretch's last word is in the next stretch.
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

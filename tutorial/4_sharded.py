"""Chapter 4: sharded data parallelism (ZeRO-3, FSDP). Each process keeps half of every parameter.

    python tutorial/4_sharded.py

What differs from chapter 2: a rank keeps only 1/W of every parameter, of its gradient and of
AdamW's two moments. A parameter is whole only while its layer computes: the ranks gather it before
and free it afterwards. So the layers run one by one, each with its own graph, like the stages of
chapter 3:

    forward    gather 0 | layer 0 | free 0    gather 1 | layer 1 | free 1    ...
    backward   gather 3 | layer 3 | free 3, reduce-scatter 3    gather 2 | layer 2 | ...

Reduce-scatter is an all-reduce after which each rank keeps only its part. With its part of the
gradient a rank updates its part of the parameter: AdamW works element by element.

Left out: parameters that W does not divide (they would be padded), and gathering the next layer
while the current one computes.

Full versions: data_parallel/fsdp.py (the step), data_parallel/shards.py (shards: all parameters of
a layer in one row) and runtime/communicator.py (the two collectives).
"""

import importlib

import environment  # isort: skip  # noqa: F401
import torch
import torch.distributed as dist
from torch import Tensor, nn

one = importlib.import_module("1_one_process")
two = importlib.import_module("2_data_parallel")
W = two.W


class Sharded:
    """A parameter of n elements. `shard` (n/W,) stays; `whole` (n,) has memory while gathered."""

    def __init__(self, p: nn.Parameter, rank: int) -> None:
        assert p.numel() % W == 0, f"{W} ranks cannot have equal shares of {p.numel()} numbers"
        self.p, self.rank = p, rank
        self.whole = p.data.flatten()
        self.shard = nn.Parameter(self.whole.chunk(W)[rank].clone())  # what the optimizer updates
        p.data = self.whole.view(p.shape)  # the layer computes with p, a view of `whole`
        self.free()

    def gather(self) -> None:
        """Every rank sends its shard to all others."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        dist.all_gather(list(self.whole.chunk(W)), self.shard.detach())

    def free(self) -> None:
        """Frees the memory but keeps the tensors: the views of p that autograd saved in forward are
        valid again after the gather for backward."""
        self.whole.untyped_storage().resize_(0)

    def reduce_scatter(self) -> None:
        """Replaces the whole gradient by this rank's part of the mean over the ranks."""
        dist.all_reduce(self.p.grad)  # with gloo; NCCL's reduce_scatter_tensor would send half
        part = self.p.grad.flatten().chunk(W)[self.rank] / W
        # The tied matrix has two gradients, from head and embedding: add them.
        self.shard.grad = part if self.shard.grad is None else self.shard.grad + part
        self.p.grad = None


def run_step(layers: dict[nn.Module, list[Sharded]], inputs: Tensor, targets: Tensor) -> Tensor:
    """Adds gradients to the shards; returns the loss of this rank's rows."""
    graphs = []  # per layer: its parameters, and the start and end of its graph
    y = inputs
    for layer, parameters in layers.items():
        x = y.detach().requires_grad_(y.is_floating_point())  # word numbers have no gradient
        for s in parameters:
            s.gather()
        y = layer(x)
        for s in parameters:
            s.free()
        graphs.append((parameters, x, y))

    logits = y.detach().requires_grad_()
    loss = one.loss_of(logits, targets)
    loss.backward()
    gradient = logits.grad
    for parameters, x, y in reversed(graphs):
        for s in parameters:
            s.gather()
        y.backward(gradient)
        for s in parameters:
            s.free()
            s.reduce_scatter()
        gradient = x.grad
    return loss.detach()


def main(rank: int) -> None:
    text, V = one.read_text()
    model = one.build_model(V)  # whole for a moment, which a large model never is
    sharded = {p: Sharded(p, rank) for p in model.parameters()}  # a tied parameter only once
    layers = {layer: [sharded[p] for p in layer.parameters()] for layer in model}
    shards = [s.shard for s in sharded.values()]
    optimizer = torch.optim.AdamW(shards, one.LEARNING_RATE)
    if rank == 0:
        kept, whole = (sum(p.numel() for p in ps) for ps in (shards, model.parameters()))
        print(f"{W} ranks, each keeps {kept:,} of {whole:,} parameters")
    losses = []
    for step in range(one.STEPS):
        inputs, targets = (x.chunk(W)[rank] for x in one.get_batch(text, step))  # (B/W, T) each
        optimizer.zero_grad()
        mean = run_step(layers, inputs, targets) / W
        optimizer.step()

        dist.all_reduce(mean)  # only to print it
        losses.append(mean.item())
    if rank == 0:
        one.compare(sharded=losses)


if __name__ == "__main__":
    two.launch(main)

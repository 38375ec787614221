"""Chapter 6: all three at once. Eight processes: 2 replicas of 2 stages of layers cut in 2.

    python tutorial/6_all_three.py

What differs from chapters 2, 3 and 5: nothing in what they do, only who does it with whom. A rank
has three coordinates, and works in three groups of two ranks, each of which differ in one:

    rank = 4 d + 2 p + t         replica d = 0          replica d = 1
                    stage 0      t = 0, 1: ranks 0 1    ranks 4 5
                    stage 1                ranks 2 3    ranks 6 7

    tensor   0-1, 2-3, 4-5, 6-7   sums inside every layer: neighbours, as on one machine's GPUs
    stages   0-2, 1-3, 4-6, 5-7   activations between stages; the tied embedding's gradient
    data     0-4, 1-5, 2-6, 3-7   gradients, once per step: these may be furthest apart

The order is that of how often they meet: several times in a layer, per micro-batch, per step.

It grows into runtime/mesh.py (who is where), training/parallel.py (a model on a mesh) and
training/checkpoint.py (what is saved from one layout goes into any other).
"""

import importlib

import torch
import torch.distributed as dist

one = importlib.import_module("1_one_process")
two = importlib.import_module("2_data_parallel")
three = importlib.import_module("3_pipeline")
five = importlib.import_module("5_tensor_parallel")
D, P, T = 2, three.W, five.W  # replicas, stages, parts of a matrix


def groups(rank: int) -> list[dist.ProcessGroup]:
    """Those of this rank: that differ from it in t, in p, in d. All ranks make all groups."""
    mine = []
    for stride, size in ((1, T), (T, P), (T * P, D)):
        for first in range(D * P * T):
            if first // stride % size == 0:
                ranks = [first + k * stride for k in range(size)]
                group = dist.new_group(ranks)
                mine += [group] if rank in ranks else []
    return mine


def main(rank: int) -> None:
    d, p, t = rank // (P * T), rank // T % P, rank % T
    tensor, stages, data = groups(rank)
    text, V = one.read_text()
    model = five.cut(one.build_model(V), t, tensor)
    tied = model[0].wte.weight
    size = len(model) // P
    layers = model[p * size : (p + 1) * size]
    optimizer = torch.optim.AdamW(layers.parameters(), one.LEARNING_RATE)
    losses = []
    for step in range(one.STEPS):
        optimizer.zero_grad()
        inputs, targets = (x.chunk(D)[d] for x in one.get_batch(text, step))  # (B/D, T) each
        schedule = three.one_f_one_b()
        loss = three.run_step(layers, p, schedule, inputs, targets, rank - T, rank + T)
        dist.all_reduce(tied.grad, group=stages)
        for q in layers.parameters():
            q.grad /= D
            dist.all_reduce(q.grad, group=data)
        optimizer.step()

        mean = loss / (D * T)  # the last stage's t all have it, the others 0
        dist.all_reduce(mean)  # only to print it
        losses.append(mean.item())
    if rank == 0:
        one.compare(all_three=losses)


if __name__ == "__main__":
    two.launch(main, D * P * T)

"""Chapter 6: all three at once. Eight processes: 2 replicas of 2 stages, their layers cut in 2.

    python tutorial/6_all_three.py

Only the groups differ from chapters 2, 3 and 5. A rank has three coordinates and belongs to three
groups. The ranks of a group differ in one coordinate and share the other two:

    rank = 4 d + 2 p + t         replica d = 0          replica d = 1
                    stage 0      t = 0, 1: ranks 0 1    ranks 4 5
                    stage 1                ranks 2 3    ranks 6 7

    tensor   0-1, 2-3, 4-5, 6-7   sums inside every layer: neighbours, as on one machine's GPUs
    stages   0-2, 1-3, 4-6, 5-7   the tied embedding's gradient; activations go from rank to rank
    data     0-4, 1-5, 2-6, 3-7   gradients, once per step: these ranks may be furthest apart

The rows are ordered by how often ranks communicate: several times per layer, once per micro-batch,
once per step.

Full versions: runtime/mesh.py (coordinates), training/layouts/stages.py (a model on a mesh) and
training/checkpoint.py (a checkpoint of one layout loads into any other).
"""

import importlib

import environment  # isort: skip  # noqa: F401
import torch
import torch.distributed as dist

one = importlib.import_module("1_one_process")
two = importlib.import_module("2_data_parallel")
three = importlib.import_module("3_pipeline")
five = importlib.import_module("5_tensor_parallel")
D, P, T = 2, three.W, five.W  # replicas, stages, parts of a matrix


def groups(rank: int) -> list[dist.ProcessGroup]:
    """This rank's groups: ranks that differ in t, in p, in d. Every rank has to make all groups."""
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

        mean = loss / (D * T)  # all T ranks of a last stage have it, other stages have 0
        dist.all_reduce(mean)  # only to print it
        losses.append(mean.item())
    if rank == 0:
        one.compare(all_three=losses)


if __name__ == "__main__":
    two.launch(main, D * P * T)

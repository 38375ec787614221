"""Chapter 3: a pipeline. Two processes, each with half of the layers; the batch in micro-batches.

    python tutorial/3_pipeline.py

What differs from chapter 2: the ranks divide the layers, not the rows. Stage s sends its output to
stage s+1 and gets back the gradient of that output. Its backward starts from that gradient, as the
last stage's starts from the loss. If the batch were not cut, one stage would wait while the other
works; with M micro-batches both work. In which order? F2 and B2 are the forward and backward of
micro-batch 2, and a dot means waiting:

    GPipe     stage 0   F0 F1 F2 F3 .  .  B0 B1 B2 B3
              stage 1   .  F0 F1 F2 F3 B0 B1 B2 B3 .

    1F1B      stage 0   F0 F1 .  B0 F2 B1 F3 B2 .  B3
              stage 1   .  F0 B0 F1 B1 F2 B2 F3 B3 .

Both take equally long, but GPipe holds the activations of M micro-batches, 1F1B those of at most W,
the number of stages. `python project/report.py --explore` writes a page on which you move these
actions, and see what that breaks or costs.
Left out: a number of layers that W does not divide, and stages of unequal cost.

Full versions: pipeline/schedules/schedule.py (the orders), pipeline/stage.py (a stage's graphs) and
pipeline/processes/process.py (a rank per stage).
"""

import importlib

import environment  # isort: skip  # noqa: F401
import torch
import torch.distributed as dist
from torch import Tensor, nn

one = importlib.import_module("1_one_process")
two = importlib.import_module("2_data_parallel")
W, M = two.W, 4  # stages, micro-batches
Schedule = list[list[tuple[str, int]]]  # per stage its actions, in order: ("F", 0), ("F", 1), ...


def gpipe() -> Schedule:
    """All forwards, then all backwards; the same on every stage."""
    return [[("F", i) for i in range(M)] + [("B", i) for i in range(M)] for _ in range(W)]


def one_f_one_b() -> Schedule:
    """First one forward for each later stage, then a backward after each further forward."""
    schedule = []
    for stage in range(W):
        warm_up = min(M, W - 1 - stage)
        actions = [("F", i) for i in range(warm_up)]
        for i in range(warm_up, M):
            actions += [("F", i), ("B", i - warm_up)]
        schedule.append(actions + [("B", i) for i in range(M - warm_up, M)])
    return schedule


def receive(source: int, rows: int) -> Tensor:
    """One micro-batch's activations, or their gradient: (rows, T, C)."""
    x = torch.empty(rows, one.T, one.C, dtype=torch.float64)
    dist.recv(x, source)
    return x


def run_step(
    layers: nn.Module, stage: int, schedule: Schedule, inputs: Tensor, targets: Tensor,
    before: int, after: int,
) -> Tensor:  # fmt: skip
    """Adds to the gradients of this stage's parameters; returns the loss on the last stage, else 0.
    `before` and `after` are the ranks of the neighbouring stages."""
    first, last, rows = stage == 0, stage == W - 1, len(inputs) // M
    graphs = {}  # the start and end of each micro-batch's graph, from its F to its B
    sent = []  # isend, not send: two stages sending to each other would deadlock
    total = torch.zeros((), dtype=torch.float64)
    for kind, i in schedule[stage]:
        if kind == "F":
            x = inputs.chunk(M)[i] if first else receive(before, rows).requires_grad_()
            y = layers(x)
            if last:
                y = one.loss_of(y, targets.chunk(M)[i]) / M  # the M parts add up to the mean
                total += y.detach()
            else:
                sent.append(dist.isend(y.detach(), after))
            graphs[i] = x, y
        else:
            x, y = graphs.pop(i)  # popped, so that backward frees the activations
            y.backward(None if last else receive(after, rows))
            if not first:
                sent.append(dist.isend(x.grad, before))
    for work in sent:
        work.wait()
    return total


def train(rank: int, schedule: Schedule) -> list[float]:
    """The loss of every step on the last stage; zeros on the others."""
    text, V = one.read_text()
    model = one.build_model(V)
    tied = model[0].wte.weight  # used by the first and the last stage
    size = len(model) // W
    layers = model[rank * size : (rank + 1) * size]  # drop the other layers
    optimizer = torch.optim.AdamW(layers.parameters(), one.LEARNING_RATE)
    losses = []
    for step in range(one.STEPS):
        optimizer.zero_grad()
        inputs, targets = one.get_batch(text, step)
        loss = run_step(layers, rank, schedule, inputs, targets, rank - 1, rank + 1)
        losses.append(loss.item())
        dist.all_reduce(tied.grad)  # each stage has one term (with more stages: first and last)
        optimizer.step()
    return losses


def main(rank: int) -> None:
    runs = {order.__name__: train(rank, order()) for order in (gpipe, one_f_one_b)}
    if rank == W - 1:
        one.compare(**runs)


if __name__ == "__main__":
    two.launch(main)

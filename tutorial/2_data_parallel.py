"""Chapter 2: data parallelism. Two processes, each with the whole model and half of the batch.

    python tutorial/2_data_parallel.py

What differs from chapter 1: each rank takes its rows of the batch, and between backward and the
optimizer the ranks average their gradients. They start with equal weights and make equal updates,
so the weights stay equal and are never sent.

    rank 0   rows 0 to 3   forward  backward   all-reduce   optimizer
    rank 1   rows 4 to 7   forward  backward   all-reduce   optimizer

There are two ways to average: after backward, one parameter at a time, or while backward still
runs. Left out: batches that W, the number of ranks, does not divide. There the mean of the ranks'
means is not the mean of all rows.

Full versions: data_parallel/gradients.py (a few large buckets instead of many parameters),
data_parallel/dataset.py (the rows of each rank) and training/launch/launch.py (ranks that fail).
"""

import importlib
import os
import socket
from collections.abc import Callable

import environment  # isort: skip  # noqa: F401
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

one = importlib.import_module("1_one_process")  # `import` allows no name with a leading digit
W = 2  # world size: how many ranks


def launch(main: Callable[[int], None], ranks: int = W) -> None:
    """Runs main(rank) in new processes. They find each other's addresses in the store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # 0: a free port
    mp.set_forkserver_preload(["torch._dynamo"])  # imports torch once, not in every rank
    mp.start_processes(run_rank, (main, ranks, store.port), ranks, start_method="forkserver")


def run_rank(rank: int, main: Callable[[int], None], ranks: int, port: int) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback  # messages stay on this machine
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.set_num_threads(1)  # a core per process
    main(rank)
    dist.barrier()  # no rank leaves while another still communicates
    dist.destroy_process_group()


def average_gradients(model: nn.Module) -> None:
    """After backward: each gradient becomes its mean over the ranks."""
    for p in model.parameters():
        p.grad /= W
        dist.all_reduce(p.grad)  # sums, in place


def average_during_backward(model: nn.Module) -> list[dist.Work]:
    """Call once. Backward then starts each gradient's all-reduce as soon as the gradient is ready.

    Backward continues with earlier layers while the gradients travel. The returned list collects
    the running all-reduces; the optimizer must wait for them. Collectives are matched by their
    order. All ranks run the same backward, so all start their all-reduces in the same order.
    """
    started = []

    def start(p: nn.Parameter) -> None:
        p.grad /= W
        started.append(dist.all_reduce(p.grad, async_op=True))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(start)
    return started


def train(rank: int, overlap: bool) -> list[float]:
    """The loss of every step, over the whole batch."""
    text, V = one.read_text()
    model = one.build_model(V)  # the same seed everywhere; else broadcast rank 0's weights
    optimizer = torch.optim.AdamW(model.parameters(), one.LEARNING_RATE)
    started = average_during_backward(model) if overlap else []
    losses = []
    for step in range(one.STEPS):
        inputs, targets = (x.chunk(W)[rank] for x in one.get_batch(text, step))  # (B/W, T) each
        loss = one.loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if overlap:
            while started:
                started.pop().wait()
        else:
            average_gradients(model)
        optimizer.step()

        mean = loss.detach() / W
        dist.all_reduce(mean)  # only to print it
        losses.append(mean.item())
    return losses


def main(rank: int) -> None:
    after, during = train(rank, overlap=False), train(rank, overlap=True)
    if rank == 0:
        one.compare(after_backward=after, during_backward=during)


if __name__ == "__main__":
    launch(main)

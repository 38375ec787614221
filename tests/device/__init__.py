"""A CUDA device without hardware: torch sees two over the CPU's memory.

    def test_something(device: Device) -> None:
        assert device.run(step) == 1            # in a process that has it; `step` is a function

    def step() -> int:                          # of a module: it is found by its name there
        x = torch.randn(3, device="cuda:1")
        with watch() as seen:
            x.sum().item()
        return len(seen.waits)                  # and .kernels, .copies, .collectives, .streams

What is as on CUDA: tensors report cuda:k; those of two devices, or of a device and the CPU, do not
mix; autograd runs the backward of a device on a thread of that device, on the streams of the
forward; current device and streams are each thread's own; each device has its generator; memory
can be pinned; kernels, copies and what the host waits for are noted by file and line, and kernels
with their stream. A foreach operator counts as one kernel.

What it cannot show: races between streams, memory, times, NCCL itself (gloo stands for it), CUDA
graphs, torch.compile, and what an operator launches inside: one that is no view counts as one.

The `device` fixture (tests/conftest.py) has a process with it, forked from one that has imported
the libraries. `install` puts it into any process that has not computed yet: autograd counts the
devices once.

    guard.cpp   what torch's C++ asks a device for, compiled once (10 s) with g++
    tensors.py  a tensor of the device, and what an operator does with it
    flash.py    FlashAttention, and what it takes for granted
    cuda.py     torch.cuda and NCCL
    seen.py     what is noted
    session.py  the process of the fixture
"""

from __future__ import annotations


def install(number: int = 2) -> None:
    """Make cuda:0 ... cuda:number-1 available from now on, in this process and its forks."""
    from . import cuda, guard

    cuda.install(guard.load(), number)

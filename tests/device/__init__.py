"""A CUDA device without hardware: torch sees two of them, whose memory is the CPU's.

    def test_something(device: Device) -> None:
        assert device.run(step) == 1            # in a process that has it; `step` is a function

    def step() -> int:                          # in a module, where it is found by its name
        x = torch.randn(3, device="cuda:1")
        with watch() as seen:
            x.sum().item()
        return len(seen.waits)                  # and .kernels, .copies, .collectives, .streams

What is as on CUDA: tensors report cuda:k; tensors of two devices, or of a device and the CPU, do
not mix; autograd runs the backward of a device on a thread of that device, on the streams of the
forward; each thread has its own current device and streams; each device has its generator; memory
can be pinned. Kernels, copies and what the host waits for are noted by file and line, and kernels
with their stream.

What it cannot show: races between streams, memory, times, NCCL itself (gloo stands for it), CUDA
graphs, torch.compile, and the kernels inside an operator. An operator counts as one kernel, a
foreach operator too, a view as none.

The `device` fixture (tests/conftest.py) is a process that has the devices, forked from one that has
imported the libraries. `install` adds them to any process that has not computed yet: autograd
counts devices only once.

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

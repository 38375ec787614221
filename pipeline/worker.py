"""One thread per device: a queue of tasks in, a queue of results out.

Problem. A stage of a pipeline must compute while the other stages compute, on GPUs as well as on
the cores of one CPU. Torch's operators release the GIL, so threads suffice, and tensors pass from
stage to stage without a copy. But a fresh thread is not the caller's thread: grad mode, autocast,
the default device and the CUDA streams (streams.py) are thread-local in torch and must be carried
over (the default dtype and the deterministic flags are global, and need not be).

Idea. ``cpu:0`` and ``cpu:1`` are *logical* devices: worker k of n binds itself to the k-th of n
slices of the cores this process may use, and has as many intra-op threads. Threads that OpenMP
starts later inherit the binding. ``torch.set_num_threads`` sets the calling thread's count, but
also the count that every thread takes at its first parallel operator: so a worker makes that first
use at once, and ``create_workers`` sets the caller's own count again when all workers are up.
Where the system cannot bind a thread (macOS), only the count is set.

Every task is answered, whatever it raises: ``SystemExit`` and ``KeyboardInterrupt`` too are handed
back, with their traceback, and the worker goes on.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, TypeAlias

import torch

from runtime.cores import core_slice

from .streams import Streams

ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType]
Queue: TypeAlias = "SimpleQueue[Any]"

_START_TIMEOUT = 60.0  # seconds for a thread to come up
_POLL = 1.0  # seconds between looks at whether a worker is still there


class Context:
    """The thread-local state of the thread that makes it, for another thread to enter."""

    def __init__(self) -> None:
        self.grad_enabled = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        }
        self.autocast_cache = torch.is_autocast_cache_enabled()
        self.streams = Streams()
        default = torch.get_default_device()
        self.default_device = None if default.type == "cpu" else default

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for kind, dtype in self.autocast.items():
                cache = self.autocast_cache
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cache))
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            stack.enter_context(self.streams.enter())
            yield


class Task:
    """A function to run on a worker, under the grad mode, autocast, streams of its creator."""

    def __init__(self, compute: Callable[[], Any], context: Context | None = None) -> None:
        self._compute = compute
        self._context = context or Context()
        self.on_failure: Callable[[], None] = lambda: None  # others may wait for what it hands on

    def compute(self) -> Any:
        try:
            with self._context.enter():
                return self._compute()
        except BaseException:
            self.on_failure()
            raise


def worker(in_queue: Queue, out_queue: Queue, device: torch.device) -> None:
    """Answer each task of ``in_queue``, until None arrives.

    Puts ``(True, (task, result))``, or ``(False, exc_info)`` for whatever the task raised, and
    ``(False, None)`` as its last word.
    """
    with _use_device(device):
        while True:
            task = in_queue.get()
            if task is None:
                break
            try:
                answer: tuple[bool, Any] = (True, (task, task.compute()))
            except BaseException:  # SystemExit and KeyboardInterrupt belong to the caller
                answer = (False, sys.exc_info())
            out_queue.put(answer)
            del task, answer  # an idle worker must keep no tensor, and no Pipe, alive
    out_queue.put((False, None))


def create_workers(devices: Sequence[torch.device]) -> tuple[list[Queue], list[Queue]]:
    """Start one daemon thread per distinct device; return its queues for each of ``devices``.

    A device named twice has one worker, and its queues appear twice. Put a `Task` into
    ``in_queues[j]``, get its answer from ``out_queues[j]``; None ends a worker.
    """
    in_queues, out_queues, _ = start_workers(devices)
    return in_queues, out_queues


def start_workers(
    devices: Sequence[torch.device],
) -> tuple[list[Queue], list[Queue], list[threading.Thread]]:
    """`create_workers`, and the thread behind each device."""
    names = [_with_index(device) for device in devices]
    cpus = [device for device in dict.fromkeys(names) if device.type == "cpu"]
    callers_threads = torch.get_num_threads()
    crew: dict[torch.device, tuple[Queue, Queue, threading.Thread]] = {}
    for device in dict.fromkeys(names):
        in_queue, out_queue = SimpleQueue[Any](), SimpleQueue[Any]()
        up = threading.Event()
        share = (cpus.index(device), len(cpus)) if device in cpus else None
        arguments = (in_queue, out_queue, device, share, up)
        thread = threading.Thread(target=_run, args=arguments, name=f"pipe-{device}", daemon=True)
        thread.start()
        if not up.wait(_START_TIMEOUT):
            raise RuntimeError(f"the worker of {device} did not start in {_START_TIMEOUT} s")
        crew[device] = (in_queue, out_queue, thread)
    torch.set_num_threads(callers_threads)
    members = [crew[name] for name in names]
    return [m[0] for m in members], [m[1] for m in members], [m[2] for m in members]


def wait_for(
    out_queue: Queue, threads: Sequence[threading.Thread], timeout: float | None = None
) -> Any:
    """The next answer of a worker; Empty after ``timeout`` seconds.

    RuntimeError if any of ``threads`` is gone: the worker may be waiting for that one.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        with contextlib.suppress(Empty):
            return out_queue.get(timeout=_POLL)
        for thread in threads:
            if not thread.is_alive() and out_queue.empty():
                raise RuntimeError(f"the worker thread {thread.name} has ended without an answer")
        if deadline is not None and time.monotonic() > deadline:
            raise Empty


def _run(
    in_queue: Queue,
    out_queue: Queue,
    device: torch.device,
    share: tuple[int, int] | None,
    up: threading.Event,
) -> None:
    """The life of a worker; one on a CPU has the ``share`` (k, n), the k-th of n slices of it."""
    if share is not None:
        cores = core_slice(*share)
        if cores:
            with contextlib.suppress(OSError):  # a sandbox may forbid it: slower, not wrong
                os.sched_setaffinity(0, cores)  # 0: the calling thread
        torch.set_num_threads(len(cores) or max(1, (os.cpu_count() or 1) // share[1]))
        torch.get_num_threads()  # a thread takes the process's count on its first use: use it now
    up.set()
    worker(in_queue, out_queue, device)


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _use_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

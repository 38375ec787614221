"""One thread per device: a queue of tasks in, a queue of results out.

Problem. All stages must compute at the same time, on GPUs as well as on the cores of one CPU.
Torch's operators release the GIL, so threads suffice, and tensors pass between stages without a
copy. But grad mode, autocast, the default device, hooks on saved tensors and the CUDA streams
(streams.py) are thread-local in torch and must be carried over from the caller. Other modes, such
as `FlopCounterMode`, are objects for one thread: under them a call is refused.

Idea. `cpu:0` and `cpu:1` are *logical* devices: worker k of n binds itself to the k-th of n
slices of this process' cores, and uses an intra-op thread per core. Threads that OpenMP starts
later inherit the binding. If the system cannot bind a thread (macOS), only the number of threads is
set.

Every task is answered, whatever it raises: `SystemExit` and `KeyboardInterrupt` are returned
too, with their traceback, and the worker continues.

A `Crew` is the workers of one Pipe. An error in one task must end a call at once, whatever the
other workers do; so must Ctrl-C in the waiting thread; and no stale answer may stay in a queue. So
a task that fails wakes those that wait for it (executor.py), and a call collects the answer of
every task. If it is interrupted, or a worker is gone, it calls `stop` and ends the crew: whoever
goes on makes a new Pipe.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from runtime.cores import core_slice, pin
from runtime.graph import memory_of
from runtime.recompute import Autocast

from .executor import Stopped
from .streams import Streams


class Queue(SimpleQueue[Any]):
    """Holds tasks for a worker, or its answers. `thread`: the worker's."""

    thread: threading.Thread


class Task:
    """A function to run on a worker, under the thread-local state of its creator."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        _refuse_modes()
        self._compute = compute
        self._grad_enabled = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = Autocast()
        self._streams = Streams()
        default = torch.get_default_device()
        self._default_device = None if default.type == "cpu" else default
        self._saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def compute(self) -> Any:
        """Runs it; called on the worker's thread."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))  # changes grad mode, too
            stack.enter_context(torch.set_grad_enabled(self._grad_enabled))
            # Autograd has one thread for each GPU, and runs backward there. The backward of a Pipe
            # runs there, too, and waits for the workers. A worker's own backward would wait for
            # that thread for ever, so it stays on the worker.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self._autocast.entered())
            if self._default_device is not None:
                stack.enter_context(self._default_device)
            if self._saved_tensors_hooks is not None:
                hooks = torch.autograd.graph.saved_tensors_hooks(*self._saved_tensors_hooks)
                stack.enter_context(hooks)
            stack.enter_context(self._streams.enter())
            return self._compute()


def _refuse_modes() -> None:
    """Raises RuntimeError if a mode is active: it would see nothing of what workers compute."""
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    names = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    if names:
        raise RuntimeError(
            f"{names[-1]} is active in this thread, and would not see what the workers of a "
            "Pipe compute: enter it inside a layer, or use the plain Sequential under it"
        )


def worker(in_queue: Queue, out_queue: Queue, device: torch.device) -> None:
    """Answers each task of `in_queue`, until None arrives.

    Puts `(True, (task, result))`, or `(False, exc_info)` if the task raised, and at the end
    `(False, None)`.
    """
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        while True:
            task = in_queue.get()
            if task is None:
                break
            try:
                answer: tuple[bool, Any] = (True, (task, task.compute()))
            except BaseException:  # SystemExit and KeyboardInterrupt belong to the caller
                answer = (False, sys.exc_info())
            out_queue.put(answer)
            del task, answer  # an idle worker must keep neither tensors nor a Pipe alive
    out_queue.put((False, None))


def create_workers(devices: Sequence[torch.device]) -> tuple[list[Queue], list[Queue]]:
    """Starts one daemon thread per distinct device; returns its queues for each of `devices`.

    A repeated device has one worker, and its queues appear again. Put a `Task` into
    `in_queues[j]`, get its answer from `out_queues[j]`; None ends a worker.
    """
    # cuda is cuda:k, the same worker
    names = [d if d.type == "cpu" else memory_of(d) for d in devices]
    cpus = [device for device in dict.fromkeys(names) if device.type == "cpu"]  # share the cores
    callers_threads = torch.get_num_threads()
    queues: dict[torch.device, tuple[Queue, Queue]] = {}  # in, out
    for device in dict.fromkeys(names):
        in_queue, out_queue = queues[device] = Queue(), Queue()
        thread = threading.Thread(
            target=worker, args=(in_queue, out_queue, device), name=f"pipe-{device}", daemon=True
        )
        in_queue.thread = out_queue.thread = thread
        if device in cpus:  # before the thread starts: if the Task is refused, none stays behind
            in_queue.put(Task(partial(_take_cores, cpus.index(device), len(cpus))))
        thread.start()
        if device in cpus:
            out_queue.get()  # one at a time: each sets the default
    torch.set_num_threads(callers_threads)  # the last worker's count is the default now
    return [queues[name][0] for name in names], [queues[name][1] for name in names]


def _take_cores(k: int, n: int) -> None:
    """Binds this thread to the k-th of n slices of the cores."""
    cores = core_slice(k, n)
    if cores:
        pin(cores)
    torch.set_num_threads(len(cores) or max(1, (os.cpu_count() or 1) // n))
    # This also sets the default that a thread takes at its first use. So use it now, before
    # `create_workers` restores the caller's own count.
    torch.get_num_threads()


class Crew:
    """One worker thread per distinct device. `close` or garbage collection ends them."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._calls = threading.RLock()  # held by the thread whose call is running
        self.in_queues, self.out_queues = create_workers(devices)
        queues = list(dict.fromkeys(self.in_queues))  # each once
        self._threads = [queue.thread for queue in queues]
        # Ends the threads. Its arguments must not refer to self, which would never be collected.
        self.close = weakref.finalize(self, _end_all, queues)

    def run(
        self, jobs: Mapping[int, Callable[[], Any]], stop: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """Runs each function on the worker of its stage, in parallel, as a `Task` of this thread;
        returns the results in order.

        Raises the error of the first that fails, with its traceback, after all have ended.
        """
        tasks = {s: Task(job) for s, job in jobs.items()}
        with self.alone():
            if not self.close.alive:
                raise RuntimeError(
                    "the Pipe is closed, by close() or since a call was interrupted: make a new one"
                )
            try:
                for s, task in tasks.items():  # all start before the first answer is awaited
                    self.in_queues[s].put(task)
                # of two jobs of one worker, the first is answered first
                answers = [self._answer(s) for s in jobs]
            except BaseException:  # Ctrl-C here, or a worker is gone
                stop()  # wakes workers that wait for each other
                self.close()  # answers that nobody collects may still come
                raise
        failures = [payload[1] for ok, payload in answers if not ok]
        if failures:
            try:  # the first cause, in job order, or else the first consequence
                raise min(failures, key=lambda error: isinstance(error, Stopped))
            finally:
                del answers, failures  # else the error's traceback would keep the error alive
        return [payload[1] for _, payload in answers]

    def _answer(self, s: int) -> tuple[bool, Any]:
        """The next answer of stage s. RuntimeError if any worker is gone: s may wait for it."""
        while all(thread.is_alive() for thread in self._threads):
            with contextlib.suppress(Empty):
                answer: tuple[bool, Any] = self.out_queues[s].get(timeout=1.0)
                if answer != (False, None):  # not a worker's last words
                    return answer
        raise RuntimeError(
            "a worker of the Pipe is gone: a None in its queue ended it, or this is a fork of the "
            "process that made the Pipe"
        )

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Only one thread may be inside. For others it raises at once: the call inside could be
        waiting for a thread that waits here."""
        if not self._calls.acquire(blocking=False):
            raise RuntimeError(
                "another call of this Pipe is running: a Pipe runs one call at a time, and its "
                "layers, hooks and run_on_stages may not call it. Share a threading.Lock around "
                "the calls of several threads, or make a Pipe per thread"
            )
        try:
            yield
        finally:
            self._calls.release()


def _end_all(in_queues: list[Queue]) -> None:
    """Also run by the garbage collector, in any thread, and at exit: so waits are short."""
    for queue in in_queues:
        queue.put(None)  # ends the worker after its current task
    for queue in in_queues:
        if queue.thread is not threading.current_thread():  # the collector may run in a worker
            with contextlib.suppress(RuntimeError):
                queue.thread.join(timeout=1.0)

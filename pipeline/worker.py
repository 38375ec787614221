"""One thread per device: a queue of tasks in, a queue of results out.

Problem. All stages must compute at the same time, on GPUs as well as on the cores of one CPU.
Torch's operators release the GIL, so threads suffice, and tensors pass between stages without a
copy. But grad mode, autocast, the default device, hooks on saved tensors and the CUDA streams
(streams.py) are thread-local in torch and must be carried over from the caller. Other modes, such
as `FlopCounterMode`, are objects for one thread: under them a call is refused.

Idea. ``cpu:0`` and ``cpu:1`` are *logical* devices: worker k of n binds itself to the k-th of n
slices of this process' cores, and uses as many intra-op threads. Threads that OpenMP starts later
inherit the binding. If the system cannot bind a thread (macOS), only the number of threads is set.

Every task is answered, whatever it raises: ``SystemExit`` and ``KeyboardInterrupt`` are returned
too, with their traceback, and the worker continues.

A `Crew` is the workers of one Pipe. An error in one task must end a call at once, whatever the
other workers do; so must Ctrl-C in the waiting thread; and no stale answer may stay in a queue. So
a task that fails wakes those that wait for it (executor.py), and a call collects the answer of
every task. If it is interrupted, or a worker is gone, it calls ``stop`` and ends the crew: whoever
goes on makes a new Pipe.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Holds tasks for a worker, or its answers. ``thread``: the worker's."""

    thread: threading.Thread


class Context:
    """The thread-local state of the creating thread, for another thread to enter."""

    def __init__(self) -> None:
        self.grad_enabled = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = Autocast()
        self.streams = Streams()
        default = torch.get_default_device()
        self.default_device = None if default.type == "cpu" else default
        self.saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._refuse_what_cannot_be_carried()

    def _refuse_what_cannot_be_carried(self) -> None:
        modes: list[Any] = [
            *_get_current_function_mode_stack(),
            *_get_current_dispatch_mode_stack(),
        ]
        names = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
        transform = torch._C._functorch.peek_interpreter_stack()
        names += [] if transform is None else [f"torch.func's {transform.key().name.lower()}"]
        if names:
            raise RuntimeError(
                f"{names[-1]} is active in this thread, and would not see what the workers of a "
                "Pipe compute: enter it inside a layer, or use the plain Sequential under it"
            )
        pack = self.saved_tensors_hooks and self.saved_tensors_hooks[0]
        if getattr(pack, "__module__", None) == "torch.utils.checkpoint":
            raise RuntimeError(
                "torch.utils.checkpoint around a Pipe would have to run the Pipe inside its own "
                "backward: make the Pipe with recompute='always', or checkpoint inside its layers"
            )

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            # Autograd runs a GPU's backward on its thread of that GPU. That of a Pipe, too, which
            # waits there for the workers. A worker's own backward would wait for the same thread,
            # for ever: so it stays on the worker. Ranks need none of this: where one starts a
            # backward inside another, both are on one thread, and autograd nests them.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self.inference:  # first, because it changes grad mode
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            stack.enter_context(self.autocast.entered())
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            if self.saved_tensors_hooks is not None:
                hooks = torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors_hooks)
                stack.enter_context(hooks)
            stack.enter_context(self.streams.enter())
            yield


class Task:
    """A function to run on a worker, under its creator's `Context`."""

    def __init__(self, compute: Callable[[], Any], context: Context | None = None) -> None:
        self._compute = compute
        self._context = context or Context()

    def compute(self) -> Any:
        with self._context.enter():  # on the worker's thread
            return self._compute()


def worker(in_queue: Queue, out_queue: Queue, device: torch.device) -> None:
    """Answer each task of ``in_queue``, until None arrives.

    Puts ``(True, (task, result))``, or ``(False, exc_info)`` if the task raised, and at the end
    ``(False, None)``.
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
    """Start one daemon thread per distinct device; return its queues for each of ``devices``.

    A repeated device has one worker, and its queues appear again. Put a `Task` into
    ``in_queues[j]``, get its answer from ``out_queues[j]``; None ends a worker.
    """
    # cuda is cuda:k, the same worker
    names = [d if d.type == "cpu" else memory_of(d) for d in devices]
    cpus = [device for device in dict.fromkeys(names) if device.type == "cpu"]  # share the cores
    callers_threads = torch.get_num_threads()
    queues: dict[torch.device, tuple[Queue, Queue]] = {}  # in, out
    for device in dict.fromkeys(names):
        in_queue, out_queue = queues[device] = Queue(), Queue()
        up = threading.Event()
        share = (cpus.index(device), len(cpus)) if device in cpus else None  # (k, n)
        arguments = (in_queue, out_queue, device, share, up)
        thread = threading.Thread(target=_run, args=arguments, name=f"pipe-{device}", daemon=True)
        in_queue.thread = out_queue.thread = thread
        thread.start()
        up.wait()  # one at a time: each sets the default
    torch.set_num_threads(callers_threads)  # the last worker's count is the default now
    return [queues[name][0] for name in names], [queues[name][1] for name in names]


def _run(
    in_queue: Queue,
    out_queue: Queue,
    device: torch.device,
    share: tuple[int, int] | None,
    up: threading.Event,
) -> None:
    """The body of a worker thread; on a CPU its ``share`` (k, n) is the k-th of n slices."""
    if share is not None:
        cores = core_slice(*share)
        if cores:
            pin(cores)
        torch.set_num_threads(len(cores) or max(1, (os.cpu_count() or 1) // share[1]))
        # This also sets the default that a thread takes at its first use. So use it now, before
        # `create_workers` restores the caller's own count.
        torch.get_num_threads()
    up.set()
    worker(in_queue, out_queue, device)


class Crew:
    """One worker thread per distinct device. ``close`` or garbage collection ends them."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self.closed = False
        self._calls = threading.RLock()  # held by the thread whose call is running
        self.in_queues, self.out_queues = create_workers(self.devices)
        queues = list(dict.fromkeys(self.in_queues))  # each once
        self.threads = [queue.thread for queue in queues]
        # its arguments must not refer to self, which would never be collected
        self._end = weakref.finalize(self, _end_all, queues)

    def close(self) -> None:
        """End the threads. A closed crew runs nothing more."""
        self.closed = True
        self._end()

    def run(
        self, jobs: Mapping[int, Callable[[], Any]], stop: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """Run each function on the worker of its stage, in parallel, under this thread's `Context`;
        return the results in order.

        Raises the error of the first that fails, with its traceback, after all have ended.
        """
        context = Context()
        with self.alone():
            if self.closed:
                raise RuntimeError(
                    "the Pipe is closed, by close() or since a call was interrupted: make a new one"
                )
            try:
                for s, job in jobs.items():  # all start before the first answer is awaited
                    self.in_queues[s].put(Task(job, context))
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
        while all(thread.is_alive() for thread in self.threads):
            with contextlib.suppress(Empty):
                answer: tuple[bool, Any] = self.out_queues[s].get(timeout=1.0)
                if answer != (False, None):  # not a worker's last words
                    return answer
        raise RuntimeError("a None in its queue ended a worker, and with it the Pipe is closed")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Only one thread may be inside. For others it raises at once: the call inside could be
        waiting for a thread that waits here."""
        if threading.current_thread() in self.threads:
            raise RuntimeError(
                "a worker of the Pipe cannot wait for the workers: call the Pipe from outside its "
                "layers, hooks and run_on_stages"
            )
        if not self._calls.acquire(blocking=False):
            raise RuntimeError(
                "another call of this Pipe is running in another thread: a Pipe runs one call at "
                "a time, so share a threading.Lock around its calls, or make a Pipe per thread"
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

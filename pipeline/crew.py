"""The workers of one Pipe: they live as long as it does, and every call ends.

An error in one task must end the call at once, wherever the others are; Ctrl-C in the waiting
thread must too; and afterwards no stale answer may lie in a queue. So a call collects the answer of
every task it has put, and before it waits for the rest after a failure it calls ``stop``, which
wakes those who wait for each other. A worker that is gone, or stays busy for longer than
``_GRACE`` seconds after a stop, is replaced with all the others at the next call; so are all if
a second Ctrl-C ends the waiting early.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import Empty
from typing import Any

import torch

from .worker import Queue, Task, start_workers, wait_for

_GRACE = 30.0  # seconds that a task may go on after the call it belongs to has failed


class Stopped(BaseException):
    """Raised in a worker whose call has failed elsewhere; never seen by the caller."""


class Crew:
    """One worker thread per distinct device. ``close`` or garbage collection ends them."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self.in_queues: list[Queue] = []
        self.out_queues: list[Queue] = []
        self.threads: list[threading.Thread] = []
        self.closed = False
        self._calls = threading.RLock()  # held by the thread whose call is running
        self._start()

    def _start(self) -> None:
        self.in_queues[:], self.out_queues[:], self.threads[:] = start_workers(self.devices)
        queues = list({id(q): q for q in self.in_queues}.values())
        self._end = weakref.finalize(self, _end, queues, list(dict.fromkeys(self.threads)))

    def close(self) -> None:
        """End the threads. A closed crew runs nothing more."""
        self.closed = True
        self._end()

    def run(
        self, jobs: Sequence[tuple[int, Task]], stop: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """Run each task on the worker of its stage, at the same time; return the results in order.

        Raises what the first failing task raised, with its traceback, once all have ended.
        """
        with self.alone():
            return self._run(jobs, stop)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Of several threads only one may be inside; for the others it raises at once, since one
        that waited here could be what the call inside waits for."""
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

    def _run(self, jobs: Sequence[tuple[int, Task]], stop: Callable[[], None]) -> list[Any]:
        if self.closed:
            raise RuntimeError("the Pipe is closed: make a new one")
        if not self._end.alive or not all(thread.is_alive() for thread in self.threads):
            self._end()
            self._start()
        answers: list[tuple[bool, Any]] = []
        num_put = 0
        try:
            for s, task in jobs:
                task.on_failure = stop
                num_put += 1  # before: an interrupt falls after a call, not before it
                self.in_queues[s].put(task)
            for s, task in jobs:
                answers.append(wait_for(self.out_queues[s], self.threads))
                if answers[-1] == (False, None):
                    raise RuntimeError(f"the worker of stage {s} ({self.devices[s]}) has ended")
                if answers[-1][0] and answers[-1][1][0] is not task:
                    self._end()
                    raise RuntimeError(f"stage {s} ({self.devices[s]}) answered another task")
        except BaseException:  # Ctrl-C here, or a worker that is gone
            self._drain([s for s, _ in jobs[len(answers) : num_put]], stop)
            raise
        failures = [payload[1] for ok, payload in answers if not ok]
        failures.sort(key=lambda error: isinstance(error, Stopped))
        if failures:
            del answers
            try:
                raise failures[0]
            finally:
                failures.clear()  # else the error's own traceback would hold the error
        return [payload[1] for _, payload in answers]

    def _drain(self, stages: Sequence[int], stop: Callable[[], None]) -> None:
        try:
            stop()
            for s in stages:
                wait_for(self.out_queues[s], self.threads, _GRACE)
        except (Empty, RuntimeError):
            self._end()  # replaced at the next call
        except BaseException:  # another Ctrl-C: answers will come that nobody collects
            stop()
            self._end()
            raise


def _end(in_queues: list[Queue], threads: list[threading.Thread]) -> None:
    """Also run by the garbage collector, in whatever thread, and at exit: so it waits little."""
    for queue in in_queues:
        queue.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            with contextlib.suppress(RuntimeError):
                thread.join(timeout=1.0)

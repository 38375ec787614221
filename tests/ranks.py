"""A distributed world that is started once per test session, and given functions to run.

A process needs seconds to import its libraries, so the ranks live as long as the session, and are
forked from a server that has imported them. The server is a fork of the process that runs tests,
made when that has collected the tests. A test hands the ranks a function of its module; each calls
it with (rank, world_size, *args) and sends back what it returns. A failure on any rank fails the
test with that rank's traceback.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import multiprocessing as mp
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from runtime.pool import Pool
from runtime.shared_memory import SharedMemory
from training.launch.meeting import connect, host_store, listen, setup

LIMIT = 240.0  # seconds that a function may take, on a busy machine; less than a test has
STOPS = sys.platform == "linux"  # idle ranks are stopped; elsewhere nobody might end them
LIBRARIES = [
    "torch._dynamo", "transformers.models.gpt2.modeling_gpt2", "matplotlib.pyplot", "sacrebleu",
    "tests.project.programs",
]  # fmt: skip

of_server: Any = forkserver._forkserver  # what a process knows of its server


def server() -> Any:
    """The context of processes that are forked from the server."""
    return mp.get_context("forkserver")


def start_server(libraries: Sequence[str] = LIBRARIES) -> None:
    """Forks it, where multiprocessing would start a Python that imports the libraries again."""
    for library in libraries:
        importlib.import_module(library)
    torch.set_num_threads(1)  # a fork has no others
    gc.freeze()  # what the libraries hold is not searched for garbage any more
    gc.enable()
    with patch("multiprocessing.util.spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(_: Any, command: list[Any], passed: list[int]) -> int:
    """In the place of starting a Python with `-c` and a program. Closes the other end of the pipe
    that tells the server, by its end, that nobody needs it any more."""
    child = os.fork()
    if child == 0:
        try:
            of_server._lock.release()  # the caller's: a process of this server may start one, too
            for fd in {int(path.name) for path in Path("/dev/fd").iterdir()} - {*passed}:
                with suppress(OSError):  # the list's own
                    if any(os.path.sameopenfile(fd, other) for other in passed):
                        os.close(fd)
            exec(command[-1], {"__name__": "__main__"})
        finally:
            os._exit(0)
    return child


def sharing(allowed: bool) -> AbstractContextManager[object]:
    """Inside, the CPU ranks of one machine share memory, or they send as ranks of several do. Only
    what is made and first used inside is concerned; all ranks must enter it."""
    return nullcontext() if allowed else patch.object(SharedMemory, "open", return_value=None)


def under_torchrun(
    rank: int = 0, world_size: int = 2, local_rank: int = 0, each: int | None = None
) -> AbstractContextManager[object]:
    """Inside, this process is a rank that torchrun has started, on a host with `each` of them; by
    default one host has all."""
    each = each or world_size
    numbers = {
        "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": each,
        "GROUP_WORLD_SIZE": world_size // each,
    }  # fmt: skip
    environment = {name: str(number) for name, number in numbers.items()}
    return patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": "run", **environment})


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Inside, memory from torch.empty, and what a pool lends again and again, is full of NaN:
    nothing is right because it was clean."""
    take = Pool.take

    def dirty(pool: Pool, numel: int, dtype: torch.dtype) -> torch.Tensor:
        x = take(pool, numel, dtype)
        x.view(torch.uint8).fill_(255)
        return x

    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills torch.empty's
    try:
        with patch.object(Pool, "take", dirty):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def _serve(rank: int, world_size: int, port: int, backend: str, inbox: Connection) -> None:
    if STOPS:  # also when the tests end: the server does not wait for it, and the system ends both
        os.close(of_server._forkserver_alive_fd)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    torch.set_num_threads(1)
    store = connect(port, LIMIT)
    setup(rank, world_size, backend, store=store, timeout=LIMIT)
    while True:
        try:
            function, args = inbox.recv()
        except EOFError:  # the tests are over
            return
        end_groups()
        try:
            inbox.send((True, inspect.unwrap(function)(rank, world_size, *args)))
        except BaseException:
            inbox.send((False, traceback.format_exc()))
            raise


def end_groups() -> None:
    """Ends the groups that this rank's last work has made, when all ranks are done with it. A group
    has a thread of gloo that wakes a hundred times a second. One of NCCL's that has been used keeps
    memory of the GPU, some in the hundreds of megabytes."""
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


class Ranks:
    """`world_size` processes with a gloo process group among them; a function may take `limit`
    seconds, the first with the start."""

    def __init__(self, world_size: int, limit: float = LIMIT, backend: str = "gloo") -> None:
        self.world_size, self.limit = world_size, limit
        context = server()
        self.store = host_store(listen(), LIMIT)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, self.store.port, backend, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.broken = False

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What function(rank, world_size, *args) returns on each rank."""
        assert not self.broken, "an earlier test has ended these ranks"
        self.broken = True  # until all have answered
        self._signal(signal.SIGCONT)
        for pipe in self.pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            missing = [p for r, p in enumerate(self.pipes) if r not in results]
            ready = wait(missing, self.limit)
            assert ready, f"no answer within {self.limit} s; had {sorted(results)}"
            for rank in [r for r, pipe in enumerate(self.pipes) if pipe in ready]:
                fine, value = self.pipes[rank].recv()
                assert fine, f"rank {rank} failed:\n{value}"
                results[rank] = value
        self.broken = False
        self._signal(signal.SIGSTOP)
        return [results[rank] for rank in range(self.world_size)]

    def _signal(self, number: int) -> None:
        """Ranks are stopped while they have nothing to do: of each, gloo's threads would take 5 ms
        of every second, and a session has forty ranks."""
        for process in self.processes if STOPS else ():
            os.kill(process.pid, number)

    def close(self) -> None:
        """Ends the processes, which have nothing to put in order: their exit would take seconds."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

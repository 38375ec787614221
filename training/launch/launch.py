"""Starts the ranks of a run on this machine, or takes them from torchrun.

Problem: one command must start N processes that find each other and are not reachable from outside
this machine. If one of them fails, all must end quickly, with the traceback that matters.

Idea: the program binds the meeting point (a TCP store) to 127.0.0.1 *before* it starts any process
and passes the socket on. So no other run can take the port, and nothing listens on another
interface, as torch's store does by default. The program may have threads, so it does not fork: it
starts one new process, the starter, which imports what ranks need, forks them, hosts the store, and
watches. Each rank reports to the starter, through a pipe, how it ended.

    what happens to a rank         who notices it                    what is printed
    it raises                      the starter, by its report        the rank, its traceback
    it is killed, or just exits    the starter, by the pipe's end    the rank, how it died
    it is stopped                  the others, after `timeout`       the traceback of the first
    program or starter die         the system ends it (on Linux)

The first failure in time is printed, and below it what every rank did last: a rank that lost its
connection to another, or timed out waiting for it, may be the first to say so. No collective waits
longer than `timeout`, and no rank counts as done until all are.

Cost: about four seconds of imports, once instead of per rank: one step of eight ranks of a tiny
model takes 10 CPU seconds instead of 55. (Outside Linux, where forking is not safe, each rank
imports for itself.)

Rejected: `torch.distributed.elastic.multiprocessing`, and Python's fork server; see docs/log.md.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from runtime.cores import core_slice
from training.options import Options

from . import notice
from .errors import (
    GRACE,
    OF_TERMINAL,
    Interrupted,
    RunError,
    UserError,
    format_error,
    leave,
    say,
    torchrun_world_size,
)
from .last_actions import WAITS, LastAction, in_file, of_all_machines, table
from .meeting import fresh_part
from .memory import keep_freed_memory
from .world import World, choose_backend, choose_device, quiet_libraries

DEFAULT_PORT = 11868
LOOPBACK = "127.0.0.1"


def listen(port: int = 0) -> socket.socket:
    """A socket that listens on the loopback interface, on `port`; by default on a free one. Raises
    UserError if it cannot."""
    try:
        return socket.create_server((LOOPBACK, port), backlog=128)
    except (OSError, OverflowError) as error:  # the latter: no such port
        reason = getattr(error, "strerror", None) or "ports go from 0 to 65535"
        raise UserError(
            f"--master_port {port}: {reason}; without the option a free port is chosen"
        ) from None


def setup(
    rank: int,
    world_size: int,
    backend: str,
    *,
    port: int = DEFAULT_PORT,
    hosted: bool = False,
    timeout: float = 300.0,
) -> None:
    """Joins the default process group of the ranks on this machine, over loopback only.

    The ranks meet in a store on `port`: rank 0 hosts it, unless another process has it `hosted`.

    Raises:
        UserError: rank 0 cannot listen on the port.
        torch.distributed.DistError: a rank did not join within `timeout` seconds.
    """
    stay_on_interface_to(LOOPBACK)
    limit = timedelta(seconds=timeout)
    if rank == 0 and not hosted:
        store = host_store(listen(port), limit)
    else:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK, port, None, False, limit, False
        )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


def host_store(listener: socket.socket, limit: timedelta) -> Any:
    """The store of a process group, at a socket that it takes over. It waits for nobody."""
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK, port, None, True, limit, False, master_listen_fd=listener.detach()
    )


def stay_on_interface_to(host: str) -> None:
    """Makes ranks communicate over the interface that reaches `host`: loopback on one machine, the
    one that reaches torchrun's store on several, whatever their hostnames resolve to. On several
    machines the user's own choice is kept."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    if str(address[0]).startswith("127.") and address[0] != LOOPBACK:  # Debian's, of its own name
        address = ("192.0.2.1", 1)  # no machine's (RFC 5737): the interface of the default route
    with socket.socket(family, kind) as probe:
        with suppress(OSError):  # no route: torch chooses
            probe.connect(address)  # sends nothing: only looks up the route
        here = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if here in [address.address for address in addresses]:
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                if host == LOOPBACK or variable not in os.environ:
                    os.environ[variable] = name


@dataclass(frozen=True)
class Settings:
    """How ranks are started; the options that every program shares."""

    world_size: int
    device: str = "auto"
    master_port: int | None = None
    timeout: float = 300.0
    cores_per_rank: int | None = None
    libraries: tuple[str, ...] = ()  # that ranks need; imported before they are forked

    @classmethod
    def of(cls, args: Options) -> Settings:
        """From a program's options."""
        # Making an optimizer imports torch._dynamo, which takes seconds.
        libraries = ["torch._dynamo", "torch.distributed.checkpoint"]
        if args.model != "vgg16":
            libraries.append("transformers.models.gpt2.modeling_gpt2")
        return cls(
            args.world_size, args.device, args.master_port, args.timeout, args.cores_per_rank,
            tuple(libraries),
        )  # fmt: skip


def launch(main: Callable[..., None], settings: Settings, *args: Any) -> None:
    """Runs main(world, *args) on every rank, and returns when all have returned.

    Under torchrun this process is a rank; otherwise `settings.world_size` processes are started
    here. `main` and `args` must be picklable.

    Raises:
        UserError: the device or the port is not available, or a rank raised it.
        RunError: a rank raised it.
        SystemExit: a rank failed (status 1); its traceback has been printed.
    """
    quiet_libraries()  # here, since ranks import libraries before they run our code
    if torchrun_world_size() is not None:
        _join_torchrun(main, settings, args)
        return
    listener = listen(settings.master_port or 0)  # before any process starts
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    starter = context.Process(target=_start_ranks, args=(settings, listener, theirs))
    try:
        with listener, terminal_ignored():  # the starter has a duplicate of the socket
            starter.start()
        theirs.close()  # only the children hold it: it ends when they have ended
        with suppress(OSError):  # the starter has died: `_received` reports it
            ours.send((main, args))
        with notice.heeded(processes=[starter]) as came:
            failure = _received(ours, starter, None)  # waits for the end of the run
    finally:
        if starter.pid is not None:  # it was started
            starter.kill()  # on Linux its ranks end with it
            starter.join()
        ours.poll(GRACE)  # waits for the ranks, which share the pipe's other end
    if failure is None:
        return
    if failure.explained is not None:  # the program reports it, in one line
        raise failure.explained
    if came:  # before the ranks could save
        raise Interrupted(128 + came[0])
    who = "the process that starts the ranks" if failure.rank is None else f"rank {failure.rank}"
    say(f"\n{who} failed; the run has been ended.\n{failure.text}")
    raise SystemExit(1)


def _start_ranks(settings: Settings, listener: socket.socket, report: Any) -> None:
    """The starter's main. Sends None when all ranks are done, else the first `Failure`."""
    _end_with_parent()
    for number in OF_TERMINAL:  # they are blocked, too: see `terminal_ignored`
        signal.signal(number, signal.SIG_IGN)
    context: Any = get_context("fork" if sys.platform == "linux" else "spawn")
    try:
        main, args = report.recv()
        for library in settings.libraries:  # once for all ranks, which are forked from here
            importlib.import_module(library)
        gc.freeze()  # no rank's garbage collector scans, and so copies, the libraries' objects
        # Memory that the starter shares with the ranks, an entry for each.
        last = context.RawArray(LastAction, settings.world_size)
        port = listener.getsockname()[1]
        processes, pipes = [], []
        for rank in range(settings.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(rank, port, settings, theirs, last, main, args)
            )
            process.start()
            theirs.close()  # else the starter and later ranks would keep the pipe open
            processes.append(process)
            pipes.append(ours)
        # Here, where it answers although a rank is stopped; its thread is not there to be forked.
        _store = host_store(listener, timedelta(seconds=settings.timeout))
        with notice.heeded(processes=processes):
            failure = watch(processes, pipes, settings.timeout, last)
        if failure is None:
            for process in processes:
                process.join(GRACE)  # they end after the barrier
    except BaseException as error:
        failure = Failure(None, format_error(error))
    report.send(failure)


@contextmanager
def terminal_ignored() -> Iterator[None]:
    """Processes started within it never see SIGINT and SIGHUP: a terminal sends them to all its
    processes, but the parent ends the others. The parent hears one afterwards."""
    came: list[int] = []
    resource_tracker.ensure_running()  # when it starts, it unblocks signals
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, OF_TERMINAL)  # new processes inherit it
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in OF_TERMINAL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        for number in came[:1]:  # another thread has taken it
            signal.raise_signal(number)


@dataclass(frozen=True)
class Failure:
    """How a rank, or the starter (None), failed. `explained` is a UserError or RunError, which
    needs no traceback."""

    rank: int | None
    text: str
    explained: Exception | None = None


def watch(
    processes: Sequence[Any], pipes: Sequence[Any], timeout: float, last: Sequence[LastAction]
) -> Failure | None:
    """Returns None when every rank has reported that it is done, else the first failure."""
    silent: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    limit = None  # until the first report
    while silent and (ready := wait([*silent], limit)):
        for pipe in ready:
            rank = silent.pop(pipe)  # it has reported, or its pipe has ended
            failure = _received(pipe, processes[rank], rank)
            if failure is not None:
                return replace(failure, text=failure.text + table(last))
        limit = timeout  # one rank is done only after all have met at the final barrier
    if silent:
        return Failure(min(silent.values()), f"It does not answer.\n{table(last)}")
    return None


def _received(pipe: Any, process: Any, rank: int | None) -> Failure | None:
    """The report of a process, or how it died without one."""
    try:
        failure: Failure | None = pipe.recv()
        return failure
    except (EOFError, OSError):  # the latter: in the middle of its report
        process.join(GRACE)  # for its exit code
    code = process.exitcode
    if code is not None and code < 0:
        return Failure(rank, f"It was killed by {signal.Signals(-code).name}.\n")
    return Failure(rank, f"It exited with status {code} before it was done.\n")


def _rank_main(
    rank: int,
    port: int,
    settings: Settings,
    pipe: Any,
    last: Sequence[LastAction],
    main: Callable[..., None],
    args: Sequence[Any],
) -> None:
    """The main of a rank that the starter forks. Sends None when it is done, else its `Failure`."""
    _end_with_parent()
    world_size = settings.world_size

    def join(backend: str) -> None:
        setup(rank, world_size, backend, port=port, hosted=True, timeout=settings.timeout)

    try:
        world = World(rank, world_size, rank, last=last[rank])
        _run_rank(world, world_size, settings, join, main, args)
    except BaseException as error:
        explained = error if isinstance(error, (UserError, RunError)) else None
        pipe.send(Failure(rank, format_error(error), explained))  # the program prints it
        leave("", 1)
    pipe.send(None)  # after the barrier: all ranks are done


def _join_torchrun(main: Callable[..., None], settings: Settings, args: Sequence[Any]) -> None:
    """The same for a rank that torchrun starts."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a wait in gloo would not see torchrun's Ctrl-C
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    last: Any = (LastAction * local_size)()  # of this rank alone
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # .../ATTEMPT/RANK/error.json
        last = in_file(Path(error_file).parents[1] / "last_actions", local_size)  # of its machine
    store: Any = None  # torchrun's, if it is kept

    def join(backend: str) -> None:
        nonlocal store
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=settings.timeout)
        stay_on_interface_to(LOOPBACK if local_size == world_size else host)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # one for all attempts
            kept = dist.TCPStore(host, port, None, False, limit)  # type: ignore[attr-defined]
            store = fresh_part(kept, rank, world_size, settings.timeout)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=limit
        )

    try:
        world = World(rank, world_size, local_rank, last=last[local_rank])
        _run_rank(world, local_size, settings, join, main, args)
    except (UserError, RunError):  # the program reports it, in one line
        raise
    except BaseException as error:
        say(f"\nrank {rank} failed; torchrun ends the others.\n{format_error(error)}")
        everyone: list[LastAction] = []
        if store is not None and world_size > local_size:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends this rank, too
            waits = last[local_rank].name.decode() in WAITS
            everyone = of_all_machines(store, last, rank - local_rank, world_size, waits)
        leave(table(last, rank - local_rank, everyone), 1)


def _run_rank(
    world: World,
    local_size: int,
    settings: Settings,
    join: Callable[[str], None],
    main: Callable[..., None],
    args: Sequence[Any],
) -> None:
    """A rank's life: binds it to its GPU or its slice of the cores, joins the process group, runs
    main, and waits for all ranks."""
    world.last.note("start")
    device = choose_device(settings.device, world.local_rank, local_size)
    if device.type == "cuda":
        torch.accelerator.set_device_index(device)
    elif cores := core_slice(world.local_rank, local_size, settings.cores_per_rank):
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        keep_freed_memory()
    join(choose_backend(settings.device, local_size))
    main(replace(world, device=device), *args)
    world.last.note("end")
    dist.barrier()
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """Makes this process end when its parent ends, however that happens."""
    parent = parent_process()  # None: torchrun
    if sys.platform == "linux":  # at once, even while it is stopped
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if parent and os.getppid() != parent.pid:
            os._exit(1)  # the parent ended before the prctl
    elif parent:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()

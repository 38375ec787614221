"""Starts the ranks of a run on this machine, or takes them from torchrun.

Problem: a person types one command and wants N processes that know each other, on this machine
and on nothing that is reachable from outside it; if one of them fails, all must end, quickly,
with the one traceback that matters.

Idea: the parent binds the meeting point (a TCP store) to 127.0.0.1 *before* it starts anybody
and hands the socket over to rank 0. So no port can be lost to another run, and nothing listens on
another interface, as torch's store does by default. Each rank has a pipe to the parent: its work
comes through it once all ranks are started, and through it the rank reports how it ended. The
parent names the rank that failed first and ends the others (`training.watch`); a rank whose parent
has gone ends itself.

    who notices         that a rank failed     that a rank is stopped       that the parent died
    our own launcher    the parent, at once    the parent, after timeout    every rank, at once
    torchrun            torchrun, at once      the ranks that wait for it   every rank, at once

Nobody waits in a collective for longer than `timeout`, and a rank is done when all are: each waits
for the others at the end, so that one which is stopped even then is noticed.

This module and `ending` are the only ones that read or write the environment.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from training.ending import (
    Interrupted,
    end_with_parent,
    format_error,
    ignore_ctrl_c,
    is_consequence,
    leave_torchrun,
    look_for_torchrun,
    say,
    until_orphaned,
)
from training.ending import RunError as RunError  # where all look for them
from training.ending import UserError as UserError
from training.ending import torchrun_world_size as torchrun_world_size
from training.watch import Report, Signals, ctrl_c_held, end, watch

DEFAULT_PORT = 11868
LOOPBACK = "127.0.0.1"
_BEAT = 0.1  # seconds between signs of life: less than any time-out
DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True)
class World:
    """Who this process is. `local_rank` counts on this machine, `rank` over all of them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (it is immutable)

    @property
    def is_main(self) -> bool:
        """Rank 0 prints, draws the progress bars and writes what is written once."""
        return self.rank == 0


def core_slice(index: int, slices: int, cores_each: int | None = None) -> list[int]:
    """The cores of slice `index` of `slices`: this process' cores dealt out in equal, consecutive
    parts; with more slices than cores they share cores in turn. Empty where the system does not
    tell which cores a process may use (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    each = cores_each or max(1, len(cores) // slices)
    return [cores[(index * each + i) % len(cores)] for i in range(min(each, len(cores)))]


def choose_device(device: str, local_rank: int, local_world_size: int) -> torch.device:
    """`auto` takes a GPU if there is one. More ranks than GPUs share them in turn."""
    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise UserError("--device cuda: no GPU is visible here; --device cpu works everywhere")
    if device == "mps" and (local_world_size > 1 or not torch.backends.mps.is_available()):
        raise UserError(
            f"--device mps with {local_world_size} ranks: an Apple GPU takes one rank; "
            "--world_size 1, or --device cpu, works"
        )
    if device == "cuda" or (device == "auto" and gpus):
        return torch.device("cuda", local_rank % gpus)
    return torch.device("mps" if device == "mps" else "cpu")


def choose_backend(device: str, local_world_size: int) -> str:
    """NCCL where every rank has a GPU of its own, gloo otherwise."""
    on_gpu = choose_device(device, 0, local_world_size).type == "cuda"
    return "nccl" if on_gpu and torch.cuda.device_count() >= local_world_size else "gloo"


def listen(port: int | None = None) -> socket.socket:
    """A socket that listens on the loopback interface, on `port`; by default on 11868 or, where
    that is taken, on a free port. Raises UserError where a given port is taken."""
    for candidate in (port,) if port is not None else (DEFAULT_PORT, 0):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((LOOPBACK, candidate))
            sock.listen(128)
            return sock
        except (OSError, OverflowError) as error:
            sock.close()
            reason = error
    raise UserError(
        f"--master_port {port}: cannot listen on {LOOPBACK}:{port} ({reason}); "
        "without the option a free port is chosen"
    )


def setup(
    rank: int,
    world_size: int,
    backend: str,
    *,
    port: int = DEFAULT_PORT,
    listener: socket.socket | None = None,
    timeout: float = 300.0,
) -> None:
    """Joins the default process group of the ranks on this machine, over loopback only.

    Rank 0 hosts the meeting point, on `listener` if it was given one, else on `port`.

    Raises:
        UserError: rank 0 cannot listen on the port.
        torch.distributed.DistError: a rank did not come within `timeout` seconds.
    """
    _stay_on_loopback()
    limit = timedelta(seconds=timeout)
    if rank == 0:
        listener = listener or listen(port)
        port = listener.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK, port, world_size, True, limit, False, master_listen_fd=listener.detach()
        )
    else:
        store = dist.TCPStore(LOOPBACK, port, world_size, False, limit)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


def _stay_on_loopback() -> None:
    """Ranks of one machine talk to each other there, and nothing outside can."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback


@dataclass(frozen=True)
class Settings:
    """How ranks are started; the options that every program shares."""

    world_size: int
    device: str = "auto"
    master_port: int | None = None
    timeout: float = 300.0
    cores_per_rank: int | None = None


def launch(main: Callable[..., None], settings: Settings, *args: Any) -> None:
    """Runs main(world, *args) on every rank, and returns when all have returned.

    Under torchrun this process is a rank; otherwise `settings.world_size` processes are started
    here. `main` and `args` must be picklable.

    Raises:
        UserError: the device or the port cannot be had.
        RunError: the ranks raised it.
        SystemExit: a rank failed (status 1); its traceback has been printed. Or this process was
            told to end (128 + signal); the ranks have been ended.
    """
    if torchrun_world_size() is not None:
        _join_torchrun(main, settings, args)
        return
    quiet_libraries()  # ranks import theirs before they run a line of ours
    backend = choose_backend(settings.device, settings.world_size)
    listener = listen(settings.master_port)
    port = listener.getsockname()[1]
    if settings.master_port is None and port != DEFAULT_PORT:
        say(f"Port {DEFAULT_PORT} is taken; the ranks meet on {port}.\n")
    # The work is sent when all ranks are started, and not as arguments of the processes: start()
    # waits until a process has read its arguments, which it does seconds later, when it has
    # imported its libraries; the ranks would import theirs one after the other.
    work = pickle.dumps((main, args))
    context = mp.get_context("spawn")
    processes: list[Any] = []
    pipes: list[Connection] = []
    with Signals() as signals:
        try:
            with ctrl_c_held():
                for rank in range(settings.world_size):
                    ours, theirs = context.Pipe()
                    process = context.Process(
                        target=_rank_main,
                        name=f"rank {rank}",
                        args=(rank, settings, backend, port, theirs)
                        + ((listener,) if rank == 0 else ()),
                    )
                    process.start()
                    theirs.close()
                    processes.append(process)
                    pipes.append(ours)
            listener.close()
            for pipe in pipes:  # a rank that does not read must not keep us from watching
                threading.Thread(target=_send, args=(pipe, work), daemon=True).start()
            failure = watch(processes, pipes, settings.timeout, signals)
        finally:
            listener.close()
            end(processes)
    if signals.number is not None:
        raise Interrupted(128 + signals.number)
    if failure is not None:
        if failure.kind is not None:
            raise failure.kind(failure.text)
        say(f"\nrank {failure.rank} failed; the run has been ended.\n{failure.text}")
        raise SystemExit(1)


def _send(pipe: Connection, work: bytes) -> None:
    with suppress(OSError):  # a rank that is gone: _watch says so
        pipe.send_bytes(work)


def _join_torchrun(main: Callable[..., None], settings: Settings, args: Sequence[Any]) -> None:
    parent = os.getppid()
    end_with_parent(lambda: until_orphaned(parent))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torchrun passes Ctrl-C on: gloo is deaf to it
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    local_size, world_size = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    try:
        device = choose_device(settings.device, local_rank, local_size)
        _claim(device, local_rank, local_size, settings.cores_per_rank)
        limit = timedelta(seconds=settings.timeout)
        store = None  # torch finds it
        if local_size == world_size:
            _stay_on_loopback()
            store = _attempts_store(world_size, limit)
        backend = choose_backend(settings.device, local_size)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=limit
        )
        main(World(rank, world_size, local_rank, device), *args)
        _finish(device)
    except (UserError, RunError):
        raise
    except BaseException as error:
        leave_torchrun(rank, error)


def _attempts_store(world_size: int, limit: timedelta) -> Any:
    """The meeting point of one of torchrun's attempts; None where torchrun does not keep it. It
    keeps one for all attempts, and nobody clears it: ranks that are started again could find the
    addresses of those before them there, and end because nobody answers.

    (Of the ranks on several machines nobody knows which attempt all are at: they use it as it is.)
    """
    address = look_for_torchrun()
    if address is None:
        return None
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = dist.TCPStore(*address, world_size, False, limit)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]


def on_main(world: World, work: Callable[[], None]) -> None:
    """Runs work() on rank 0 while the others wait for it, however long it takes: no time-out ends
    them, since rank 0 keeps telling them that it lives. `work` must not communicate. Where it
    raises, rank 0 does; the others go on."""
    if world.world_size == 1:
        work()
        return
    done = torch.zeros((), device=world.device)
    if not world.is_main:
        while not done.item():
            dist.broadcast(done, 0)
        return
    finished = threading.Event()

    def tell() -> None:
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)
        with suppress(RuntimeError):  # another rank is gone: whoever watches knows it
            while not done.item():
                done.fill_(finished.wait(_BEAT))
                dist.broadcast(done, 0)

    teller = threading.Thread(target=tell, name="tell the others", daemon=True)
    teller.start()
    try:
        work()
    finally:
        finished.set()
        teller.join()


def _finish(device: torch.device) -> None:
    """The end of a rank's work: when all are there."""
    if dist.is_initialized():
        dist.barrier(device_ids=[device.index] if dist.get_backend() == "nccl" else None)
        dist.destroy_process_group()


def _claim(device: torch.device, index: int, slices: int, cores_each: int | None) -> None:
    """Makes the device this process' own: the current GPU, or its slice of the cores."""
    quiet_libraries()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif cores := core_slice(index, slices, cores_each):
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))


def quiet_libraries() -> None:
    """Silences the advice and progress bars of libraries; the programs have their own. The
    environment is for those that are imported later, and for the ranks; the loggers are for those
    that have been."""
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_HUB_VERBOSITY": "error",
        "DATASETS_VERBOSITY": "critical",  # what it cannot read, it raises as well
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "true",
        # oneDNN keeps what it compiled for each of the last 1,024 shapes, and batches of like
        # lengths have many: a bf16 run of gpt2-mini grew to 3 GB a rank. With 32: 0.7 GB, as fast.
        "LRU_CACHE_CAPACITY": "32",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    }.items():
        os.environ.setdefault(name, value)
    for library in ("transformers", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)
    logging.getLogger("datasets").setLevel(logging.CRITICAL)


def _rank_main(
    rank: int,
    settings: Settings,
    backend: str,
    port: int,
    pipe: Connection,
    listener: socket.socket | None = None,
) -> None:
    """A rank's life. Sends a `Report` when it is done, or has failed."""
    ignore_ctrl_c()  # it reaches the parent, which ends us
    parent = mp.parent_process()
    assert parent is not None
    end_with_parent(parent.join)
    try:
        main, args = pipe.recv()
        device = choose_device(settings.device, rank, settings.world_size)
        _claim(device, rank, settings.world_size, settings.cores_per_rank)
        setup(
            rank, settings.world_size, backend,
            port=port, listener=listener, timeout=settings.timeout,
        )  # fmt: skip
        main(World(rank, settings.world_size, rank, device), *args)
        _finish(device)
    except BaseException as error:
        kind = next((k for k in (UserError, RunError) if isinstance(error, k)), None)
        text = str(error) if kind else format_error(error)
        pipe.send(Report(time.time(), text, kind, is_consequence(error)))
        sys.stdout.flush()
        os._exit(1)  # not through destructors, which may wait for the other ranks
    pipe.send(Report(time.time()))

"""Starts the ranks of a run on this machine, or takes them from torchrun.

Problem: a person types one command and wants N processes that know each other, on this machine
and on nothing that is reachable from outside it; if one of them fails, all must end, quickly,
with the one traceback that matters.

Idea: the parent binds the meeting point (a TCP store) to 127.0.0.1 *before* it starts anybody
and hands the socket over to rank 0. So no port can be lost to another run, and nothing listens on
another interface, as torch's store does by default. Each rank has a pipe to the parent: its work
comes through it once all ranks are started, and through it the rank reports how it ended. A rank
that dies without a word was killed, and that is the cause; otherwise the earliest report is, for
the others fail in consequence.
A rank whose parent has gone ends itself.

This is the only module that reads or writes the environment.
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
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DEFAULT_PORT = 11868
LOOPBACK = "127.0.0.1"
DEVICES = ("auto", "cpu", "cuda", "mps")
_GRACE = 2.0  # seconds for the other ranks' reports, and then to end when asked


class UserError(Exception):
    """A mistake of the user's: programs print it as one line and end with status 2. The text
    gives the value, the rule, and a setting that works."""


class RunError(Exception):
    """The run cannot go on, and the text says all there is to say, as of a loss that is not a
    number: programs print it as one line, without traceback, and end with status 1."""


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


def torchrun_world_size() -> int | None:
    """The number of ranks that torchrun started, or None where it started none."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


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
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
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
        return _join_torchrun(main, settings, args)
    quiet_libraries()  # ranks import theirs before they run a line of ours
    backend = choose_backend(settings.device, settings.world_size)
    listener = listen(settings.master_port)
    port = listener.getsockname()[1]
    if settings.master_port is None and port != DEFAULT_PORT:
        print(f"Port {DEFAULT_PORT} is taken; the ranks meet on {port}.", file=sys.stderr)  # noqa: T201
    # The work is sent when all ranks are started, and not as arguments of the processes: start()
    # waits until a process has read its arguments, which it does seconds later, when it has
    # imported its libraries; the ranks would import theirs one after the other.
    work = pickle.dumps((main, args))
    context = mp.get_context("spawn")
    processes: list[Any] = []
    pipes: list[Connection] = []
    with _signals_raise():
        try:
            with _ctrl_c_ignored():
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
            _watch(processes, pipes)
        finally:
            listener.close()
            with _ctrl_c_ignored():  # an impatient second one would leave ranks behind
                _end(processes)
    return None


def _send(pipe: Connection, work: bytes) -> None:
    with suppress(OSError):  # a rank that is gone: _watch says so
        pipe.send_bytes(work)


def _join_torchrun(main: Callable[..., None], settings: Settings, args: Sequence[Any]) -> None:
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = choose_device(settings.device, local_rank, local_size)
    _claim(device, local_rank, local_size, settings.cores_per_rank)
    dist.init_process_group(
        choose_backend(settings.device, local_size), timeout=timedelta(seconds=settings.timeout)
    )
    try:
        main(World(dist.get_rank(), dist.get_world_size(), local_rank, device), *args)
    finally:
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
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "true",
        # oneDNN keeps what it compiled for each of the last 1,024 shapes, and batches of like
        # lengths have many: a bf16 run of gpt2-mini grew to 3 GB a rank. With 32: 0.7 GB, as fast.
        "LRU_CACHE_CAPACITY": "32",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    }.items():
        os.environ.setdefault(name, value)
    for library in ("transformers", "huggingface_hub", "datasets"):
        logging.getLogger(library).setLevel(logging.ERROR)


def _rank_main(
    rank: int,
    settings: Settings,
    backend: str,
    port: int,
    pipe: Connection,
    listener: socket.socket | None = None,
) -> None:
    """A rank's life. Sends the time, and twice None when done; when not, the kind of error whose
    text explains itself, and the text, or None and a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    try:
        main, args = pipe.recv()
        device = choose_device(settings.device, rank, settings.world_size)
        _claim(device, rank, settings.world_size, settings.cores_per_rank)
        setup(
            rank, settings.world_size, backend,
            port=port, listener=listener, timeout=settings.timeout,
        )  # fmt: skip
        main(World(rank, settings.world_size, rank, device), *args)
        dist.destroy_process_group()
    except BaseException as error:
        kind = next((k for k in (UserError, RunError) if isinstance(error, k)), None)
        pipe.send((time.time(), kind, str(error) if kind else traceback.format_exc()))
        sys.stdout.flush()
        os._exit(1)  # not through destructors, which may wait for the other ranks
    pipe.send((time.time(), None, None))


def _end_with_parent() -> NoReturn:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _signals_raise:  # noqa: N801
    """Within it, the signals that ask this process to end raise SystemExit, so that its ranks
    are ended first."""

    def __enter__(self) -> None:
        self.before = {}
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGTERM", "SIGHUP", "SIGINT"):
                number = getattr(signal, name, None)  # Windows has not all of them
                # What is ignored stays ignored: SIGHUP under nohup, for one.
                if number and signal.getsignal(number) is not signal.SIG_IGN:
                    self.before[number] = signal.signal(number, self._raise)

    @staticmethod
    def _raise(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Processes started within it ignore Ctrl-C from birth: it reaches all processes of a
    terminal, and each would print where in its imports it was."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _watch(processes: list[Any], pipes: list[Connection]) -> None:
    """Returns when every rank is done.

    Raises:
        UserError, RunError: the first rank that failed raised one.
        SystemExit: with status 1, after saying which rank failed first, and how.
    """
    silent = dict(enumerate(pipes))  # the ranks not heard of yet
    failures: list[tuple[float, int, type[Exception] | None, str]] = []
    deadline = None
    while silent and (deadline is None or time.time() < deadline):
        for pipe in wait(list(silent.values()), deadline and max(0.0, deadline - time.time())):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            del silent[rank]
            try:
                when, kind, text = pipes[rank].recv()
            except (
                EOFError,
                ConnectionError,
            ):  # it died without a word: that is the cause, whatever others report
                processes[rank].join(_GRACE)
                when, kind, text = 0.0, None, _how_it_died(processes[rank].exitcode)
            if text is not None:
                failures.append((when, rank, kind, text))
                deadline = deadline or time.time() + _GRACE
    if failures:
        _, rank, kind, text = min(failures)
        if kind:
            raise kind(text)
        print(f"\nrank {rank} failed; the run has been ended.\n{text}", file=sys.stderr)  # noqa: T201
        raise SystemExit(1)
    for process in processes:
        process.join(_GRACE)


def _how_it_died(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"It was ended by {signal.Signals(-exitcode).name}."
    return f"It exited with status {exitcode} before it was done."


def _end(processes: list[Any]) -> None:
    """Ends the ranks that still run: asked first, then not."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.time() + _GRACE
    for process in processes:
        process.join(max(0.0, deadline - time.time()))
        if process.is_alive():
            process.kill()
            process.join()

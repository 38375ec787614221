"""Starts the ranks of a run on this machine, or takes them from torchrun.

Problem: one command must start N processes that find each other and are not reachable from outside
this machine. If one of them fails, all must end quickly, with the traceback that matters.

Idea: the program binds the meeting point (a TCP store) to 127.0.0.1 *before* it starts any process.
So no other run can take the port, and nothing listens on another interface, as torch's store does
by default. The program imports what ranks need, forks them before it reads data or computes, hosts
the store, and watches. Each rank reads for itself, as under torchrun, and reports to the program,
through a pipe, how it ended.

    what happens to a rank         who notices it                    what is printed
    it raises                      the program, by its report        the rank, its traceback
    it is killed, or just exits    the program, by the pipe's end    the rank, how it died
    it is stopped                  the others, after `timeout`       the traceback of the first
    the program dies               the system ends it (on Linux)

The first failure in time is printed, and below it what every rank did last: a rank that lost its
connection to another, or timed out waiting for it, may be the first to say so. No collective waits
longer than `timeout`, and no rank counts as done until all are.

Cost: about four seconds of imports, once instead of per rank. (Outside Linux, where forking is not
safe, and where there is a GPU, which no fork can use, each rank imports for itself.)

Rejected: `torch.distributed.elastic.multiprocessing`, and Python's fork server; see docs/log.md.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from runtime.cores import core_slice, pin
from training.options import VGG, Options

from .errors import (
    RunError,
    UserError,
    format_error,
    leave,
    open_streams,
    say,
    torchrun,
    torchrun_world_size,
)
from .last_actions import LastAction, in_file, in_memory, table
from .meeting import LOOPBACK, agree_on_backend, connect, host_store, listen, meet, setup
from .signals import (
    ENDING_SIGNALS,
    NOTICE_SIGNALS,
    NOTICES_GIVEN,
    TERMINAL_SIGNALS,
    die_with_parent,
    notice_sets_flag,
    set_handlers,
)
from .world import World, choose_device, quiet_libraries

SEEN = 0.3  # seconds in which torchrun, which looks every 0.1, or `watch` sees an earlier end
GONE = 5.0  # seconds that a rank has to exit, once it has reported or the system closed its pipe

# How a rank has ended: well (None), by an error that explains itself, or as this text says.
Report = UserError | RunError | str | None


class Job(NamedTuple):
    """What every rank does: main(world, *inputs). The settings are the options that say how."""

    main: Callable[..., None]
    settings: Options
    inputs: Sequence[Any]


def libraries(args: Options) -> list[str]:
    """What ranks import, once for all before they are forked."""
    # Making an optimizer imports torch._dynamo, which takes seconds.
    of_text = ["transformers.models.gpt2.modeling_gpt2"] if args.model != VGG else []
    return ["torch._dynamo", "torch.distributed.checkpoint", *of_text]


def launch(main: Callable[..., None], settings: Options, *inputs: Any) -> None:
    """Runs main(world, *inputs) on every rank, and returns when all have returned.

    Under torchrun this process is a rank; otherwise `settings.world_size` processes are started
    here. `main` and `inputs` must be picklable. `settings` are the options that say how.

    Raises:
        UserError: the device is not available, or a rank raised it.
        RunError: a rank raised it.
        SystemExit: a rank failed (status 1); its traceback has been printed.
    """
    quiet_libraries()  # here, since ranks import libraries before they run our code
    job = Job(main, settings, inputs)
    if torchrun_world_size() is not None:
        _join_torchrun(job)
        return
    listener = listen()  # before any process starts
    forks = sys.platform == "linux" and not torch.cuda.device_count()
    context: Any = get_context("fork" if forks else "spawn")
    if forks:
        for library in libraries(settings):
            importlib.import_module(library)
        gc.freeze()  # no rank's garbage collector scans, and so copies, the libraries' objects
    else:
        resource_tracker.ensure_running()  # when it starts, it unblocks signals
    # Memory that the program shares with the ranks, an entry for each.
    last = (in_memory if forks else partial(context.RawArray, LastAction))(settings.world_size)
    port = listener.getsockname()[1]
    processes: list[Any] = []
    pipes = []
    # Until a rank has handlers of its own no signal reaches it: see `_rank_main`.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        for rank in range(settings.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(rank, port, theirs, last, job))
            process.start()
            processes.append(process)
            pipes.append(ours)
            theirs.close()  # else this process and later ranks would keep the pipe open
        # In this process the store answers even if a rank is stopped. It starts after the forks,
        # which must not copy its thread.
        _store = host_store(listener, settings.timeout)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        with notice_sets_flag(processes):
            report = watch(processes, pipes, settings.timeout, last)  # until the end of the run
            notices = [*NOTICES_GIVEN]
    finally:
        for process in processes:
            process.kill()
            process.join()
    if isinstance(report, str):
        if notices:  # a rank had nothing to save, and the notice has ended it
            signal.raise_signal(notices[0])
        say(f"\n{report}")
        raise SystemExit(1)
    if report is not None:  # the program prints it, in one line
        raise report


def watch(
    processes: Sequence[Any], pipes: Sequence[Any], timeout: float, last: Sequence[LastAction]
) -> Report:
    """Returns None when every rank has reported that it is done, else the report of the first that
    failed. A text gets a line with its rank above it, and the table of last actions below."""
    silent: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    failures: list[tuple[float, int, Report]] = []  # when, who, and how
    limit = None  # until the first report
    while silent and (ready := wait([*silent], limit)):
        for pipe in ready:
            rank = silent.pop(pipe)
            when, report = _received(pipe, processes[rank])
            if report is not None:
                failures.append((when, rank, report))
        # A rank is done only after all have met at the final barrier. A rank that has lost another
        # may say so before the system has closed the other's pipe.
        limit = SEEN if failures else timeout
    if silent and not failures:
        failures.append((0.0, min(silent.values()), "It does not answer.\n"))
    if not failures:
        return None
    when, rank, report = min(failures, key=lambda failure: failure[0])
    if isinstance(report, str):
        alone = not when or not last[rank].is_wait  # it died, or has an error of its own
        actions = table(last, failed=rank if alone else None)
        report = f"rank {rank} failed; the run has been ended.\n{report}{actions}"
    return report


def _received(pipe: Any, process: Any) -> tuple[float, Report]:
    """When a rank ended (time.monotonic), and its report. If it died without one: how, at time 0,
    before ranks that reported, since these may have lost their connection to it."""
    report: tuple[float, Report] | None = None
    with suppress(EOFError, OSError):  # the latter: it died in the middle of its report
        report = pipe.recv()
    process.join(GONE)  # now it prints what it has not printed yet, and ends
    if report is not None:
        return report
    code = process.exitcode
    if code is None or code >= 0:
        return 0.0, f"It exited with status {code} before it was done.\n"
    by = signal.Signals(-code)
    why = " Perhaps memory ran out: then the system does that." * (by is signal.SIGKILL)
    return 0.0, f"It was killed by {by.name}.{why}\n"


def _rank_main(rank: int, port: int, pipe: Any, last: Sequence[LastAction], job: Job) -> None:
    """The main of a rank that the program starts. Reports how it has ended."""
    _end_with_parent()
    open_streams()
    # A terminal sends Ctrl-C to all its processes, but the program ends the ranks. Until
    # `notice_sets_flag`, notice ends a rank at once, even while it waits in C.
    set_handlers(TERMINAL_SIGNALS, signal.SIG_IGN)
    set_handlers(NOTICE_SIGNALS, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    report: Report = None
    try:
        world = World(rank, job.settings.world_size, rank, last=last[rank])
        _run_rank(world, job, partial(connect, port, job.settings.timeout))
    except (UserError, RunError) as error:
        report = error
    except BaseException as error:
        report = format_error(error)
    pipe.send((time.monotonic(), report))
    leave("", int(report is not None))


def _join_torchrun(job: Job) -> None:
    """The same for a rank that torchrun starts."""
    _end_with_parent()
    set_handlers(ENDING_SIGNALS, signal.SIG_DFL)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])  # .../ATTEMPT/RANK/error.json
    last = in_file(error_file.parents[1] / "last_actions", local_size)  # of this machine's ranks
    try:
        world = World(rank, world_size, local_rank, last=last[local_rank])
        _run_rank(world, job, partial(meet, job.settings.timeout))
    except (UserError, RunError):  # the program reports it, in one line
        raise
    except BaseException as error:
        say(f"\nrank {rank} failed; torchrun ends the others.\n{format_error(error)}")
        set_handlers([signal.SIGTERM], signal.SIG_IGN)  # torchrun ends this rank, too
        failed = None if last[local_rank].is_wait else rank  # None: it waited in vain
        say(table(last, rank - local_rank, failed))
        time.sleep(SEEN)
        leave("", 1)


def _run_rank(world: World, job: Job, store_of: Callable[[], Any]) -> None:
    """A rank's life: binds it to its GPU or its slice of the cores, joins the process group, runs
    main, and waits for all ranks. `store_of` connects to the store in which they meet."""
    settings = job.settings
    world.last.note("start")
    local_size = torchrun("LOCAL_WORLD_SIZE", world.world_size)
    device = choose_device(settings.device, world.local_rank)
    gpu = ""
    if device.type == "cuda":
        torch.accelerator.set_device_index(device)
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    cores = core_slice(world.local_rank, local_size, settings.cores_per_rank)
    if cores and not gpu:
        pin(cores)
        torch.set_num_threads(len(cores))
        _keep_freed_memory()
    # A store whose host is stopped accepts connections, but never answers.
    signal.alarm(math.ceil(2 * settings.timeout))  # then the system ends this rank
    store = store_of()
    backend = agree_on_backend(store, world.rank, world.world_size, gpu)
    signal.alarm(0)
    setup(
        world.rank, world.world_size, backend, store=store,
        host=LOOPBACK if local_size == world.world_size else os.environ["MASTER_ADDR"],
        timeout=settings.timeout,
    )  # fmt: skip
    job.main(replace(world, device=device), *job.inputs)
    world.last.note("end")
    with world.last.waiting():
        dist.barrier()
    dist.destroy_process_group()


def _keep_freed_memory() -> None:
    """Has glibc keep the blocks below 32 MiB that this process frees. Otherwise it would return
    many to the system after each step and take them back in the next, page by page. Larger ones go
    back: kept, they would be cut up, and the next large block would take new memory (docs/log.md).
    Not for workers that are threads, since each would keep its own."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD


def _end_with_parent() -> None:
    """Makes this process end when its parent ends, however that happens."""
    parent = parent_process()  # None: torchrun
    if sys.platform == "linux":
        die_with_parent()
        if parent and os.getppid() != parent.pid:
            os._exit(1)  # the parent ended before the prctl
    elif parent:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()

"""How a process of a run ends: by a user's mistake, an interrupt, a failure, or with its parent.

Whatever it is, a person reads it once, and nobody waits. A process that has failed ends by
`os._exit`: destructors of process groups may wait for ranks that will never come.

Ranks that torchrun started have no parent of ours that could choose what is said. It ends the
others as soon as one has ended; so a rank that has something to say which another may know better,
or says as well, waits for its end, and speaks only if that does not come.

This module and `launch` are the only ones that read or write the environment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import psutil
import torch.distributed as dist

POLL = 1.0  # seconds between looks at what cannot be heard
_SAY = 8.0  # seconds that a rank of torchrun's leaves to the one that knows better
_PR_SET_PDEATHSIG = 1  # of Linux' prctl
_ASKED = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


class UserError(Exception):
    """A mistake of the user's: programs print it as one line and end with status 2. The text
    gives the value, the rule, and a setting that works."""


class RunError(Exception):
    """The run cannot go on, and the text says all there is to say, as of a loss that is not a
    number: programs print it as one line, without traceback, and end with status 1."""


class Interrupted(SystemExit):
    """This process was asked to end, by a signal: its status is 128 + the signal."""


# Words


def say(text: str) -> None:
    """Prints in one piece: ranks may share a terminal."""
    with suppress(OSError):  # a terminal that is closed
        sys.stderr.write(text)
        sys.stderr.flush()


def format_error(error: BaseException) -> str:
    """The traceback, with the notes that Python 3.10 would leave out."""
    text = "".join(traceback.format_exception(error))
    notes: list[str] = getattr(error, "__notes__", []) if sys.version_info < (3, 11) else []
    return text + "".join(f"{note}\n" for note in notes)


def is_consequence(error: BaseException) -> bool:
    """Whether what began an error says no more than that another rank did not answer."""
    while before := error.__cause__ or (not error.__suppress_context__ and error.__context__):
        error = before
    # gloo raises plain RuntimeErrors, which begin with the place in its source.
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


def run_here(main: Callable[..., None], *args: Any) -> None:
    """Runs main(*args) in this process, for a run without ranks. It fails as a rank does:

    Raises:
        UserError, RunError, Interrupted: as they are.
        SystemExit: with status 1, whatever main raised, a SystemExit(0) of a layer among others;
            the traceback has been printed.
    """
    try:
        main(*args)
    except (UserError, RunError, Interrupted):
        raise
    except BaseException as error:
        say(f"\nThe run failed.\n{format_error(error)}")
        raise SystemExit(1) from None


class signals_end:  # noqa: N801
    """Within it Ctrl-C, SIGTERM and the end of the terminal end this process by way of its own
    ends, so that nothing half written stays, and without a traceback, which would say only where
    it was. A signal that is ignored, as under nohup, stays so. (Ranks of torchrun's must end
    at once when it says so: to them only Ctrl-C is meant.)"""

    def __enter__(self) -> None:
        self.before: dict[int, Any] = {}
        self.late: list[threading.Timer] = []
        if threading.current_thread() is not threading.main_thread():
            return
        asked = _ASKED if torchrun_world_size() is None else []
        for number in (signal.SIGINT, *asked):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self.before[number] = signal.signal(number, self._end)

    def _end(self, number: int, _: object) -> NoReturn:
        # An exception may come to nothing: in a destructor or callback Python only prints it.
        self.status = 128 + number
        late = threading.Timer(_SAY, os._exit, (self.status,))
        late.daemon = True
        late.start()
        self.late.append(late)
        raise Interrupted(self.status)

    def __exit__(self, *_: object) -> None:
        for late in self.late:
            late.cancel()
        for number, before in self.before.items():
            signal.signal(number, before)
        if self.late:  # and not of what writing to a closed terminal may have raised since
            raise Interrupted(self.status) from None


# Parents and siblings


def ignore_ctrl_c() -> None:
    """For a rank, which its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def end_with_parent(wait_for_its_end: Callable[[], object]) -> None:
    """Ends this process when its parent has ended, however that does."""
    if sys.platform == "linux":  # at once, even while it is stopped
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def follow() -> NoReturn:
        wait_for_its_end()
        os._exit(1)

    threading.Thread(target=follow, name="end with parent", daemon=True).start()


def end_stopped_siblings() -> list[dict[str, str]]:
    """Kills the other processes of this one's parent that are stopped, which hear nothing else;
    returns their environments."""
    killed = []
    with suppress(psutil.Error):
        for sibling in psutil.Process(os.getppid()).children():
            if sibling.pid != os.getpid() and is_stopped(sibling.pid):
                killed.append(sibling.environ())
                sibling.kill()
    return killed


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped, and not ended."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


# torchrun


def torchrun_world_size() -> int | None:
    """The number of ranks that torchrun started, or None where it started none."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def ranks_here(world_size: int) -> int:
    """How many of a run's ranks are on this machine: all, unless torchrun has started others."""
    if torchrun_world_size() is None:
        return world_size
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def is_first() -> bool:
    """Whether this process is the first, of all machines', of torchrun's ranks, or none of them."""
    return torchrun_world_size() is None or os.environ["RANK"] == "0"


def speaks() -> bool:
    """Whether this process is the one that speaks where all find the same: of torchrun's ranks,
    the first on each machine."""
    return torchrun_world_size() is None or os.environ["LOCAL_RANK"] == "0"


def refuse(message: str, status: int = 2) -> NoReturn:
    """Prints a user's mistake and ends this process: once, where all ranks of torchrun's make the
    same. A rank that does not speak waits to be ended, and speaks where the one that does seems
    to have made no mistake."""
    if torchrun_world_size() is None:
        say(message)
        raise SystemExit(status)
    if not speaks():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(status))  # so torchrun ends the others
        time.sleep(_SAY)
    sys.stdout.flush()
    say(message)
    os._exit(status)  # not through destructors, which may wait for the other ranks


def leave_torchrun(rank: int, error: BaseException) -> NoReturn:
    """Says how a rank failed, once per run, and ends it. One that has only lost another is quiet
    until torchrun, which has seen the other's end, ends it; and where the other was stopped, it
    does what torchrun would do half a minute later."""
    text = format_error(error)
    for stopped in end_stopped_siblings():
        rank = int(stopped.get("RANK", rank))
        text = "It was stopped (by SIGSTOP, or in a debugger) and did not answer.\n"
        break
    else:
        if is_consequence(error):
            time.sleep(_SAY)
    sys.stdout.flush()
    say(f"\nrank {rank} failed; torchrun ends the others.\n{text}")
    os._exit(1)  # not through destructors, which may wait for the other ranks


def leave_when_done() -> None:
    """Ends a rank of torchrun's that has done all it had to, at once: all others may have gone, and
    nobody would notice that it is stopped while Python clears up."""
    if torchrun_world_size() is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def until_orphaned(parent: int) -> None:
    """Waits for the end of this process' parent."""
    while os.getppid() == parent:
        time.sleep(POLL)


def look_for_torchrun() -> tuple[str, int] | None:
    """The address at which torchrun keeps the ranks' meeting point; None if it keeps none. Raises
    where torchrun has gone: the store's client would go on trying until its time-out."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(address, timeout=_SAY).close()
    except ConnectionRefusedError:
        raise
    except OSError:  # slow, or a name that is not found: that is for the store to say
        pass
    return address

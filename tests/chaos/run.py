"""A run of a program: its processes, what it says, and what it leaves behind."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import tempfile
import termios
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.programs import OWN, TORCHRUN

ROOT = Path(__file__).resolve().parents[2]
ARM = ROOT / "tests" / "chaos" / "arm"
MARK = "CHAOS_RUN"  # in the environment of every process of a run
SHARED_MEMORY = Path("/dev/shm")


class Run:
    """A command, started on a terminal of its own, as a person starts it.

    `folder` is given to it for temporary files, and holds what it prints. Within `with`; at the
    end of it every process of the run is killed.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, launcher: str = OWN, failure: str = ""
    ) -> None:
        self.launcher = launcher
        self.stdout, self.stderr, self.tmp = folder / "stdout", folder / "stderr", folder / "tmp"
        self.tmp.mkdir()
        self.mark = uuid.uuid4().hex
        self.listening: set[tuple[str, int]] = set()  # all that `look` has seen
        self._shared_before = _shared_memory()
        environment = {
            **os.environ,
            MARK: self.mark,
            "TMPDIR": str(self.tmp),
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "",
        }
        if failure:
            path = [str(ARM), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment |= {"CHAOS_FAILURE": failure, "PYTHONPATH": os.pathsep.join(path)}
        self._terminal, theirs = pty.openpty()
        try:
            with self.stdout.open("w") as stdout, self.stderr.open("w") as stderr:
                self.process = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdin=theirs, stdout=stdout,
                    stderr=stderr, start_new_session=True, preexec_fn=_take_terminal,
                )  # fmt: skip
        finally:
            os.close(theirs)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self.process.kill()
        self.process.wait()
        self.close_terminal()

    def close_terminal(self) -> None:
        """The terminal is gone."""
        if self._terminal >= 0:
            os.close(self._terminal)
            self._terminal = -1

    def processes(self) -> list[psutil.Process]:
        """Those of the run that are there, whoever their parents are."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                dead = process.status() == psutil.STATUS_ZOMBIE
                if not dead and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """The ranks, in order, as far as they have been started; the process where there are
        none."""
        try:
            children = psutil.Process(self.process.pid).children()
            if self.launcher == TORCHRUN:
                ranks = {c.environ().get("RANK"): c for c in children}
                return [ranks[str(r)] for r in range(len(ranks)) if str(r) in ranks]
            if self.launcher == OWN:
                ranks_ = [c for c in children if "spawn_main" in " ".join(c.cmdline())]
                return sorted(ranks_, key=lambda c: (c.create_time(), c.pid))
            return [psutil.Process(self.process.pid)]
        except psutil.Error:  # one has ended meanwhile
            return []

    def look(self) -> None:
        """Notes where the processes of the run listen."""
        for process in self.processes():
            with suppress(psutil.Error):
                for connection in process.net_connections():
                    if connection.status == psutil.CONN_LISTEN:
                        self.listening.add((connection.laddr.ip, connection.laddr.port))

    def wait(self, seconds: float) -> float | None:
        """Waits until every process of the run has ended: how long that took, or None."""
        start = time.monotonic()
        ended = until(lambda: self.process.poll() is not None and not self.processes(), seconds)
        return time.monotonic() - start if ended else None

    def leftovers(self) -> list[str]:
        """What is still there of a run that should have left nothing."""
        left = [f"process {p.pid} ({' '.join(p.cmdline())[:80]})" for p in self.processes()]
        open_now = {
            c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN
        }
        left += [f"port {port}" for _, port in sorted(self.listening) if port in open_now]
        left += [f"shared memory {name}" for name in sorted(_shared_memory() - self._shared_before)]
        # torchrun itself leaves an empty folder for logs.
        files = [p for p in self.tmp.rglob("*") if not p.is_dir()]
        files += [p for p in self.tmp.iterdir() if not p.name.startswith("torchelastic_")]
        return left + [f"temporary file {path}" for path in sorted(set(files))]

    def said(self) -> str:
        """What it has written to stderr."""
        return self.stderr.read_text(errors="replace")


def _take_terminal() -> None:
    """In the new process: the terminal that is its stdin becomes the one it is controlled by. And
    Ctrl-C is heard, which a shell that starts tests in the background has switched off."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _shared_memory() -> set[str]:
    return {p.name for p in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def can_be_armed(process: psutil.Process) -> bool:
    """Whether it has come so far as to take SIGUSR1."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text().split()
    except OSError:
        return False
    return bool(int(status[status.index("SigCgt:") + 1], 16) >> (signal.SIGUSR1 - 1) & 1)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition comes to hold within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for a run."""
    return tempfile.TemporaryDirectory(prefix="chaos_", ignore_cleanup_errors=True)

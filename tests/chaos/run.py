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
MARK = "CHAOS_RUN"  # in the environment of every process of a run
SHARED_MEMORY = "/dev/shm/"
KEPT = ("torchinductor_", "torchelastic_")  # torch's cache, and torchrun's folder for logs


class Run:
    """A command, started on a terminal of its own, as a person starts it.

    `folder` is given to it for temporary files, and holds what it prints. To be used with `with`:
    at its end every process that is left is killed.
    """

    def __init__(self, command: Sequence[str], folder: Path, launcher: str = OWN) -> None:
        self.launcher = launcher
        self.stdout, self.stderr, self.tmp = folder / "stdout", folder / "stderr", folder / "tmp"
        self.tmp.mkdir()
        self.mark = uuid.uuid4().hex
        self.listening: set[tuple[str, int]] = set()  # all that `look` has seen
        self.mapped: set[str] = set()  # shared memory that has a name, likewise
        environment = {
            **os.environ, MARK: self.mark, "TMPDIR": str(self.tmp), "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "",
        }  # fmt: skip
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
                return sorted(children, key=lambda c: (c.create_time(), c.pid))
            return [psutil.Process(self.process.pid)]
        except psutil.Error:  # one has ended meanwhile
            return []

    def look(self) -> None:
        """Notes where the processes of the run listen, and what memory they share."""
        for process in self.processes():
            with suppress(psutil.Error):
                self.mapped |= {
                    mapped.path
                    for mapped in process.memory_maps()
                    if mapped.path.startswith(SHARED_MEMORY) and Path(mapped.path).exists()
                }
                for connection in process.net_connections():
                    if connection.status == psutil.CONN_LISTEN:
                        self.listening.add((connection.laddr.ip, connection.laddr.port))

    def wait(self, seconds: float) -> float | None:
        """Waits until every process of the run has ended: how long that took, or None."""
        start = time.monotonic()
        ended = until(lambda: self.process.poll() is not None and not self.processes(), seconds)
        return time.monotonic() - start if ended else None

    def leftovers(self, seconds: float = 2.0) -> list[str]:
        """What is still there, a moment later, of a run that should have left nothing."""
        until(lambda: not self._left(), seconds)  # the system closes what a killed process had open
        return self._left()

    def _left(self) -> list[str]:
        left = [f"process {p.pid} ({' '.join(p.cmdline())[:80]})" for p in self.processes()]
        left += [f"shared memory {path}" for path in sorted(self.mapped) if Path(path).exists()]
        files = [path for path in self.tmp.iterdir() if not path.name.startswith(KEPT)]
        return left + [f"temporary file {path.name}" for path in sorted(files)]

    def said(self) -> str:
        """What it has written to stderr."""
        return self.stderr.read_text(errors="replace")


def _take_terminal() -> None:
    """In the new process: the terminal that is its stdin becomes the one it is controlled by. And
    Ctrl-C is heard, which a shell that starts tests in the background has switched off, and the end
    of the terminal, which nohup has."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


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

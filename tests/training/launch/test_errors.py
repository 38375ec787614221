"""What holds from a program's first moment: its signals, its streams, its system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from subprocess import CompletedProcess

import pytest

from tests.project.programs import ROOT

BEGIN = """
import os, signal, sys, time
from project.command_line import begin
from training.options import Options

Options.GROUPS = ()
{before}
sys.argv = ["program"]
begin(Options, None)
{then}
"""


def ended(then: str, before: str = "", closed: int = 0) -> CompletedProcess[str]:
    """How a program ended that did so before and after it began, while one standard stream (by
    default its input) was closed."""
    line = [sys.executable, "-c", BEGIN.format(before=before, then=then)]
    close = partial(os.close, closed)
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, preexec_fn=close)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP], ids=lambda n: n.name
)
def test_a_signal_ends_a_program_that_still_imports(number: int) -> None:
    """By a handler of its own: the system's would not end process 1 of a container."""
    then = f"os.kill(os.getpid(), {number:d}); time.sleep(50); print('went on')"
    done = ended(then)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")
    done = ended(then.replace("50", "0"), before=f"signal.signal({number:d}, signal.SIG_IGN)")
    assert (done.returncode, done.stdout) == (0, "went on\n")  # as under nohup


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_stream_is_one_that_nobody_reads(closed: int) -> None:
    """And no file gets its number, into which libraries print."""
    then = """
print("said"); print("complained", file=sys.stderr); sys.stdout.flush(); sys.stderr.flush()
os.write(1, b"in C, "); os.write(2, b"in C, ")
assert not sys.stdin.isatty() and open(os.devnull).fileno() > 2
"""
    done = ended(then, closed=closed)
    assert done.returncode == 0
    open_streams = ["", "said\nin C, ", "complained\nin C, "]
    open_streams[closed] = ""
    assert [done.stdout, done.stderr] == open_streams[1:]


def test_a_system_without_posix_signals_is_refused_in_the_first_line_that_fails() -> None:
    """As Windows."""
    line = "import signal; del signal.SIGHUP; import project.command_line"
    done = subprocess.run([sys.executable, "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("This program runs on Linux and macOS. On Windows use WSL (")
    assert done.stderr.count("\n") == 1

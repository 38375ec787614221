"""What holds from a program's first moment: its signals, its streams, its system."""

from __future__ import annotations

import io
import os
import re
import runpy
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.project.programs import ROOT
from tests.ranks import under_torchrun
from training.launch.errors import open_streams, parameters, refuse
from training.launch.signals import ENDING_SIGNALS, end_process, handlers

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


FIRST = "program begins; it imports torch, then it reads its data.\n"  # of a log


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
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", FIRST)
    done = ended(then.replace("50", "0"), before=f"signal.signal({number:d}, signal.SIG_IGN)")
    assert (done.returncode, done.stdout) == (0, "went on\n")  # as under nohup


@pytest.mark.parametrize("line", ["generate.py . Satz", "plot.py schedule", "report.py workdir"])
def test_ctrl_c_ends_other_programs_that_import_torch(line: str) -> None:
    program = f"""
import os, runpy, signal, sys, time
from importlib.util import spec_from_loader
class Torch:
    def find_spec(self, name, *_):
        return spec_from_loader(name, self) if name == "torch" else None
    def create_module(self, spec):
        pass
    def exec_module(self, module):
        os.kill(os.getpid(), signal.SIGINT); time.sleep(5)
sys.meta_path.insert(0, Torch())
sys.argv = {f"project/{line}".split()}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's")
def test_a_rank_of_torchrun_dies_with_it_while_it_still_imports() -> None:
    """Even while it is stopped, when it could do nothing by itself."""
    then = (
        "import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n)); print(n)"
    )
    found = []
    for ranks in ({}, {"TORCHELASTIC_RUN_ID": "run", "RANK": "1"}):
        found.append(ended(then, before=f"os.environ |= {ranks}").stdout)
    assert found == ["c_int(0)\n", f"c_int({signal.SIGKILL:d})\n"]


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
    open_streams = ["", "said\nin C, ", f"{FIRST}complained\nin C, "]
    open_streams[closed] = ""
    assert [done.stdout, done.stderr] == open_streams[1:]


def test_output_lacks_no_line_whatever_its_encoding_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would end after its first epoch."""
    content = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(content, "latin-1"))
    open_streams()
    sys.stdout.write("für \u2192 \udcfc\n")  # of which the last is of a name that is not UTF-8
    sys.stdout.flush()
    assert content.getvalue() == b"f\xfcr \\u2192 \\udcfc\n"


def test_what_every_attempt_of_torchrun_finds_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("training.launch.errors.leave", lambda text, _: said.append(text))
    for attempt, mistake in enumerate(["a typo", "a typo", "a full disk", "a typo"]):
        folder = tmp_path / f"run/attempt_{attempt}/0"
        folder.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        with under_torchrun():
            refuse(mistake)
    assert said == ["a typo", "", "a full disk", "a typo"]


PROGRAMS = [
    path for folder in ("project", "examples") for path in sorted((ROOT / folder).glob("*.py"))
    if "__main__" in path.read_text("utf-8")
]  # fmt: skip
CHAPTER = ROOT / "tutorial" / "6_all_three.py"  # which imports three others
NEED_A_WORD = {"generate.py", "plot.py", "report.py", "train.py", "lora.py", "plan.py"}


def test_without_the_environment_every_program_says_what_to_type() -> None:
    """-S leaves out where libraries are."""
    for path in [*PROGRAMS, CHAPTER]:
        line = [sys.executable, "-S", str(path), "-w", "2"]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done
        assert f"{path.name} -w 2, or source .venv/bin/activate first\n" in done.stderr


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_every_program_answers_help_and_a_word_that_it_does_not_know(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that need a word may ask for it first."""
    for words, status in ((["--help"], 0), (["--no_such_option"], 2), ([], 2)):
        monkeypatch.setattr("sys.argv", [str(path), *words])
        if not words and path.name not in NEED_A_WORD:
            continue  # it would begin
        with (
            handlers([signal.SIGPIPE], lambda *_: None),  # which a program may change
            handlers(ENDING_SIGNALS, end_process), pytest.raises(SystemExit) as end,
        ):  # fmt: skip
            runpy.run_path(str(path), run_name="__main__")
        printed = capsys.readouterr()
        assert end.value.code == status
        if words == ["--help"]:
            assert path.name in printed.out and printed.err == ""
        else:
            last = printed.err.splitlines()[-1]
            assert re.search("no_such_option|required|must be named|is missing", last), last


def test_a_system_without_posix_signals_is_refused_in_the_first_line_that_fails() -> None:
    """As Windows."""
    line = "import signal; del signal.SIGHUP; import project.command_line"
    done = subprocess.run([sys.executable, "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("This program runs on Linux and macOS. On Windows use WSL (")
    assert done.stderr.count("\n") == 1


def test_a_size_says_something() -> None:
    """0.0 M parameters would say nothing of a tiny model."""
    assert [*map(parameters, (1, 4528, 3_769_856, 1_555_251_200))] == [
        "1 parameter", "4,528 parameters", "3.8 M parameters", "1,555.3 M parameters"
    ]  # fmt: skip

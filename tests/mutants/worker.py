"""Runs tests again and again, in processes whose libraries are imported already.

Problem: a mutant needs new processes, as Python imports a file once; and torch, transformers and
pytest take four seconds to import, in every rank again.

Idea: this process imports them, and nothing of the project, and is forked for each line that it
reads: {"tests": [...], "limit": seconds}. The fork imports the project, with the mutant in it, from
the current folder. It answers {"status": ..., "said": ...}: pytest's status, or null for tests that
had not ended; these are killed, with all that they have started.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

PROJECT = (
    "runtime",
    "data_parallel",
    "pipeline",
    "tensor_parallel",
    "context_parallel",
    "training",
    "project.utils",
)
LIBRARIES = (
    "torch", "torch.distributed", "torch._dynamo", "transformers.models.gpt2.modeling_gpt2",
    "transformers", "tokenizers", "datasets", "safetensors.torch", "matplotlib.pyplot", "numpy",
    "docstring_parser", "sacrebleu", "tqdm", "pytest", "torch.utils.flop_counter",
    "torch.distributed.checkpoint", "torch.distributed.device_mesh", "torch.export",
)  # fmt: skip


def serve() -> None:
    """Until there is no line left, or whoever writes them has been ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    for library in LIBRARIES:
        __import__(library)
    assert not any(name in sys.modules for name in PROJECT)
    for line in sys.stdin:
        print(json.dumps(_run(**json.loads(line))), flush=True)


def _run(tests: list[str], limit: float) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile() as said, tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            _test(tests, said.name, folder)
        status, end = None, time.monotonic() + limit
        try:
            while status is None and time.monotonic() < end:
                time.sleep(0.02)
                done, code = os.waitpid(child, os.WNOHANG)
                status = os.waitstatus_to_exitcode(code) if done else None
        finally:
            if status is None:  # too late; or a signal ends this process
                _kill(child)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it has left, as the server of its ranks
        return {"status": status, "said": Path(said.name).read_text("utf-8", "replace")}


def _kill(child: int) -> None:
    """And all that it has started."""
    every = [psutil.Process(child), *psutil.Process(child).children(recursive=True)]
    for process in every:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os.waitpid(child, 0)


def _test(tests: list[str], said: str, folder: str) -> NoReturn:
    """In the fork."""
    status = 3  # pytest's, for an error of its own
    try:
        os.setsid()
        out = os.open(said, os.O_WRONLY)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        import pytest

        options = ["-x", "-q", "--tb=line", "--show-capture=no", "--disable-warnings"]
        options += ["-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        status = int(pytest.main([*options, *tests]))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    os._exit(status)


if __name__ == "__main__":
    serve()

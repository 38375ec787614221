"""Finds programs that only some machines have, and has GPUs seen that none has."""

from __future__ import annotations

import json
import shutil
import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def program(*names: str, tests: str) -> str:
    """The path of the first that is here. Where there is none, the test is skipped, and a warning,
    which stands at the end of the suite's output, says what was not tested."""
    for name in names:
        if path := shutil.which(name):
            return path
    missing = f"there is no {' or '.join(names)}: {tests} was not tested"
    warnings.warn(missing, stacklevel=2)
    pytest.skip(missing)


def in_node(script: str, file: Path, given: Any) -> Any:
    """What a script for node prints, in JSON. It gets a file's path as its argument, and `given` in
    JSON on its standard input."""
    node = program("node", tests=file.name)
    done = subprocess.run(
        [node, "-e", script, str(file)], input=json.dumps(given), capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def see_gpus(number: int, patch: pytest.MonkeyPatch) -> None:
    """Has the programs' rules see so many GPUs of 80 GiB, whatever this computer has."""
    patch.setattr("torch.cuda.device_count", lambda: number)
    gpu = SimpleNamespace(total_memory=80 << 30)
    patch.setattr("torch.cuda.get_device_properties", lambda _: gpu)

"""Compiles and loads guard.cpp."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("guard.cpp")
CACHE = Path(__file__).resolve().parents[2] / ".pytest_cache" / "device"  # `make clean` removes it


def missing() -> str | None:
    """What this machine lacks for the device."""
    if not sys.platform.startswith("linux"):
        return "the device without hardware needs Linux"
    if shutil.which("g++") is None:
        return "the device without hardware needs a C++ compiler, and there is no g++"
    return None


def load() -> ctypes.CDLL:
    """The library of guard.cpp, compiled (10 s) if this torch has none yet."""
    home = Path(torch.__file__).parent
    key = SOURCE.read_bytes() + (home / "version.py").read_bytes() + str(home).encode()
    built = CACHE / f"guard_{hashlib.sha256(key).hexdigest()[:16]}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, the others wait
        if not built.exists():
            _compile(home, built)
    return ctypes.CDLL(str(built))


def _compile(home: Path, built: Path) -> None:
    part = built.with_suffix(".part")
    command = [
        "g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{home}/include", str(SOURCE),
        f"-L{home}/lib", "-lc10", "-ltorch_cpu", "-o", str(part),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    part.replace(built)

"""Compiles and loads guard.cpp, before torch is imported."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

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
    """The library of guard.cpp, compiled (10 s) if this torch has none yet.

    Torch asks for CUDA's hooks once, on its import: RuntimeError if that is past."""
    if "torch" in sys.modules:
        raise RuntimeError("install the device before torch is imported")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    key = SOURCE.read_bytes() + (torch / "version.py").read_bytes() + str(torch).encode()
    built = CACHE / f"guard_{hashlib.sha256(key).hexdigest()[:16]}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, the others wait
        if not built.exists():
            _compile(torch, built)
    for pattern in ("libgomp*.so*", "libc10.so", "libtorch_cpu.so"):
        for library in (torch / "lib").glob(pattern):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(built))


def _compile(torch: Path, built: Path) -> None:
    part = built.with_suffix(".part")
    command = [
        "g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch}/include", str(SOURCE),
        f"-L{torch}/lib", "-lc10", "-ltorch_cpu", "-o", str(part),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    part.replace(built)

"""What happens on the device while somebody watches: kernels, copies, waits of the host."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)
HIDDEN = ("contextlib.py", "threading.py", "<")  # ends, or beginnings, of files that say nothing


class Kernel(NamedTuple):
    phase: str
    operator: str
    where: str  # file:line of the nearest caller, or [node] of autograd
    device: int
    stream: int  # its stream_id; 0 is the default stream


class Wait(NamedTuple):
    phase: str
    why: str
    where: str


class Copy(NamedTuple):
    """A copy from or to the device; a wait too, if the host waits for it."""

    phase: str
    source: str  # "cpu", "cuda:0"
    target: str
    where: str
    streams: tuple[int, int]  # the current ones of source and target; 0 for the CPU


class Collective(NamedTuple):
    phase: str
    operator: str
    where: str


@dataclass
class Seen:
    """All of it in the order of the launches: `Counter(wait.where for wait in seen.waits)`."""

    kernels: list[Kernel] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)

    @property
    def streams(self) -> Counter[tuple[int, int]]:
        """Kernels by (device, stream)."""
        return Counter((kernel.device, kernel.stream) for kernel in self.kernels)

    @property
    def operators(self) -> Counter[str]:
        """Kernels by operator."""
        return Counter(kernel.operator for kernel in self.kernels)


_watching: list[Seen] = []
_phases = ["other"]
_lock = threading.Lock()


@contextlib.contextmanager
def watch() -> Iterator[Seen]:
    """Notes what all threads do inside."""
    seen = Seen()
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.remove(seen)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Names what happens inside, in all threads."""
    _phases.append(name)
    try:
        yield
    finally:
        _phases.pop()


def kernel(operator: str, device: int) -> None:
    if _watching:
        stream = torch._C._accelerator_getStream(device).stream_id
        note = Kernel(_phases[-1], operator, where(), device, stream)
        with _lock:
            for seen in _watching:
                seen.kernels.append(note)


def wait(why: str) -> None:
    if _watching:
        note = Wait(_phases[-1], why, where())
        with _lock:
            for seen in _watching:
                seen.waits.append(note)


def copy(source: int | None, target: int | None) -> None:
    """None is the CPU."""
    if _watching:
        ids = [
            0 if k is None else torch._C._accelerator_getStream(k).stream_id
            for k in (source, target)
        ]
        names = ["cpu" if k is None else f"cuda:{k}" for k in (source, target)]
        note = Copy(_phases[-1], names[0], names[1], where(), (ids[0], ids[1]))
        with _lock:
            for seen in _watching:
                seen.copies.append(note)


def collective(operator: str) -> None:
    if _watching:
        note = Collective(_phases[-1], operator, where())
        with _lock:
            for seen in _watching:
                seen.collectives.append(note)


def where() -> str:
    """The nearest caller outside torch and this package; in backward, autograd's node."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        ours = name.startswith((TORCH, HERE + "/", "<")) and "test_" not in Path(name).name
        if not ours and not name.endswith(("contextlib.py", "threading.py")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    node = torch._C._current_autograd_node()
    return "?" if node is None else f"[{node.name()}]"

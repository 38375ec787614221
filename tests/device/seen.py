"""Records what happens on the device: kernels, copies, waits of the host."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)


class Kernel(NamedTuple):
    operator: str
    where: str  # file:line of the nearest caller, or [node] of autograd
    device: int
    stream: int  # its stream_id; 0 is the default stream


class Wait(NamedTuple):
    why: str
    where: str


class Copy(NamedTuple):
    """A copy from or to the device; a wait too, if the host waits for it."""

    source: str  # "cpu", "cuda:0"
    target: str
    streams: tuple[int, int]  # the current ones of source and target; 0 for the CPU


@dataclass
class Seen:
    """All of it in the order of the launches: `Counter(wait.where for wait in seen.waits)`."""

    kernels: list[Kernel] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)  # their operators
    order: list[Kernel | Wait | Copy | str] = field(default_factory=list)  # all of these

    @property
    def streams(self) -> Counter[tuple[int, int]]:
        """Kernels by (device, stream)."""
        return Counter((kernel.device, kernel.stream) for kernel in self.kernels)

    @property
    def operators(self) -> Counter[str]:
        """Kernels by operator."""
        return Counter(kernel.operator for kernel in self.kernels)


_watching: list[Seen] = []
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


def kernel(operator: str, device: int) -> None:
    """The device launches one."""
    if _watching:
        _note("kernels", Kernel(operator, where(), device, _stream(device)))


def wait(why: str) -> None:
    """The host waits."""
    if _watching:
        _note("waits", Wait(why, where()))


def copy(source: int | None, target: int | None) -> None:
    """None is the CPU."""
    if _watching:
        names = ["cpu" if k is None else f"cuda:{k}" for k in (source, target)]
        streams = _stream(source), _stream(target)
        _note("copies", Copy(names[0], names[1], streams))


def collective(operator: str) -> None:
    """Ranks exchange something."""
    if _watching:
        _note("collectives", operator)


def _stream(device: int | None) -> int:
    return 0 if device is None else torch._C._accelerator_getStream(device).stream_id


def _note(kind: str, what: Kernel | Wait | Copy | str) -> None:
    with _lock:
        for seen in _watching:
            getattr(seen, kind).append(what)
            seen.order.append(what)


@cache
def calls(file: str) -> bool:
    """Whether what a file does is noted under its name."""
    ours = file.startswith((TORCH, HERE + "/", "<")) and "test_" not in Path(file).name
    return not ours and not file.endswith(("contextlib.py", "threading.py"))


def where() -> str:
    """The nearest caller outside torch and this package; in backward, autograd's node."""
    frame = sys._getframe(1)
    while frame is not None:
        if calls(name := frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    node = torch._C._current_autograd_node()
    return "?" if node is None else f"[{node.name()}]"

"""Long sequences on one rank, and cut over two: time of a step, and memory.

gpt2-mini, one sequence, fp32, AdamW, no dropout, a core per rank. Memory is what a process's first
step adds to its resident memory at the peak, without gradients and optimizer state, less what a
sequence of 64 positions adds: it is activations, and keys and values in transit. The longest
sequence that fits into 4 GiB together with its model is extrapolated from the two longest ones.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, write_rows
from runtime.mesh import make_mesh
from training.launch.launch import launch
from training.launch.world import World
from training.layouts.layout import Setup
from training.layouts.replicated import Replicated
from training.layouts.stages import Staged
from training.options import Options
from training.tasks.gpt2 import Sequences, gpt2_config, initializer
from training.tasks.language import LanguageTask
from training.tasks.task import Step

TITLE = "one long sequence, gpt2-mini: one rank, and positions on two, a core per rank"
ROUNDS = 5
TIMED, MEASURED, VOCABULARY = 4096, (64, 1024, 4096, 16384), 4096
WAYS = ("one rank", "ring", "heads")
GIB, FITS = 2**30, 4 * 2**30
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-4, fused=True)


class _Task(LanguageTask):
    """The project's own task, without a text."""

    def __init__(self, world: World, positions: int) -> None:
        self.args, self.device, self.pretrained = Options(), world.device, None
        self.config = gpt2_config("gpt2-mini", VOCABULARY, positions, dropout=0.0)
        self._initialize = initializer(self.config, seed=0)


class _Contestant:
    """A model, and a sequence, on the first rank or on all."""

    def __init__(self, world: World, way: str, positions: int) -> None:
        args: Any = Options(strategy="context", attention="heads" if way == "heads" else "ring")
        alone, task, setup = way == WAYS[0], _Task(world, positions), Setup(args, _adamw)
        self.takes_part = world.is_main or not alone
        self.model: Replicated | Staged
        if alone:
            self.model = Replicated(task, World(), setup)
        else:
            self.model = Staged(task, world, setup, make_mesh({"cp": world.world_size}, 300.0))
        ids = torch.randint(VOCABULARY, (1, positions + 1), generator=torch.Generator())
        self.x = Sequences(ids[:, :-1], torch.arange(positions), torch.zeros(1, dtype=torch.long))
        self.labels = ids[0, 1:]

    def step(self) -> float:
        """The mean loss of the sequence, of which each rank has a part."""
        total = torch.zeros(())
        if self.takes_part:
            (optimizer,) = self.model.optimizers
            optimizer.zero_grad()
            count = len(self.labels)
            total += self.model.backward(Step([self.x], [self.labels], count, count, count))
            optimizer.step()
        dist.all_reduce(total)
        return total.item() / len(self.labels)


def _times(world: World, out: Path) -> None:
    contestants = {way: _Contestant(world, way, TIMED) for way in WAYS}
    losses: dict[str, float] = {}

    def turn(way: str) -> None:
        losses[way] = contestants[way].step()

    seconds = alternate({way: partial(turn, way) for way in WAYS}, ROUNDS)
    agree(losses)
    if world.is_main:
        torch.save(seconds, out)


def _resident(name: str) -> int:
    return 1024 * int(STATUS.read_text().split(f"{name}:")[1].split()[0])  # kB


def _memory(world: World, way: str, positions: int, out: Path) -> None:
    contestant = _Contestant(world, way, positions)
    ctypes.CDLL(None).malloc_trim(0)  # else a step would reuse memory left from making the model
    before = _resident("VmRSS")
    CLEAR.write_text("5")  # forgets the peak
    contestant.step()
    state = contestant.model.state_bytes()
    made = state["gradients"] + state["optimizer"]  # by the first step; both stay
    most = max(world.gather(_resident("VmHWM") - before - made))
    if world.is_main:
        torch.save((most, sum(state.values())), out)


def run() -> list[Row]:
    """Prints the table."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"

        def on_two(function: Callable[..., None], *args: Any) -> Any:
            launch(function, Options(world_size=2, device="cpu", cores_per_rank=1), *args, out)
            return torch.load(out, weights_only=True)

        seconds = on_two(_times)
        for way, values in seconds.items():
            value, spread = summarize([1000 * s for s in values])
            ratio, goal = ratio_of(seconds[WAYS[0]], values), 1.8 if way == "ring" else None
            name = f"a step of {TIMED:,}, {way}"
            rows.append(Row(name, value, spread, "ms", ratio, WAYS[0], goal))
        held, state = {}, 0
        for way, n in product(WAYS, MEASURED):
            held[way, n], state = on_two(_memory, way, n)  # in the end, the state of the longest
        shortest, *others = MEASURED
        for way, n in product(WAYS, others):
            value, alone = (held[w, n] - held[w, shortest] for w in (way, WAYS[0]))
            ratio, goal = alone / value, 1 / 0.55 if way == "ring" else None
            mib = value / 2**20
            name = f"{n:,} positions, {way}"
            rows.append(Row(name, mib, (mib, mib), "MiB", ratio, WAYS[0], goal))
        short, long = MEASURED[-2:]
        for way in WAYS:
            of_position = (held[way, long] - held[way, short]) / (long - short)
            fits = long + (FITS - state - held[way, long]) / of_position
            rows.append(Row(f"fit into 4 GiB, {way}", fits, (fits, fits), "positions"))
    write_rows("context", TITLE, rows)
    return rows


if __name__ == "__main__":
    run()

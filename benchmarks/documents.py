"""Tokens per second: rows of documents that do not see each other, beside rows of one document.

gpt2-mini, fp32: a forward and a backward of one micro-batch on one core, and of the ring attention
of a long row on two ranks. Documents have lengths drawn evenly from one token to twice the median.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import Row, alternate, ratio_of, summarize, use_cores, write_rows
from benchmarks.plain_gpt2 import build_model
from context_parallel.ring import ring_attention
from runtime.communicator import Communicator
from training.launch.launch import launch
from training.launch.world import World
from training.options import Options
from training.tasks.gpt2 import Sequences, gpt2_config, gpt2_layers, loss_of_targets

TITLE = "documents apart, gpt2-mini, fp32, a core per rank: tokens/s, beside rows of one document"
ROUNDS, VOCABULARY = 5, 4096
GOAL = 1.0  # no slower
# Rows, their positions, and the median lengths of documents.
CASES = (
    ((3, 128), (10, 60)), ((1, 256), (30, 120)), ((1, 1024), (30, 300)), ((1, 4096), (300, 1500)),
)  # fmt: skip
ON_RING = (1, 4, 4096, 64), (30, 300, 1500)  # rows, heads, positions, channels of a head


def starts_of(rows: int, positions: int, median: int) -> Tensor:
    """Where the document of each position starts."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.zeros(rows, positions, dtype=torch.long)
    for row in starts:
        at = 0
        while at < positions:
            row[at:] = at
            at += int(torch.randint(1, 2 * median, (), generator=generator))
    return starts


def _one_process() -> list[Row]:
    use_cores([0])
    torch.set_num_threads(1)
    rows = []
    for (B, T), medians in CASES:
        model = build_model(gpt2_config("gpt2-mini", VOCABULARY, T, dropout=0.0), 0)
        layers, ids = nn.Sequential(*gpt2_layers(model)), torch.randint(VOCABULARY, (B, T))

        def step(layers: nn.Module, ids: Tensor, starts: Tensor | None) -> None:
            layers.zero_grad()
            loss_of_targets(
                layers(Sequences(ids, starts=starts)).flatten(0, 1), ids.flatten()
            ).backward()

        ways: dict[str, Callable[[], None]] = {"together": partial(step, layers, ids, None)}
        ways |= {f"apart, of {n}": partial(step, layers, ids, starts_of(B, T, n)) for n in medians}
        rows += _rows(f"{B} x {T}, ", alternate(ways, ROUNDS), B * T)
    return rows


def _rows(what: str, seconds: dict[str, list[float]], tokens: int) -> list[Row]:
    rows = []
    for way, values in seconds.items():
        value, spread = summarize([tokens / s for s in values])
        ratio, goal = ratio_of(seconds["together"], values), None if way == "together" else GOAL
        rows.append(Row(what + way, value, spread, "tokens/s", ratio, "together", goal))
    return rows


def _on_ring(world: World, out: Path) -> None:
    (B, H, T, E), medians = ON_RING
    ring = partial(ring_attention, Communicator(dist.group.WORLD))
    own = torch.randn(3, B, H, T // world.world_size, E, requires_grad=True)

    def step(starts: Tensor | None) -> None:
        q, k, v = own
        ring(q, k, v, None, 0.0, None, 0, 0, starts).sum().backward()

    ways: dict[str, Callable[[], None]] = {"together": partial(step, None)}
    ways |= {f"apart, of {n}": partial(step, starts_of(B, T, n)) for n in medians}
    seconds = alternate(ways, ROUNDS)
    if world.is_main:
        torch.save(seconds, out)


def run() -> list[Row]:
    """Prints the table."""
    options: Any = Options(world_size=2, device="cpu", cores_per_rank=1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"
        launch(_on_ring, options, out)
        on_ring = _rows("a ring's attention, 4,096, ", torch.load(out), ON_RING[0][2])
    rows = [*_one_process(), *on_ring]
    write_rows("documents", TITLE, rows)
    return rows


if __name__ == "__main__":
    run()

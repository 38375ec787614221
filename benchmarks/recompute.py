"""What recomputation costs in time: a step of two stages in threads, a core each, GPipe and 1F1B.

Forward is a third of a step, so a step that repeats all of it takes 1.33 times as long. The memory
that this saves is counted by tests/test_recompute.py and derived in docs/mathematics.md.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, write_rows
from benchmarks.plain_gpt2 import build_model
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from training.tasks.gpt2 import Sequences, gpt2_config, gpt2_layers

BLOCKS, HEADS, WIDTH, LENGTH, BATCH, K, M = 8, 4, 256, 128, 16, 2, 16
ROUNDS = 7
MODES = ("never", "always", "except_last", "sqrt")


def make_layers() -> list[nn.Module]:
    """Halves of blocks."""
    config = gpt2_config(
        "gpt2-mini", 320, LENGTH, dropout=0.1, n_layer=BLOCKS, n_embd=WIDTH, n_head=HEADS
    )
    return gpt2_layers(build_model(config, 0).train())[1:-1]


def squares(output: Sequences, target: Tensor) -> Tensor:
    """A loss that is summed over the examples."""
    return (output.hidden - target).square().sum()


def run() -> list[Row]:
    """Times all modes under both schedules and prints their table."""
    torch.manual_seed(1)
    hidden, weights = torch.randn(BATCH, LENGTH, WIDTH), torch.ones(BATCH, LENGTH)
    x, target = Sequences(hidden, weights, torch.arange(BATCH)), torch.zeros_like(hidden)
    losses, pipes = dict[str, float](), dict[str, Pipe]()
    for mode in MODES:
        devices = [f"cpu:{k * K // (2 * BLOCKS)}" for k in range(2 * BLOCKS)]
        layers = map(WithDevice, make_layers(), devices)
        pipes[mode] = Pipe(nn.Sequential(*layers), recompute=mode)

    def turn(schedule: str, mode: str) -> None:
        pipes[mode].zero_grad()
        loss = pipes[mode].train_step(x, target, squares, schedule, M)
        losses[f"{schedule}, {mode}"] = loss.item()

    seconds = alternate(
        {f"{s}, {mode}": partial(turn, s, mode) for s in ("gpipe", "1f1b") for mode in MODES},
        ROUNDS,
    )
    agree(losses, tolerance=0.0)
    for pipe in pipes.values():
        pipe.close()
    rows = []
    for name, of_rounds in seconds.items():
        never = f"{name.partition(', ')[0]}, never"
        longer = None if name == never else 1 / ratio_of(seconds[never], of_rounds)
        against = "of never; at most 1.33 is predicted"
        rows.append(Row(name, *summarize(of_rounds), "s", longer, against))
    title = (
        f"Recomputation: {BLOCKS} GPT-2 blocks of width {WIDTH}, batch {BATCH} x {LENGTH}, M={M}"
    )
    write_rows("recompute", title, rows)
    return rows


if __name__ == "__main__":
    run()

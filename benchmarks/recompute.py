"""Recomputation: the peak of activations beside the formula, and what it costs in time.

Memory: the first of two stages runs its list of actions alone, with made-up gradients, and the
bytes of all live tensors are counted, including temporaries of backward but not the gradients of
parameters. The formula is `benchmarks.formulas.recomputed_activations`, applied to the counted
activations of one micro-batch. Under the V-shaped schedules, with two stages per rank, the same is
done for each of four ranks.

Time: a step of both stages in threads, a core each, M=16. Forward is a third of a step, so a step
that repeats all of it takes 1.33 times as long.

Draws submit_figures/recompute.png.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.formulas import (
    held_activations,
    held_chunks,
    held_microbatches,
    recomputed_activations,
)
from benchmarks.harness import Row, agree, alternate, ratio_of, summarize, write_rows
from benchmarks.live_bytes import LiveBytes
from benchmarks.plain_gpt2 import build_model
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.schedules.catalogue import V_SHAPED, ranks_of_stages, validated
from pipeline.schedules.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from pipeline.stage import Stage
from project.figures.style import BLUE, GREEN, GREY, picture
from runtime.recompute import segments
from training.tasks.gpt2 import Sequences, gpt2_config, gpt2_layers

BLOCKS, HEADS, LENGTH, BATCH, K = 8, 4, 128, 16, 2
COUNTED, TIMED = 128, 256  # widths
MICROBATCHES, ROUNDS = (4, 8, 16), 7
MODES = ("never", "always", "except_last", "sqrt")
COLOURS = {"never": GREY, "always": BLUE, "sqrt": GREEN}
FIGURE = Path("submit_figures/recompute.png")
SETTING = f"{BLOCKS} GPT-2 blocks, batch {BATCH} x {LENGTH}, dropout 0.1, {K} stages"


def make_layers(width: int) -> list[nn.Module]:
    """Halves of blocks."""
    config = gpt2_config(
        "gpt2-mini", 320, LENGTH, dropout=0.1, n_layer=BLOCKS, n_embd=width, n_head=HEADS
    )
    return gpt2_layers(build_model(config, 0).train())[1:-1]


def batch(examples: int, width: int) -> Sequences:
    """Hidden states, weights of positions, keys of dropout."""
    torch.manual_seed(1)
    keys = torch.arange(examples)
    return Sequences(torch.randn(examples, LENGTH, width), torch.ones(examples, LENGTH), keys)


def squares(output: Sequences, target: Tensor) -> Tensor:
    return (output.hidden - target).square().sum()


def peak(schedule: str, m: int, mode: str, num_ranks: int = K, rank: int = 0) -> tuple[int, int]:
    """Peak bytes of a rank; and bytes of one micro-batch after the forward of the first stage."""
    ranks = ranks_of_stages(schedule, num_ranks)
    size = 2 * BLOCKS // len(ranks)
    stages = {
        s: Stage(
            s,
            nn.Sequential(*make_layers(COUNTED)[:size]),
            torch.device("cpu"),
            recompute=mode,
            num_microbatches=m,
        )
        for s, r in enumerate(ranks)
        if r == rank
    }
    x = batch(BATCH // m, COUNTED)
    one = [torch.ones_like(x.hidden), None, None]
    for stage in stages.values():
        stage.forward(m, x)
        stage.backward(m, one)  # allocates the parameters' gradients before counting starts
    live, first = LiveBytes(), 0
    with live:
        for kind, s, i in validated(schedule, tuple(ranks), m)[0][rank]:
            if kind is FORWARD:
                stages[s].forward(i, x._replace(hidden=x.hidden.clone()))
                first = first or live.now
            elif kind is BACKWARD:
                stages[s].backward(i, one)
            elif kind is BACKWARD_INPUT:
                stages[s].backward_input(i, one)
            else:
                stages[s].backward_weight(i)
    return live.peak, first


def promised(schedule: str, m: int, num_ranks: int, first: int) -> float:
    """Upper bound in bytes for the fullest rank with `always`, by its list. A waiting micro-batch
    holds its input, one in backward all of ``first``, and one that waits for its W at most as much:
    the inputs of its products and the gradients of their outputs."""
    x, most = BATCH // m * LENGTH * COUNTED * 4, 0
    for actions in validated(schedule, tuple(ranks_of_stages(schedule, num_ranks)), m)[0]:
        waiting = begun = 0
        for kind, *_ in actions:
            waiting += kind is FORWARD
            most = max(most, waiting * x + (begun + (kind is not BACKWARD_WEIGHT)) * first)
            waiting -= kind in (BACKWARD, BACKWARD_INPUT)
            begun += {BACKWARD_INPUT: 1, BACKWARD_WEIGHT: -1}.get(kind, 0)
    return most


def held_by_ranks() -> list[Row]:
    """Rows of the fullest of four ranks, beside the prediction of its schedule."""
    rows, n, m = [], 4, MICROBATCHES[-1]
    for schedule in ("gpipe", "1f1b", *V_SHAPED):
        in_a_v = schedule in V_SHAPED
        held = held_chunks(schedule, n) if in_a_v else held_microbatches(schedule, n, m, 0)
        peaks = {mode: [peak(schedule, m, mode, n, r) for r in range(n)] for mode in MODES[:2]}
        first = peaks["never"][0][1]
        for mode, by_rank in peaks.items():
            found = max(most for most, _ in by_rank) / 1e6
            of = held * first if mode == "never" else promised(schedule, m, n, first)
            name = f"activations of the fullest of {n} ranks, {schedule}, M={m}, {mode}"
            at_most = "at most " * (mode != "never" and in_a_v)
            against = f"of {at_most}{of / 1e6:.2f} MB"
            rows.append(Row(name, found, (found, found), "MB", found / of * 1e6, against))
    return rows


def memory() -> tuple[list[Row], dict[tuple[str, str, int], tuple[float, float]]]:
    """The table's rows; and by schedule, mode and M, predicted and measured MB."""
    rows, points, inputs = [], {}, BATCH * LENGTH * COUNTED * 4
    for schedule in ("gpipe", "1f1b"):
        for m in MICROBATCHES:
            held, activations = held_microbatches(schedule, K, m, 0), 0
            for mode in ("never", "always", "sqrt"):
                found, first = peak(schedule, m, mode)
                activations = activations or first * m
                number = len(segments(range(BLOCKS), mode))
                predicted = recomputed_activations(inputs, activations, held, m, number)
                if mode == "never":
                    predicted = held_activations(K * activations, schedule, K, m, 0)
                points[schedule, mode, m] = predicted / 1e6, found / 1e6
                name = f"activations of stage 0, {schedule}, M={m}, {mode}"
                ratio = found / predicted
                against = f"of {predicted / 1e6:.2f} MB"
                rows.append(Row(name, found / 1e6, (found / 1e6,) * 2, "MB", ratio, against))
    return rows, points


def times() -> list[Row]:
    """Rows of a step's seconds, with recomputation beside without."""
    x, m = batch(BATCH, TIMED), MICROBATCHES[-1]
    target, losses, pipes = torch.zeros_like(x.hidden), dict[str, float](), dict[str, Pipe]()
    turns: dict[str, Callable[[], None]] = {}

    def turn(name: str, schedule: str, pipe: Any) -> None:
        pipe.zero_grad()
        losses[name] = pipe.train_step(x, target, squares, schedule, m).item()

    for mode in MODES:
        devices = [f"cpu:{k * K // (2 * BLOCKS)}" for k in range(2 * BLOCKS)]
        layers = map(WithDevice, make_layers(TIMED), devices)
        pipes[mode] = Pipe(nn.Sequential(*layers), recompute=mode)
        for schedule in ("gpipe", "1f1b"):
            name = f"step, {schedule}, M={m}, {mode}"
            turns[name] = partial(turn, name, schedule, pipes[mode])
    seconds = alternate(turns, ROUNDS)
    agree(losses, tolerance=0.0)
    for pipe in pipes.values():
        pipe.close()
    rows = []
    for name, found in seconds.items():
        never = f"{name.rpartition(', ')[0]}, never"
        value, spread = summarize(found)
        longer = 1 / ratio_of(seconds[never], found)
        against = "" if name == never else "of never; a third more is predicted"
        rows.append(Row(name, value, spread, "s", None if name == never else longer, against))
    return rows


def draw(points: dict[tuple[str, str, int], tuple[float, float]]) -> None:
    """Measured peaks, and the formula as a line."""
    m = MICROBATCHES[-1]
    saved = points["gpipe", "never", m][1] / points["gpipe", "always", m][1]
    title = f"GPipe with M={m}: recomputing takes 1/{saved:.0f} of the memory"
    foot = (
        f"{SETTING}, width {COUNTED}; tensors on the first stage; lines: formula, points: counted"
    )
    with picture(FIGURE, title, foot, ncols=2, sharey=True) as (_, axes):
        for ax, schedule in zip(axes, ("gpipe", "1f1b"), strict=True):
            for mode, colour in COLOURS.items():
                found = [points[schedule, mode, m] for m in MICROBATCHES]
                ax.plot(MICROBATCHES, [p for p, _ in found], color=colour)
                ax.plot(MICROBATCHES, [f for _, f in found], "o", color=colour, label=mode, ms=9)
            ax.set(title=f"{schedule}: MB at the peak", xlabel="micro-batches M")
            ax.set(xticks=MICROBATCHES, yscale="log")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.legend(labelcolor="linecolor", prop={"weight": "bold"})


def run() -> list[Row]:
    """Counts, times, prints the table, draws."""
    rows, points = memory()
    draw(points)
    rows += held_by_ranks() + times()
    title = f"Recomputation: {SETTING}, widths {COUNTED} (memory) and {TIMED} (time)"
    write_rows("recompute", title, rows)
    return rows


if __name__ == "__main__":
    run()

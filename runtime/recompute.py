"""Recomputes the forward right before backward: less memory, more time.

Problem. Between forward and backward autograd keeps what the layers have computed: for a block of
GPT-2 some thirty times its input.

Idea. Activation checkpointing: keep the input of a segment of layers, free the rest, and compute it
again when backward gets there. Forward is a third of a step, so a step takes about a third longer.
Kept by each of K stages, for L layers and M micro-batches of a batch of N examples:

    never         N L/K                          everything
    always        N  +  N/M L/K                  a stage's inputs; one micro-batch, computed again
    except_last   the same                       as always, and everything of the last micro-batch
    sqrt          N sqrt(L/K)  +  N/M sqrt(L/K)  the inputs of segments; of one segment, the rest

With one stage, data parallelism or shards, a rank holds one micro-batch at a time, and a segment
per stage would save nothing: there `always` recomputes layer by layer, except the last layer, whose
backward is next. When: a stage computes its last segment again before it waits for the gradient
(executor.py), and each other segment just before its own backward.

No bit changes. The second forward has the first one's autocast and draws the same random numbers:
a stage seeds them for each layer and micro-batch (randomness.py), elsewhere the generators are
restored. A segment works on a copy of its input, so it may write to it. A layer that changes its
buffers would change them twice, and is refused (guards.py). (Whole models are this project's own:
their layers neither write to their inputs nor change buffers.)

    threads, processes    pipeline/stage.py                    a Graph per segment (graph.py)
    shards                data_parallel/gathered_layer.py       the same, a layer being a segment
    whole models          training/layouts/replicated.py       torch.utils.checkpoint

Papers: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (sqrt); Huang et al.,
"GPipe", 2019 (always); Kim et al., "torchgpipe", 2020 (except_last).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import torch

T = TypeVar("T")
MODES = ("never", "always", "except_last", "sqrt", "layers")
NEVER, EXCEPT_LAST, SQRT, LAYERS = "never", "except_last", "sqrt", "layers"


def mode_of(asked: str, one_at_a_time: bool) -> str:
    """The mode for --recompute: `always` is `layers` where one micro-batch is held at a time."""
    return LAYERS if asked == "always" and one_at_a_time else asked


def segments(layers: Sequence[T], mode: str) -> list[list[T]]:
    """The layers, cut where inputs are kept. ValueError for an unknown mode."""
    if mode not in MODES:
        raise ValueError(f"recompute={mode!r}: one of {', '.join(MODES)}")
    number = {SQRT: round(math.sqrt(len(layers))), LAYERS: len(layers)}.get(mode, 1)  # segments
    edges = [len(layers) * k // number for k in range(number + 1)]
    return [list(layers[a:b]) for a, b in pairwise(edges)]


class Autocast:
    """This thread's autocast, or none, to be entered again."""

    def __init__(self, off: bool = False) -> None:
        accelerator = torch.accelerator.current_accelerator()  # of this machine, if torch knows one
        kinds = ["cpu", *([] if accelerator is None else [accelerator.type])]
        self._state = [
            (kind, torch.get_autocast_dtype(kind), not off and torch.is_autocast_enabled(kind))
            for kind in kinds
        ]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self._state:
                if enabled or torch.is_autocast_enabled(kind):  # on then, or off then and on now
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield

"""Cost of a parallel layout: bytes held, bytes sent, seconds, idle time. Closed forms, no torch.

The derivations are in docs/mathematics.md; every number there is computed here. Bytes are exact for
the layout itself. Fragmentation, the framework's own memory and activations inside a layer are not
counted.

Glossary: P parameters, W workers (ranks), n stages, m micro-batches, s stage, B sequences of T
positions of width H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class State:
    """Bytes that training holds per parameter, by purpose."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """The sum."""
        return self.parameters + self.gradients + self.optimizer


FP32 = State(4, 4, 4 + 4)  # Adam's two moments
MIXED = State(2, 2, 4 + 4 + 4)  # computes in fp16 or bf16; fp32 weights, two moments


@dataclass(frozen=True)
class Link:
    """A link between two workers: bytes per second in each direction, and the seconds of the
    smallest message."""

    bandwidth: float
    latency: float = 0.0

    @classmethod
    def gigabits(cls, rate: float, latency: float = 0.0) -> Link:
        """A link of `rate` Gb/s: 8 bits per byte, 10^9 per giga."""
        return cls(rate * 1e9 / 8, latency)

    def seconds(self, size: float, messages: int = 1) -> float:
        """The time for `messages` in sequence, `size` bytes in total."""
        return messages * self.latency + size / self.bandwidth


# --- bytes held -----------------------------------------------------------------------------------


def zero(stage: int, parameters: float, workers: int, state: State = MIXED) -> State:
    """Bytes on each worker under ZeRO (Rajbhandari et al., 2020): 0 is data parallelism, 1 shards
    the optimizer state, 2 also the gradients, 3 also the parameters."""
    share = [1 / workers if stage >= first else 1.0 for first in (3, 2, 1)]
    return State(
        parameters * state.parameters * share[0],
        parameters * state.gradients * share[1],
        parameters * state.optimizer * share[2],
    )


def gathered(layer_parameters: float, state: State = MIXED) -> float:
    """Bytes that ZeRO-3 holds besides its shards: the whole parameters of the layer that computes
    and of the one being fetched, and one layer's whole gradients."""
    return layer_parameters * (2 * state.parameters + state.gradients)


def padded(numel: int, workers: int, alignment: int = 16) -> int:
    """The elements of each worker's shard of a layer with one parameter: all shards are as long as
    the longest, the rest is padding.

    Args:
        alignment: a shard holds a multiple of this many elements. In data_parallel/shards.py they
            fill a cache line of 64 bytes: 16 in fp32, 32 if 16-bit numbers are gathered.
    """
    return -(-numel // (workers * alignment)) * alignment  # rounded up


def pipeline_state(parameters: float, stages: int, state: State = MIXED) -> State:
    """Bytes on each worker of a pipeline with evenly cut layers."""
    share = parameters / stages
    return State(share * state.parameters, share * state.gradients, share * state.optimizer)


def held_microbatches(schedule: str, stages: int, microbatches: int, stage: int) -> int:
    """The most micro-batches whose activations a stage holds at once, with one stage per rank."""
    n, m, s = stages, microbatches, stage
    return {"gpipe": m, "1f1b": min(m, n - s), "zb": min(m, n), "sequential": 1}[schedule]


def held_chunks(schedule: str, ranks: int, chunks: int = 2) -> int:
    """The most chunks of micro-batches whose activations a rank holds at once, if each rank has
    several chunks of layers and there are enough micro-batches. `interleaved`: on the first rank;
    V-shaped schedules (two chunks): on every rank, give or take one or two chunks."""
    n = ranks
    return {
        "interleaved": (chunks - 1) * n + 2 * (n - 1) + 1,  # the first rank's warm-up, and one more
        "zbv": 2 * n, "vhalf": 2 * math.ceil((n + 1) / 2), "vmin": 2 * math.ceil((n + 2) / 3),
    }[schedule]  # fmt: skip


def held_activations(
    activations: float, schedule: str, stages: int, microbatches: int, stage: int
) -> float:
    """Peak bytes of activations on a stage, if the whole batch needs `activations` in the whole
    model, and layers and micro-batches are cut evenly."""
    held = held_microbatches(schedule, stages, microbatches, stage)
    return activations / (stages * microbatches) * held  # one stage, one micro-batch; times held


def recomputed_activations(
    inputs: float, activations: float, held: int, microbatches: int, segments: int = 1
) -> float:
    """Peak bytes on a stage that keeps the inputs of its segments and recomputes one segment at a
    time (Chen et al., 2016).

    Args:
        inputs, activations: bytes of the stage's input, and of everything its backward needs, for
            the whole batch.
        held: micro-batches between forward and backward, see `held_microbatches`.
    """
    # inputs of all segments that are held, and one segment computed again
    return held / microbatches * segments * inputs + activations / (microbatches * segments)


def gpt2_parameters(layers: int, width: int, vocabulary: int, positions: int) -> int:
    """Parameters of GPT-2 with tied embeddings: per block 12 H^2 + 13 H."""
    # blocks; both embeddings, and the final norm: 2 H
    return layers * (12 * width**2 + 13 * width) + (vocabulary + positions + 2) * width


def expert_parameters(layers: int, width: int, experts: int) -> int:
    """Parameters of the experts alone: in each block so many MLPs of 8 H^2 + 5 H."""
    return layers * experts * (8 * width**2 + 5 * width)


def expert_gpt2_parameters(
    layers: int, width: int, vocabulary: int, positions: int, experts: int
) -> int:
    """Parameters of GPT-2 with experts in the place of its MLPs, and a router of E H per block."""
    more = expert_parameters(layers, width, experts - 1) + layers * experts * width
    return gpt2_parameters(layers, width, vocabulary, positions) + more


# --- bytes sent, and how long it takes ------------------------------------------------------------


def reduce_scatter_bytes(size: float, workers: int) -> float:
    """Bytes that each worker sends in a ring reduce-scatter of `size` bytes; an all-gather of the
    parts sends as many."""
    return size * (workers - 1) / workers  # W - 1 messages of size / W


def all_reduce_bytes(size: float, workers: int) -> float:
    """Bytes that each worker sends in a ring all-reduce: a reduce-scatter and an all-gather."""
    return 2 * reduce_scatter_bytes(size, workers)


def all_reduce_seconds(size: float, workers: int, link: Link) -> float:
    """The time of a ring all-reduce: 2 (W-1) steps in sequence."""
    return link.seconds(all_reduce_bytes(size, workers), 2 * (workers - 1))


def server_seconds(size: float, workers: int, link: Link) -> float:
    """The same through one worker (parameter server), which receives from all and sends to all."""
    return 2 * link.seconds(size * (workers - 1), workers - 1)  # in, then out


def zero_traffic(
    stage: int, parameters: float, workers: int, state: State = MIXED, microbatches: int = 1
) -> float:
    """Bytes that each worker sends in a step of `microbatches` per worker: gradients are
    reduce-scattered, updated parameters all-gathered. Sharded tensors cannot wait for the last
    micro-batch: ZeRO-2 and 3 reduce the gradients of each micro-batch, and ZeRO-3 gathers the
    parameters twice for each, for forward and for backward."""
    if stage == 0:
        return all_reduce_bytes(parameters * state.gradients, workers)
    reductions = microbatches if stage >= 2 else 1  # reduce-scatters of the gradients
    gathers = 2 * microbatches if stage == 3 else 1  # all-gathers of the parameters
    return reductions * reduce_scatter_bytes(parameters * state.gradients, workers) + gathers * (
        reduce_scatter_bytes(parameters * state.parameters, workers)
    )


def boundary_bytes(sequences: int, positions: int, width: int, element: int = 2) -> int:
    """Bytes of the activations that cross a boundary between two stages, one way: B T H elements.
    As many come back as gradients. The number of micro-batches does not change the sum."""
    return sequences * positions * width * element


def expert_traffic(positions: int, width: int, top_k: int, workers: int, element: int = 2) -> float:
    """Bytes that a worker with so many positions sends in a layer of experts, if all workers share
    them and all are chosen alike: k rows of H elements for each position, there and back, forward
    and backward. (The counts of rows are a few bytes more.)"""
    return 4 * reduce_scatter_bytes(positions * top_k * width * element, workers)


def ring_traffic(sequences: int, positions: int, width: int, ranks: int, element: int = 2) -> float:
    """Bytes that a rank sends in a layer of ring attention: its keys and values, 2 B T H / c
    elements, to each of the c - 1 others, forward and backward, and as many gradients back."""
    return 3 * (ranks - 1) * 2 * boundary_bytes(sequences, positions, width, element) / ranks


def heads_traffic(
    sequences: int, positions: int, width: int, ranks: int, element: int = 2
) -> float:
    """Bytes that a rank sends in a layer whose attention is exchanged by heads: of its queries,
    keys, values and results, each B T H / c elements, all but a c-th, forward and backward."""
    own = boundary_bytes(sequences, positions, width, element) / ranks
    return 2 * reduce_scatter_bytes(4 * own, ranks)


# --- idle time ------------------------------------------------------------------------------------


def pipeline_bubble(stages: int, microbatches: int, work: float = 1) -> Fraction:
    """The share of a step in which a rank idles: (n-1)/(work m + n-1).

    Args:
        work: the clocks of a rank's work on a micro-batch, if the next rank can start one clock
            after it: 1 for GPipe and 1F1B (F and B as one clock); 3 for ZB-H1 (F, I, W); 6 for
            ZB-V (of two chunks); v for interleaved 1F1B with v chunks. All but GPipe and 1F1B:
            m >= n.
    """
    return Fraction(stages - 1) / (Fraction(work) * microbatches + stages - 1)


def pipeline_speedup(stages: int, microbatches: int) -> float:
    """Compared with one stage at a time: n m / (m + n - 1)."""
    return float(stages * (1 - pipeline_bubble(stages, microbatches)))


def microbatches_for(stages: int, bubble: float) -> int:
    """The fewest micro-batches with which the bubble of GPipe or 1F1B is at most `bubble`."""
    limit = Fraction(str(bubble))  # 0.1 is 1/10
    return max(1, math.ceil((stages - 1) * (1 - limit) / limit))  # from (n-1)/(m+n-1) <= limit

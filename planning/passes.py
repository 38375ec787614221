"""What a pass over some layers costs, in seconds of the GPU and of the host, and what it holds.

Idea. The work of a block is a list of kernels. A matrix product takes as long as its arithmetic or
its bytes, whichever is longer; everything else takes as long as its bytes. The host starts kernels
one by one, so that a pass takes as long as the GPU's work or the host's, whichever is longer.
Collectives are rings.

docs/planning.md explains the model and its constants, and says what it leaves out.

Under context parallelism a rank has t of the tokens, and its attention needs the keys and values of
all. They go round a ring while attention computes, or positions are exchanged for heads before
attention, and heads for positions after it. Experts are assumed to be chosen equally often: a rank
sends its tokens to them, and gets them back.

Glossary: t tokens of a rank's micro-batch, h width, f width of the MLP, v vocabulary, s sequence.
"""

from __future__ import annotations

from typing import NamedTuple

from .describe import BYTES, Layout, Machine, Model

FLASH = 0.5  # the rate of fused attention, as a share of that of large matrix products
LAUNCHES = 20  # kernels of a block's forward; backward has twice as many
UNFUSED_SOFTMAX = 8  # more kernels: mask, scale and softmax separately, to fp32 and back
KEYS_KEPT = 6  # micro-batches whose keys generation keeps, if nothing is computed again
SHARP = 4  # a pass takes a little longer than GPU or host alone, since each waits now and then


class Pass(NamedTuple):
    """Seconds of the GPU by purpose, and of the host, in one pass over some layers."""

    products: float = 0  # matrix products
    attention: float = 0
    elementwise: float = 0  # norms, dropout, residuals, activations, the loss, adding gradients
    tensor: float = 0  # collectives of tensor parallelism
    context: float = 0  # messages of context parallelism that attention does not hide
    experts: float = 0  # exchanges of tokens with the experts of other ranks
    host: float = 0  # starting kernels and collectives
    gathering: float = 0  # collectives of ZeRO-2 and 3 that do not overlap

    def plus(self, other: Pass, times: float = 1) -> Pass:
        """This pass plus `times` times the other."""
        return Pass(*(a + times * b for a, b in zip(self, other, strict=True)))

    def with_waits(self, skew: float) -> Pass:
        """This pass with the wait for the last rank of tensor parallelism."""
        return self._replace(tensor=self.tensor + skew * (self.device - self.tensor))

    @property
    def device(self) -> float:
        """Seconds of the GPU."""
        return sum(self[:6])

    @property
    def seconds(self) -> float:
        """Seconds of the whole pass."""
        longer, shorter = max(self.device, self.host), min(self.device, self.host)
        overlapped = longer * (1 + (shorter / longer) ** SHARP) ** (1 / SHARP) if longer else 0.0
        return overlapped + self.gathering


class Group(NamedTuple):
    """Ranks that work together: how many, how many of them in a node, and the links they have."""

    size: int
    inside: int
    bandwidth: float  # bytes per second of the slowest link of a ring
    link: float  # seconds of a message inside a node
    network: float  # and between nodes

    def scatter(self, size: float) -> float:
        """Seconds of a reduce-scatter or all-gather of `size` bytes, by a ring."""
        hops, nodes = self.size - 1, self.size // self.inside
        between = min(hops, nodes) if nodes > 1 else 0  # of the hops, those that leave a node
        latency = (hops - between) * self.link + between * self.network
        return size * hops / self.size / self.bandwidth + latency

    def reduce(self, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes, by a ring."""
        return 2 * self.scatter(size)


def group(machine: Machine, size: int, stride: int) -> Group:
    """The group of ranks r, r + stride, ... Only as many of them count as inside a node as every
    such group has in each of its nodes: of 6 ranks in nodes of 8, only 2."""
    per_node = machine.gpus_per_node
    inside = max(1, min(size, per_node // stride))
    while inside > 1 and (size % inside or per_node % (inside * stride)):
        inside -= 1
    return over_nodes(machine, size, inside)


def over_nodes(machine: Machine, size: int, inside: int) -> Group:
    """A group with `inside` ranks in each node. The groups in a node share its network."""
    bandwidth = machine.link_gbs * 1e9 * machine.link_efficiency
    if inside < size:
        network = machine.network_gbs * 1e9 * machine.network_efficiency
        network *= inside / machine.gpus_per_node
        bandwidth = min(bandwidth, network) if inside > 1 else network
    return Group(size, inside, bandwidth, machine.link_us * 1e-6, machine.network_us * 1e-6)


class Passes(NamedTuple):
    """The passes of some layers over one micro-batch."""

    forward: Pass
    backward: Pass
    weights: Pass  # the part of backward that computes gradients of weights


def costs(model: Model, layout: Layout, machine: Machine) -> tuple[Passes, Passes]:
    """What a micro-batch costs on one of the tp ranks of a stage: in a block, and in the head."""
    tp, size, s = layout.tp, BYTES[layout.precision], model.seq
    b, h, f, cp = layout.micro_batch, model.hidden, model.ffn, layout.cp
    t = b * s // cp
    rate, memory = machine.per_second(layout.precision), machine.memory_per_second
    kernel = machine.kernel_us * 1e-6

    def product(m: int, n: int, k: int, batch: int = 1) -> float:
        moved = size * batch * (m * n + m * k + n * k)
        return max(2.0 * batch * m * n * k / rate, moved / memory) + kernel

    heads = -(-model.heads // tp)  # of the rank with the most
    wide, narrow = h // model.heads * heads, -(-f // tp)
    up = (1 + model.gated_mlp) * narrow
    queries_keys_values = wide + 2 * round(wide * model.kv_share)
    own_experts = model.experts // layout.ep
    routed = t * model.top_k // own_experts  # tokens of each expert
    # A product t x k x n takes as long as those of its two gradients, t x n x k and k x t x n.
    products = product(t, queries_keys_values, h) + product(t, h, wide)  # features out, in
    products += own_experts * (product(routed, up, h) + product(routed, h, narrow))
    launches = LAUNCHES + (own_experts - 1) * LAUNCHES // 4
    if machine.attention == "flash":
        attend = 2.0 * b * s * s * wide / cp / (FLASH * rate) + kernel
        attention = (attend, 2.5 * attend)
    else:  # with all scores in memory: two products, softmax, dropout; twice as many backward
        if b * heads % 4:  # Megatron-LM's kernel for softmax takes four matrices at a time
            launches += UNFUSED_SOFTMAX
        scores = b * heads * s * s // cp
        one = product(s // cp, s, h // model.heads, b * heads)
        attention = (2 * one + 4.5 * size * scores / memory, 4 * one + 5.5 * size * scores / memory)
    # Bytes per token. shared: norms, dropout and residuals. own: what lies between the matrices.
    shared = 11 * size * h / (tp if layout.sequence_parallel else 1)
    own = size * (6 * h + model.top_k * (5 if model.gated_mlp else 2) * f) / tp
    passed = t * (shared + own) / memory + 8 * kernel
    # Seconds to add a parameter's gradient.
    added = (size + 2 * gradient_bytes(layout)) / tp / memory
    exchanged = 2 * group(machine, tp, 1).reduce(size * t * h)
    context = _context(model, layout, machine, attention)
    # To the experts and back.
    sharers = group(machine, layout.ep, layout.stride * cp)
    sent = 2 * sharers.scatter(size * t * model.top_k * h)
    host = machine.host_us * 1e-6
    crowded = layout.pp > 1 and layout.gpus > machine.gpus_per_node
    collective_us = machine.collective_us + crowded * machine.staged_us * tp
    collective = (2 if tp > 1 else 0) * collective_us * 1e-6
    there = Pass(
        products, attention[0], passed, exchanged, context[0], sent, launches * host + collective
    )
    grown = model.attention + own_experts * model.mlp
    back = Pass(
        2 * products, attention[1], 2 * passed + grown * added, exchanged, context[1], sent,
        2 * launches * host + collective,
    )  # fmt: skip
    if layout.recompute == "always":
        back = back.plus(there)
        # torch's recomputation stops at the last tensor that backward needs; a router needs all.
        if layout.zero > 1 and model.experts == 1:
            back = back.plus(Pass(product(t, h, narrow)), -1)
    elif layout.recompute == "selective":
        if machine.attention != "flash":
            back = back.plus(Pass(attention=attention[0]))
        if layout.zero > 1:  # torch's computes every other product again
            again = Pass(products / 2, 0, passed, experts=sent, host=launches * host / 2)
            back = back.plus(again)
    v = -(-model.vocab // tp)
    logits, last = t * v / memory, product(t, v, h)  # logits: seconds for a byte of each
    head = Passes(
        Pass(last, 0, 28 * logits, host=LAUNCHES * host),
        Pass(2 * last, 0, 12 * logits + model.table * added, host=2 * LAUNCHES * host),
        Pass(last, host=LAUNCHES * host / 2),
    )
    return Passes(there, back, Pass(products, host=LAUNCHES * host)), head


def _context(
    model: Model, layout: Layout, machine: Machine, attention: tuple[float, float]
) -> tuple[float, float]:
    """Seconds that a block's attention, forward and backward, waits for other ranks' positions."""
    ranks = group(machine, layout.cp, layout.stride)
    tokens = BYTES[layout.precision] * layout.micro_batch * model.seq * model.hidden / layout.tp
    if layout.attention == "heads":  # of queries, keys, values and results
        exchange = ranks.scatter((2 + 2 * model.kv_share) * tokens / layout.cp)
        return exchange, exchange
    ring = ranks.scatter(2 * model.kv_share * tokens)  # of all keys and values
    hidden = 0.0 if machine.overlap == "nothing" else 1.0
    forward, backward = (hidden * seconds for seconds in attention)
    return max(0.0, ring - forward), max(0.0, 2 * ring - backward)  # backward: their gradients, too


def gradient_bytes(layout: Layout) -> int:
    """Bytes of a parameter's gradient. Under bf16, gradients are summed in fp32."""
    return 2 if layout.precision == "fp16" else max(4, BYTES[layout.precision])


def activations(model: Model, layout: Layout, machine: Machine) -> tuple[float, float, float]:
    """Three numbers of bytes, of a block and a micro-batch: what waits for backward; the block's
    input alone; the gradients of the products' results, which wait for the second half of
    backward, that for weights."""
    t = layout.micro_batch * model.seq // layout.cp
    tp, size = layout.tp, BYTES[layout.precision]
    shared = tp if layout.sequence_parallel else 1
    unfused = machine.attention != "flash"
    # Inputs of both norms, masks of dropout, and the norms' outputs, which the matrices take.
    outside = (2 * size + 2 * unfused) * model.hidden / shared
    outside += 2 * size * model.hidden / (shared if machine.gathered == "again" else 1)
    # q, k, v and the heads' output; of the MLP what its last product and its activation need.
    # With gated MLPs nanotron's runs held more: as much as q, k and the gate a second time.
    gated = model.gated_mlp
    copies = gated and layout.zero < 2 and machine.gathered == "kept"
    heads = (3 if copies else 2) * (1 + model.kv_share) * model.hidden
    inside = size * (heads + model.top_k * (2 + 2 * gated + copies) * model.ffn) / tp
    if model.experts > 1:  # what each expert takes, and what it returns
        inside += size * model.top_k * 2 * model.hidden
    if layout.recompute == "selective" and layout.zero > 1:
        # torch's keeps every other product of q, k, v, output, up, gate, down: q, v, up and, if
        # gated, down. It also keeps the heads' output and the block's input.
        inside = size * ((2 + model.kv_share) * model.hidden + model.top_k * model.ffn) / tp
        outside = (1 + gated * model.top_k) * size * model.hidden / shared
    scores = 0.0
    if unfused and layout.recompute != "selective":
        scores = (2 * size + 1) * model.heads * model.seq / tp
    late = (1 + 2 * model.kv_share) * model.hidden + model.top_k * (1 + gated) * model.ffn
    late *= size / tp
    late += size * (1 + model.top_k) * model.hidden  # the output's product, and the MLPs'
    return t * (outside + inside + scores), t * size * model.hidden / shared, t * late


def cached_by_block(model: Model, layout: Layout) -> float:
    """Bytes that a block holds while text is generated: the keys and values of `KEYS_KEPT` times
    the positions of a micro-batch; see `training.tasks.sequences`."""
    t = layout.micro_batch * model.seq // layout.cp
    times = KEYS_KEPT if layout.recompute == "never" else 1
    return times * t * 2 * model.kv_share * model.hidden * BYTES[layout.precision] / layout.tp

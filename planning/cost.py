"""Predicts a step of training: its seconds and where they go, and the memory of every stage.

Idea. The work of a block is a list of kernels. A matrix product takes as long as its arithmetic or
its bytes, whichever is longer; everything else takes as long as its bytes. The host starts kernels
one by one, so that a pass takes as long as the GPU's work or the host's, whichever is longer. These
seconds, and those of messages and collectives, go into the simulator with the schedule's own lists.

The model and its constants are explained in docs/planning.md, and what it leaves out.

Glossary: t tokens of a micro-batch, h width, f width of the MLP, v vocabulary, s sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from pipeline.schedules.catalogue import as_written, find
from pipeline.schedules.printed import peak_alive
from pipeline.schedules.schedule import BACKWARD, Action

from .describe import BYTES, Layout, Machine, Model
from .simulate import CAUSES, Simulation, Simulator, Work, with_times

FLASH = 0.5  # the rate of fused attention, as a share of that of large matrix products
LAUNCHES = 20  # kernels of a block's forward; backward has twice as many
UNFUSED_SOFTMAX = 8  # more of them: mask, scale and softmax apart, and to fp32 and back
UPDATE_BYTES = (
    48  # read and written per parameter by unscaling, clipping, AdamW, the copy to 16 bits
)
GIB = 2**30
# Bytes per logit that wait for backward, and those that are added when it begins. plain: 16 bits
# and the log-softmax in fp32, their gradients likewise. fused: one kernel, all in 16 bits.
LOGITS = {"plain": (6, 6), "fused": (2, 2)}
FRAGMENTS = 0.05  # of a GPU's memory that no tensor can use
SHARP = 4  # a pass is longer than the longer of the two: now and then each waits for the other


class Pass(NamedTuple):
    """Seconds of the GPU by purpose, and of the host, in one pass over some layers."""

    products: float = 0  # matrix products
    attention: float = 0
    elementwise: float = 0  # norms, dropout, residuals, activations, the loss, adding gradients
    tensor: float = 0  # collectives of tensor parallelism
    host: float = 0  # starting kernels and collectives
    gathering: float = 0  # collectives of ZeRO-2 and 3 that do not overlap

    def plus(self, other: Pass, times: float = 1) -> Pass:
        """The sum of this and some of the other."""
        return Pass(*(a + times * b for a, b in zip(self, other, strict=True)))

    def with_waits(self, skew: float) -> Pass:
        """With the wait for the last rank of tensor parallelism."""
        return self._replace(tensor=self.tensor + skew * (self.device - self.tensor))

    @property
    def device(self) -> float:
        """Seconds of the GPU."""
        return self.products + self.attention + self.elementwise + self.tensor

    @property
    def seconds(self) -> float:
        """Of the whole pass."""
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
        """Seconds of a reduce-scatter or all-gather of ``size`` bytes, by a ring."""
        if self.size == 1:
            return 0.0
        nodes = self.size // self.inside
        hops = (self.size - nodes) * self.link + (nodes if nodes > 1 else 0) * self.network
        return size * (self.size - 1) / self.size / self.bandwidth + hops

    def reduce(self, size: float) -> float:
        """Seconds of an all-reduce of ``size`` bytes, by a ring."""
        return 2 * self.scatter(size)


def group(machine: Machine, size: int, stride: int) -> Group:
    """The group of ranks r, r + stride, ... A node's network is shared by the groups in it."""
    per_node = machine.gpus_per_node
    inside = max(1, min(size, per_node // stride))
    while size % inside:
        inside -= 1
    bandwidth = machine.link_gbs * 1e9 * machine.link_efficiency
    if inside < size:
        network = machine.network_gbs * 1e9 * machine.network_efficiency * inside / per_node
        network *= (2 * inside / size) ** machine.network_falls
        bandwidth = min(bandwidth, network) if inside > 1 else network
    return Group(size, inside, bandwidth, machine.link_us * 1e-6, machine.network_us * 1e-6)


class Passes(NamedTuple):
    """Those of some layers over one micro-batch."""

    forward: Pass
    backward: Pass
    weights: Pass  # the part of backward that computes gradients of weights


class Costs(NamedTuple):
    """The passes of a block, and of the head."""

    block: Passes
    head: Passes


def costs(model: Model, layout: Layout, machine: Machine) -> Costs:
    """What a micro-batch costs on one of the tp ranks of a stage."""
    tp, size, s = layout.tp, BYTES[layout.precision], model.seq
    b, h, f = layout.micro_batch, model.hidden, model.ffn
    t = b * s
    rate, memory = machine.per_second(layout.precision), machine.memory_per_second
    kernel = machine.kernel_us * 1e-6

    def product(m: int, n: int, k: int, batch: int = 1) -> float:
        moved = size * batch * (m * n + m * k + n * k)
        return max(2.0 * batch * m * n * k / rate, moved / memory) + kernel

    heads = -(-model.heads // tp)  # of the rank with the most
    wide, narrow = h // model.heads * heads, -(-f // tp)
    up = (1 + model.gated_mlp) * narrow
    queries_keys_values = wide + 2 * round(wide * model.kv_share)
    shapes = [(h, queries_keys_values), (wide, h), (h, up), (narrow, h)]  # features in, out
    forward = sum(product(t, n, k) for k, n in shapes)
    weights = sum(product(n, k, t) for k, n in shapes)
    inputs = sum(product(t, k, n) for k, n in shapes)
    launches = LAUNCHES
    if machine.attention == "flash":
        attend = 2.0 * b * s * s * wide / (FLASH * rate) + kernel
        attention = (attend, 2.5 * attend)
    else:  # with all scores in memory: two products, softmax, dropout; twice as many backward
        if b * heads % 4:  # Megatron-LM's kernel for softmax takes four matrices at a time
            launches += UNFUSED_SOFTMAX
        scores = b * heads * s * s
        one = product(s, s, h // model.heads, b * heads)
        attention = (2 * one + 4.5 * size * scores / memory, 4 * one + 5.5 * size * scores / memory)
    # Bytes per token: norms, dropout and residuals; what lies between the matrices.
    shared = 11 * size * h / (tp if layout.sequence_parallel else 1)
    own = size * (6 * h + (5 if model.gated_mlp else 2) * f) / tp
    passed = t * (shared + own) / memory + 8 * kernel
    gradient = gradient_bytes(layout)
    added = (size + 2 * gradient) / tp / memory  # seconds to add a parameter's gradient
    ring = group(machine, tp, 1)
    exchanged = 2 * ring.reduce(size * t * h) if tp > 1 else 0.0
    host = machine.host_us * 1e-6
    collective = (2 if tp > 1 else 0) * machine.collective_us * 1e-6
    start = launches * host + collective
    there = Pass(forward, attention[0], passed, exchanged, start)
    back = Pass(
        inputs + weights, attention[1], 2 * passed + model.block * added, exchanged,
        2 * launches * host + collective,
    )  # fmt: skip
    if layout.recompute == "always":
        back = back.plus(there)
        if layout.zero > 1:  # torch's stops at the last tensor that backward needs
            back = back.plus(Pass(product(t, h, narrow)), -1)
    elif layout.recompute == "selective" and machine.attention != "flash":
        back = back.plus(Pass(attention=attention[0]))
    elif layout.recompute == "selective" and layout.zero > 1:  # torch's: every other product
        back = back.plus(Pass(forward / 2, 0, passed, 0, launches * host / 2))
    v = -(-model.vocab // tp)
    logits = t * v / memory  # seconds per byte of a logit
    # One all-reduce forward, of the embedding's result, and one backward, of the head's gradient.
    head = Passes(
        Pass(product(t, v, h), 0, 28 * logits, exchanged / 2, LAUNCHES * host + collective / 2),
        Pass(product(t, h, v) + product(h, v, t), 0, 12 * logits + model.table * added,
             exchanged / 2, 2 * LAUNCHES * host + collective / 2),
        Pass(product(h, v, t), host=LAUNCHES * host / 2),
    )  # fmt: skip
    return Costs(Passes(there, back, Pass(weights, host=LAUNCHES * host)), head)


def gradient_bytes(layout: Layout) -> int:
    """Of a parameter's gradient: bf16's are summed in fp32."""
    return 2 if layout.precision == "fp16" else 4


def blocks_of_stages(model: Model, layout: Layout, machine: Machine) -> list[int]:
    """The blocks of each stage: as many each, embedding and head counted as a block if that divides
    them, or else cut where the work of blocks and head is even."""
    n, layers = layout.stages, model.layers
    if n == 1 or (machine.balance == "uniform" and layers % n == 0):
        return [layers // n] * n
    if machine.balance == "uniform" and (layers + 2) % n == 0:
        each = (layers + 2) // n
        return [each - 1] + [each] * (n - 2) + [each - 1]
    total = model.layers + model.table / model.block  # in blocks
    edges = [min(model.layers, round(total * s / n)) for s in range(n)] + [model.layers]
    return [b - a for a, b in pairwise(edges)]


class Memory(NamedTuple):
    """Bytes of a GPU of a rank of the pipeline, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float  # of one block that is computed again, of the loss, of gathered parameters
    reserve: float  # the framework's own, and buffers of collectives

    @property
    def gib(self) -> float:
        """The peak, in GiB."""
        return sum(self) / GIB


@lru_cache(maxsize=512)
def _prepared(schedule: str, n: int, m: int, chunks: int | None, early: bool) -> Simulator:
    """Prepared once per schedule and size. ``early``: gradients are sent before those of the
    weights are computed, as by this project's programs, where other trainers compute both."""
    return Simulator((find if early else as_written)(schedule, chunks)(n, m))


class PricedStage(NamedTuple):
    """A stage's passes for one micro-batch, and its seconds at the end of a step."""

    passes: Passes
    blocks: int
    halves: bool  # its backward is split
    exchange: float
    update: float
    held: float  # bytes until the backward of a micro-batch
    parameters: float  # that a GPU has of it
    table: bool  # it has the embedding, or the head
    last: bool


class PricedStep:
    """The step of a layout, predicted. What its actions cost is known at once; they are put in
    order when the seconds are first asked for.

    Raises ValueError if the layout cannot run, unless it has run (``legal`` is False).
    """

    def __init__(self, model: Model, layout: Layout, machine: Machine, legal: bool = True) -> None:
        if legal:
            layout.check(model)
        self.model, self.layout, self.machine = model, layout, machine
        self.blocks = blocks_of_stages(model, layout, machine)
        self.cost = costs(model, layout, machine)
        tp, dp, pp, n = layout.tp, layout.dp, layout.pp, layout.stages
        outer = layout.order == "pp-dp-tp"  # stages are outermost
        self.replicas = group(machine, dp, tp if outer else tp * pp)
        self.size = BYTES[layout.precision]
        self.whole, self.entry, self.late = activations(model, layout, machine)
        self.logits = layout.micro_batch * model.seq * model.vocab / tp
        self.overlapped = machine.overlap in ("gradients", "all")
        self.loss = LOGITS[machine.loss]  # bytes of each
        small = self.simulator(1)
        listed = set(small.actions)
        kinds = [
            (blocks, s == 0, s == n - 1, Action(BACKWARD, s, 0) not in listed)
            for s, blocks in enumerate(self.blocks)
        ]
        priced = {kind: self._stage(*kind) for kind in set(kinds)}
        self.stages = [priced[kind] for kind in kinds]
        self.of_ranks: list[list[PricedStage]] = [[] for _ in range(pp)]
        for rank, stage in zip(small.ranks, self.stages, strict=True):
            self.of_ranks[rank].append(stage)
        step = machine.step_ms * 1e-3
        self.updates = [step + sum(stage.update for stage in mine) for mine in self.of_ranks]
        stride = tp * dp if outer else tp  # of neighbouring stages
        self.message = self._message(stride) if pp > 1 else 0.0
        if pp > 1 and model.tied:  # first and last stage add their gradients of the embedding
            ends = group(machine, 2, stride * (pp - 1))
            tied = ends.reduce(gradient_bytes(layout) * model.table / tp)
            self.updates[0] += tied
            self.updates[-1] += tied

    def _message(self, stride: int) -> float:
        """Seconds of a message between stages: of the slowest."""
        layout, machine = self.layout, self.machine
        link = group(machine, 2, stride)
        if layout.pp * stride > machine.gpus_per_node:  # some neighbours are on two nodes
            link = group(machine, 2, machine.gpus_per_node)
        sent = self.size * layout.micro_batch * self.model.seq * self.model.hidden / layout.tp
        hop = link.link if link.inside > 1 else link.network
        return sent / link.bandwidth + hop + machine.message_us * 1e-6

    def simulator(self, num_microbatches: int) -> Simulator:
        """Its schedule's lists. One rank has F0 B0 F1 B1 ... under every schedule."""
        at, pp = self.layout, self.layout.pp
        name, chunks = (at.schedule, at.chunks) if pp > 1 else (Layout.schedule, None)
        early = self.machine.backward == "early"
        return _prepared(name, pp, num_microbatches, chunks, early)

    def _stage(self, blocks: int, first: bool, last: bool, halves: bool) -> PricedStage:
        layout, dp, cost = self.layout, self.replicas, self.cost
        skew = self.machine.skew if layout.tp > 1 else 0.0
        forward, backward, late = (
            Pass().plus(block, blocks).plus(head, last).with_waits(skew)
            for block, head in zip(cost.block, cost.head, strict=True)
        )
        tables = 1 if first and last and self.model.tied else first + last
        number = (blocks * self.model.block + tables * self.model.table) / layout.tp
        share = layout.dp if layout.zero else 1
        update = number / share * UPDATE_BYTES / self.machine.memory_per_second
        exchange, parts = 0.0, max(1, blocks)
        scatter = parts * dp.scatter(self.size * number / parts)  # block by block
        if layout.zero < 2:
            sums = gradient_bytes(layout) * number
            exchange = dp.scatter(sums) if layout.zero else dp.reduce(sums)
        else:  # every micro-batch: gradients are reduced, under ZeRO-3 parameters gathered
            gather = scatter if layout.zero == 3 else 0.0
            forward = forward._replace(gathering=self._exposed(gather, forward.seconds))
            gather += scatter
            backward = backward._replace(gathering=self._exposed(gather, backward.seconds))
        if layout.zero in (1, 2):
            # The parameters that others have updated; or those of the first block to compute.
            update += scatter / (parts if self.machine.overlap == "all" else 1)
        held = blocks * (self.entry if layout.recompute == "always" else self.whole)
        if last:  # halves of backward: what waits for W is the gradient of the logits alone
            held += self.logits * (self.size if halves else self.loss[0])
        passes, table = Passes(forward, backward, late), first or last
        return PricedStage(passes, blocks, halves, exchange, update, held, number, table, last)

    def _exposed(self, seconds: float, work: float) -> float:
        """What ZeRO-2's and 3's collectives add to the seconds of a pass over a micro-batch."""
        if self.machine.overlap == "nothing":  # then its ranks wait for the last one, too
            return seconds + self.machine.skew * work
        return max(0.0, seconds - work)  # parameters are fetched ahead

    def work(self) -> Work:
        """For the simulator."""
        forward, backward, late = (
            [stage.passes[k].seconds for stage in self.stages] for k in range(3)
        )
        early = [whole - part for whole, part in zip(backward, late, strict=True)]
        return Work(
            with_times(forward, early, late), lambda _: self.message,
            overlap=self.overlapped,
            exchange=lambda s: self.stages[s].exchange,
            overlap_exchange=self.overlapped,
            update=self.updates.__getitem__,
        )  # fmt: skip

    @cached_property
    def least_seconds(self) -> float:
        """That the step takes at least, in any order: of each rank, its work, once its first
        micro-batch has come through the stages before, and then what its gradients take."""
        m, found, before = self.layout.num_microbatches, 0.0, 0.0
        for mine, update in zip(self.of_ranks, self.updates, strict=True):
            busy = sum(s.passes.forward.seconds + s.passes.backward.seconds for s in mine)
            exchange = 0.0 if self.overlapped else sum(s.exchange for s in mine)
            found = max(found, before + m * busy + exchange + update)
            before += mine[0].passes.forward.seconds + self.message
        return found

    @property
    def _sizes(self) -> list[int]:
        """How many micro-batches are simulated. A long step repeats itself: two short ones, with n
        micro-batches more in the second, tell what n in its middle take."""
        n, m = self.layout.pp, self.layout.num_microbatches
        return [m] if m <= 4 * n + 8 else [2 * n + m % n, 3 * n + m % n]

    def _simulated(self, of: Callable[[Simulation], list[float]]) -> list[float]:
        """Numbers ``of`` the simulated step."""
        work, sizes = self.work(), self._sizes
        found = [of(self.simulator(size).run(work)) for size in sizes]
        times = (self.layout.num_microbatches - sizes[0]) / self.layout.pp
        return [a + times * (b - a) for a, b in zip(found[0], found[-1], strict=True)]

    @cached_property
    def _times(self) -> list[float]:
        """Seconds of the step, of its actions from first to last, and of those of the mean rank."""
        n = self.layout.pp
        return self._simulated(lambda found: [found.seconds, found.span, sum(found.busy) / n])

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self._times[0]

    @property
    def bubble(self) -> float:
        """The share of the time from the first action to the last in which a rank idles."""
        return 1 - self._times[2] / self._times[1]

    @cached_property
    def parts(self) -> dict[str, float]:
        """The seconds by purpose, of the mean rank."""
        n, m, total = self.layout.pp, self.layout.num_microbatches, Pass()
        for stage in self.stages:
            total = total.plus(stage.passes.forward, m / n).plus(stage.passes.backward, m / n)
        parts, busy = total._asdict(), self._times[2]
        parts["host"] = busy - total.device - total.gathering  # more than the GPU's own seconds
        idle = self._simulated(lambda found: [found.idle.get(cause, 0.0) for cause in CAUSES])
        parts |= dict(zip(CAUSES, idle, strict=True))
        parts["update"] = sum(self.updates) / n
        # What a rank waits while its messages are sent is no gap between actions.
        parts["transfer"] += max(0.0, self.seconds - sum(parts.values()))
        return parts

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.layout.batch_size * self.model.seq / self.seconds

    @property
    def tflops(self) -> float:
        """Of the model's arithmetic, per GPU."""
        return self.model.flops(self.layout.batch_size) / self.seconds / self.layout.gpus / 1e12

    @cached_property
    def memory(self) -> list[Memory]:
        """Per rank of the pipeline."""
        layout, model, found = self.layout, self.model, list[Memory]()
        share = [1 / layout.dp if layout.zero >= first else 1.0 for first in (3, 2, 1)]
        # Mixed precision's weights in fp32 count as the optimizer's. Under ZeRO-3 they are the
        # parameters, whose 16 bits are only gathered.
        single = self.size == 4 or layout.zero == 3
        states = (4, 4, 8) if single else (self.size, gradient_bytes(layout), 12)
        waiting = 0 if self.stages[-1].halves else self.loss[0]
        loss = sum(self.loss) - waiting
        schedule = self.simulator(self._sizes[-1]).schedule
        peaks = peak_alive(schedule, lambda s: self.stages[s].held)
        for mine, peak in zip(self.of_ranks, peaks, strict=True):
            number = sum(stage.parameters for stage in mine)
            a, b, c = (number * size * part for size, part in zip(states, share, strict=True))
            working = self.whole if layout.recompute == "always" else 0.0
            working += self.late * max(stage.blocks * stage.halves for stage in mine)
            if any(stage.last for stage in mine):  # a block is computed again without the logits
                working = max(working - waiting * self.logits, loss * self.logits)
            if any(stage.table for stage in mine):  # its gradient, twice
                working += 2 * self.size * model.table / layout.tp
            if layout.zero == 3:  # the block that computes, and the next
                working += 3 * self.size * model.block / layout.tp
            found.append(Memory(a, b, c, peak, working, self.machine.reserve_gb * GIB))
        return found

    @property
    def memory_gb(self) -> float:
        """Of the fullest GPU, GiB."""
        return max(rank.gib for rank in self.memory)

    @property
    def usable_gb(self) -> float:
        """GiB of a GPU, less its fragments."""
        return self.machine.memory_gb * (1 - FRAGMENTS)

    @property
    def fits(self) -> bool:
        """Whether every GPU has enough memory, and some more for fragments."""
        return self.memory_gb <= self.usable_gb


def activations(model: Model, layout: Layout, machine: Machine) -> tuple[float, float, float]:
    """Bytes that a block holds for the backward of a micro-batch, those of its input alone, and
    those of the gradients of its products, which wait for the half of backward for weights."""
    t, tp, size = layout.micro_batch * model.seq, layout.tp, BYTES[layout.precision]
    shared = tp if layout.sequence_parallel else 1
    unfused = machine.attention != "flash"
    # Inputs of both norms, masks of dropout, and what the norms give to the matrices.
    outside = (2 * size + 2 * unfused) * model.hidden / shared
    outside += 2 * size * model.hidden / (shared if machine.gathered == "again" else 1)
    # q k v and the heads' output; of the MLP what its last product and its activation need. With
    # gated MLPs nanotron's runs held more, as much as q and k and the gate once again.
    gated = model.gated_mlp
    copies = gated and layout.zero < 2 and machine.gathered == "kept"
    heads = (3 if copies else 2) * (1 + model.kv_share) * model.hidden
    inside = size * (heads + (2 + 2 * gated + copies) * model.ffn) / tp
    if layout.recompute == "selective" and layout.zero > 1:
        # torch's keeps every other product, of q k v, output, up, gate, down: q, v, up and, if
        # gated, down; the heads' output, and the block's input.
        inside = size * ((2 + model.kv_share) * model.hidden + model.ffn) / tp
        outside = (1 + gated) * size * model.hidden / shared
    scores = 0.0
    if unfused and layout.recompute != "selective":
        scores = (2 * size + 1) * model.heads * model.seq / tp
    late = size * ((1 + 2 * model.kv_share) * model.hidden + (1 + gated) * model.ffn) / tp
    late += size * 2 * model.hidden
    return t * (outside + inside + scores), t * size * model.hidden / shared, t * late

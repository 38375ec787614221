"""Predicts a step of training: its seconds and where they go, and the memory of every stage.

The seconds of passes (`passes.py`), of messages and of collectives go into the simulator with the
schedule's own lists. Memory is counted, for as many micro-batches as the lists keep alive.

docs/planning.md explains the model and its constants, and says what it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from pipeline.schedules.catalogue import SCHEDULES, find
from pipeline.schedules.printed import peak_alive
from pipeline.schedules.schedule import BACKWARD, Action

from .describe import BYTES, Layout, Machine, Model
from .passes import (
    Pass,
    Passes,
    activations,
    cached_by_block,
    costs,
    gradient_bytes,
    group,
    over_nodes,
)
from .simulate import CAUSES, Simulator, Work, with_times

# Bytes read and written per parameter by unscaling, clipping, AdamW and the copy to 16 bits.
UPDATE_BYTES = 48
GIB = 2**30
BUCKET = 25 * 2**20  # bytes of gradients that are summed at once, during backward: DDP's default
FRAGMENTS = 0.05  # the share of a GPU's memory that fragmentation wastes
KEPT = 32 * 2**20  # bytes: glibc's malloc gives larger tensors back to the system, once freed


def blocks_of_stages(model: Model, layout: Layout, machine: Machine) -> list[int]:
    """How many blocks each stage has. `uniform`: equally many, if necessary with the embedding and
    the head counted as a block each. `auto`, and where neither divides: cut to even out the work
    of blocks and head."""
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
    """Bytes on a GPU of one pipeline rank, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float  # a block that is computed again, the loss, gathered parameters, evaluation
    reserve: float  # the framework's own, and buffers of collectives


@lru_cache(maxsize=512)
def _prepared(schedule: str, n: int, m: int, chunks: int | None) -> Simulator:
    """Prepared once per schedule and size."""
    return Simulator(find(schedule, chunks)(n, m))


class PricedStage(NamedTuple):
    """A stage's passes for one micro-batch, and its seconds at the end of a step."""

    passes: Passes
    exchange: float
    update: float
    parameters: float  # of the stage on one GPU
    shard: float  # those of them that this GPU alone updates under ZeRO
    held: float  # bytes per micro-batch, until its backward
    working: float  # further bytes while a backward runs
    cached: float  # bytes of keys and values while text is generated


class PricedStep:
    """The predicted step of a layout. The costs of its actions are computed at once; the simulation
    runs when the seconds are first asked for.

    Raises ValueError if the layout cannot run. `legal=False` skips this check, for measured runs.
    """

    def __init__(self, model: Model, layout: Layout, machine: Machine, legal: bool = True) -> None:
        if legal:
            layout.check(model)
        machine = machine.with_nodes(layout.gpus // layout.nodes(machine.gpus_per_node))
        self.model, self.layout, self.machine = model, layout, machine
        self.blocks = blocks_of_stages(model, layout, machine)
        self.block, self.head = costs(model, layout, machine)
        self.usable_gb = machine.memory_gb * (1 - FRAGMENTS)
        tp, pp, n, ep = layout.tp, layout.pp, layout.stages, layout.ep
        # replicas: ranks that share one copy, or add up gradients. of_shards: those with one shard.
        self.replicas = group(machine, layout.sharing, layout.stride)
        more = layout.copies // layout.sharing
        self.of_shards = group(machine, more, layout.stride * layout.sharing)
        # Replicas of an expert. Without --ep experts are treated like all other parameters.
        of_expert = layout.sharing // ep if ep > 1 else 1
        self.of_experts = group(machine, of_expert, layout.stride * layout.cp * ep)
        self.block_size = (model.attention + model.experts // ep * model.mlp) / tp
        self.size = BYTES[layout.precision]
        self.whole, self.entry, self.late = activations(model, layout, machine)
        self.logits = layout.micro_batch * model.seq * model.vocab / tp / layout.cp
        self.on_cores = machine.overlap == "nothing"
        self.overlapped = machine.overlap in ("gradients", "all")
        self.early = machine.overlap == "all" or (self.overlapped and not layout.zero)
        small = self.simulator(1)
        listed = set(small.actions)
        # In a V, the first rank has both ends of the model, and only one table if they are tied.
        self.one_table = model.tied and small.ranks[-1] == 0
        priced = cache(self._stage)  # most stages are alike
        self.stages = [
            priced(blocks, s == 0, s == n - 1, Action(BACKWARD, s, 0) not in listed)
            for s, blocks in enumerate(self.blocks)
        ]
        self.of_ranks: list[list[PricedStage]] = [[] for _ in range(pp)]
        for rank, stage in zip(small.ranks, self.stages, strict=True):
            self.of_ranks[rank].append(stage)
        step = machine.step_ms * 1e-3
        self.updates = [step + sum(stage.update for stage in of_rank) for of_rank in self.of_ranks]
        # The link between neighbouring stages.
        stride = tp * layout.copies if layout.order == "pp-dp-tp" else tp
        pair = over_nodes(machine, 2, 1 if pp * stride > machine.gpus_per_node else 2)
        sent = self.size * layout.micro_batch * model.seq * model.hidden / tp / layout.cp
        # `scatter` takes the size of the result, of which each of two ranks sends half.
        self.message = pair.scatter(2 * sent)
        if model.tied and not self.one_table:  # both ends add up its gradient
            tied = pair.reduce(gradient_bytes(layout) * model.table / tp)
            self.updates[0] += tied
            self.updates[-1] += tied

    @property
    def nodes(self) -> int:
        """How many nodes it is on."""
        return self.layout.gpus // self.machine.gpus_per_node

    def simulator(self, num_microbatches: int) -> Simulator:
        """The simulator of its schedule. A single rank has F0 B0 F1 B1 ... under every schedule."""
        at, pp = self.layout, self.layout.pp
        name, chunks = (at.schedule, at.chunks) if pp > 1 else (Layout.schedule, None)
        return _prepared(name, pp, num_microbatches, chunks)

    def _stage(self, blocks: int, first: bool, last: bool, halves: bool) -> PricedStage:
        layout, model = self.layout, self.model
        skew = self.machine.skew if layout.tp > 1 else 0.0
        forward, backward, late = (
            Pass().plus(block, blocks).plus(head, last).with_waits(skew)
            for block, head in zip(self.block, self.head, strict=True)
        )
        tables = first + (last and not self.one_table)
        number = blocks * self.block_size + tables * model.table / layout.tp
        apart = blocks * model.experts / layout.ep * model.mlp / layout.tp * (layout.ep > 1)
        if layout.zero > 1:  # every micro-batch reduces gradients, and ZeRO-3 gathers
            reduced = self._by_block(blocks, number, apart)
            gathered = reduced if layout.zero == 3 else 0.0
            forward = forward._replace(gathering=self._exposed(gathered, forward.seconds))
            exposed = self._exposed(gathered + reduced, backward.seconds)
            backward = backward._replace(gathering=exposed)
        shard = (number - apart + apart * layout.ep) / layout.sharing
        exchange, update = self._end_of_step(blocks, tables, number, apart, shard)
        held, working = self._memory_of_stage(blocks, tables, last, halves, number)
        passes = Passes(forward, backward, late)
        cached = blocks * cached_by_block(model, layout)
        return PricedStage(passes, exchange, update, number, shard, held, working, cached)

    def _scattered(self, each: float, number: float, apart: float) -> float:
        """Seconds to reduce or gather `each` bytes per parameter; `apart` of these are experts'."""
        shared = self.replicas.scatter(each * (number - apart))
        return shared + self.of_experts.scatter(each * apart)

    def _by_block(self, blocks: int, number: float, apart: float) -> float:
        """As `_scattered`, block by block, in the type of the products."""
        parts = max(1, blocks)
        return parts * self._scattered(self.size / parts, number, apart)

    def _end_of_step(
        self, blocks: int, tables: int, number: float, apart: float, shard: float
    ) -> tuple[float, float]:
        """Seconds of the exchange of gradients, and of what comes after it and all passes."""
        layout, model, overlap = self.layout, self.model, self.machine.overlap
        updated = shard if layout.zero else number
        exchange, update = 0.0, updated * UPDATE_BYTES / self.machine.memory_per_second
        each = gradient_bytes(layout)
        if layout.zero < 2:
            exchange = self._scattered(each, number, apart) * (1 if layout.zero else 2)
        if layout.zero < 2 and overlap == "gradients":
            # nanotron: DDP's buckets, or under ZeRO-1 one sum of all gradients, after backward.
            buckets = 1.0 if layout.zero else max(1.0, self.size * number / BUCKET)
            exchange = 2 * buckets * self._scattered(each / buckets, number, apart)
        if layout.copies > layout.sharing:  # once per step, between groups with one copy each
            exchange += self.of_shards.reduce(each * shard)
        if self.early and tables:  # the embedding's gradient comes last: nothing hides its sum
            last_sum = exchange * tables * model.table / (number * layout.tp)
            exchange, update = exchange - last_sum, update + last_sum
        if layout.zero in (1, 2):
            # Gathers what other ranks have updated. Only the first block waits, if this overlaps.
            beside = max(1, blocks) if overlap == "all" else 1
            update += self._by_block(blocks, number, apart) / beside
            update += self.machine.slices_us * 1e-6 * layout.sharing * blocks
        return exchange, update

    def _memory_of_stage(
        self, blocks: int, tables: int, last: bool, halves: bool, number: float
    ) -> tuple[float, float]:
        """Bytes per micro-batch until its backward, and further bytes while a backward runs."""
        again = self.layout.recompute == "always"
        held, working = blocks * (self.entry if again else self.whole), self.whole * again
        working += self.late * blocks * halves
        if last:
            # Bytes per logit: those that wait for backward, and all when backward begins. fused:
            # logits and gradient in the type of the products; plain: also a log-softmax, in
            # at least fp32, and two gradients of its size.
            log, fused = max(4, self.size), self.machine.loss == "fused"
            waiting = self.size if fused or self.size == log else log + self.size
            most = 2 * self.size if fused else 3 * log
            if halves:  # only the gradient of the logits waits for W
                held += self.logits * self.size
                waiting = 0
            held += self.logits * waiting
            # A block is computed again when the logits are gone.
            working = max(working - waiting * self.logits, (most - waiting) * self.logits)
        if tables or last:  # the gradient of the embedding, or of the head, twice
            twice = 2 * self.size * self.model.table / self.layout.tp
            if last and self.on_cores and self.size * self.logits >= KEPT:
                # By then the system has the log-softmax's memory back; only the logits are left.
                working = max(working, twice + (2 * self.size - waiting) * self.logits)
            else:
                working += twice
        working += self._exchanged(number, tables)
        if self.layout.zero == 3:
            # Gathered: the tables, the block that computes, with its gradients, and the next one.
            tables_size = tables * self.model.table / self.layout.tp
            working += self.size * (3 * self.block_size + tables_size)
        return held, working

    def _exchanged(self, number: float, tables: int) -> float:
        """Bytes held for sums over replicas, if ranks run on cores: gradients in buckets, which are
        copies of those that stages add up, or under ZeRO-2 and 3 the gradients of the last two
        units; and what a rank reads of other ranks' memory, which counts as its own."""
        layout, each = self.layout, gradient_bytes(self.layout)
        if not self.on_cores or layout.sharing == 1:
            return 0.0
        read = (layout.sharing - 1) / layout.sharing
        if layout.zero > 1:
            return 2 * (1 + read) * each * tables * self.model.table / layout.tp
        # Plain data parallelism adds up its gradients in the buckets themselves.
        plain = layout.gpus == layout.dp and not layout.zero and layout.ep == 1
        return (read if plain else 1 + read) * each * number

    def _exposed(self, seconds: float, work: float) -> float:
        """What ZeRO-2's and 3's collectives add to the seconds of a pass over a micro-batch."""
        if self.on_cores:  # nothing overlaps, and ranks wait for the last of them
            return seconds + self.machine.skew * work
        return max(0.0, seconds - work)  # parameters are fetched ahead

    def work(self) -> Work:
        """The input of the simulator."""
        forward, backward, late = (
            [stage.passes[k].seconds for stage in self.stages] for k in range(3)
        )
        of_input = [whole - part for whole, part in zip(backward, late, strict=True)]
        return Work(
            with_times(forward, of_input, late), lambda _: self.message,
            overlap=self.overlapped,
            exchange=lambda s: self.stages[s].exchange,
            overlap_exchange=self.early,
            update=self.updates.__getitem__,
        )  # fmt: skip

    @cached_property
    def least_seconds(self) -> float:
        """A lower bound of the step's seconds, for any order. A rank's first micro-batch passes the
        stages before it; then the rank does all its work, its exchange and its update."""
        m, bound, before = self.layout.num_microbatches, 0.0, 0.0
        for of_rank, update in zip(self.of_ranks, self.updates, strict=True):
            busy = sum(s.passes.forward.seconds + s.passes.backward.seconds for s in of_rank)
            exchange = 0.0 if self.early else sum(s.exchange for s in of_rank)
            bound = max(bound, before + m * busy + exchange + update)
            before += of_rank[0].passes.forward.seconds + self.message
        return bound

    def _numbers(self, of: Callable[[Simulator], list[float]]) -> list[float]:
        """Numbers `of` the step. A long step repeats itself. So two short ones are simulated, the
        second with n micro-batches more: their difference is what any further n add."""
        n, m = self.layout.pp, self.layout.num_microbatches
        times = 5 + 8 // n  # a V, or a pipeline of few ranks, becomes periodic late
        if m < (times + 2) * n or self.layout.schedule not in SCHEDULES:
            return of(self.simulator(m))
        few, more = (of(self.simulator(k * n + m % n)) for k in (times, times + 1))
        left = m // n - times - 1
        return [b + left * max(0.0, b - a) for a, b in zip(few, more, strict=True)]

    @cached_property
    def _times(self) -> list[float]:
        """Seconds of the step, from its first action to the end of its last, and of the mean rank's
        work."""

        def of(simulator: Simulator) -> list[float]:
            simulated = simulator.run(self.work())
            return [simulated.seconds, simulated.span, fmean(simulated.busy)]

        return self._numbers(of)

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return self._times[0]

    @property
    def bubble(self) -> float:
        """The share of the time from the first action to the last in which a rank idles."""
        return 1 - self._times[2] / self._times[1]

    @cached_property
    def parts(self) -> dict[str, float]:
        """The mean rank's seconds, by purpose."""
        n, m, total = self.layout.pp, self.layout.num_microbatches, Pass()
        for stage in self.stages:
            total = total.plus(stage.passes.forward, m / n).plus(stage.passes.backward, m / n)
        parts, busy = total._asdict(), self._times[2]
        parts["host"] = busy - total.device - total.gathering  # beyond the GPU's own seconds
        work = self.work()
        idle = self._numbers(lambda s: [s.run(work).idle.get(cause, 0.0) for cause in CAUSES])
        parts |= dict(zip(CAUSES, idle, strict=True))
        parts["update"] = sum(self.updates) / n
        # While a message holds up its sender, the simulator sees no gap between actions.
        parts["transfer"] += max(0.0, self.seconds - sum(parts.values()))
        return parts

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all GPUs process in a second."""
        return self.layout.batch_size * self.model.seq / self.seconds

    @property
    def tflops(self) -> float:
        """TFLOP/s of the model's arithmetic, per GPU."""
        return self.model.flops(self.layout.batch_size) / self.seconds / self.layout.gpus / 1e12

    @cached_property
    def memory(self) -> list[Memory]:
        """What each rank of the pipeline holds."""
        layout, ranks = self.layout, list[Memory]()
        sharded = [layout.zero >= first for first in (3, 2, 1)]
        # Some trainers keep a gradient in bf16 in addition to its sum in fp32.
        second = self.machine.second_gradient * (layout.precision == "bf16")
        states = (self.size, gradient_bytes(layout) + second, 12)
        # In mixed precision the fp32 weights count as the optimizer's. Under ZeRO-3 they are the
        # parameters, and copies of 16 bits exist only while they are gathered.
        if self.size >= 4 or layout.zero == 3:
            weight = max(4, self.size)
            states = (weight, weight, 2 * weight)
        each = [stage.held for stage in self.stages]
        peaks = self._numbers(lambda s: peak_alive(s.schedule, each.__getitem__))
        for of_rank, peak in zip(self.of_ranks, peaks, strict=True):
            whole = sum(stage.parameters for stage in of_rank)
            shard = sum(stage.shard for stage in of_rank)
            a, b, c = (
                size * (shard if part else whole)
                for size, part in zip(states, sharded, strict=True)
            )
            # An evaluation holds no activations for backward.
            cached = sum(stage.cached for stage in of_rank) - peak
            working = max(cached, *(stage.working for stage in of_rank))
            ranks.append(Memory(a, b, c, peak, working, self.machine.reserve_gb * GIB))
        return ranks

    @property
    def memory_gb(self) -> float:
        """GiB that the fullest GPU holds."""
        return max(map(sum, self.memory)) / GIB

    @property
    def fits(self) -> bool:
        """Whether every GPU has enough memory, with some to spare for fragmentation."""
        return self.memory_gb <= self.usable_gb

"""Ways to break training that the table must show. Each is a context: inside, the code is broken.

They are patched in where the work is done, so a test enters them on the rank. What they break is
what goes wrong in practice: a collective that is left out, a mean over ranks where one over tokens
is meant, a scale that is forgotten, gradients of the wrong micro-batch or of the last alone, a tied
weight's second gradient, a norm of a part, gradients of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.zero1 import ShardedOptimizer
from pipeline import executor as dataflow
from pipeline import pipe
from pipeline.delivery import gradients_by_stage
from pipeline.processes.neighbours import Neighbours
from runtime.randomness import StageRandomness, StepSeed
from runtime.ranks import Ranks
from runtime.shared_memory import SharedBuffers, sum_into
from tensor_parallel import collectives, layers, loss
from tensor_parallel.gpt2 import Part
from training import optimization
from training.layouts.replicated import Replicated
from training.layouts.tensor import CutTask
from training.tasks import sequences
from training.tasks.gpt2 import loss_of_targets
from training.tasks.sequences import SequenceTask
from training.tasks.task import Step

Broken = AbstractContextManager[Any]
MUTATIONS: dict[str, Callable[[], Broken]] = {"nothing": nullcontext}
RED: dict[str, list[str]] = {}  # by mutation, rows that it must turn red


def reds(rows: str) -> Callable[[Callable[[], Broken]], Callable[[], Broken]]:
    """Decorates a mutation: enters it in MUTATIONS, and in RED the rows that it must turn red."""

    def enter(mutation: Callable[[], Broken]) -> Callable[[], Broken]:
        MUTATIONS[mutation.__name__], RED[mutation.__name__] = mutation, rows.split()
        return mutation

    return enter


@contextmanager
def _both(*patches: Broken) -> Iterator[None]:
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def _left_out(*_: Any, **__: Any) -> None:
    """In the place of what is forgotten."""


@reds("ddp2-flat-one_more ddp2-overlap-m2")
def a_bucket_is_not_reduced() -> Broken:
    """The first all-reduce of gradients, and where they are summed in shared memory the first sum,
    is left out on every rank."""
    all_reduce, average = dist.all_reduce, SharedBuffers.average
    left_out: list[Any] = []

    def reduce_but_one(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point() and tensor.numel() > 16 and not left_out:
            left_out.append(tensor)
            return Mock()  # its wait() returns at once
        return all_reduce(tensor, *args, **kwargs)

    def average_but_one(self: SharedBuffers, *place: Any) -> None:
        if left_out:
            average(self, *place)
        left_out.append(place)

    return _both(
        patch.object(dist, "all_reduce", reduce_but_one),
        patch.object(SharedBuffers, "average", average_but_one),
    )


@reds("ddp2-flat-m2")
def a_mean_over_ranks() -> Broken:
    """Each rank divides by its own target tokens: the mean of the ranks' means."""
    backward = Replicated.backward

    def wrong(self: Replicated, step: Step) -> Tensor:
        mine = sum(map(len, step.targets))
        return backward(self, replace(step, count=mine * self.parts))

    return patch.object(Replicated, "backward", wrong)


@reds("ddp2-overlap-m2 pipeline2-zb-m8")
def a_micro_batch_is_not_scaled() -> Broken:
    """The gradient of the second micro-batch of the first step is too large. Its loss is right."""
    calls: list[int] = []

    def louder(output: Tensor, target: Any) -> Tensor:
        loss = loss_of_targets(output, target)
        calls.append(1)
        return loss.detach() + 20 * (loss - loss.detach()) if len(calls) == 2 else loss

    return patch.object(sequences, "loss_of_targets", louder)


@reds("threads2-zb-same_length blocks3-split_size3")
def two_micro_batches_are_swapped() -> Broken:
    """A stage gets for micro-batch 0 the gradient of its output for 1, and the reverse."""
    make, backward_all = dataflow.Dataflow.__init__, pipe.Pipe.backward_all

    class Swapping(dataflow.Channel):
        def put(self, i: int, value: Any) -> None:
            super().put({0: 1, 1: 0}.get(i, i), value)

    def swapping(self: dataflow.Dataflow, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self._losses is not None:  # the gradients of pipe(x) are swapped below
            self.down = {s: Swapping() for s in self.down}

    def swapped(self: pipe.Pipe, stages: Any, gradients: Any, retain_graph: bool) -> Any:
        gradients[:2] = gradients[1::-1]
        return backward_all(self, stages, gradients, retain_graph)

    return _both(
        patch.object(dataflow.Dataflow, "__init__", swapping),
        patch.object(pipe.Pipe, "backward_all", swapped),
    )


@reds("threads2-1f1b-m3")
def a_tied_weight_loses_a_gradient() -> Broken:
    """Of the embedding's two uses, on the first stage and on the last, only the first counts."""

    def first_only(stages: Any, replicas: Any) -> Any:
        own, tied = gradients_by_stage(stages[:-1], replicas)
        last, _ = gradients_by_stage(stages[-1:], replicas)
        last[0] = {p: g for p, g in last[0].items() if not any(p in found for found in own)}
        return [*own, *last], tied

    return patch.object(pipe, "gradients_by_stage", first_only)


@reds("pipeline2-zbv-clipped")
def a_rank_loses_what_its_chunks_share() -> Broken:
    """In a V the embedding and the head are on one rank: their gradients are forgotten."""
    return patch.object(Neighbours, "sum_tied", lambda *_: {})


@reds("pipeline2-interleaved-v2_m3")
def a_rank_keeps_its_part_of_a_tied_gradient() -> Broken:
    """Of the embedding's two uses, on the first rank and on the last, each counts its own."""

    def own(_: Neighbours, parameters: Any, parts: Any) -> Any:
        return {parameters[name]: sum(mine.values()) for name, mine in parts.items()}

    return patch.object(Neighbours, "sum_tied", own)


@reds("fsdp2-zero3-m2")
def a_rank_is_left_out_of_the_sum() -> Broken:
    """Each rank sums its shard's gradients over all ranks but the last."""

    def all_but_one(parts: list[Tensor], targets: list[Tensor], **options: Any) -> None:
        sum_into(parts[:-1] or parts, targets, **options)

    return patch("data_parallel.exchange.sum_into", all_but_one)


@reds("fsdp2-zero2-m2 ddp2-overlap-m2")
def micro_batches_replace() -> Broken:
    """The gradients of a micro-batch take the place of those before it."""
    forward, backward = nn.Sequential.forward, FullyShardedDataParallel.backward

    def forgetful(self: nn.Sequential, x: Any) -> Any:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.zero_()
        return forward(self, x)

    def replacing(self: FullyShardedDataParallel, loss: Tensor | None) -> None:
        for unit in self.units:
            unit.shard.grad = None
        backward(self, loss)

    return _both(
        patch.object(nn.Sequential, "forward", forgetful),
        patch.object(FullyShardedDataParallel, "backward", replacing),
    )


@reds("fsdp2-zero3-clipped threads2-1f1b-clipped")
def the_norm_is_of_a_part() -> Broken:
    """Gradients are clipped by the norm of half of the parameters."""
    norms = optimization.norms_of
    return patch.object(optimization, "norms_of", lambda tensors: norms(tensors[::2]))


@reds("ddp2-flat-even")
def gradients_are_kept() -> Broken:
    """The optimizer forgets no gradient before a step."""
    return patch.object(torch.optim.Optimizer, "zero_grad", _left_out)


@reds("ddp2-overlap-dropout mesh2-1x1x2")
def dropout_is_drawn() -> Broken:
    """Masks come from the rank's generator, and depend on which examples it has."""
    return patch.object(SequenceTask, "_keys", _left_out)


@reds("blocks3-resumed")
def dropout_is_not_seeded() -> Broken:
    """Every run, also a resumed one, goes on with the random numbers that the last one left."""
    return patch.object(torch, "manual_seed", _left_out)


@reds("fsdp2-zero3-recompute_always pipeline2-gpipe-recompute_sqrt")
def other_dropout_is_recomputed() -> Broken:
    """Masks are drawn, and the second forward draws others."""
    of, seen = StageRandomness.of, set[tuple[int, int, int]]()

    def anew(self: StageRandomness, step: StepSeed, layer: int, microbatch: int) -> StageRandomness:
        place = id(step), layer, microbatch
        again = place in seen
        seen.add(place)
        return of(self, step, layer, microbatch + (1000 if again else 0))

    return _both(
        dropout_is_drawn(),
        patch.object(torch, "set_rng_state", _left_out),
        patch.object(StageRandomness, "of", anew),
    )


@reds("fsdp2-zero2-m2 single-one_more")
def a_piece_is_not_held() -> Broken:
    """No rank says that it holds the first rows of the embedding."""
    from tests.equivalence import compare

    rectangles = compare.rectangles

    def fewer(*args: Any) -> compare.Found:
        found = rectangles(*args)
        for (_, name, _), pieces in found.items():
            if name == "transformer.wte.weight":
                pieces.pop((0, 0), None)
        return found

    return patch.object(compare, "rectangles", fewer)


# Tensor parallelism: one for every collective, and what goes wrong around them


_start = Ranks._start


def _alone(self: Ranks, kind: str, x: Tensor, dim: int) -> Callable[[], Tensor]:
    """In the place of `Ranks._start`: each rank has its own part of what is to be summed."""
    if kind == "all_gather":
        return _start(self, kind, x, dim)
    return lambda: x if kind == "all_reduce" else self.part_of(x, dim).clone()


def _unsummed(function: Any, way: str) -> Broken:
    """`function` without the sums in `way`, its forward or its backward."""
    wrapped = getattr(function, way)

    def alone(*args: Any) -> Any:
        with patch.object(Ranks, "_start", _alone):
            return wrapped(*args)

    return patch.object(function, way, staticmethod(alone))


for _name, _function, _way, _rows in (
    ("a_gradient_of_the_head_is_not_summed", collectives._Replicate, "backward", "mesh2-1x1x2"),
    ("a_gradient_between_matrices_is_not_summed", layers._Columns, "backward", "mesh2-1x1x2"),
    ("a_row_parallel_product_is_not_summed", collectives._AllReduce, "forward", "mesh2-1x1x2"),
    (
        "a_part_of_the_sequence_is_not_summed", collectives._Scatter, "forward",
        "mesh2-1x1x2-sequence",
    ),
    (
        "a_gradient_of_gathered_positions_is_not_summed", collectives._Gather, "backward",
        "mesh2-1x1x2-sequence",
    ),
):  # fmt: skip
    MUTATIONS[_name], RED[_name] = partial(_unsummed, _function, _way), _rows.split()


@reds("mesh2-1x1x2-sequence")
def a_gradient_of_scattered_positions_is_not_gathered() -> Broken:
    """Every rank takes its own in the place of all."""

    def own(ctx: Any, dy: Tensor) -> Any:
        return torch.cat([dy] * ctx.ranks.size, ctx.dim), None, None

    return patch.object(collectives._Scatter, "backward", staticmethod(own))


@reds("mesh2-1x1x2-sequence")
def a_softmax_is_of_a_part_of_the_vocabulary() -> Broken:
    of = loss._Chunk.of

    def wrong(*args: Any) -> Any:
        chunk = of(*args)
        own = chunk.largest + chunk.exps.sum(-1).log()
        return chunk._replace(log_sum=own, losses=own - chunk.at_label)

    return patch.object(loss._Chunk, "of", wrong)


@reds("mesh2-1x1x2")
def a_bias_is_added_by_every_rank() -> Broken:
    forward = layers.RowParallelLinear.forward

    def wrong(self: layers.RowParallelLinear, x: Tensor) -> Tensor:
        return forward(self, x) + (self.ranks.size - 1) * self.bias

    return patch.object(layers.RowParallelLinear, "forward", wrong)


@reds("mesh2-1x1x2")
def queries_keys_and_values_are_cut_as_one_matrix() -> Broken:
    """Rank 0 of 2 has all of q and half of k."""

    def ranges(self: Part) -> list[tuple[int, int]]:
        length = -(-self.shape[self.dim] // self.size)
        start = self.rank * length
        return [(start, min(length, self.shape[self.dim] - start))]

    return patch.object(Part, "ranges", property(ranges))


@reds("mesh2-1x1x2-sequence")
def norms_keep_the_gradient_of_their_positions() -> Broken:
    """With sequence parallelism, what all ranks have is not summed."""
    return patch.object(CutTask, "sum_gradients", _left_out)


@reds("mesh2-1x1x2")
def all_ranks_count_what_all_have() -> Broken:
    """Where gradients are clipped."""
    return patch.object(CutTask, "counted", lambda *_: True)


@reds("mesh2-2x1x1 mesh2-2x1x1-zero1")
def replicas_keep_their_gradients() -> Broken:
    reduce = ShardedOptimizer.reduce

    def own(self: ShardedOptimizer) -> None:
        with patch.object(Ranks, "_start", _alone):
            reduce(self)

    return _both(
        patch.object(SharedBuffers, "average", _left_out),
        patch.object(ShardedOptimizer, "reduce", own),
    )


@reds("mesh2-2x1x1-zero1")
def a_shard_is_not_handed_to_the_others() -> Broken:
    return patch.object(ShardedOptimizer, "publish", _left_out)

"""Ways to break training that the table must show. Each is a context: inside, the code is broken.

They are patched in where the work is done, so a test enters them on the rank. What they break is
what goes wrong in practice: a collective that is left out, a mean over ranks where one over tokens
is meant, a scale that is forgotten, gradients of the wrong micro-batch or of the last alone, a tied
weight's second gradient, a norm of a part, gradients of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.sharded_optimizer import ShardedOptimizer
from pipeline import autograd, dataflow, pipe, process, trace
from pipeline.delivery import gradients_by_stage
from pipeline.neighbours import Neighbours
from runtime.randomness import StageRandomness, StepSeed
from runtime.ranks import Ranks
from runtime.shared_memory import SharedBuffers, sum_into
from tensor_parallel import collectives, layers, loss
from tensor_parallel.gpt2 import Part
from training import model, optimization, sequences
from training.model import loss_of_targets
from training.replicated import Replicated
from training.task import Step
from training.tensor import Shared

MUTATIONS: dict[str, Callable[[], AbstractContextManager[None]]] = {}


def mutation(function: Callable[[], Iterator[None]]) -> None:
    """Enters a mutation under its name."""
    MUTATIONS[function.__name__] = contextmanager(function)


@mutation
def nothing() -> Iterator[None]:
    """The code as it is."""
    yield


@mutation
def a_bucket_is_not_reduced() -> Iterator[None]:
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

    with (
        patch.object(dist, "all_reduce", reduce_but_one),
        patch.object(SharedBuffers, "average", average_but_one),
    ):
        yield


@mutation
def a_mean_over_ranks() -> Iterator[None]:
    """Each rank divides by its own target tokens: the mean of the ranks' means."""
    backward = Replicated.backward

    def wrong(self: Replicated, step: Step) -> Tensor:
        mine = sum(int((weights != 0).sum()) for _, weights in step.targets)
        return backward(self, replace(step, count=mine * self.parts))

    with patch.object(Replicated, "backward", wrong):
        yield


@mutation
def a_micro_batch_is_not_scaled() -> Iterator[None]:
    """The gradient of the second micro-batch of the first step is too large. Its loss is right."""
    calls: list[int] = []

    def louder(output: Tensor, target: Any) -> Tensor:
        loss = loss_of_targets(output, target)
        calls.append(1)
        return loss.detach() + 20 * (loss - loss.detach()) if len(calls) == 2 else loss

    with patch.object(sequences, "loss_of_targets", louder):
        yield


@mutation
def two_micro_batches_are_swapped() -> Iterator[None]:
    """A stage gets for micro-batch 0 the gradient of its output for 1, and the reverse."""
    make, split = dataflow.Dataflow.__init__, autograd._Call.split

    class Swapping(dataflow.Channel):
        def put(self, i: int, value: Any) -> None:
            super().put({0: 1, 1: 0}.get(i, i), value)

    def swapping(self: dataflow.Dataflow, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self._losses is not None:  # the gradients of pipe(x) are swapped below
            self.down = {s: Swapping() for s in self.down}

    def split_wrongly(self: autograd._Call, gradients: Any) -> Any:
        pieces = split(self, gradients)
        pieces[:2] = pieces[1::-1]
        return pieces

    with (
        patch.object(dataflow.Dataflow, "__init__", swapping),
        patch.object(autograd._Call, "split", split_wrongly),
    ):
        yield


@mutation
def a_tied_weight_loses_a_gradient() -> Iterator[None]:
    """Of the embedding's two uses, on the first stage and on the last, only the first counts."""

    def first_only(stages: Any, replicas: Any) -> Any:
        own, tied = gradients_by_stage(stages[:-1], replicas)
        last, _ = gradients_by_stage(stages[-1:], replicas)
        last[0] = {p: g for p, g in last[0].items() if not any(p in found for found in own)}
        return [*own, *last], tied

    with patch.object(pipe, "gradients_by_stage", first_only):
        yield


@mutation
def a_rank_loses_what_its_chunks_share() -> Iterator[None]:
    """In a V the embedding and the head are on one rank: their gradients are forgotten."""

    def own_alone(*args: Any) -> Any:
        return gradients_by_stage(*args)[0], {}

    with patch.object(process, "gradients_by_stage", own_alone):
        yield


@mutation
def a_rank_keeps_its_part_of_a_tied_gradient() -> Iterator[None]:
    """Of the embedding's two uses, on the first rank and on the last, each counts its own."""

    def own(_: Neighbours, parameters: Any, parts: Any) -> Any:
        return {
            parameters[name]: sum(part for part in mine.values() if part is not None)
            for name, mine in parts.items()
        }

    with patch.object(Neighbours, "sum_tied", own):
        yield


@mutation
def a_rank_is_left_out_of_the_sum() -> Iterator[None]:
    """Each rank sums its shard's gradients over all ranks but the last."""

    def all_but_one(parts: list[Tensor], targets: list[Tensor], **options: Any) -> None:
        sum_into(parts[:-1] or parts, targets, **options)

    with patch("data_parallel.exchange.sum_into", all_but_one):
        yield


@mutation
def micro_batches_replace() -> Iterator[None]:
    """The gradients of a micro-batch take the place of those before it."""
    forward, backward = nn.Sequential.forward, FullyShardedDataParallel.backward

    def forgetful(self: nn.Sequential, x: Any) -> Any:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.zero_()
        return forward(self, x)

    def replacing(self: FullyShardedDataParallel, loss: Tensor | None, last: bool = True) -> None:
        for unit in self.units:
            unit.has_gradient = False
        backward(self, loss, last)

    with (
        patch.object(nn.Sequential, "forward", forgetful),
        patch.object(FullyShardedDataParallel, "backward", replacing),
    ):
        yield


@mutation
def a_traced_shortcut_has_no_gradient() -> Iterator[None]:
    """Of a sum, one term is cut off: forwards are right."""

    def add(a: Tensor, b: Any) -> Tensor:
        return a + (b.detach() if isinstance(b, Tensor) else b)

    with patch.dict(trace._CALLED, {torch.ops.aten.add.Tensor: add}):
        yield


@mutation
def the_norm_is_of_a_part() -> Iterator[None]:
    """Gradients are clipped by the norm of half of the parameters."""
    norms = optimization.squared_norms
    with patch.object(optimization, "squared_norms", lambda tensors: norms(tensors[::2])):
        yield


@mutation
def gradients_are_kept() -> Iterator[None]:
    """The optimizer forgets no gradient before a step."""
    with patch.object(torch.optim.Optimizer, "zero_grad", lambda *_, **__: None):
        yield


@mutation
def dropout_is_drawn() -> Iterator[None]:
    """Masks come from the rank's generator, and depend on which examples it has."""
    with patch.object(model, "_keys", lambda _: None):
        yield


@mutation
def dropout_is_not_seeded() -> Iterator[None]:
    """Every run goes on with the random numbers that the last one left."""
    with patch.object(torch, "manual_seed", lambda _: None):
        yield


@mutation
def random_states_are_not_restored() -> Iterator[None]:
    """A resumed run draws other dropout masks."""
    with patch.object(torch, "set_rng_state", lambda _: None):
        yield


@mutation
def other_dropout_is_recomputed() -> Iterator[None]:
    """Masks are drawn, and the second forward draws others."""
    of, seen = StageRandomness.of, set[tuple[int, int, int]]()

    def anew(self: StageRandomness, step: StepSeed, layer: int, microbatch: int) -> StageRandomness:
        place = id(step), layer, microbatch
        again = place in seen
        seen.add(place)
        return of(self, step, layer, microbatch + (1000 if again else 0))

    with (
        patch.object(model, "_keys", lambda _: None),
        patch.object(torch, "set_rng_state", lambda _: None),
        patch.object(StageRandomness, "of", anew),
    ):
        yield


@mutation
def a_piece_is_not_held() -> Iterator[None]:
    """No rank says that it holds the first rows of the embedding."""
    from tests.equivalence import compare

    rectangles = compare.rectangles

    def fewer(*args: Any) -> compare.Rectangles:
        found = rectangles(*args)
        first = [k for k in found if k[0] == "transformer.wte.weight" and not any(k[1])]
        return {k: v for k, v in found.items() if k not in first}

    with patch.object(compare, "rectangles", fewer):
        yield


# Tensor parallelism: one for every collective, and what goes wrong around them


class _Mute:
    """Ranks that say nothing: each has its own part of what is to be summed."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self._ranks.part_of(x, dim).clone()

    def start_reduce_scatter(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        return lambda: self.reduce_scatter(x, dim)


def _mute(function: Any, way: str) -> Any:
    """`function`, forward or backward, without its sums."""
    wrapped = getattr(function, way)

    def muted(ctx: Any, *args: Any) -> Any:
        if way == "forward":
            return wrapped(ctx, args[0], _Mute(args[1]), *args[2:])
        ctx.ranks = _Mute(ctx.ranks)
        return wrapped(ctx, *args)

    return patch.object(function, way, staticmethod(muted))


@mutation
def a_gradient_of_the_head_is_not_summed() -> Iterator[None]:
    with _mute(collectives._Replicate, "backward"):
        yield


@mutation
def a_gradient_between_matrices_is_not_summed() -> Iterator[None]:
    with _mute(layers._Columns, "backward"):
        yield


@mutation
def a_row_parallel_product_is_not_summed() -> Iterator[None]:
    with _mute(collectives._AddUp, "forward"):
        yield


@mutation
def a_part_of_the_sequence_is_not_summed() -> Iterator[None]:
    with _mute(collectives._Scatter, "forward"):
        yield


@mutation
def a_gradient_of_gathered_positions_is_not_summed() -> Iterator[None]:
    with _mute(collectives._Gather, "backward"):
        yield


@mutation
def a_gradient_of_scattered_positions_is_not_gathered() -> Iterator[None]:
    """Every rank takes its own in the place of all."""

    def own(ctx: Any, dy: Tensor) -> Any:
        return torch.cat([dy] * ctx.ranks.size, ctx.dim), None, None

    with patch.object(collectives._Scatter, "backward", staticmethod(own)):
        yield


@mutation
def a_softmax_is_of_a_part_of_the_vocabulary() -> Iterator[None]:
    of = loss._Chunk.of

    def wrong(*args: Any) -> Any:
        chunk = of(*args)
        own = chunk.largest + chunk.exps.sum(-1).log()
        return chunk._replace(log_sum=own, losses=own - chunk.at_label)

    with patch.object(loss._Chunk, "of", wrong):
        yield


@mutation
def a_bias_is_added_by_every_rank() -> Iterator[None]:
    forward = layers.RowParallelLinear.forward

    def wrong(self: layers.RowParallelLinear, x: Tensor) -> Tensor:
        return forward(self, x) + (self.ranks.size - 1) * self.bias

    with patch.object(layers.RowParallelLinear, "forward", wrong):
        yield


@mutation
def queries_keys_and_values_are_cut_as_one_matrix() -> Iterator[None]:
    """Rank 0 of 2 has all of q and half of k."""

    def ranges(self: Part) -> list[tuple[int, int]]:
        length = -(-self.shape[self.dim] // self.size)
        start = self.rank * length
        return [(start, min(length, self.shape[self.dim] - start))]

    with patch.object(Part, "ranges", property(ranges)):
        yield


@mutation
def norms_keep_the_gradient_of_their_positions() -> Iterator[None]:
    """With sequence parallelism, what all ranks have is not summed."""
    with patch.object(Shared, "sum_gradients", lambda *_: None):
        yield


@mutation
def all_ranks_count_what_all_have() -> Iterator[None]:
    """Where gradients are clipped."""
    with patch.object(Shared, "counted", lambda *_: True):
        yield


@mutation
def replicas_keep_their_gradients() -> Iterator[None]:
    with (
        patch.object(SharedBuffers, "average", lambda *_: None),
        patch.object(ShardedOptimizer, "reduce", _reduce_nothing),
    ):
        yield


def _reduce_nothing(self: ShardedOptimizer) -> None:
    self.ranks, ranks = _Mute(self.ranks), self.ranks  # type: ignore[assignment]
    _reduce(self)
    self.ranks = ranks


_reduce = ShardedOptimizer.reduce


@mutation
def a_shard_is_not_handed_to_the_others() -> Iterator[None]:
    with patch.object(ShardedOptimizer, "publish", lambda _: None):
        yield

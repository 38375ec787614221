"""Ways to break training that verify.py must see. Each is a context: inside, the code is broken.

They are patched in where the work is done, so a test enters them on the rank. What they break is
what goes wrong in practice: a collective that is left out, a mean over ranks where one over tokens
is meant, a scale that is forgotten, gradients of the wrong micro-batch or of the last alone, a tied
weight's second gradient, a norm of a part, gradients of the step before.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from data_parallel import exchange, gradients
from data_parallel.ddp import DistributedDataParallel
from data_parallel.fsdp import FullyShardedDataParallel
from data_parallel.shared_memory import SharedBuffers
from pipeline import autograd, dataflow, pipe
from pipeline.gradients import gradients_by_stage
from pipeline.neighbours import Neighbours
from pipeline.schedule import Action
from project import run_data_parallel, trainers
from training.data import Step
from training.model import target_loss
from training.optimization import Optimizers, squared_norms


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    """The code as it is."""
    yield


@contextlib.contextmanager
def a_bucket_is_not_reduced() -> Iterator[None]:
    """The first all-reduce of gradients, and where they are summed in shared memory the first sum,
    is left out on every rank."""
    left_out: list[str] = []

    class Done:
        def wait(self) -> None:
            """Nothing was sent."""

    class Collectives:
        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_floating_point() and tensor.numel() > 16 and not left_out:
                left_out.append("a collective")
                return Done()
            return dist.all_reduce(tensor, *args, **kwargs)

    average = SharedBuffers.average

    def average_but_one(self: SharedBuffers, parts: list[Tensor]) -> None:
        if "a sum" not in left_out:
            left_out.append("a sum")
            return
        average(self, parts)

    with (
        patch.object(gradients, "dist", Collectives()),
        patch.object(SharedBuffers, "average", average_but_one),
    ):
        yield


@contextlib.contextmanager
def a_mean_over_ranks() -> Iterator[None]:
    """Each rank divides by its own target tokens: the mean of the ranks' means."""
    make_backward = run_data_parallel.make_backward

    def per_rank(args: Any, world: Any, *more: Any) -> Callable[[Step], Tensor]:
        backward = make_backward(args, world, *more)

        def wrong(step: Step) -> Tensor:
            mine = sum(len(batch["target_index"]) for batch in step.micro_batches)
            tokens = mine * world.world_size
            return backward(dataclasses.replace(step, target_tokens=tokens))

        return wrong

    with patch.object(trainers, "make_backward", per_rank):
        yield


@contextlib.contextmanager
def a_micro_batch_is_not_scaled() -> Iterator[None]:
    """The gradients of every second micro-batch are those of the sum, not of the mean."""
    backward_of = dataflow.Dataflow._backward

    def unscaled(self: dataflow.Dataflow, action: Action) -> None:
        flow = copy.copy(self)
        if action.microbatch == 1:
            flow._scale = 1.0
        backward_of(flow, action)

    calls: list[Any] = []

    def louder(model: Any, batch: Any) -> Tensor:
        calls.append(model)
        loss = target_loss(model, batch)
        return loss if len(calls) % 2 else loss.detach() + 20 * (loss - loss.detach())

    with (
        patch.object(dataflow.Dataflow, "_backward", unscaled),
        patch.object(run_data_parallel, "target_loss", louder),
    ):
        yield


@contextlib.contextmanager
def two_micro_batches_are_swapped() -> Iterator[None]:
    """A stage gets for micro-batch 0 the gradient of its output for 1, and the reverse."""
    make, split = dataflow.Dataflow.__init__, autograd._Call.split

    class Swapping(dataflow.Channel):
        def put(self, i: int, value: Any) -> None:
            super().put({0: 1, 1: 0}.get(i, i), value)

    def swapping(self: dataflow.Dataflow, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._down = {s: Swapping() for s in self._down}

    def split_wrongly(self: autograd._Call, gradients: Any) -> Any:
        pieces = split(self, gradients)
        pieces[:2] = pieces[1::-1]
        return pieces

    with (
        patch.object(dataflow.Dataflow, "__init__", swapping),
        patch.object(autograd._Call, "split", split_wrongly),
    ):
        yield


@contextlib.contextmanager
def a_tied_weight_loses_a_gradient() -> Iterator[None]:
    """Of the embedding's two uses, on the first stage and on the last, only the first counts."""
    by_stage = gradients_by_stage

    def first_only(stages: Any, replicas: Any) -> Any:
        own, tied = by_stage(stages[:-1], replicas)
        last, _ = by_stage(stages[-1:], replicas)
        last[0] = {p: g for p, g in last[0].items() if not any(p in found for found in own)}
        return [*own, *last], tied

    with patch.object(pipe, "gradients_by_stage", first_only):
        yield


@contextlib.contextmanager
def a_rank_is_left_out_of_the_sum() -> Iterator[None]:
    """Each rank sums its shard's gradients over all ranks but the last."""
    sum_into = exchange._sum_into

    def all_but_one(target: Tensor, parts: list[Tensor], accumulate: bool) -> None:
        sum_into(target, parts[:-1], accumulate)

    with patch.object(exchange, "_sum_into", all_but_one):
        yield


@contextlib.contextmanager
def micro_batches_replace() -> Iterator[None]:
    """The gradients of a micro-batch take the place of those before it."""
    forward = DistributedDataParallel.forward
    backward = FullyShardedDataParallel.backward

    def forgetful(self: DistributedDataParallel, *args: Any) -> Any:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.zero_()
        return forward(self, *args)

    def replacing(self: FullyShardedDataParallel, loss: Tensor | None, last: bool = True) -> None:
        for unit in self.units:
            unit.has_gradient = False
        backward(self, loss, last)

    with (
        patch.object(DistributedDataParallel, "forward", forgetful),
        patch.object(FullyShardedDataParallel, "backward", replacing),
    ):
        yield


@contextlib.contextmanager
def a_rank_keeps_its_part_of_a_tied_gradient() -> Iterator[None]:
    """Of the embedding's two uses, on the first rank and on the last, each counts its own."""

    def own(_: Neighbours, parameters: Any, parts: Any) -> Any:
        return {parameters[name]: part for name, part in parts.items() if part is not None}

    with patch.object(Neighbours, "sum_tied", own):
        yield


@contextlib.contextmanager
def the_norm_is_of_a_part() -> Iterator[None]:
    """Gradients are clipped by the norm of what one rank, or one stage, has to count."""
    facts_of = Optimizers._facts

    def of_a_part(self: Optimizers, loss: Tensor) -> tuple[float, list[float]]:
        _, losses = facts_of(self, loss)
        counted = [p.grad for p in self._counted[0] if p.grad is not None]
        return math.sqrt(sum(squared_norms(counted))), losses

    with patch.object(Optimizers, "_facts", of_a_part):
        yield


@contextlib.contextmanager
def gradients_are_kept() -> Iterator[None]:
    """The optimizer forgets no gradient before a step."""
    with patch.object(torch.optim.Optimizer, "zero_grad", lambda *_, **__: None):
        yield


@contextlib.contextmanager
def dropout_is_not_seeded() -> Iterator[None]:
    """Every run goes on with the random numbers that the last one left."""
    with patch.object(torch, "manual_seed", lambda _: None):
        yield


MUTATIONS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    mutation.__name__: mutation
    for mutation in (
        nothing,
        a_bucket_is_not_reduced,
        a_mean_over_ranks,
        a_micro_batch_is_not_scaled,
        two_micro_batches_are_swapped,
        a_tied_weight_loses_a_gradient,
        a_rank_is_left_out_of_the_sum,
        micro_batches_replace,
        a_rank_keeps_its_part_of_a_tied_gradient,
        the_norm_is_of_a_part,
        gradients_are_kept,
        dropout_is_not_seeded,
    )
}

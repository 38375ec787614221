"""Copies of a parameter in several groups of ranks, whose sums may differ in their last bits.

The tied embedding has copies on the first and on the last stage, in two groups of replicas. Each
group may add its gradients in an order of its own, as NCCL does, which chooses rings and trees for
each group. In a group of three the order decides the bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runtime.axes import DATA_AXES, ranks_of
from runtime.mesh import Mesh, make_mesh
from runtime.sums import add_up, sum_into
from tests.equivalence.compare import rectangles, same_places
from tests.equivalence.plain import plain
from tests.equivalence.problems import Sentences
from tests.ranks import sharing
from tests.remote import on_ranks
from training.launch.compare_ranks import check_replicas
from training.launch.world import World
from training.layouts.layout import Setup
from training.layouts.sharded import Sharded
from training.layouts.stages import Staged
from training.options import Options

# Batches of eight sentences and of two, where one of three replicas has none.
PROBLEM = Sentences(10, 8, n_head=6, n_embd=24)  # heads for two and for three tensor ranks


@contextmanager
def adding_backwards(mesh: Mesh) -> Iterator[None]:
    """Inside, the replicas of this rank add up their gradients from the last to the first, if it is
    the second on its other axis; and so do the tensor ranks of all replicas but the first."""
    after = mesh["pp"].rank + mesh["tp"].rank > 0
    groups = [mesh[DATA_AXES].group] * after + [mesh["tp"].group] * (mesh[DATA_AXES].rank > 0)
    all_reduce: Any = dist.all_reduce

    def reduced(x: Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
        if group not in groups:
            return all_reduce(x, *args, group=group, **options)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        x.copy_(add_up(parts[::-1]))
        return SimpleNamespace(wait=lambda: None)

    changes: dict[str, Any] = {
        "torch.distributed.all_reduce": reduced,
        "runtime.communicator.sum_into": lambda x, terms, *how: sum_into(x, terms[::-1], *how),
    }
    with ExitStack() as stack:
        for name, changed in changes.items() if after else list(changes.items())[:1]:
            stack.enter_context(patch(name, changed))
        yield


@cache
def reference() -> Any:
    """The first step of one process."""
    found = plain(PROBLEM, 1, torch.float32)
    return {key: value for key, value in found.items() if key[0] == "gradient"}


@pytest.mark.parametrize(
    ("pp", "tp", "zero", "sequence"),
    [
        (2, 1, 0, False), (2, 1, 1, False), (1, 2, 0, False), (1, 2, 1, False), (1, 2, 1, True),
        (1, 2, 3, False), (1, 3, 0, True),
    ],
)  # fmt: skip
@on_ranks(6)
def test_copies_stay_equal_in_whatever_order_groups_add(
    rank: int, world_size: int, pp: int, tp: int, zero: Literal[0, 1, 3], sequence: bool
) -> None:
    """Raises RunError if the gradients of copies differ in one of two steps. (In the weights their
    last bits show later.)"""
    world = World(rank, world_size)
    ranks = {"dp": 6 // (pp * tp), "pp": pp, "tp": tp, "zero": zero}
    mesh = make_mesh(ranks_of(ranks), 60.0)
    task = PROBLEM.task(world, torch.float32)
    options = Options(num_microbatches=2, zero=zero or None, sequence_parallel=sequence)
    setup = Setup(options, partial(torch.optim.SGD, lr=0.1), cut=(3, 3) if pp > 1 else None)
    with sharing(False), adding_backwards(mesh):
        model: Any = (Sharded if zero == 3 else Staged)(task, world, setup, mesh)
        steps = [*enumerate(task.steps(0, model.dp_rank, model.dp_size, 2), 1)]
        for number, step in reversed(steps):
            model.optimizers[0].zero_grad()
            model.backward(step)
            copies = [x for x in model.held if {"pp", "tp"} & {*x.replicas}]
            assert copies
            gradients = {x.label: x.of(x.parameter.grad) for x in copies}
            check_replicas(world, gradients, f"in step {number}")
        # Nor are they anything else: nothing is left of the other step, which updated nothing.
        found = rectangles(model, "gradient", 1, lambda p: p.grad)
        wanted = same_places(reference(), found).items()
        torch.testing.assert_close(found, {key: value for key, value in wanted if value})
        model.close()

"""A short form of the table. tests/mutants has wrong lines that turn its rows red."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from inspect import isabstract
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pipeline.schedules.catalogue import SCHEDULES
from tests.equivalence import table
from tests.equivalence.compare import check
from tests.equivalence.plain import Key, Reference, of_arrays, plain, to_arrays
from tests.equivalence.problems import Problem
from tests.equivalence.table import ODD, TABLE, find
from tests.ranks import Ranks, nan_in_new_memory
from training.launch.world import World
from training.layouts import layout
from training.tasks.sequences import SequenceTask


@cache
def reference(problem: Problem, steps: int) -> Reference:
    return plain(problem, steps, torch.float64)


def on_a_rank(
    rank: int,
    world_size: int,
    name: str,
    arrays: dict[Key, Any],
    steps: int,
    draws: bool,
    dtype: torch.dtype,
) -> str:
    """What is said of a row, beside the reference. `draws`: dropout is not hashed, but drawn."""
    row, world = find(name), World(rank, world_size)
    drawn = patch.object(SequenceTask, "_keys", lambda *_: None) if draws else nullcontext()
    with drawn, nan_in_new_memory():
        return check(row, of_arrays(arrays), world, steps, dtype).failure


def failure(
    world: Ranks | None,
    name: str,
    steps: int = 2,
    draws: bool = False,
    dtype: torch.dtype = torch.float64,
) -> str:
    """The same; all ranks say the same."""
    arrays = to_arrays(reference(find(name).problem, steps))
    args = (name, arrays, steps, draws, dtype)
    said = [on_a_rank(0, 1, *args)] if world is None else world.run(on_a_rank, *args)
    assert said == [said[0]] * len(said)
    return str(said[0])


# The short form: every layout, way of averaging, ZeRO stage and schedule, on text and on
# pictures, and what is special in each, once. (Meshes have dropout.) `make verify` runs all there
# are; tests/project/test_losses.py has more.
SHORT = """
    single-one_more single-dropout threads2-gpipe-m3 threads2-1f1b-auto threads2-zb-clipped
    threads2-zb-same_length threads2-zb-recompute_sqrt threads2-interleaved-v2_m3
    threads2-sequential-m4 threads2-dualpipev-v2_m8 threads3-vhalf-v2_m3 threads3-vmin-v2_m3
    threads3-zb-cut_6_1_1
    module3-gpt2 blocks2-one_by_one blocks3-resumed ddp2-flat-no_target ddp2-overlap-m2
    ddp2-gloo-none_left ddp2-overlap-vgg16 fsdp2-zero2-one_more fsdp2-zero3-m2 fsdp2-zero3-gloo
    fsdp3-zero3-none_left pipeline2-1f1b-m8 pipeline2-zb-untied pipeline2-interleaved-resumed
    pipeline2-zbv-vgg16 mesh2-1x1x2 mesh2-1x1x2-sequence mesh2-1x1x2-odd mesh2-1x1x2-untied
    mesh2-1x1x2-sequence-full
    mesh2-2x1x1 mesh2-2x1x1-zero1 mesh3-1x1x3-sequence mesh4-2x1x2-sequence-zero3
    mesh4-2x2x1-zero1-resumed
    mesh2-1x1x2-recompute_always mesh4-2x2x1-zero1 single-experts-top1
    ddp2-flat-bias single-bias single-z mesh2-ep2 mesh2-ep2-zero1-bias
    mesh2-ep2-zero3-recompute_always mesh4-dp4-ep2-zero3
    mesh4-dp4-ep4-none_left mesh4-ep2-pp2-zb-zero1 mesh4-dp4-ep2
    context2-ring context2-heads-no_target context3-ring-one_each context3-heads-zero3
    mesh4-1x2x1-cp2-zb mesh4-2x1x1-cp2-none_left context2-experts context2-experts-bias
    mesh4-ep2-cp2-zero3-bias hybrid4-shards2-zero3
    hybrid4-shards2-zero1-gloo hybrid4-shards2-zero3-none_left hybrid4-shards2-zero3-ep2
    single-documents module2-documents pipeline2-zb-documents context2-heads-documents
    mesh4-1x1x2-cp2-sequence-documents
    context2-experts-documents mesh2-ep2-bias-muon
    single-experts-muon ddp2-muon threads2-zb-muon fsdp2-zero3-muon-resumed fsdp3-zero3-gloo-muon
    mesh2-1x1x2-muon context2-ring-zero3-muon mesh4-2x1x2-zero1-muon mesh4-2x2x1-zero1-muon
    mesh4-dp4-ep2-zero3-muon hybrid4-shards2-zero1-muon pipeline2-zbv-muon
"""

IN_BF16 = ["single-dropout", "mesh2-1x1x2-sequence", "context2-ring", "context2-heads", "mesh2-ep2"]


def kinds(names: Iterable[str]) -> set[str]:
    """Layouts and schedules in the names of rows."""
    words = [name.split("-") for name in names]
    return {first.rstrip("0123456789") for first, *_ in words} | {*chain(*words)} & {*SCHEDULES}


def test_the_short_form_has_every_layout_and_schedule() -> None:
    """So that a new one is not tried by `make verify` alone."""
    assert kinds(SHORT.split()) == kinds(row.name for row in TABLE) > {*SCHEDULES}


def test_every_layout_has_rows() -> None:
    for path in Path(layout.__file__ or "").parent.glob("[a-z]*.py"):
        import_module(f"training.layouts.{path.stem}")
    classes = [layout.LaidOutModel]
    for known in classes:
        classes += known.__subclasses__()  # the list grows while it is gone through
    built = {known.__name__ for known in classes if not isabstract(known)}
    assert len(built) > 4 and built <= {*vars(table)}


@pytest.mark.parametrize("name", SHORT.split())
def test_a_layout_is_one_process(world_of: Callable[[int], Ranks | None], name: str) -> None:
    steps = 3 if "-dropout" in name else 2  # the third is of the second epoch: other masks
    assert failure(world_of(find(name).ranks), name, steps) == ""


@pytest.mark.parametrize("name", IN_BF16)
def test_a_layout_in_bf16_is_one_process_up_to_rounding(
    world_of: Callable[[int], Ranks | None], name: str
) -> None:
    assert failure(world_of(find(name).ranks), name, steps=1, dtype=torch.bfloat16) == ""


def test_steps_without_target_or_finite_loss_are_left_out(ranks: Ranks) -> None:
    """Also the last one of an epoch, which has one example: fewer than ranks."""
    expected = reference(ODD, 7)
    assert [k for k in range(1, 8) if expected["loss", "", k].isnan()] == [2, 3]
    for name in ("ddp2-overlap-odd", "fsdp2-zero3-odd", "pipeline2-1f1b-odd"):
        assert failure(ranks, name, steps=7) == ""
    for name in ("single-odd", "threads2-zb-odd", "blocks2-odd"):
        assert failure(None, name, steps=7) == ""


def test_a_rank_may_have_no_target_but_never_all() -> None:
    row, targets = find("ddp2-flat-no_target"), []
    for rank in range(2):
        steps = row.problem.task(World(rank, 2), torch.float64).steps(0, rank, 2, 1)
        targets.append([sum(map(len, step.targets)) for step in steps])
    assert min(map(min, targets)) == 0
    assert min(map(sum, zip(*targets, strict=True))) > 0


def test_random_numbers_are_drawn_again(ranks: Ranks) -> None:
    """GPT-2's dropout is hashed; here it draws on the ranks, as other models do."""
    for name in ("fsdp2-zero3-recompute_always", "pipeline2-gpipe-recompute_sqrt"):
        assert failure(ranks, name, draws=True) == ""
    drawn = failure(ranks, "mesh2-1x1x2", draws=True)  # other masks than in one process
    assert drawn.startswith(("gradient of ", "weight of "))

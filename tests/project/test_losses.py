"""Every program, under every layout, computes and translates what one process does. And
the functions that the course asks for are those that the programs run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from data_parallel import dataset
from tests.project.conftest import Learn, WorldOf
from tests.project.programs import FLOW, VGG, assert_same_run, finish, losses, run
from tests.ranks import Ranks
from training.launch.errors import RunError
from training.tasks import tokens as data

pytestmark = pytest.mark.usefixtures("elsewhere")


def refuse_the_whole(_: int, patches: pytest.MonkeyPatch) -> None:
    """No rank needs the whole model, not even to translate."""

    def refuse(*_: Any) -> Any:
        raise RunError("the whole model is asked for")

    for module in ("tasks.task", "layouts.replicated", "layouts.threads"):
        patches.setattr(f"training.{module}.whole_model", refuse)


LAYOUTS = [
    ("pairs", 1, f"run_pipeline {FLOW} --n_chunk 4 --pipeline blocks"),
    ("pairs", 2, "run_data_parallel --gradient_sync per_parameter --num_microbatches 2"),
    ("dropout", 2, "run_data_parallel --bucket_mb 0.002"),
    ("text", 2, "train tensor --sequence_parallel"),
    ("dropout", 3, "train fsdp"),  # of the last batch the third rank has no part
    ("dropout", 4, "train 3d --pp 2 --tp 2 --sequence_parallel"),
    ("dropout", 4, "train 3d --cp 2 --pp 2"),  # each pipeline translates a half
    ("experts", 2, "train ddp --ep 2"),  # of three sentences, one rank translates two
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "n", "line"), LAYOUTS, ids=[" ".join(map(str, x)) for x in LAYOUTS]
)
def test_a_layout_is_one_process(
    learned: Learn, world_of: WorldOf, what: str, n: int, line: str
) -> None:
    one = learned(what)
    assert losses(one.workdir)[-1] < losses(one.workdir)[0]
    cut = line.startswith(("train fsdp", "train 3d"))
    finish(f"{line} {one.line}", world_of(n), refuse_the_whole if cut else None)
    assert_same_run("work", one.workdir)


def break_it(_: int, patch: pytest.MonkeyPatch, function: str) -> None:
    """Puts a broken function in the place of `function`."""
    patch.setattr(function, partial(_broken, function.split(".")[-1]))


def _broken(name: str, *args: Any, **options: Any) -> Any:
    if name == "average_gradients":
        return None  # every rank keeps its own
    if name == "partition_dataset":  # as if all had the first rank's
        return dataset.partition_dataset(0, *args[1:], **options)
    batch = data.collate_batch(*args, **options)
    batch["label_token_weights"][0] = 0  # the first sentence teaches nothing
    return batch


SYNC = "run_data_parallel --gradient_sync per_parameter --num_microbatches 1 "
USED = [
    ("training.tasks.sequences.partition_dataset", SYNC),
    ("training.tasks.sequences.collate_batch", "train pipeline "),
    ("training.tasks.vgg.partition_dataset", "train ddp --check_weights --num_batches 2 "),
    ("training.layouts.replicated.average_gradients", SYNC),
]


@pytest.mark.parametrize(("function", "line"), USED, ids=[f"{f} {line}" for f, line in USED])
def test_a_broken_function_of_the_course_changes_the_run(
    learned: Learn, ranks: Ranks, function: str, line: str
) -> None:
    pairs = learned("pairs")
    one_step = pairs.line.replace("--n_epochs 2 --warmup_steps 2", "--num_batches 1")
    more = VGG if "vgg" in function else one_step
    _, error = run(line + more, ranks, partial(break_it, function=function))
    if function.endswith("average_gradients"):
        assert error is not None and error.startswith("replicas differ in epoch 1: ")
    elif "vgg" in function:
        assert error is not None and error.startswith("ddp: weights are not those of one process")
    else:
        assert error is None
        assert losses()[0] != pytest.approx(losses(pairs.workdir)[0], rel=1e-3)

"""Every program, under every layout, computes the losses of one process. And the functions that the
course asks for are those that the programs run."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from data_parallel import dataset
from tests.project.programs import FLOW, TINY, VGG, run, summary
from tests.ranks import Ranks
from training import data

pytestmark = pytest.mark.usefixtures("elsewhere")

# Batches that three ranks, or four micro-batches, do not divide; sentences that leave no target
# within 24 tokens; warm-up, decay, and a norm that clips some steps.
ODD = TINY + (
    "--dropout 0 --precision fp64 --n_epochs 2 --warmup_steps 2 --lr_scheduler cosine "
    "--max_grad_norm 1.2 --model_max_length 24 --n_test 2 "
)
# In float64 a sum of a thousand terms is off by 1e-13. AdamW, which divides a gradient by its size,
# makes little more of it in eight steps. A micro-batch counted twice is off in the second digit.
SAME = 1e-9


def losses(workdir: str = "work") -> list[float]:
    """Of every step, NaN where it had no target; and at the end on validation data."""
    found = summary(workdir)
    every = [*found["loss"], found["validation_loss"]]
    return [math.nan if loss is None else loss for loss in every]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """By model: one process, the whole batch."""
    folder, found = tmp_path_factory.mktemp("one"), {}
    for name, line in (("gpt2", ODD), ("vgg", VGG + "--precision fp64 --n_epochs 2 ")):
        assert run(f"train single {line} --num_microbatches 1 --workdir {folder / name}")[1] is None
        found[name] = losses(str(folder / name))
        assert len(found[name]) == 8 + 1 and found[name][-1] < found[name][0]
    return found


HERE = [
    "run_pipeline --model_parallel_mode model_parallel",
    f"run_pipeline {FLOW} --schedule gpipe --balance 1,1",
    f"run_pipeline {FLOW} --schedule zb --num_devices 3 --n_chunk 6",
    f"run_pipeline {FLOW} --n_chunk 4 --pipeline blocks",
    "run_data_parallel --world_size 1",  # which chooses micro-batches of like lengths
]


@pytest.mark.parametrize("line", HERE)
def test_in_one_process(reference: dict[str, list[float]], line: str) -> None:
    check(reference["gpt2"], None, line, ODD)


ON_RANKS = [
    "run_data_parallel --gradient_sync per_parameter --num_microbatches 2",
    "run_data_parallel --gradient_sync flat --num_microbatches 1",
    "run_data_parallel --bucket_mb 0.002",
    "train ddp",
    "train fsdp --zero 1 --num_microbatches 2",
    "train pipeline --num_microbatches 3 --schedule interleaved",
    "train pipeline --schedule zb --balance 1,1",
]


@pytest.mark.parametrize("line", ON_RANKS)
def test_on_two_ranks(reference: dict[str, list[float]], ranks: Ranks, line: str) -> None:
    check(reference["gpt2"], ranks, line, ODD)


@pytest.mark.parametrize("line", ["run_data_parallel", "train fsdp"])
def test_on_three_ranks_one_of_which_has_no_part_of_the_last_batch(
    reference: dict[str, list[float]], three_ranks: Ranks, line: str
) -> None:
    check(reference["gpt2"], three_ranks, line, ODD.replace("--n_test 2", "--n_test 3"))


@pytest.mark.parametrize("strategy", ["fsdp", "model"])
def test_of_vgg16(reference: dict[str, list[float]], ranks: Ranks, strategy: str) -> None:
    check(reference["vgg"], ranks, f"train {strategy}", VGG + "--precision fp64 --n_epochs 2 ")


def check(expected: list[float], ranks: Ranks | None, line: str, more: str) -> None:
    """Runs it; compares its losses."""
    printed, error = run(f"{line} {more}", ranks)
    assert error is None, printed
    assert losses() == pytest.approx(expected, rel=SAME, nan_ok=True)


# ------------------------------------------------------------ what the course asks for is what runs


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
    ("training.sequences.partition_dataset", SYNC),
    ("training.sequences.collate_batch", "train pipeline "),
    ("training.sequences.collate_batch", SYNC),
    ("training.vgg.partition_dataset", "train ddp "),
    ("training.replicated.average_gradients", SYNC),
]


@pytest.mark.parametrize(("function", "line"), USED, ids=[f"{f} {line}" for f, line in USED])
def test_a_broken_function_of_the_course_changes_the_run(
    reference: dict[str, list[float]], ranks: Ranks, function: str, line: str
) -> None:
    model = "vgg" if "vgg" in function else "gpt2"
    more = VGG + "--precision fp64 --n_epochs 2 " if model == "vgg" else ODD
    _, error = run(line + more, ranks, partial(break_it, function=function))
    if function.endswith("average_gradients"):
        assert error is not None and error.startswith("replicas have come apart in epoch 1: ")
        return
    assert error is None
    assert losses() != pytest.approx(reference[model], rel=1e-3, nan_ok=True)

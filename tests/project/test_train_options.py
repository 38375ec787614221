"""The options of project/train.py: what is chosen where nothing is said, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from project import strategies
from project.recipes import plan_of
from project.tasks import make_task, read_data
from project.train import parse
from training.launch import UserError, World

pytestmark = pytest.mark.usefixtures("elsewhere")

# Options that cannot work: the line, how what is said begins, and how it ends.
BAD: list[tuple[str, str, str]] = [
    ("ddp --num_workers 3 --batch_size 2", "--batch_size 2 --num_workers 3: ", "2 or less works"),
    ("ddp --num_workers 3 --n_train 2", "--n_train 2 --num_workers 3: ", "2 or less works"),
    ("fsdp --num_workers 3 --n_validation 2", "--n_validation 2 --num_workers 3: ", "less works"),
    ("single --num_workers 2", "single --num_workers 2: ", "ddp takes several"),
    ("pipeline --num_workers 17", "pipeline --num_workers 17: vgg16 has 16 ", "16 or less works"),
    (
        "model --num_workers 7 --model gpt2-mini --n_layer 2",
        "model --num_workers 7: gpt2-mini has 6 layers",
        "--num_workers 6 or less works",
    ),
    ("pipeline --balance 9,8", "--num_workers 2 --balance='9,8': ", "uniform or 8,8"),
    ("ddp --balance uniform", "ddp --balance uniform: ", "option of pipeline and model"),
    ("ddp --schedule gpipe", "ddp --schedule gpipe: ", "option of pipeline"),
    ("pipeline --zero 2", "pipeline --zero 2: ", "option of fsdp"),
    ("model --num_microbatches 2", "model --num_microbatches 2: ", "it is pipeline"),
    (
        "pipeline --num_microbatches 33",
        "--num_microbatches 33 --batch_size 32: ",
        "--num_microbatches 32 or less works",
    ),
    ("ddp --model gpt3", "--model gpt3: ", "gpt2-large, gpt2-xl"),
    ("ddp --model gpt2 --n_embd 770", "--n_layer 12 --n_embd 770 --n_head 12: ", "--n_head 4"),
    ("ddp --n_layer 2", "--n_layer 2 --model vgg16: ", "gpt2-large, gpt2-xl"),
    ("ddp --dropout 0.1", "--dropout 0.1 --model vgg16: ", "gpt2-large, gpt2-xl"),
    (
        "ddp --model gpt2-mini --dropout 0.1 --check_weights",
        "--dropout 0.1 with --check_weights or --check_output: ",
        "--dropout 0 works",
    ),
    ("ddp --save_every 3 --keep 0", "--save_every 3 --keep 0: ", "--keep 1 works"),
    ("ddp --workdir file", "--workdir file: nothing can be written", "--workdir workdir"),
]


@pytest.mark.parametrize(("line", "begin", "end"), BAD, ids=[line for line, _, _ in BAD])
def test_bad_options(line: str, begin: str, end: str) -> None:
    Path("file").touch()
    with pytest.raises(UserError) as error:
        parse(line.split())
    said = str(error.value)
    assert (said[: len(begin)], said[-len(end) :]) == (begin, end)
    assert "\n" not in said


@pytest.mark.parametrize(
    "line",
    ["", "dpp", "ddp --num_workers 0", "fsdp --zero 4", "pipeline --schedule sequential",
     "ddp --optimizer lamb", "ddp --precision fp8", "ddp --momentum 1", "ddp --vgg_width 0"],
)  # fmt: skip
def test_bad_values(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(line.split())
    assert end.value.code == 2
    assert "error: " in capfd.readouterr().err


def test_warm_ups_end_before_the_run() -> None:
    for line in ("--num_batches 5 --warmup_steps 5", "--n_train 64 --warmup_steps 2"):
        with pytest.raises(UserError, match=r"^--warmup_steps .* works$"):
            read_data(parse(["ddp", *line.split()]))
    read_data(parse(["ddp", "--num_batches", "5", "--warmup_steps", "4", "--n_train", "64"]))


def test_there_are_as_many_micro_batches_as_asked_for() -> None:
    args = parse(["pipeline", "--batch_size", "8", "--n_train", "11", "--num_microbatches", "5"])
    task = make_task(args, World(), read_data(args))
    sizes = [[len(x) for x in step.inputs] for step in task.steps(0, 0, 1, args.num_microbatches)]
    assert sizes == [[2, 2, 2, 1, 1], [1, 1, 1]]


def test_what_is_not_given() -> None:
    args = parse(["pipeline"])
    assert (args.num_workers, args.workdir, args.model) == (2, Path("workdir/pipeline2"), "vgg16")
    assert (args.schedule, args.balance, args.dropout, args.n_epochs) == ("1f1b", "auto", 0.0, 1)
    assert (args.batch_size, args.cores_per_worker, args.num_batches) == (32, 1, None)
    assert parse(["single"]).workdir == Path("workdir/single1")
    assert parse(["fsdp", "--num_workers", "3"]).zero == 3


def test_torchrun_decides_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert parse(["ddp"]).num_workers == 3
    with pytest.raises(UserError, match="torchrun started 3 ranks; leave it out"):
        parse(["ddp", "--num_workers", "2"])


def test_workers_that_hand_each_other_tensors_need_a_gpu_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or none; whole models may share one."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for strategy in ("fsdp", "pipeline", "model"):
        for device in ("auto", "cuda"):
            with pytest.raises(UserError) as error:
                parse([strategy, "--device", device])
            assert str(error.value) == (
                f"{strategy} --num_workers 2 --device {device}: 1 GPU is visible, and every worker "
                "needs one; --num_workers 1, or --device cpu, works"
            )
        for works in ("--num_workers 1", "--device cpu"):
            assert parse([strategy, *works.split()]).strategy == strategy
    assert parse(["ddp", "--device", "cuda"]).num_workers == 2
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert parse(["pipeline", "--num_workers", "3"]).num_workers == 3
    with pytest.raises(UserError, match=r": 3 GPUs are visible, .*; --num_workers 3, or"):
        parse(["fsdp", "--num_workers", "4"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # on each of four machines
    assert parse(["fsdp"]).num_workers == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError, match="; --nproc-per-node 3, or --device cpu, works"):
        parse(["fsdp"])


def test_a_neighbour_may_be_silent_for_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun nobody else notices that a rank is stopped."""
    args = parse(["pipeline", "--timeout", "7"])
    task: Any = SimpleNamespace(
        dtype=torch.float32, skeleton=lambda: nn.Linear(1, 1), layers=lambda model: [model],
        initialize=None,
    )  # fmt: skip
    pipes: list[dict[str, Any]] = []

    def make(*_: Any, **options: Any) -> Any:
        pipes.append(options)
        raise LookupError

    monkeypatch.setattr(strategies, "cut_into_stages", lambda *_: [1])
    monkeypatch.setattr(strategies, "ProcessPipe", make)
    with pytest.raises(LookupError):
        strategies.Pipeline(task, World(), plan_of(args, World(), task))
    assert [pipe["timeout"] for pipe in pipes] == [7.0]

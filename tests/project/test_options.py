"""Command lines that cannot work: each is refused with its value and one that works."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from project import run_pipeline
from project.options import launch_settings, open_timeline
from project.rules import check_model, check_warmup
from project.run_data_parallel import parse
from project.session import read_texts
from training.data import train_tokenizer
from training.launch import Settings, UserError, World
from training.model import build_model, gpt2_config


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default workdir is made in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# What argparse refuses by itself: the options, and what its line must contain.
BAD_VALUES: list[tuple[str, list[str]]] = [
    ("--world_size 0", ["--world_size", "0 must be a whole number, 1 or more"]),
    ("--save_every 0", ["--save_every", "0 must be a whole number, 1 or more"]),
    ("--keep -1", ["--keep", "-1 must be a whole number from 0 to"]),
    ("--world_size -2", ["--world_size", "-2 must be a whole number, 1 or more"]),
    ("--n_epochs two", ["--n_epochs", "two must be a whole number, 1 or more"]),
    ("--batch_size 1.5", ["--batch_size", "1.5 must be a whole number, 1 or more"]),
    ("--n_train 0", ["--n_train", "0 must be a whole number, 1 or more"]),
    ("--n_test none", ["--n_test", "none must be a whole number, 1 or more"]),
    ("--model_max_length 0", ["--model_max_length", "0 must be a whole number, 1 or more"]),
    ("--n_layer 0", ["--n_layer", "0 must be a whole number, 1 or more"]),
    ("--accumulation_steps 0", ["--accumulation_steps", "0 must be a whole number, 1 or more"]),
    ("--cores_per_rank 0", ["--cores_per_rank", "0 must be a whole number, 1 or more"]),
    ("--learning_rate 0", ["--learning_rate", "0 must be a positive, finite number, as 0.5"]),
    ("--learning_rate nan", ["--learning_rate", "nan must be a positive, finite number"]),
    ("--lr_scheduler step", ["--lr_scheduler", "'step'", "constant", "linear", "cosine"]),
    ("--warmup_steps -1", ["--warmup_steps", "-1 must be a whole number from 0 to 4294967295"]),
    ("--warmup_steps 0.1", ["--warmup_steps", "0.1 must be a whole number from 0 to 4294967295"]),
    ("--max_grad_norm 0", ["--max_grad_norm", "0 must be a positive, finite number, as 0.5"]),
    ("--max_grad_norm inf", ["--max_grad_norm", "inf must be a positive, finite number, as 0.5"]),
    ("--on_nan ignore", ["--on_nan", "'ignore'", "stop", "skip"]),
    ("--timeout inf", ["--timeout", "inf must be a positive, finite number, as 0.5"]),
    ("--bucket_mb big", ["--bucket_mb", "big must be a positive, finite number, as 0.5"]),
    ("--dropout 1", ["--dropout", "1 must be at least 0 and less than 1, as 0.1"]),
    ("--dropout -0.1", ["--dropout", "-0.1 must be at least 0 and less than 1, as 0.1"]),
    ("--dropout much", ["--dropout", "much must be at least 0 and less than 1, as 0.1"]),
    ("--seed -1", ["--seed", "-1 must be a whole number from 0 to 4294967295"]),
    ("--seed 4294967296", ["--seed", "4294967296 must be a whole number from 0 to 4294967295"]),
    ("--pytest yes", ["--pytest", "yes is neither True nor False"]),
    ("--padding shortest", ["--padding", "'shortest'", "longest", "max_length"]),
    ("--precision fp8", ["--precision", "'fp8'", "fp32", "bf16"]),
    ("--device tpu", ["--device", "'tpu'", "auto", "cpu", "cuda", "mps"]),
    ("--gradient_sync ring", ["--gradient_sync", "'ring'", "per_parameter", "flat", "overlap"]),
    ("--comm_dtype fp16", ["--comm_dtype", "'fp16'", "fp32", "bf16"]),
    ("--master_port http", ["--master_port", "http must be a port from 0 (any free one) to 65535"]),
    ("--n_layers 3", ["unrecognized arguments: --n_layers 3"]),
    ("--world 2", ["unrecognized arguments: --world 2"]),
]


@pytest.mark.parametrize(("line", "words"), BAD_VALUES, ids=[line for line, _ in BAD_VALUES])
def test_bad_values(line: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(line.split())
    assert end.value.code == 2
    said = capsys.readouterr().err.rstrip().split("\n")[-1]
    assert [word for word in words if word not in said] == [], said


# What does not fit together: the options, how the line begins, and how it ends.
BAD_COMBINATIONS: list[tuple[str, str, str]] = [
    ("--batch_size 3", "--batch_size 3: batch size 3 on 2 ranks: ", "for example 2"),
    ("--batch_size 1", "--batch_size 1: batch size 1 on 2 ranks: ", "for example 2"),
    (
        "--batch_size 30 --world_size 4",
        "--batch_size 30: batch size 30 on 4 ranks: ",
        "for example 28",
    ),
    (
        "--n_train 3 --world_size 4",
        "--world_size 4 --n_train 3: ",
        "--world_size 3 or less works",
    ),
    (
        "--comm_dtype bf16 --gradient_sync flat",
        "--comm_dtype bf16 --gradient_sync flat: ",
        "--gradient_sync overlap travel in another type",
    ),
    ("--n_head 3", "--n_layer 4 --n_embd 256 --n_head 3: ", "--n_embd 256 --n_head 4"),
    ("--model gpt2 --n_embd 770", "--n_layer 12 --n_embd 770 --n_head 12: ", "--n_head 4"),
    ("--vocab_size 258", "--vocab_size 258: ", "at least 259 tokens; --vocab_size 2048 works"),
    ("--model . --n_layer 2", "--n_layer with --model .: ", "gpt2-large, gpt2-xl)"),
    ("--model . --vocab_size 400", "--vocab_size with --model .: ", "gpt2-large, gpt2-xl)"),
    ("--model .", "--model .: the folder holds no weights", "gpt2-large, gpt2-xl"),
    ("--model gpt-2", "--model gpt-2: no GPT-2 weights come from this name", "gpt2-large, gpt2-xl"),
    ("--save_every 9 --keep 0", "--save_every 9 --keep 0: no checkpoint", "--keep 1 works"),
    ("--export file", "--export file: something else is there", "--export file_gpt2"),
    ("--export file/sub", "--export file/sub: nothing can be", "--export exported"),
    ("--workdir file", "--workdir file: nothing can be written there", "--workdir workdir"),
    ("--workdir file/sub", "--workdir file/sub: nothing can be", "--workdir workdir"),
]


@pytest.mark.parametrize(
    ("line", "begin", "end"), BAD_COMBINATIONS, ids=[line for line, _, _ in BAD_COMBINATIONS]
)
def test_bad_combinations(line: str, begin: str, end: str) -> None:
    Path("file").touch()
    with pytest.raises(UserError) as error:
        parse(line.split())
    said = str(error.value)
    assert (said[: len(begin)], said[-len(end) :]) == (begin, end)
    assert "\n" not in said


@pytest.mark.parametrize(
    "line",
    [
        "--batch_size 2",
        "--batch_size 28 --world_size 4",
        "--n_train 3 --world_size 3 --batch_size 3",
        "--n_train all --n_validation all --n_test all",
        "--comm_dtype bf16 --gradient_sync overlap",
        "--n_layer 4 --n_embd 256 --n_head 4",
        "--vocab_size 259",
        "--vocab_size 2048",
        "--dropout 0",
        "--seed 4294967295",
        "--pytest True",
        "--workdir a/new/folder",
        "--keep 0",
        "--save_every 9 --keep 1",
    ],
)
def test_what_messages_propose_works(line: str) -> None:
    args = parse(line.split())
    assert list(args.workdir.iterdir()) == []


def test_what_is_not_given() -> None:
    args = parse([])
    assert vars(args) == {
        "dataset": "builtin", "src": "de", "tgt": "en",
        "n_train": 5000, "n_validation": 1000, "n_test": 100,
        "padding": "longest", "model_max_length": 128,
        "model": "auto", "n_layer": None, "n_embd": None, "n_head": None,
        "vocab_size": None, "dropout": 0.1,
        "n_epochs": 8, "batch_size": 64, "learning_rate": None, "precision": "fp32",
        "lr_scheduler": "constant", "warmup_steps": 0, "max_grad_norm": None, "on_nan": "stop",
        "seed": 0, "workdir": Path("workdir"), "device": "auto", "timeout": 300.0,
        "world_size": 2, "gradient_sync": "overlap", "bucket_mb": 4.0, "comm_dtype": "fp32",
        "accumulation_steps": None, "cores_per_rank": None, "master_port": None, "pytest": False,
        "timeline": None, "save_every": None, "keep": 2, "resume": False, "export": None,
    }  # fmt: skip


@pytest.mark.parametrize("program", [parse, run_pipeline.parse])
def test_a_timeline_of_no_steps_is_none(program: Any) -> None:
    """Of train.py, which records some where nothing is said, see test_train.py."""
    assert not open_timeline(program(["--timeline", "0"]), World()).recording
    assert open_timeline(program(["--timeline", "1"]), World()).recording


@pytest.mark.parametrize(
    ("line", "steps", "works"),
    [
        ("--n_epochs 2 --warmup_steps 10", 10, 1),  # 33 pairs in batches of 8: 5 steps an epoch
        ("--n_epochs 1 --warmup_steps 100", 5, 0),
        ("--n_epochs 8 --warmup_steps 40", 40, 4),
    ],
)
def test_a_warm_up_that_does_not_end(line: str, steps: int, works: int) -> None:
    args = parse([*line.split(), "--batch_size", "8"])
    with pytest.raises(UserError) as error:
        check_warmup(args, 33)
    assert str(error.value) == (
        f"--warmup_steps {args.warmup_steps}: the run has {steps} steps, and the warm-up must end "
        f"before the last; --warmup_steps {works} works"
    )
    for good in (works, steps - 1):
        args.warmup_steps = good
        check_warmup(args, 33)


def test_the_warm_up_is_checked_with_the_texts() -> None:
    args = parse(["--n_train", "33", "--n_epochs", "1", "--batch_size", "8", "--warmup_steps", "5"])
    with pytest.raises(UserError, match=r"^--warmup_steps 5: the run has 5 steps"):
        read_texts(args, 2)


def test_values_are_what_is_meant() -> None:
    args = parse(
        ["--n_train", "all", "--pytest", "True", "--learning_rate", "3e-4", "--n_test", "5"]
    )
    assert (args.n_train, args.pytest, args.learning_rate, args.n_test) == (None, True, 3e-4, 5)
    assert parse(["--pytest", "false"]).pytest is False


def test_launch_settings_are_those_of_the_options() -> None:
    line = "--world_size 4 --device cpu --master_port 1234 --timeout 5 --cores_per_rank 1"
    assert launch_settings(parse(line.split())) == Settings(4, "cpu", 1234, 5.0, 1)


def test_torchrun_decides_the_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse([]).world_size == 4
    with pytest.raises(
        UserError, match=r"^--world_size 2: torchrun started 4 ranks; leave it out$"
    ):
        parse(["--world_size", "2"])


def options(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(parse([])), **changes})


def test_a_folder_with_weights_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    model = build_model(gpt2_config("gpt2-mini", 300, 32, n_layer=1, n_embd=32, n_head=2), 0)
    model.save_pretrained(folder)
    train_tokenizer([{"de": "ja", "en": "yes"}], 259, "de", "en").save_pretrained(folder)
    check_model(options(model=str(folder), model_max_length=32))
    with pytest.raises(UserError, match=r"^--model_max_length 33 .* --model_max_length 32 works$"):
        check_model(options(model=str(folder), model_max_length=33))
    with pytest.raises(UserError, match=r"^--n_head with --model "):
        check_model(options(model=str(folder), n_head=4))


def test_auto_is_checked_as_the_smallest_preset() -> None:
    check_model(options(model="auto", n_head=8))
    with pytest.raises(UserError, match="--n_head 12"):
        check_model(options(model="auto", n_head=12))


IMPORTS = """
import sys
from project import run_data_parallel, run_pipeline, train
from training.launch import UserError

for parse, options in (
    (run_data_parallel.parse, ["--world_size", "65"]),
    (run_pipeline.parse, ["--n_chunk", "65"]),
    (train.parse, ["model", "--model", "gpt2-mini", "--num_microbatches", "2"]),
):
    try:
        parse(options)
    except UserError:
        continue
    raise AssertionError(f"{options} is accepted")
late = ("transformers", "sacrebleu", "datasets", "matplotlib", "torch._dynamo")
print(*(name for name in late if name in sys.modules))
"""


def test_what_only_ranks_need_is_imported_by_ranks() -> None:
    """It takes seconds, which everybody would wait for who has mistyped an option."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []

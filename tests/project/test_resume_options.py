"""--resume with other options than the checkpoint's: what is refused, and what is not."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from project import run_data_parallel, run_pipeline, train
from project.options import plain
from project.progress import MADE_BY, MAY_CHANGE, Resume, check_texts, find_resume
from training.checkpoint import Saver
from training.launch import UserError
from training.text import Texts

MADE = "--batch_size 8 --learning_rate 0.01 --n_epochs 5 --device cpu --n_train 50 --dropout 0"
NAME = "000001-epoch2-step3"
CHOSEN = {"model": "gpt2-mini", "n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 2560}
TEXTS = Texts({"train": [{"de": "ja", "en": "yes"}]})


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default workdir is made in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def checkpoint(line: str = MADE) -> None:
    """A checkpoint in the default workdir of a run with these options, in its third epoch."""
    options = plain(vars(run_data_parallel.parse(line.split())))
    state: dict[str, Any] = {
        "position": {"epoch": 2, "step": 3},
        "options": options,
        "resolved": {**options, **CHOSEN},
        "texts": TEXTS.fingerprint(),
        "totals": [],
    }
    Saver(Path("workdir/checkpoints"), 2).save("epoch2-step3", [], state)


def resume(line: str, program: Any = run_data_parallel) -> Resume:
    return find_resume(program.parse(["--resume", *line.split()]))


REFUSED: list[tuple[str, str, str]] = [
    ("--batch_size 16", "--batch_size 16", "--batch_size 8"),
    ("--seed 1", "--seed 1", "--seed 0"),
    ("--n_embd 128", "--n_embd 128", "--n_embd 256"),
    ("--n_layer 2", "--n_layer 2", "--n_layer 4"),
    ("--n_head 8", "--n_head 8", "--n_head 4"),
    ("--vocab_size 512", "--vocab_size 512", "--vocab_size 2560"),
    ("--model gpt2", "--model gpt2", "--model gpt2-mini"),
    ("--model_max_length 64", "--model_max_length 64", "--model_max_length 128"),
    ("--dropout 0.1", "--dropout 0.1", "--dropout 0.0"),
    ("--learning_rate 0.02", "--learning_rate 0.02", "--learning_rate 0.01"),
    ("--precision bf16", "--precision bf16", "--precision fp32"),
    ("--padding max_length", "--padding max_length", "--padding longest"),
    ("--dataset pairs", "--dataset pairs", "--dataset builtin"),
    ("--n_train all", "--n_train all", "--n_train 50"),
    ("--n_validation 10", "--n_validation 10", "--n_validation 1000"),
    ("--src en --tgt de", "--src en", "--src de"),
    ("--lr_scheduler linear", "--lr_scheduler linear", "--lr_scheduler constant"),
    ("--warmup_steps 2", "--warmup_steps 2", "--warmup_steps 0"),
    ("--max_grad_norm 1", "--max_grad_norm 1.0", "no --max_grad_norm"),
    ("--comm_dtype bf16", "--comm_dtype bf16", "--comm_dtype fp32"),
]


@pytest.mark.parametrize(("line", "now", "then"), REFUSED, ids=[line for line, *_ in REFUSED])
def test_refused(line: str, now: str, then: str) -> None:
    checkpoint()
    with pytest.raises(UserError) as error:
        resume(f"{MADE} {line}")
    assert str(error.value) == (
        f"{now} with --resume: {NAME} was made with {then}; {then} goes on from it, another "
        "--workdir starts anew"
    )


@pytest.mark.parametrize(
    "line",
    [
        "", "--n_epochs 3", "--n_epochs 50", "--world_size 4", "--save_every 7", "--keep 5",
        "--timeout 5", "--cores_per_rank 1", "--gradient_sync flat", "--bucket_mb 1",
        "--accumulation_steps 2", "--master_port 12345", "--export out", "--on_nan skip",
        "--model gpt2-mini", "--n_layer 4", "--n_embd 256 --n_head 4", "--vocab_size 2560",
    ],
)  # fmt: skip
def test_allowed(line: str) -> None:
    """Among them what the checkpoint's run chose by itself, now given."""
    checkpoint()
    found = resume(f"{MADE} {line}")
    assert found.checkpoint is not None
    assert found.epoch == 2


def test_the_other_program_goes_on() -> None:
    checkpoint()
    line = f"{MADE} --model_parallel_mode pipeline_parallel --num_devices 3 --n_chunk 2"
    assert resume(line, run_pipeline).checkpoint is not None
    with pytest.raises(UserError, match=r"^--seed 3 with --resume: "):
        resume(f"{line} --seed 3", run_pipeline)


def test_every_option_is_either_checked_or_listed() -> None:
    """What is new is checked until it is listed; what is listed is an option of some program."""
    options = {
        **vars(run_data_parallel.parse(["--device=cpu"])),
        **vars(run_pipeline.parse(["--device=cpu"])),
    }
    every = options.keys() | vars(train.parse(["ddp", "--device=cpu"])).keys()
    assert MAY_CHANGE - every == set()
    checked = {line.split()[0][2:] for line, *_ in REFUSED}
    assert options.keys() - MAY_CHANGE - checked == {"n_test", "tgt"}  # as n_validation, src


ALONE = {"run_data_parallel": "", "run_pipeline": "", "train": "ddp"}


@pytest.mark.parametrize("program", [run_data_parallel, run_pipeline, train])
def test_every_option_that_says_what_is_computed_is_refused(program: Any) -> None:
    """One after the other, whatever options there are."""
    line = ALONE[program.__name__.split(".")[1]].split()
    args = program.parse([*line, "--resume", "--device=cpu"])
    made = plain(vars(args))
    chosen = {**made, "model": made["model"].replace("auto", "gpt2-mini")}
    state = {"position": {"epoch": 0, "step": 3}, "options": made, "resolved": chosen, "both": []}
    Saver(args.workdir / "checkpoints", 2).save("epoch0-step3", [], state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MADE_BY, "both", "any")
        assert find_resume(args, "both").checkpoint is not None
        for option in vars(args).keys() - MAY_CHANGE:
            other = argparse.Namespace(**{**vars(args), option: "other"})
            with pytest.raises(UserError, match=rf"^--{option} other with --resume: 000001-epoch0"):
                find_resume(other, "both")


def test_the_workdir_may_have_another_name() -> None:
    checkpoint()
    Path("workdir").rename("moved")
    assert resume(f"{MADE} --workdir moved").checkpoint is not None


def test_fewer_epochs_than_are_done() -> None:
    checkpoint()
    with pytest.raises(UserError) as error:
        resume(f"{MADE} --n_epochs 2")
    assert str(error.value) == (
        f"--n_epochs 2 with --resume: {NAME} is in epoch 2, the first being 0; "
        "--n_epochs 3 or more works"
    )


def test_a_schedule_ends_where_it_was_to_end() -> None:
    made = f"{MADE} --lr_scheduler cosine"
    checkpoint(made)
    assert resume(made).checkpoint is not None
    with pytest.raises(UserError) as error:
        resume(f"{made} --n_epochs 6")
    assert str(error.value) == (
        f"--n_epochs 6 with --resume: {NAME} has a learning rate that falls over 5 epochs; "
        "--n_epochs 5 goes on from it"
    )


def test_other_texts_of_the_same_name() -> None:
    checkpoint()
    found = resume(MADE)
    check_texts(TEXTS, found)
    with pytest.raises(UserError) as error:
        check_texts(Texts({"train": [{"de": "ja", "en": "no"}]}), found)
    assert str(error.value) == (
        f"--resume: {NAME} was trained on other texts of the same name; another --workdir starts "
        "anew"
    )

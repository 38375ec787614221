"""Ranks on hosts of their own, one of which has something else: the run ends, and says what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from project import run_data_parallel, train, worker
from project.checkpoints import find
from project.progress import find_resume
from project.session import Session, read_texts
from project.tasks import read_data
from tests.ranks import Ranks
from training.data import train_tokenizer
from training.launch import RunError, World
from training.optimization import Optimizers

SIZES = [
    "--n_layer=1", "--n_embd=16", "--n_head=2", "--vocab_size=300", "--model_max_length=64",
    "--batch_size=7", "--n_train=20", "--n_validation=6", "--n_test=2", "--device=cpu",
    "--dropout=0", "--learning_rate=1e-2", "--model=gpt2-mini", "--n_epochs=2",
]  # fmt: skip
TAMPERS = {"texts": "--n_train=19", "seed": "--seed=1", "rate": "--learning_rate=2e-2"}


def leave_tokenizer(folder: Path) -> None:
    """What an earlier run on other texts has left."""
    pairs = [{"de": "Zwölf Boxkämpfer jagen Viktor.", "en": "Twelve boxers chase Viktor."}] * 9
    train_tokenizer(pairs, 300, "de", "en").save_pretrained(folder)


def drift(patches: pytest.MonkeyPatch) -> None:
    """A weight moves at the second epoch's first step."""
    step = Optimizers.step

    def move(self: Optimizers, *args: Any) -> Any:
        left_out = step(self, *args)
        if self.steps == 4:
            with torch.no_grad():
                self.optimizers[0].param_groups[0]["params"][0][0] += 1e-6
        return left_out

    patches.setattr(Optimizers, "step", move)


def tampered(
    rank: int, what: str, folder: Path, work: Callable[[list[str]], None]
) -> tuple[str | None, bool]:
    """How a rank's run ends, with a folder of its own and, on rank 1, something else; and whether
    it made a step."""
    mine = folder / str(rank)
    options = [*SIZES, f"--workdir={mine}"]
    made: list[bool] = []
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Session, "close", lambda _: None)
        patches.setattr(worker, "say", lambda *_: None)
        if rank == 1:
            options += [TAMPERS[what]] if what in TAMPERS else []
            if what == "tokenizer":
                leave_tokenizer(mine)
            elif what == "drift":
                drift(patches)
        step = Optimizers.step

        def noting(self: Optimizers, *args: Any) -> Any:
            made.append(True)
            return step(self, *args)

        patches.setattr(Optimizers, "step", noting)
        try:
            work(options)
        except RunError as error:
            return str(error), bool(made)
    return None, bool(made)


def data_parallel(rank: int, world_size: int, folder: Path, what: str) -> tuple[str | None, bool]:
    def work(options: list[str]) -> None:
        args = run_data_parallel.parse([*options, f"--world_size={world_size}"])
        texts = read_texts(args, world_size)
        run_data_parallel.run_dp(World(rank, world_size, rank), args, texts, find_resume(args))

    return tampered(rank, what, folder, work)


def strategy(
    rank: int, world_size: int, folder: Path, what: str, name: str
) -> tuple[str | None, bool]:
    def work(options: list[str]) -> None:
        args = train.parse([name, *options, f"--num_workers={world_size}"])
        data = read_data(args)
        worker.run_worker(World(rank, world_size, rank), args, data, find(args, data))

    return tampered(rank, what, folder, work)


START = "not the same as on rank 0: {} (rank 1); every host needs the same options, data, model, "
CASES = {
    "texts": START.format("--n_train (rank 1), the train data"),
    "seed": START.format("--seed"),
    "rate": START.format("--learning_rate"),
    "tokenizer": START.format("the tokenizer"),
}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("program", ["run_data_parallel", "ddp", "fsdp", "pipeline"])
def test_another_start_is_named_before_the_first_step(
    ranks: Ranks, tmp_path: Path, program: str, what: str
) -> None:
    if program == "run_data_parallel":
        ends = ranks.run(data_parallel, tmp_path, what)
    else:
        ends = ranks.run(strategy, tmp_path, what, program)
    for error, made_a_step in ends:
        assert error is not None and error.startswith(CASES[what])
        assert not made_a_step


@pytest.mark.usefixtures("elsewhere")
def test_replicas_that_come_apart_end_the_run_with_the_epoch(ranks: Ranks, tmp_path: Path) -> None:
    expected = (
        "replicas have come apart in epoch 1: transformer.wte.weight (rank 1, against rank 0)"
    )
    leave_tokenizer(tmp_path / "1")
    (tmp_path / "0").symlink_to(tmp_path / "1")  # one folder
    assert ranks.run(data_parallel, tmp_path, "drift") == [(expected, True)] * 2

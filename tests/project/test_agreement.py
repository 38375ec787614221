"""Ranks on hosts of their own, one of which has something else: the run ends, and says what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.project.programs import TINY, VGG, on_rank
from tests.ranks import Ranks
from training.data import train_tokenizer
from training.optimization import Optimizers

pytestmark = pytest.mark.usefixtures("elsewhere")

LINE = TINY + "--dropout 0 --n_epochs 2 "
TAMPERS = {"texts": "--n_train 19", "rate": "--learning_rate 2e-2"}


def one_is_other(
    rank: int, world_size: int, folder: Path, line: str, what: str
) -> tuple[str | None, bool]:
    """How a rank's run ends, with a folder of its own and, on rank 1, something else; and whether
    it made a step."""
    made: list[bool] = []
    step = Optimizers.step

    def tamper(_: int, patches: pytest.MonkeyPatch) -> None:
        def noting(self: Optimizers, *args: Any) -> Any:
            made.append(True)
            reason = step(self, *args)
            if what == "drift" and rank == 1 and self.steps == 5:  # in the second epoch
                with torch.no_grad():
                    for p in self.optimizers[0].param_groups[0]["params"]:
                        p.add_(1e-6)
            return reason

        patches.setattr(Optimizers, "step", noting)

    line += f" --workdir {folder}/host{rank} --world_size {world_size} "
    _, error = on_rank(rank, world_size, line + (TAMPERS.get(what, "") if rank else ""), tamper)
    return error, bool(made)


@pytest.mark.parametrize(
    ("program", "what", "named"),
    [
        ("run_data_parallel", "texts", "--n_train (rank 1 against rank 0), the train data"),
        ("train pipeline", "rate", "--learning_rate"),
    ],
)
def test_another_start_is_named_before_the_first_step(
    ranks: Ranks, program: str, what: str, named: str
) -> None:
    said = f"not the same on all ranks: {named} (rank 1 against rank 0); every host needs "
    for error, made_a_step in ranks.run(one_is_other, Path.cwd(), f"{program} {LINE}", what):
        assert error is not None and error.startswith(said)
        assert not made_a_step


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("train ddp --n_epochs 2 " + VGG, "conv1_1.weight"),
        ("train pipeline --balance 1,1 " + LINE, "transformer.wte.weight"),  # tied: on both stages
    ],
)
def test_replicas_that_come_apart_end_the_run_with_the_epoch(
    ranks: Ranks, line: str, name: str
) -> None:
    expected = f"replicas differ in epoch 2: {name} (rank 1 against rank 0)"
    for error, made_a_step in ranks.run(one_is_other, Path.cwd(), line, "drift"):
        assert error is not None and error.startswith(expected)
        assert made_a_step


def test_hosts_need_no_common_folder(ranks: Ranks) -> None:
    """Rank 0's tokenizer goes to all: what an earlier run has left on a host is no matter."""
    Path("host1").mkdir()
    other = [{"de": "Zwölf Boxkämpfer jagen Viktor.", "en": "Twelve boxers chase Viktor."}] * 9
    train_tokenizer(other, 300, "de", "en").save_pretrained("host1")
    assert (
        ranks.run(one_is_other, Path.cwd(), "run_data_parallel " + LINE, "") == [(None, True)] * 2
    )

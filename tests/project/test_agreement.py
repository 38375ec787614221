"""Ranks on different hosts, one of which has something different: the run ends, and says what."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.project.programs import KINDS, TINY, VGG, Tamper, on_rank
from tests.ranks import Ranks
from tests.remote import on_ranks
from training.launch.compare_ranks import check_same, compared_values
from training.launch.errors import RunError
from training.launch.world import World
from training.optimization import GlobalOptimizer
from training.tasks.tokens import get_tokenizer

pytestmark = pytest.mark.usefixtures("elsewhere")

LINE = TINY + "--dropout 0 --n_epochs 2 "


def drift(rank: int, patches: pytest.MonkeyPatch) -> None:
    """The weights of rank 1 change in the second epoch."""
    step = GlobalOptimizer.step

    def drifting(self: GlobalOptimizer, *args: Any) -> Any:
        reason = step(self, *args)
        if rank == 1 and self.steps == 5:
            with torch.no_grad():
                for p in self.optimizers[0].param_groups[0]["params"]:
                    p.copy_(p.nextafter(p + 1))  # the least change there is
        return reason

    patches.setattr(GlobalOptimizer, "step", drifting)


def one_is_other(
    rank: int, world_size: int, folder: Path, line: str, other: str, tamper: Tamper | None = None
) -> str | None:
    """How a rank's run ends, with a folder of its own and, on rank 1, other options."""
    line += f" --workdir {folder}/host{rank} --world_size {world_size} {other if rank else ''}"
    return on_rank(rank, world_size, line, tamper, local_rank=0)[1]


@pytest.mark.parametrize(
    ("line", "parameter"),
    [
        (f"train ddp --n_epochs 2 {VGG}", "conv1_1.weight"),
        # whose stages have one parameter in common
        (f"train pipeline --balance 1,1 {LINE}", "transformer.wte.weight"),
    ],
)
def test_replicas_that_drift_apart_end_the_run(ranks: Ranks, line: str, parameter: str) -> None:
    said = f"replicas differ in epoch 2: {parameter} (rank 1 against rank 0)"
    for error in ranks.run(one_is_other, Path.cwd(), line, "", drift):
        assert error is not None and error.startswith(said)


def test_ranks_that_differ_end_the_run(ranks: Ranks) -> None:
    against = "(rank 1 against rank 0)"
    said = f"not the same on all ranks: --n_train {against}, the train data {against}, "
    for error in ranks.run(one_is_other, Path.cwd(), f"run_data_parallel {LINE}", "--n_train 19"):
        assert error is not None and error.startswith(said)
    assert not Path("host0/options.json").exists()  # before it begins


@on_ranks(2)
def test_devices_of_one_type(rank: int, world_size: int) -> None:
    """Some would wait for shared memory, and others for NCCL."""
    world = World(rank, world_size, device=torch.device("cuda" if rank else "cpu"))
    with pytest.raises(RunError, match=r"^not the same on all ranks: the type of device \(rank 1"):
        check_same(world, {"--seed": b"0"})


def test_hosts_need_no_common_folder(ranks: Ranks) -> None:
    """Rank 0's tokenizer goes to all: what an earlier run has left on a host is no matter."""
    Path("host1").mkdir()
    other = [{"de": "Zwölf Boxkämpfer jagen Viktor.", "en": "Twelve boxers chase Viktor."}] * 9
    get_tokenizer(other, 300, "de", "en", Path("host1"))
    said = ranks.run(one_is_other, Path.cwd(), f"run_data_parallel {LINE}", "--timeout 50")
    assert said == [None] * 2


def test_what_hosts_may_choose_is_not_compared() -> None:
    options = {field.name: 0 for kind in KINDS for field in fields(kind)}
    compared = compared_values(options, {"test": "x"}, b"y")
    assert (compared.pop("the test data"), compared.pop("the model")) == (b"x", b"y")
    assert set(compared.values()) == {b"0"}
    assert {f"--{name}" for name in options} - compared.keys() == {
        "--workdir", "--dataset", "--model", "--device", "--cores_per_rank", "--timeout",
    }  # fmt: skip

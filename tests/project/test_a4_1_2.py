"""The course's check: after a step of the program all ranks hold the same gradients.

`python project/run_data_parallel.py --pytest True --n_epochs 1` leaves them in tests/. Where they
are not there, this runs the program's ranks in a temporary folder, which is what CI does.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.project.programs import course_commands, on_rank
from tests.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
FILES = ("tests/model0_gradients.pth", "tests/model1_gradients.pth")


def _in_folder(folder: Path, _: int, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(folder)


@pytest.fixture
def gradients(ranks: Ranks, tmp_path: Path) -> list[dict[str, Tensor]]:
    folder = ROOT
    if not all((folder / file).exists() for file in FILES):
        folder = tmp_path
        (line,) = course_commands("cmu_11868", "--pytest True")
        line += " --n_train 48 --n_validation 2 --n_test 2 --batch_size 32 --world_size 2 "
        line += f"--device cpu --n_layer 2 --vocab_size 512 --workdir {folder}/work"
        said = ranks.run(on_rank, line, partial(_in_folder, folder))
        assert said == [(f"rank {r} wrote {FILES[r]}\n", None) for r in range(2)]
    return [torch.load(folder / file, weights_only=True) for file in FILES]


@pytest.mark.a4_1_2
@pytest.mark.a5_1_2
def test_gradients_are_the_same_on_all_ranks(gradients: list[dict[str, Tensor]]) -> None:
    first, second = gradients
    assert list(first) == list(second)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert {"transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"} <= first.keys()
    assert all(g.abs().sum() > 0 and g.isfinite().all() for g in first.values())

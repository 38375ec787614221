"""The course's check: after a step of the program all ranks hold the same gradients.

`python project/run_data_parallel.py --pytest True --n_epochs 1` leaves them in tests/. Where they
are not there, this runs the program in a temporary folder, which is what CI does.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
FILES = ("tests/model0_gradients.pth", "tests/model1_gradients.pth")


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    folder = ROOT
    if not all((folder / file).exists() for file in FILES):
        folder = tmp_path_factory.mktemp("gradients")
        subprocess.run(
            [
                sys.executable, str(ROOT / "project/run_data_parallel.py"), "--pytest", "True",
                "--n_epochs", "1", "--n_train", "192", "--n_validation", "2", "--n_test", "2",
                "--batch_size", "128", "--device", "cpu", "--n_layer", "2", "--vocab_size", "512",
            ],
            cwd=folder, check=True, timeout=100,
        )  # fmt: skip
    return [torch.load(folder / file, weights_only=True) for file in FILES]


@pytest.mark.a4_1_2
@pytest.mark.a5_1_2
def test_gradients_are_the_same_on_all_ranks(gradients: list[dict[str, Tensor]]) -> None:
    first, second = gradients
    assert list(first) == list(second)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.a4_1_2
@pytest.mark.a5_1_2
def test_they_are_gradients_of_the_whole_model(gradients: list[dict[str, Tensor]]) -> None:
    first = gradients[0]
    assert {"transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"} <= first.keys()
    assert all(g.abs().sum() > 0 and g.isfinite().all() for g in first.values())

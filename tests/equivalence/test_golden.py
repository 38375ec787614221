"""The losses that the programs must have.

The table says that layouts agree with one process, and tests/project/test_losses.py that programs
do. But if data order, initial weights, tokenizer or batching changed, all would change alike. Here
one program must have the losses on file. After an intended change, file those that the test shows.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from project import run_data_parallel
from project.run_data_parallel import parse_data_parallel
from training.files import SUMMARY
from training.launch.world import World

# Two epochs of three steps, the last of 4 pairs. Without dropout, whose bits depend on the
# processor.
OPTIONS = (
    "--n_layer=2", "--n_embd=32", "--n_head=2", "--vocab_size=512", "--model_max_length=48",
    "--batch_size=8", "--n_train=20", "--n_validation=8", "--n_test=2", "--n_epochs=2",
    "--learning_rate=1e-3", "--warmup_steps=0", "--dropout=0", "--seed=0", "--device=cpu",
    "--keep=0", "--world_size=1",
)  # fmt: skip
LOSSES = [6.2478458, 6.2256862, 6.2141696, 6.1191051, 6.0928040, 6.0616208]
# In float32 another processor adds up in another order, and draws initial weights whose last bit
# differs: 2e-7 was seen between AVX2 and no vector instructions. Another order of the data: 1e-3.
TOLERANCE = 2e-6


def test_the_losses_are_those_on_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("project.utils.finish", lambda _: None)
    args = parse_data_parallel([*OPTIONS, f"--workdir={tmp_path}"])
    run_data_parallel.run_dp(World(), args)
    found = json.loads((tmp_path / SUMMARY).read_text("utf-8"))["loss"]
    assert found == pytest.approx(LOSSES, rel=TOLERANCE)

"""Runs of project/train.py on the ranks of a test, which import their libraries once."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from project import strategies
from project.checkpoints import find
from project.tasks import read_data
from project.train import parse
from project.worker import run_worker
from tests.ranks import Ranks
from training.checkpoint import newest
from training.launch import RunError, World

TINY = (
    "--num_workers 2 --num_batches 2 --batch_size 6 --n_train 22 --n_validation 9 --device cpu "
    "--optimizer sgd --learning_rate 0.02 --check_weights --check_output "
)
VGG = TINY + "--vgg_width 4 "
GPT = TINY + (
    "--model gpt2-mini --n_layer 2 --n_embd 16 --n_head 2 --vocab_size 300 --n_test 2 "
    "--model_max_length 64 "
)
ON_TWO = [name for name in strategies.STRATEGIES if name != "single"]


def work(rank: int, world_size: int, line: str, tamper: Any) -> Any:
    """What one rank prints, and how it ends: the text of a RunError, or None."""
    printed = io.StringIO()
    args = parse(line.split())
    with pytest.MonkeyPatch.context() as patches, contextlib.redirect_stdout(printed):
        if tamper is not None:
            tamper(rank, patches)
        try:
            data = read_data(args)
            run_worker(World(rank, world_size, rank), args, data, find(args, data))
        except RunError as error:
            return printed.getvalue(), str(error)
    return printed.getvalue(), None


def trained(ranks: Ranks, line: str, tamper: Any = None) -> tuple[str, str | None, dict[str, Any]]:
    """What rank 0 prints, how it ends, and its summary; an empty one where it got to none."""
    workdir = Path("work").resolve()
    line = f"{line} --num_workers {ranks.world_size} --workdir {workdir}"
    (printed, error), *others = ranks.run(work, line, tamper)
    assert others in ([("", None)] * len(others), [("", error)] * len(others))
    path = workdir / "summary.json"
    return printed, error, read_json(path) if path.exists() else {}


def read_json(path: Path) -> Any:
    """JSON as it is defined: without NaN."""
    return json.loads(
        path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} in {path}")
    )


def saved(ranks: Ranks, line: str) -> dict[str, torch.Tensor]:
    """The tensors of a run's last checkpoint."""
    trained(ranks, line)
    checkpoint, _ = newest(Path("work/checkpoints"))
    assert checkpoint is not None
    tensors = checkpoint.tensors
    types = {"random": torch.uint8, "model": torch.float32, "optimizer": torch.float32}
    return {name: tensors.tensor(name, types[name.split(".")[0]]) for name in sorted(tensors)}

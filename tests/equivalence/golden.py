"""The losses that the programs must have: 50 steps each, kept in tests/golden/.

The table says that layouts agree with one process; were data order, initial weights, tokenizer
or batching to change, both would change alike. Here the programs themselves train, small and with
fixed options, and every step's loss, which they write into summary.json, is compared with the one
on file. After a change that is meant: python project/verify.py --write_golden
"""

from __future__ import annotations

import contextlib
import io
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import tokenizers
import torch
import transformers

from project import run_data_parallel, run_pipeline
from project.run_data_parallel import parse_data_parallel
from project.run_pipeline import choose_devices, parse_pipeline
from project.utils import read_texts
from training.launch import Settings, launch
from training.results import SUMMARY, write_json
from training.world import World

FOLDER = Path(__file__).resolve().parents[1] / "golden"
STEPS = 50
# Two epochs of 25 steps, the last of 4 pairs. Without dropout, whose bits depend on the processor.
OPTIONS = (
    "--n_layer=2", "--n_embd=32", "--n_head=2", "--vocab_size=512", "--model_max_length=48",
    "--batch_size=8", "--n_train=196", "--n_validation=8", "--n_test=2", "--n_epochs=2",
    "--learning_rate=1e-3", "--dropout=0", "--seed=0", "--device=cpu", "--keep=0",
)  # fmt: skip


def data_parallel(world: World, workdir: Path, *options: str) -> None:
    """run_data_parallel.py; all ranks call it."""
    ranks = f"--world_size={world.world_size}"
    args = parse_data_parallel(None, [*OPTIONS, ranks, f"--workdir={workdir}", *options])
    run_data_parallel.run_dp(world, args, read_texts(args))


def pipeline(_: World, workdir: Path, *options: str) -> None:
    """run_pipeline.py, two stages."""
    mode = ("--model_parallel_mode=pipeline_parallel", "--num_devices=2", "--n_chunk=4")
    balance = "--balance=uniform"
    args = parse_pipeline(None, [*OPTIONS, *mode, balance, f"--workdir={workdir}", *options])
    run_pipeline.run_pp(args, choose_devices(args))


PROGRAMS: dict[str, tuple[int, Callable[..., None]]] = {  # with the ranks that it runs on
    "data_parallel": (2, data_parallel),
    "pipeline": (1, pipeline),
}


def losses(world: World, program: str, workdir: Path, *options: str) -> list[float]:
    """Trains with a program, which prints and draws nothing; the losses of its steps, on rank 0."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        patch.object(run_data_parallel, "finish"),
        patch.object(run_pipeline, "finish"),
    ):
        PROGRAMS[program][1](world, workdir, *options)
    summary = json.loads((workdir / SUMMARY).read_text("utf-8")) if world.is_main else {"loss": []}
    return summary["loss"]


def tolerance(step: int) -> float:
    """How far, relatively, the loss of a step (from 0 on) may be from the one on file.

    In float32 another processor adds up in another order: a loss then differs in its last bit
    (1e-7), a gradient g by some e, 1e-6 of its size; and Adam, which divides by the size, moves the
    weight by up to lr * e / |g| differently. To first order that changes the loss by g times as
    much, lr * e. With 42,000 parameters of |g| about 5e-3 (a norm of 1) and lr = 1e-3 that is 2e-7
    per step if all have one sign, 4e-8 of a loss of 5; it adds up over the steps. Initial weights
    drawn with other vector instructions differ in the last bit, too.

    Seen: 2e-7 between one process and two, and between AVX2 and no vector instructions. Nothing
    grows faster: initial weights off by 1e-5 of their size, a hundred times an ulp, leave at most
    4e-7 in any of the 50 steps. Another order of the data: 1e-3 and more.
    """
    return 1e-6 + 1e-7 * step


def path(program: str) -> Path:
    """The file of a program."""
    return FOLDER / f"{program}.json"


def versions() -> dict[str, str]:
    """What the losses may depend on beyond this code."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def deviation(program: str, found: Sequence[float]) -> str:
    """What is wrong with the losses of a run: a line that names the first step which is not as on
    file, or nothing."""
    file = json.loads(path(program).read_text(encoding="utf-8"))
    wanted: list[float] = file["losses"]
    if len(found) != len(wanted):
        return f"{program}: {len(found)} steps, {len(wanted)} on file"
    for step, (loss, golden) in enumerate(zip(found, wanted, strict=True)):
        off = abs(loss - golden) / golden
        if not off <= tolerance(step):
            return (
                f"{program}: the loss of step {step} is {loss:.7f}, on file {golden:.7f}: off by "
                f"{off:.1e}, allowed {tolerance(step):.1e}. On file is {file['versions']}, this is "
                f"{versions()}. If a change is meant: python project/verify.py --write_golden"
            )
    return ""


def write() -> list[Path]:
    """Write the losses of the programs' first 50 steps to tests/golden/, and nothing else."""
    FOLDER.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="golden-") as folder:
        for program, (ranks, _) in PROGRAMS.items():
            workdir = Path(folder) / program
            launch(_write, Settings(ranks, "cpu", master_port=0), program, workdir)
    return [path(program) for program in PROGRAMS]


def _write(world: World, program: str, workdir: Path) -> None:
    found = losses(world, program, workdir)
    if world.is_main:
        content = {"options": OPTIONS, "versions": versions(), "losses": found}
        write_json(path(program), content)

"""The losses that the programs must have: 50 steps each, kept under tests/golden/.

verify.py says that strategies agree with one process; were data order, initial weights, tokenizer
or batching to change, both would change alike. Here the programs themselves train, small and with
fixed options, and every step's loss is compared with the one on file.
"""

from __future__ import annotations

import contextlib
import io
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor

from project import run_data_parallel, run_pipeline
from project.session import read_texts
from project.utils import sum_over_ranks
from training.data import Step
from training.launch import Settings, World, launch
from training.record import write_json

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "golden"
STEPS = 50
# Two epochs of 25 steps, the last of 4 pairs. Without dropout, whose bits depend on the processor.
OPTIONS = (
    "--n_layer=2", "--n_embd=32", "--n_head=2", "--vocab_size=512", "--model_max_length=48",
    "--batch_size=8", "--n_train=196", "--n_validation=8", "--n_test=2", "--n_epochs=2",
    "--learning_rate=1e-3", "--dropout=0", "--seed=0", "--device=cpu",
)  # fmt: skip


def data_parallel(world: World, workdir: Path) -> list[float]:
    """The losses of run_data_parallel.py, on every rank."""
    ranks = f"--world_size={world.world_size}"
    args = run_data_parallel.parse([*OPTIONS, ranks, f"--workdir={workdir}"])
    with _noted(run_data_parallel, world) as losses:
        run_data_parallel.run_dp(world, args, read_texts(args, world.world_size))
    return losses


def pipeline(_: World, workdir: Path) -> list[float]:
    """The losses of run_pipeline.py, two stages."""
    mode = ("--model_parallel_mode=pipeline_parallel", "--num_devices=2", "--n_chunk=4")
    args = run_pipeline.parse([*OPTIONS, *mode, "--balance=uniform", f"--workdir={workdir}"])
    with _noted(run_pipeline, World()) as losses:
        run_pipeline.run_pp(args, run_pipeline.choose_devices(args))
    return losses


Run = Callable[[World, Path], list[float]]
PROGRAMS: dict[str, tuple[int, Run]] = {  # with the ranks that it runs on
    "data_parallel": (2, data_parallel),
    "pipeline": (1, pipeline),
}


@contextlib.contextmanager
def _noted(program: ModuleType, world: World) -> Iterator[list[float]]:
    """Within it the program is silent, and its training loop notes the loss of every step, in nats
    per target token of the global batch. The list is filled at the end."""
    loop = vars(program)["train"]
    losses: list[float] = []
    sums: list[float] = []
    tokens: list[int] = []

    def train(
        model: Any, optimizer: Any, steps: Any, backward: Any, *more: Any, **named: Any
    ) -> Any:
        def noting(step: Step) -> Tensor:
            loss = backward(step)
            sums.append(loss.item())
            tokens.append(step.target_tokens)
            return loss

        return loop(model, optimizer, steps, noting, *more, **named)

    vars(program)["train"] = train
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield losses
    finally:
        vars(program)["train"] = loop
    total = sum_over_ranks(sums, world.device)
    losses += [loss / n for loss, n in zip(total, tokens, strict=True)]


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


def deviation(program: str, losses: Sequence[float]) -> str:
    """What is wrong with the losses of a run: a line that names the first step which is not as on
    file, or nothing."""
    file = json.loads(path(program).read_text(encoding="utf-8"))
    wanted: list[float] = file["losses"]
    if len(losses) != len(wanted):
        return f"{program}: {len(losses)} steps, {len(wanted)} on file"
    for step, (loss, golden) in enumerate(zip(losses, wanted, strict=True)):
        off = abs(loss - golden) / golden
        if not off <= tolerance(step):
            return (
                f"{program}: the loss of step {step} is {loss:.7f}, on file {golden:.7f}: off by "
                f"{off:.1e}, allowed {tolerance(step):.1e}. On file is {file['versions']}, this is "
                f"{versions()}. If a change is meant: python project/verify.py --write_golden"
            )
    return ""


def write() -> list[Path]:
    """Runs the programs and writes their files anew."""
    FOLDER.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="golden-") as folder:
        for program, (ranks, run) in PROGRAMS.items():
            workdir = Path(folder) / program
            if ranks == 1:
                _write(World(), program, run, workdir)
            else:
                launch(_write, Settings(ranks, "cpu", master_port=0), program, run, workdir)
    return [path(program) for program in PROGRAMS]


def _write(world: World, program: str, run: Run, workdir: Path) -> None:
    losses = run(world, workdir)
    if world.is_main:
        content = {"options": OPTIONS, "versions": versions(), "losses": losses}
        write_json(path(program), content)

"""What is measured on a GPU: the second half of `make gpu`.

    waits     how often the host waits for the GPU in a step
    memory    of each ZeRO stage, two ranks
    speed     GPT-2 small in bf16, beside the plain loop of a user of transformers, also compiled,
              and DistributedDataParallel

What is checked on a GPU: tests/gpu.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2LMHeadModel

from benchmarks.harness import Row, alternate, ratio_of, summarize, write_rows
from benchmarks.programs import program
from project.train import parse_train
from training.launch.meeting import setup
from training.launch.world import World
from training.layouts.layout import setup_of
from training.layouts.replicated import Replicated
from training.optimization import Counts, GlobalOptimizer, Recipe
from training.tasks.language import LanguageTask
from training.tasks.texts import load_texts

CORPUS = Path(__file__).resolve().parents[1] / "training" / "tasks" / "corpus"
GIB, MIB = 2**30, 2**20


class Text:
    """GPT-2 on the built-in text, through the program's own options, task and layout."""

    def __init__(self, folder: Path, batch: int, length: int, *more: str) -> None:
        folder.mkdir(exist_ok=True)
        text = folder / "text.txt"
        if not text.exists():
            names = ("train.en", "train.de")
            text.write_text("".join((CORPUS / name).read_text("utf-8") for name in names), "utf-8")
        options = [
            "single", "--dataset", str(text), "--batch_size", str(batch), "--model_max_length",
            str(length), "--padding", "max_length", "--workdir", str(folder), *more,
        ]  # fmt: skip
        self.args = parse_train(options)
        self.world = World(device=torch.device("cuda", 0))
        self.task = LanguageTask(self.args, self.world, load_texts(self.args, self.world), None)

    def plain_model(self) -> Any:
        """transformers' own, in training mode."""
        torch.manual_seed(0)
        return GPT2LMHeadModel(self.task.config).to(self.world.device).train()


class Ours:
    """A step as training/loop.py takes it: data, backward, norm, update."""

    def __init__(self, text: Text, **options: Any) -> None:
        args = replace(text.args, **options)
        self.text, self.number, self.setup = text, args.num_microbatches, setup_of(args, text.world)
        self.model = Replicated(text.task, text.world, self.setup)
        recipe = Recipe(args, text.task.steps_per_epoch)
        self.optimizer = GlobalOptimizer(self.model.optimizers, recipe, text.world)
        self.steps = self._steps()
        self.loss = math.nan

    def _steps(self) -> Iterator[Any]:
        for epoch in count():
            yield from full_steps(self.text, epoch, self.number)

    def step(self) -> None:
        step = next(self.steps)
        self.optimizer.zero_grad()
        loss = self.model.backward(step)
        self.optimizer.step(loss, step.count, Counts(step.positions, step.tokens))
        self.loss = self.optimizer.loss


def full_steps(text: Text, epoch: int, num_microbatches: int | None) -> Iterator[Any]:
    """The steps of an epoch but the last, whose batch is smaller."""
    steps = text.task.steps(epoch, 0, 1, num_microbatches)
    return islice(steps, len(text.task.examples["train"]) // text.args.batch_size)


class Plain:
    """The loop that a user of transformers writes; `wrap` may compile the model, or add DDP."""

    def __init__(self, text: Text, wrap: Callable[[nn.Module], Any] = lambda model: model) -> None:
        self.device = text.world.device
        self.model = wrap(text.plain_model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        ids = torch.randint(
            len(text.task.tokenizer), (4, text.args.batch_size, text.args.model_max_length)
        )
        self.batches = cycle(ids)
        self.loss = math.nan

    def step(self) -> None:
        ids = next(self.batches).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.loss = loss.item()


def timed(step: Callable[[], None]) -> Callable[[], None]:
    def turn() -> None:
        step()
        torch.accelerator.synchronize()

    return turn


def speed() -> list[Row]:
    """Tokens per second of GPT-2 small in bf16 with dropout 0.1; contestants take turns. A user can
    compile the plain loop, too, so there is a row for that."""
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    batch = 32 if memory > 60 else 8 if memory > 20 else 2
    model = ["--model", "gpt2", "--vocab_size", "50304", "--precision", "bf16", "--dropout", "0.1"]
    with tempfile.TemporaryDirectory() as folder:
        text = Text(Path(folder), batch, 1024, *model)
        setup(0, 1, "nccl" if dist.is_nccl_available() else "gloo")
        try:
            wrap: Any = nn.parallel.DistributedDataParallel
            contestants: dict[str, Any] = {
                "plain loop": Plain(text),
                "plain loop, compiled": Plain(text, torch.compile),
                "DistributedDataParallel, one rank": Plain(
                    text, lambda model: wrap(model, device_ids=[0])
                ),
                "this project": Ours(text),
                "this project, --compile": Ours(text, compile=True),
            }
            for contestant in contestants.values():
                for _ in range(2):
                    timed(contestant.step)()
            seconds = alternate({n: timed(c.step) for n, c in contestants.items()}, 12)
        finally:
            dist.destroy_process_group()
    rows = []
    for name, of_rounds in seconds.items():
        value, spread = summarize([batch * 1024 / s for s in of_rounds])
        for against in ("plain loop", "plain loop, compiled"):
            ours = name.endswith("--compile") and against.endswith("compiled")
            ratio = ratio_of(seconds[against], of_rounds)
            goal = 1.1 if ours else None
            rows.append(Row(name, value, spread, "tokens/s", ratio, against, goal))
    return rows


@contextmanager
def waits_inside() -> Iterator[list[str]]:
    """Where the host waits for the GPU inside the `with`: file and line."""
    places: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchroniz" in str(warning.message):
            places.append(f"{Path(warning.filename).name}:{warning.lineno}")


def waits() -> list[Row]:
    """Waits in a step of one process, with one micro-batch and with four. The plain loop has one,
    its loss.item(), and those inside transformers."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        text = Text(Path(folder), 8, 128, "--model", "gpt2-mini", "--dropout", "0.1")
        contestants: dict[str, Any] = {
            "plain loop": Plain(text),
            "one process": Ours(text),
            "one process, 4 micro-batches": Ours(text, num_microbatches=4),
        }
        for name, contestant in contestants.items():
            for _ in range(3):
                contestant.step()
            with waits_inside() as places:
                contestant.step()
            number, goal = float(len(places)), 1.0 if "process" in name else None
            ratio, where = 1 / max(number, 1.0), f"as few as one; {', '.join(sorted({*places}))}"
            rows.append(Row(f"waits, {name}", number, (number, number), "", ratio, where, goal))
    return rows


def memory() -> list[Row]:
    """Peak memory of the larger of two ranks, GPT-2 small in bf16 with fp32 weights: per parameter
    4 bytes of weights, 4 of gradients and 8 of AdamW's moments, which ZeRO shards, and 2 of weights
    to compute with. Each stage of ZeRO must have a lower peak than the one before."""
    rows, before = [], math.inf
    for zero in (0, 1, 2, 3):
        strategy = f"fsdp --zero {zero}" if zero else "ddp"
        summary = program(
            f"train.py {strategy} --world_size 2 --model gpt2 --precision bf16 --dropout 0 "
            "--batch_size 8 --model_max_length 256 --padding max_length --n_train 32 "
            "--num_batches 3", device="cuda",
        )  # fmt: skip
        peak = max(summary["peak_rss_bytes"]) / MIB
        parts = ", ".join(
            f"{kind} {sizes[0] / MIB:,.0f}" for kind, sizes in summary["state_bytes"].items()
        )
        name = f"peak, {strategy}: {parts} MiB"
        goal, ratio = (1.0, before / peak) if zero else (None, None)
        rows.append(Row(name, peak, (peak, peak), "MiB", ratio, "less than before", goal))
        before = peak
    return rows


def run() -> list[Row]:
    """Measures everything and prints the table."""
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return []
    rows = waits() + memory() + speed()
    name = torch.cuda.get_device_properties(0).name
    write_rows("gpu", f"On {torch.cuda.device_count()} x {name}", rows)
    return rows


if __name__ == "__main__":
    run()

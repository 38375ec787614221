"""An epoch over 1,600 pairs: the plain loop against ours, on two ranks with a core each.

The plain loop is a first version: every sequence padded to 128, a vocabulary of 50,257 rows
whatever the text needs, logits at every position, tokenising in collate, an all-reduce per
parameter after backward. Ours is the program's. Blocks with their initial weights, optimizer,
tokenizer, batch size and number of steps are the same. Both train the whole epoch, taking turns
step by step; the times of each fifth of the epoch give the spread. With 5,000 pairs (`run(5000)`)
it takes ten minutes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

from benchmarks.harness import Row, summarize, write_rows
from benchmarks.plain_gpt2 import build_model
from benchmarks.text import benchmark_texts, text_name
from data_parallel.dataset import partition_dataset
from data_parallel.gradients import average_gradients
from project.run_data_parallel import parse_data_parallel
from project.utils import collate_batch
from training.launch.launch import launch
from training.launch.world import World
from training.layouts.layout import setup_of
from training.layouts.replicated import Replicated
from training.loop import evaluate_loss
from training.options import Options
from training.tasks.gpt2 import gpt2_config, gpt2_layers
from training.tasks.tokens import Batch
from training.tasks.translation import TranslationTask

BATCH, LENGTH, PLAIN_VOCAB, PARTS = 64, 128, 50257, 5
Pairs = Sequence[dict[str, str]]


def _plain(world: World, pairs: Pairs, tokenizer: Any) -> Iterator[torch.nn.Module]:
    """A step of the plain loop per iteration."""
    model = build_model(gpt2_config("gpt2-mini", PLAIN_VOCAB, LENGTH), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    collate = partial(
        collate_batch, src_key="de", tgt_key="en", tokenizer=tokenizer,
        model_max_length=LENGTH, device="cpu",
    )  # fmt: skip
    loader: DataLoader[Batch] = partition_dataset(
        world.rank, world.world_size, pairs, BATCH, collate
    )
    for batch in loader:
        optimizer.zero_grad()
        logits = model(input_ids=batch["input_ids"]).logits
        nll = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), batch["labels"].reshape(-1), reduction="none"
        )
        weights = batch["label_token_weights"].reshape(-1)
        (torch.sum(nll * weights) / torch.sum(weights)).backward()
        average_gradients(model)
        optimizer.step()
        yield model


def _ours(task: TranslationTask, model: Replicated) -> Iterator[Replicated]:
    """A step of the program per iteration."""
    (optimizer,) = model.optimizers
    for step in task.steps(0, model.dp_rank, model.dp_size, None):
        optimizer.zero_grad()
        model.backward(step)
        if model.average_gradients is not None:
            model.average_gradients(model.module)
        optimizer.step()
        yield model


def _rank(world: World, args: Any, out: Path) -> None:
    torch.manual_seed(world.rank)
    texts = benchmark_texts(args.n_train)
    start = time.perf_counter()
    task = TranslationTask(args, world, texts, None)  # tokenises everything
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    before = time.perf_counter() - start
    ours = Replicated(task, world, setup_of(args, world))
    # Only for the validation loss: the plain loop has its own model.
    plain = Replicated(task, world, setup_of(args, world))
    contestants: dict[str, Iterator[Any]] = {
        "plain": _plain(world, texts.splits["train"], task.tokenizer),
        "ours": _ours(task, ours),
    }
    models: dict[str, Any] = {}
    for _ in tqdm(
        range(task.steps_per_epoch),
        "An epoch, plain and ours",
        disable=None if world.is_main else True,
    ):
        for name, contestant in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            models[name] = next(contestant)
            seconds[name].append(time.perf_counter() - start)
    seconds["ours"][0] += before
    plain.modules = gpt2_layers(models["plain"])
    plain.net = torch.nn.Sequential(*plain.modules)
    losses = {}
    for name, model in (("plain", plain), ("ours", ours)):
        with model.evaluating():
            losses[name] = evaluate_loss(world, task, model)[0]
    if world.is_main:
        torch.save((seconds, losses), out)


def run(n_train: int = 1600) -> list[Row]:
    """Trains both for an epoch and prints their table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"
        args = parse_data_parallel(
            None, f"--world_size 2 --device cpu --model gpt2-mini --workdir {folder}/workdir "
            f"--n_train {n_train} --model_max_length {LENGTH} --batch_size {BATCH}".split(),
        )  # fmt: skip
        launch(_rank, Options(world_size=2, device="cpu", cores_per_rank=1), args, out)
        seconds, losses = torch.load(out, weights_only=True)
    parts = {
        name: [sum(s[i * len(s) // PARTS : (i + 1) * len(s) // PARTS]) for i in range(PARTS)]
        for name, s in seconds.items()
    }
    rows = []
    for name, label in (("plain", "plain loop"), ("ours", "this project")):
        middle, spread = summarize([PARTS * s for s in parts[name]])
        ratio = sum(seconds["plain"]) / sum(seconds[name])
        rows.append(
            Row(f"{label}, an epoch", middle, spread, "s", ratio, "plain",
                4.0 if name == "ours" else None)
        )  # fmt: skip
    for name, label in (("plain", "plain loop"), ("ours", "this project")):
        loss = losses[name]
        rows.append(
            Row(f"{label}, validation loss after it", loss, (loss, loss), "nats",
                losses["plain"] / loss, "plain", 1.0 if name == "ours" else None)
        )  # fmt: skip
    pairs = f"{n_train:,} pairs of {text_name()}"
    write_rows("epoch", f"An epoch over {pairs}, gpt2-mini, 2 ranks with a core each", rows)
    return rows


if __name__ == "__main__":
    run()

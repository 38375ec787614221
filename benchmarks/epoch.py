"""An epoch over 5,000 pairs: the plain loop against ours, on two ranks with a core each.

The plain loop is what one writes first: every sequence padded to 128, a vocabulary of 50,257
rows whatever the text needs, logits at every position, tokenising in collate, an all-reduce per
parameter after backward. Ours is the program's. Blocks, optimizer, tokenizer, batch size and
number of steps are the same, and so are the initial weights of the blocks. Both go through the
whole epoch, taking turns step by step; the times of each fifth of the epoch give the spread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import Row, summarize, write_rows
from benchmarks.text import benchmark_texts, text_name
from data_parallel.dataset import partition_dataset
from data_parallel.gradients import average_gradients
from project.run_data_parallel import make_backward, make_gradient_sync
from project.session import CPU_POSITIONS
from project.utils import collate_batch, evaluate_loss, sum_over_ranks
from training.data import PAD, Batch, GlobalBatches, RankLoader, encode, to_batch, train_tokenizer
from training.launch import Settings, World, launch
from training.model import build_model, gpt2_config, round_vocab, target_loss

BATCH, LENGTH, PLAIN_VOCAB, PARTS = 64, 128, 50257, 5
Pairs = Sequence[dict[str, str]]


def _plain(
    world: World, pairs: Pairs, tokenizer: PreTrainedTokenizerFast
) -> Iterator[torch.nn.Module]:
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


def _ours(
    world: World, pairs: Pairs, tokenizer: PreTrainedTokenizerFast
) -> Iterator[torch.nn.Module]:
    """A step of the program per iteration; the first includes tokenising everything."""
    model = build_model(gpt2_config("gpt2-mini", round_vocab(len(tokenizer)), LENGTH), seed=0)
    args = argparse.Namespace(
        gradient_sync="overlap", bucket_mb=4.0, comm_dtype="fp32", precision="fp32"
    )
    average, no_sync = make_gradient_sync(args, model)
    backward = make_backward(args, world, model, no_sync)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    examples = encode(pairs, tokenizer, "de", "en", LENGTH)
    loader = RankLoader(
        examples, GlobalBatches(len(examples), BATCH, seed=0),
        rank=world.rank, world_size=world.world_size,
        pad_id=tokenizer.convert_tokens_to_ids(PAD), device="cpu", max_positions=CPU_POSITIONS,
    )  # fmt: skip
    for step in loader.steps(0):
        optimizer.zero_grad()
        backward(step)
        average(model)
        optimizer.step()
        yield model


def _validation_loss(
    world: World, model: torch.nn.Module, pairs: Pairs, tokenizer: PreTrainedTokenizerFast
) -> float:
    mine = encode(pairs, tokenizer, "de", "en", LENGTH)[world.rank :: world.world_size]
    pad_id = tokenizer.convert_tokens_to_ids(PAD)
    batches = [to_batch(mine[i : i + 32], pad_id, "cpu") for i in range(0, len(mine), 32)]
    loss: Tensor | float
    loss, targets = sum_over_ranks(
        evaluate_loss(model, batches, partial(target_loss, model), "Validating", 1), world.device
    )
    return loss / targets


def _rank(world: World, n_train: int, out: Path) -> None:
    torch.manual_seed(world.rank)
    texts = benchmark_texts(n_train)
    tokenizer = train_tokenizer(texts.splits["train"], 10_000, "de", "en")
    contestants = {
        "plain": _plain(world, texts.splits["train"], tokenizer),
        "ours": _ours(world, texts.splits["train"], tokenizer),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    models: dict[str, torch.nn.Module] = {}
    steps = -(-n_train // BATCH)
    for _ in tqdm(
        range(steps), "An epoch, plain and ours", disable=None if world.is_main else True
    ):
        for name, contestant in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            models[name] = next(contestant)
            seconds[name].append(time.perf_counter() - start)
    losses = {
        name: _validation_loss(world, model, texts.splits["validation"], tokenizer)
        for name, model in models.items()
    }
    if world.is_main:
        torch.save((seconds, losses), out)


def run(n_train: int = 5000) -> list[Row]:
    """Trains both for an epoch and prints their table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"
        launch(_rank, Settings(world_size=2, device="cpu", cores_per_rank=1), n_train, out)
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

"""Complete runs of the programs: whole models, text, optimizer, processes.

- An epoch over 1,600 pairs on two ranks, a core each: run_data_parallel.py beside a plain loop,
  which pads every sequence to 128, has a vocabulary of 50,257 rows whatever the text needs,
  computes logits at every position, tokenizes in collate, and runs an all-reduce per parameter
  after backward. Sizes of blocks, optimizer, rate, batches and number of steps are the same. Our
  time is that of the whole epoch and of the tokenizing before it.
- run_pipeline.py on 8 blocks of width 512: zero bubble beside one stage at a time.
- train.py: every strategy with one worker and with two, on GPT-2 with sentences of one length, so
  that a step is the same work for all. Under DDP and FSDP each of two workers has half of the
  batch. A pipeline of M micro-batches is at best 2M/(M+1) times as fast as one worker that runs the
  stages in turn; `model` is that worker, spread over two cores that wait for each other.

The time of a step is the median without the first step, which has one-time costs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

from benchmarks.harness import DATASET, Row, summarize, write_rows
from benchmarks.plain_gpt2 import build_model
from data_parallel.dataset import partition_dataset
from data_parallel.gradients import average_gradients
from training.files import SUMMARY
from training.launch.launch import launch
from training.launch.world import World
from training.options import Options
from training.tasks.gpt2 import gpt2_config
from training.tasks.texts import load_texts
from training.tasks.tokens import Batch, collate_batch, get_tokenizer

ROOT = Path(__file__).resolve().parents[1]
PAIRS, BATCH, LENGTH, PLAIN_VOCAB = 1600, 64, 128, 50257
COMMON = f"--dataset {DATASET} --n_validation 16 --n_test 2 --keep 0"
EPOCH = (
    f"run_data_parallel.py --world_size 2 --model gpt2-mini --n_train {PAIRS} --n_epochs 1 "
    f"--batch_size {BATCH} --model_max_length {LENGTH} --learning_rate 1e-3"
)
WIDE = "--model gpt2-mini --n_embd 512 --n_head 8 --batch_size 32 --padding max_length"
PIPELINE = f"run_pipeline.py {WIDE} --n_layer 8 --n_train 288 --n_epochs 1 --dropout 0"
STRATEGIES = f"{WIDE} --model_max_length 64 --n_train 192 --num_batches 5"
GOALS = {4: 1.45, 8: 1.6}


def program(command: str, device: str = "cpu") -> dict[str, Any]:
    """The summary of a run, and the time of its first epoch on the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        line = f"project/{command} {COMMON} --device {device} --workdir {folder}"
        words = [sys.executable, *line.split()]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{command}: status {done.returncode}\n{done.stderr[-2000:]}")
        results = [json.loads(p.read_text()) for p in Path(folder).glob("*_results_epoch0.json")]
        summary: dict[str, Any] = json.loads((Path(folder) / SUMMARY).read_text())
        return summary | {"training_time": max(of_rank["training_time"] for of_rank in results)}


def _plain(world: World, out: Path) -> None:
    """An epoch of the plain loop: its seconds, the loss of each step, and the seconds of tokenizing
    all pairs once, as ours does before the epoch."""
    args = Options(
        dataset=DATASET, n_train=PAIRS, n_validation=16, n_test=2, dp=2, workdir=out.parent
    )  # fmt: skip
    texts = load_texts(args, world)
    pairs = list(islice(texts.pairs("train"), PAIRS))
    tokenizer = get_tokenizer(pairs, 4096, "de", "en", out.parent)
    start = time.perf_counter()
    for key in ("de", "en"):
        tokenizer([pair[key] for pair in pairs])
    tokenizing = time.perf_counter() - start
    torch.manual_seed(world.rank)
    model = build_model(gpt2_config("gpt2-mini", PLAIN_VOCAB, LENGTH), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    collate = partial(
        collate_batch, src_key="de", tgt_key="en", tokenizer=tokenizer, model_max_length=LENGTH,
        device="cpu",
    )  # fmt: skip
    loader: DataLoader[Batch] = partition_dataset(
        world.rank, world.world_size, pairs, BATCH, collate
    )
    losses, start = list[float](), time.perf_counter()
    for batch in tqdm(loader, "The plain epoch", disable=None if world.is_main else True):
        optimizer.zero_grad()
        logits = model(input_ids=batch["input_ids"]).logits
        nll = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), batch["labels"].reshape(-1), reduction="none"
        )
        weights = batch["label_token_weights"].reshape(-1)
        loss = torch.sum(nll * weights) / torch.sum(weights)
        loss.backward()
        average_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    if world.is_main:
        torch.save((time.perf_counter() - start, losses, tokenizing), out)


def epoch() -> list[Row]:
    """Rows of an epoch: whole seconds, and the loss of its last fifth."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plain.pt"
        launch(_plain, Options(world_size=2, device="cpu", cores_per_rank=1), out)
        plain, losses, tokenizing = torch.load(out, weights_only=True)
    summary = program(f"{EPOCH} --cores_per_rank 1 --benchmark_only")
    ours = summary["training_time"] + tokenizing
    found = {"plain loop": (plain, losses), "run_data_parallel.py": (ours, summary["loss"])}
    rows = []
    for name, (seconds, of_steps) in found.items():
        goal = None if name == "plain loop" else 15.0
        rows.append(Row(f"{name}, an epoch", seconds, (seconds, seconds), "s", plain / seconds,
                        "plain", goal))  # fmt: skip
        last = [statistics.fmean(of[-len(of) // 5 :]) for of in (of_steps, losses)]
        rows.append(Row(f"{name}, training loss at its end", last[0], (last[0], last[0]), "nats",
                        last[1] / last[0], "plain", goal and 1.0))  # fmt: skip
    return rows


def steps(name: str, command: str, baseline: list[float], goal: float | None) -> tuple[Row, float]:
    """The row of a program's step, beside a baseline; its loss in the end. An empty `baseline` is
    filled with the seconds of this program."""
    summary = program(command)
    seconds = summary["step_seconds"][1:]
    ratio = statistics.median(baseline or seconds) / statistics.median(seconds)
    against = "the first of its kind" if baseline else ""
    row = Row(name, *summarize(seconds), "s", ratio if baseline else None, against, goal)
    baseline.extend(() if baseline else seconds)
    return row, summary["loss"][-1]


def run() -> list[Row]:
    """Runs all of them and prints their table."""
    rows = epoch()
    for m, goal in GOALS.items():
        baseline: list[float] = []
        losses = []
        for mode, schedule in (("model_parallel", ""), ("pipeline_parallel", "--schedule zb")):
            command = f"{PIPELINE} --model_parallel_mode {mode} --num_microbatches {m} {schedule}"
            least = goal if schedule else None
            row, loss = steps(f"run_pipeline.py {mode}, M={m}", command, baseline, least)
            rows.append(row)
            losses.append(loss)
        check(losses)
    losses = []
    for strategy in ("ddp", "fsdp", "model", "pipeline", "tensor"):
        baseline = []
        for n in (1, 2):
            more = "--num_microbatches 8 --schedule zb" if strategy == "pipeline" else ""
            command = f"train.py {strategy} --num_workers {n} {STRATEGIES} {more}"
            row, loss = steps(f"train.py {strategy}, {n} workers", command, baseline, None)
            rows.append(row)
            losses.append(loss)
    check(losses)
    title = f"The programs, GPT-2 on pairs of --dataset {DATASET}, a core per worker"
    write_rows("programs", title, rows)
    return rows


def check(losses: list[float]) -> None:
    """Raises AssertionError if losses differ by over 1 %. AdamW turns rounding of small gradients
    into whole steps, so after a few steps losses differ by more than rounding."""
    if max(losses) > 1.01 * min(losses):
        raise AssertionError(f"the contestants train differently: {losses}")


if __name__ == "__main__":
    run()

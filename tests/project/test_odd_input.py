"""Odd input changes nothing: every strategy takes the steps of one plain process (plain.py).

All that is odd comes at once: batches that leave a rank without examples or without targets, or
have no target at all; a last batch of one example for up to three ranks and six micro-batches;
with them warm-up, falling learning rates, clipping, and a batch whose loss is not finite.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from project.run_data_parallel import make_backward, make_gradient_sync, make_optimizer
from project.run_pipeline import BlocksOnly, WholeModel, choose_devices, parse
from project.session import Session
from project.utils import train
from tests.project import plain
from tests.project.plain import BATCH, EPOCHS, STEPS_PER_EPOCH, Arrays, Case, Taken
from tests.ranks import Ranks
from training.data import GlobalBatches, RankLoader
from training.launch import World
from training.optimization import Recipe
from training.text import Texts

CLIPPED = Case(max_grad_norm=1.65, lr_scheduler="cosine")
INFINITE = Case(max_grad_norm=1.65, lr_scheduler="linear", infinite=True)
CASES, IDS = (CLIPPED, INFINITE), ("clipped", "infinite")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors as small as these are not worth waking another for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_loader(rank: int, world_size: int, batch_size: int, accumulation: int) -> RankLoader:
    return RankLoader(
        plain.make_examples(), GlobalBatches(plain.NUM_EXAMPLES, batch_size, plain.SEED),
        rank=rank, world_size=world_size, pad_id=plain.PAD, device="cpu", accumulation=accumulation,
    )  # fmt: skip


def test_the_input_is_as_odd_as_it_says() -> None:
    """Per step of epoch 0 and rank: target tokens in each micro-batch."""
    targets = [
        [
            [len(b["target_index"]) for b in step.micro_batches]
            for step in make_loader(rank, 2, BATCH, 2).steps(0)
        ]
        for rank in range(2)
    ]
    assert [len(rank) for rank in targets] == [STEPS_PER_EPOCH] * 2
    assert [rank[plain.NO_TARGETS_ON_RANK_1] for rank in targets] == [[2, 1], [0, 0]]
    assert [rank[plain.NO_TARGETS] for rank in targets] == [[0, 0], [0, 0]]
    assert [len(rank[-1]) for rank in targets] == [1, 0]  # micro-batches of the last batch
    assert all(sum(targets[r][k]) > 0 for r in range(2) for k in (0, 2, 4))


def test_clipping_and_rate_matter_in_the_reference() -> None:
    without, clipped = (plain.one_process(case)[0] for case in (Case(), CLIPPED))
    norms = [
        [np.sqrt(sum((g**2).sum() for g in step.gradients.values())) if step.gradients else None
         for step in steps]
        for steps in (without, clipped)
    ]  # fmt: skip
    taken = [k for k, norm in enumerate(norms[0]) if norm is not None]
    assert taken == [k for k in range(EPOCHS * STEPS_PER_EPOCH) if k != plain.NO_TARGETS]
    shortened = [k for k in taken if norms[1][k] == pytest.approx(1.65, rel=1e-5)]
    assert 3 < len(shortened) < len(taken)
    left_out = [k for k, step in enumerate(plain.one_process(INFINITE)[0]) if step.rate is None]
    assert left_out[:2] == [plain.NO_TARGETS, plain.TOO_LONG] and len(left_out) == 3


# ------------------------------------------------------------------------------- data parallel


def data_parallel(
    rank: int, world_size: int, case: Case, sync: str, accumulation: int
) -> tuple[list[Taken], Arrays, list[Any]]:
    """The program's own functions, on a rank."""
    model, world = plain.make_model(case), World(rank, world_size)
    args = argparse.Namespace(
        gradient_sync=sync, bucket_mb=0.002, comm_dtype="fp32", precision="fp32"
    )
    average, no_sync = make_gradient_sync(args, model)
    backward = make_backward(args, world, model, no_sync)
    recipe = Recipe(plain.RATE, STEPS_PER_EPOCH, EPOCHS, **case.options)
    optimizer = make_optimizer(model, recipe, world)
    steps = plain.record(optimizer, model)
    loader = make_loader(rank, world_size, BATCH, accumulation)
    totals = [
        train(model, optimizer, loader.steps(epoch), backward, "", 1, average)
        for epoch in range(EPOCHS)
    ]
    return steps, plain.weights_of(model), [t.skipped for t in totals] + [optimizer.left_out]


def check_ranks(got: list[tuple[list[Taken], Arrays, list[Any]]], case: Case) -> None:
    """The losses are parts of one sum; all else is the same on all ranks, to the bit."""
    for steps, weights, skipped in got[1:]:
        assert skipped == got[0][2]
        for name, weight in weights.items():
            assert np.array_equal(weight, got[0][1][name]), name
        for mine, first in zip(steps, got[0][0], strict=True):
            first.loss_sum += mine.loss_sum
            assert mine.rate == first.rate
    steps, weights, skipped = got[0]
    plain.compare(steps, weights, case)
    left_out = [k for k, step in enumerate(steps) if step.rate is None]
    per_epoch = [sum(k // STEPS_PER_EPOCH == e for k in left_out) for e in range(EPOCHS)]
    assert skipped == [*per_epoch, len(left_out)]


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize(
    ("sync", "accumulation"),
    [("per_parameter", 1), ("flat", 2), ("overlap", 1), ("overlap", 4)],
)
def test_two_ranks(ranks: Ranks, case: Case, sync: str, accumulation: int) -> None:
    check_ranks(ranks.run(data_parallel, case, sync, accumulation), case)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_three_ranks(three_ranks: Ranks, case: Case) -> None:
    check_ranks(three_ranks.run(data_parallel, case, "overlap", 1), case)


# ------------------------------------------------------------------------------------ pipeline


def pipeline(case: Case, folder: Path, *options: str) -> tuple[list[Taken], Arrays, list[Any]]:
    """The program's own classes."""
    given: dict[str, Any] = {
        "learning_rate": plain.RATE,
        "batch_size": BATCH,
        "n_epochs": EPOCHS,
        "seed": plain.SEED,
    }
    given |= {**case.options, **plain.SIZES, "workdir": folder, "device": "cpu"}
    args = parse(
        [f"--{k}={v}" for k, v in given.items() if v is not None]
        + ["--model_parallel_mode=pipeline_parallel", *options]
    )
    tokenizer: Any = argparse.Namespace(convert_tokens_to_ids=lambda _: plain.PAD)
    examples = {"train": plain.make_examples()}
    session = Session(args, World(), Texts({}), tokenizer, plain.make_model(case), examples)
    devices = choose_devices(args)
    loader = session.loader(1, 0, args.n_chunk if args.pipeline == "whole" else 1)
    strategy: WholeModel | BlocksOnly
    if args.pipeline == "whole":
        strategy = WholeModel(session, devices, next(loader.steps(0)))
    else:
        torch.set_default_dtype(torch.float64)  # it makes a model of its own
        strategy = BlocksOnly(session, devices)
        torch.set_default_dtype(torch.float32)
    try:
        steps = plain.record(strategy.optimizer, session.model)
        totals = [
            train(session.model, strategy.optimizer, loader.steps(epoch), strategy.backward, "", 1)
            for epoch in range(EPOCHS)
        ]
    finally:
        strategy.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("pipe-")] == []
    return (
        steps,
        plain.weights_of(session.model),
        [t.skipped for t in totals] + [strategy.optimizer.left_out],
    )


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize(
    "options",
    [
        "--n_chunk=4 --schedule=gpipe --num_devices=2 --balance=1,2",
        "--n_chunk=6 --schedule=1f1b --num_devices=3 --balance=uniform",
        "--n_chunk=6 --schedule=zb --num_devices=2 --balance=2,1",
        "--n_chunk=4 --schedule=zb --num_devices=2",
        "--n_chunk=4 --pipeline=blocks --num_devices=2 --balance=2,1",
    ],
)
def test_stages(tmp_path: Path, case: Case, options: str) -> None:
    check_ranks([pipeline(case, tmp_path, *options.split())], case)

"""Ten steps of data parallelism are ten steps of one plain process, by parameter name.

The reference is plain PyTorch: the whole batch padded to one rectangle, all logits, the mean over
the target tokens. In float64, where a wrong factor cannot hide: with eps = 1.1e-16 and sums of
less than 1e3 terms of like size, a gradient is off by less than 1e-12 of the largest; AdamW divides
by the root of the mean square, and so may turn an error d of a gradient g into lr * d / |g|. Ten
steps of lr 1e-3 leave weights within 1e-9 where |g| > 1e-6 * max|g|, which is all but a few.
"""

from __future__ import annotations

import argparse
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2LMHeadModel

from project.run_data_parallel import make_backward, make_gradient_sync
from tests.ranks import Ranks
from training.data import Encoded, GlobalBatches, RankLoader
from training.launch import World
from training.model import build_model, gpt2_config

VOCAB, PAD = 64, 0
Result = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def _examples(n: int) -> list[Encoded]:
    rng = random.Random(3)
    examples = []
    for _ in range(n):
        source, target = rng.randint(2, 9), rng.randint(1, 12)
        examples.append(Encoded([rng.randrange(1, VOCAB) for _ in range(source + target)], source))
    return examples


def _model() -> GPT2LMHeadModel:
    config = gpt2_config("gpt2-mini", VOCAB, 32, dropout=0.0, n_layer=2, n_embd=16, n_head=2)
    return build_model(config, seed=1).double()


def _weights(model: GPT2LMHeadModel) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def _gradients(model: GPT2LMHeadModel) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def one_process(n: int, batch_size: int, steps: int) -> Result:
    """Plain PyTorch, every batch as a whole."""
    model, examples = _model(), _examples(n)
    batches = GlobalBatches(n, batch_size, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        for indices in batches.epoch(epoch)[: steps - len(losses)]:
            batch = [examples[i] for i in indices]
            ids = torch.full((len(batch), max(len(e.ids) for e in batch)), PAD)
            weights = torch.zeros(ids.shape, dtype=torch.float64)
            for row, e in enumerate(batch):
                ids[row, : len(e.ids)] = torch.tensor(e.ids)
                weights[row, e.num_source : len(e.ids)] = 1
            logits = model(input_ids=ids[:, :-1]).logits
            nll = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            loss = (nll * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        epoch += 1
    return losses, _gradients(model), _weights(model)


def data_parallel(
    rank: int, world_size: int, n: int, batch_size: int, n_steps: int,
    sync: str, accumulation: int, max_positions: int | None = None,
) -> Result:  # fmt: skip
    """The program's own functions, on a rank."""
    model, examples = _model(), _examples(n)
    world = World(rank, world_size)
    args = argparse.Namespace(
        gradient_sync=sync, bucket_mb=0.002, comm_dtype="fp32", precision="fp32"
    )
    loader = RankLoader(
        examples, GlobalBatches(n, batch_size, 0),
        rank=rank, world_size=world_size, pad_id=PAD, device="cpu", accumulation=accumulation,
        max_positions=max_positions,
    )  # fmt: skip
    average, no_sync = make_gradient_sync(args, model)
    backward = make_backward(args, world, model, no_sync)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses: list[float] = []
    epoch = 0
    while len(losses) < n_steps:
        for step in loader.steps(epoch):
            if len(losses) == n_steps:
                break
            optimizer.zero_grad()
            loss = backward(step) / step.target_tokens
            average(model)
            optimizer.step()
            losses.append(loss.item())
        epoch += 1
    return losses, _gradients(model), _weights(model)


def _compare(got: list[Result], want: Result, weight_bound: float) -> None:
    losses = torch.tensor([r[0] for r in got], dtype=torch.float64).sum(0)
    assert torch.allclose(losses, torch.tensor(want[0], dtype=torch.float64), rtol=1e-11)
    for _, gradients, weights in got:
        assert gradients.keys() == want[1].keys()
        for name, gradient in want[1].items():
            difference = (gradients[name] - gradient).abs().max() / gradient.abs().max()
            assert difference < 1e-9, f"gradient of {name}: {difference:.1e}"
        for name, weight in want[2].items():
            assert (weights[name] - weight).abs().max() < weight_bound, f"weight {name}"


CASES = [
    # examples, batch, positions of a micro-batch: whole batches; a last one of 3 (2 and 1); a last
    # one of 1 (1, 0); a batch that the ranks do not divide (4 and 3)
    (24, 8, None),
    (27, 8, 30),
    (25, 8, 1),
    (21, 7, None),
]


@pytest.mark.parametrize(("n", "batch_size", "positions"), CASES)
@pytest.mark.parametrize("sync", ["per_parameter", "flat", "overlap"])
def test_ten_steps(ranks: Ranks, n: int, batch_size: int, positions: int | None, sync: str) -> None:
    got = ranks.run(data_parallel, n, batch_size, 10, sync, 1, positions)
    _compare(got, one_process(n, batch_size, 10), weight_bound=1e-9)


@pytest.mark.parametrize("sync", ["flat", "overlap"])
@pytest.mark.parametrize("accumulation", [2, 3, 100])
def test_accumulation_changes_nothing(ranks: Ranks, sync: str, accumulation: int) -> None:
    """Also across the end of an epoch, and with more parts than a rank has examples."""
    got = ranks.run(data_parallel, 25, 8, 10, sync, accumulation)
    _compare(got, one_process(25, 8, 10), weight_bound=1e-9)


def test_three_ranks(three_ranks: Ranks) -> None:
    got = three_ranks.run(data_parallel, 25, 6, 10, "overlap", 1)
    _compare(got, one_process(25, 6, 10), weight_bound=1e-9)


def test_the_reference_notices_a_mean_of_means(ranks: Ranks) -> None:
    """What this file must not accept: a loss divided by the rank's own target tokens."""
    got = ranks.run(_mean_of_means, 24, 8)
    with pytest.raises(AssertionError, match="gradient of"):
        _compare(
            [(one_process(24, 8, 1)[0], *rest) for _, *rest in got[:1]],
            one_process(24, 8, 1),
            weight_bound=1e-9,
        )


def _mean_of_means(rank: int, world_size: int, n: int, batch_size: int) -> Result:
    model, examples = _model(), _examples(n)
    loader = RankLoader(
        examples, GlobalBatches(n, batch_size, 0),
        rank=rank, world_size=world_size, pad_id=PAD, device="cpu",
    )  # fmt: skip
    step = next(iter(loader.steps(0)))
    args = argparse.Namespace(
        gradient_sync="overlap", bucket_mb=0.002, comm_dtype="fp32", precision="fp32"
    )
    average, no_sync = make_gradient_sync(args, model)
    mine = sum(len(b["target_index"]) for b in step.micro_batches)
    wrong = argparse.Namespace(micro_batches=step.micro_batches, target_tokens=mine * world_size)
    make_backward(args, World(rank, world_size), model, no_sync)(wrong)  # type: ignore[arg-type]
    average(model)
    return [], _gradients(model), _weights(model)

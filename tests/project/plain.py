"""One plain process: what every strategy must compute, on input that is odd in every way.

Plain PyTorch: the whole batch padded to one rectangle, all logits, the mean over the target tokens,
`torch.nn.utils.clip_grad_norm_`, `LambdaLR`. Of this project only the model and the order of the
examples. In float64, where a wrong factor cannot hide.

The examples: 31 in batches of 6, so that each epoch ends with a batch of one. In epoch 0, the
sentences of step 1 that two ranks deal to rank 1 have no target; step 3 has no target at all; in
step 4 one sentence is so long that it meets a position whose embedding is infinite, where a case
says so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2LMHeadModel

from training.data import Encoded, GlobalBatches
from training.model import build_model, gpt2_config
from training.optimization import Optimizers

VOCAB, PAD, LONG = 64, 0, 30
NUM_EXAMPLES, BATCH, EPOCHS, SEED = 31, 6, 2, 1
STEPS_PER_EPOCH = 6
STEPS = EPOCHS * STEPS_PER_EPOCH
NO_TARGETS_ON_RANK_1, NO_TARGETS, TOO_LONG = 1, 3, 4
RATE, WARMUP = 1e-3, 3
SIZES = {"n_layer": 3, "n_embd": 16, "n_head": 2}

Arrays = dict[str, npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Case:
    """What is asked of the optimizer. With `infinite`, step TOO_LONG has no finite loss."""

    max_grad_norm: float | None = None
    lr_scheduler: str = "constant"
    infinite: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """As the programs and `Recipe` have them."""
        return {
            "lr_scheduler": self.lr_scheduler,
            "warmup_steps": 0 if self.lr_scheduler == "constant" else WARMUP,
            "max_grad_norm": self.max_grad_norm,
            "on_nan": "skip" if self.infinite else "stop",
        }


@dataclass
class Taken:
    """A step. The rate and the gradients, after clipping, where the weights were updated."""

    loss_sum: float
    rate: float | None = None
    gradients: Arrays | None = None


def make_examples() -> list[Encoded]:
    """See above."""
    rng = random.Random(3)

    def example(source: int, target: int) -> Encoded:
        return Encoded([rng.randrange(1, VOCAB) for _ in range(source + target)], source)

    examples = [example(rng.randint(2, 7), rng.randint(1, 9)) for _ in range(NUM_EXAMPLES)]
    batches = GlobalBatches(NUM_EXAMPLES, BATCH, SEED).epoch(0)
    for place, i in enumerate(batches[NO_TARGETS_ON_RANK_1]):  # sorted by length, dealt in turn
        examples[i] = example(4 + 2 * place, 0 if place % 2 else 1)
    for i in batches[NO_TARGETS]:
        examples[i] = example(rng.randint(2, 9), 0)
    examples[batches[TOO_LONG][2]] = example(LONG, 5)
    return examples


def make_model(case: Case) -> GPT2LMHeadModel:
    """Small; head and embedding share their weight."""
    config = gpt2_config("gpt2-mini", VOCAB, LONG + 8, dropout=0.0, **SIZES)
    model = build_model(config, seed=1).double()
    if case.infinite:
        with torch.no_grad():
            model.transformer.wpe.weight[LONG] = math.inf
    return model


@cache
def one_process(case: Case) -> tuple[list[Taken], Arrays]:
    """The steps, and the weights after them."""
    model, examples = make_model(case), make_examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _factors(case.lr_scheduler))
    steps = []
    batches = GlobalBatches(NUM_EXAMPLES, BATCH, SEED)
    for indices in (batch for epoch in range(EPOCHS) for batch in batches.epoch(epoch)):
        batch = [examples[i] for i in indices]
        ids = torch.full((len(batch), max(len(e.ids) for e in batch)), PAD)
        weights = torch.zeros(ids.shape, dtype=torch.float64)
        for row, e in enumerate(batch):
            ids[row, : len(e.ids)] = torch.tensor(e.ids)
            weights[row, e.num_source : len(e.ids)] = 1
        optimizer.zero_grad()
        logits = model(input_ids=ids[:, :-1]).logits
        nll = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        chosen = weights[:, 1:].flatten() != 0
        step = Taken(nll[chosen].sum().item())
        if chosen.any():
            nll[chosen].mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm or math.inf)
            if norm.isfinite():
                step.rate = float(scheduler.get_last_lr()[0])
                step.gradients = _arrays((n, p.grad) for n, p in model.named_parameters())
                optimizer.step()
        scheduler.step()
        steps.append(step)
    return steps, weights_of(model)


def _factors(lr_scheduler: str) -> Callable[[int], float]:
    """In float64 and by its own arithmetic: thirds, and what is left of nine steps."""
    rising = [1 / 3, 2 / 3, 1.0]
    falling = {
        "constant": [1.0] * STEPS,
        "linear": [*rising, *((STEPS - k) / 9 for k in range(3, STEPS))],
        "cosine": [*rising, *(math.cos(math.pi / 2 * (k - 3) / 9) ** 2 for k in range(3, STEPS))],
    }
    return ([*falling[lr_scheduler], 0.0]).__getitem__


def record(optimizer: Optimizers, model: nn.Module) -> list[Taken]:
    """The steps that `optimizer` will take."""
    steps: list[Taken] = []
    inner = optimizer.step

    def step(loss: torch.Tensor, target_tokens: int) -> str | None:
        left_out = inner(loss, target_tokens)
        steps.append(Taken(loss.item()))
        if left_out is None:
            (steps[-1].rate,) = {g["lr"] for o in optimizer.optimizers for g in o.param_groups}
            steps[-1].gradients = _arrays((n, p.grad) for n, p in model.named_parameters())
        return left_out

    optimizer.step = step  # type: ignore[method-assign]
    return steps


def weights_of(model: nn.Module) -> Arrays:
    """The parameters by name."""
    return _arrays(model.named_parameters())


def _arrays(tensors: Iterable[tuple[str, Any]]) -> Arrays:
    """Not as tensors, of which processes would share the memory: a file each."""
    return {name: t.detach().clone().numpy() for name, t in tensors}


def compare(steps: list[Taken], weights: Arrays, case: Case) -> None:
    """With what one process does, for each step, by parameter name.

    With eps = 1.1e-16 and sums of less than 1e3 terms of like size, a gradient is off by less than
    1e-12 of the largest; AdamW divides by the root of the mean square, and so may turn an error d
    of a gradient g into lr * d / |g|: twelve steps of lr 1e-3 leave weights within 1e-9 where
    |g| > 1e-5 * max|g|, which is all but a few.
    """
    want, want_weights = one_process(case)
    assert len(steps) == len(want) == STEPS
    np.testing.assert_allclose([s.loss_sum for s in steps], [s.loss_sum for s in want], rtol=1e-10)
    rates = [[math.nan if s.rate is None else s.rate for s in these] for these in (steps, want)]
    np.testing.assert_allclose(rates[0], rates[1], rtol=1e-12)  # NaN equals NaN
    for k, (step, wanted) in enumerate(zip(steps, want, strict=True)):
        if wanted.gradients is None or step.gradients is None:
            continue
        assert step.gradients.keys() == wanted.gradients.keys()
        for name, gradient in wanted.gradients.items():
            off = np.abs(step.gradients[name] - gradient).max() / np.abs(gradient).max()
            assert off < 1e-9, f"gradient of {name} in step {k}: {off:.1e}"
    assert weights.keys() == want_weights.keys()
    for name, weight in want_weights.items():
        finite = np.isfinite(weight)
        assert np.array_equal(finite, np.isfinite(weights[name])), name
        off = np.abs(weights[name][finite] - weight[finite]).max()
        assert off < 1e-9, f"weight {name}: {off:.1e}"

"""The reference: one process, plain PyTorch.

transformers' GPT-2 or a VGG16, the whole batch in one rectangle, all logits, the mean over the
batch's targets. The updates are those that the options ask for, by code that no run uses
(`training.check.plain_steps`: learning rates, `clip_grad_norm_`, AdamW). From the project come the
order of the examples and the initial weights.
"""

from __future__ import annotations

import math
from itertools import count, islice, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from tests.equivalence.problems import BALANCE, DECAY, SEED, Noise, Problem, Sentences
from tests.plain_experts import PlainExperts, added_of, with_experts
from training.check import plain_steps
from training.launch.world import World
from training.tasks.gpt2 import Sequences, gpt2_layers
from training.tasks.task import stream
from training.tasks.vgg import vgg16

Key = tuple[str, str, int]
Reference = dict[Key, Tensor]
"""A run, by kind, parameter and step:

    ("loss", "", k)            the mean loss of global batch k, in nats per target
    ("gradient", name, k)      after it, before gradients are clipped
    ("weight", name, 0)        after all steps

A step that must be left out has loss NaN and no gradients. The first step is 1.
"""


def to_arrays(reference: Reference) -> dict[Key, Any]:
    """As it is sent to a rank: to pickle a tensor takes a hundred times as long."""
    return {key: tensor.numpy() for key, tensor in reference.items()}


def of_arrays(arrays: dict[Key, Any]) -> Reference:
    """What `to_arrays` was given."""
    return {key: torch.from_numpy(array) for key, array in arrays.items()}


def plain(problem: Problem, n_steps: int, dtype: torch.dtype) -> Reference:
    """What every row must equal."""
    task = problem.task(World(), dtype)
    model: Any = vgg16(width=4)
    if isinstance(problem, Sentences):
        model = GPT2LMHeadModel(problem.config())
        if problem.experts:
            by_bias = problem.balance_by == "bias"
            more = problem.shared_experts, by_bias
            model = with_experts(model, problem.experts, problem.top_k, *more)
    model = model.to(dtype)
    for name, p in model.named_parameters():
        task.initialize(name, p)
    batches = ((epoch, batch) for epoch in count() for batch in problem.batches(epoch))
    losses = (mean_loss(problem, model, batch, epoch) for epoch, batch in islice(batches, n_steps))
    found: Reference = {}
    steps = plain_steps(problem.options, model.named_parameters(), DECAY, losses)
    for k, (loss, updates) in enumerate(steps, 1):
        found["loss", "", k] = torch.tensor(loss if updates else math.nan, dtype=torch.float64)
        if updates:
            for name, p in model.named_parameters():
                found["gradient", name, k] = p.grad.clone()
    return found | {("weight", name, 0): p.detach() for name, p in model.named_parameters()}


def mean_loss(problem: Problem, model: Any, batch: list[int], epoch: int) -> Tensor:
    """The mean loss of the examples with these numbers; NaN where they have no target.

    Dropout is not transformers' own, which draws, but that of the layers that every layout runs.
    """
    if isinstance(problem, Noise):
        images, labels = problem.examples()[batch]
        x = images.to(next(model.parameters()).dtype) / 63.75 - 2
        return F.cross_entropy(model(x), labels)
    assert isinstance(problem, Sentences)
    examples = [problem.examples()[i] for i in batch]
    ids = torch.zeros(len(batch), max(len(example.ids) for example in examples), dtype=torch.long)
    weights = torch.zeros(ids.shape, dtype=model.dtype)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        weights[row, example.num_source : len(example.ids)] = 1
    if problem.dropout:
        seed = stream(SEED, "dropout", epoch)
        keys = torch.tensor([(seed + 0x9E3779B97F4A7C15 * i) % 2**63 for i in batch])
        inputs = Sequences(ids[:, :-1], keys=keys)
        logits = nn.Sequential(*gpt2_layers(model))(inputs).flatten(0, 1)
    elif problem.documents:
        logits = alone(model, ids[:, :-1])
    else:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1)
    losses = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    loss = losses[weights[:, 1:].flatten() != 0].mean()
    if problem.experts:  # in the gradient, and in no loss that is reported
        lengths, targets = [len(x.ids) - 1 for x in examples], [x.num_targets for x in examples]
        added = added_of(model, lengths, targets, BALANCE, problem.router_z)
        loss = loss + added - added.detach()
    return loss


def alone(model: Any, rows: Tensor) -> Tensor:
    """The logits of rows' documents, [B T, V], of each as if there were no other: it begins with
    token 0, or with the row. Experts then have their choices of all of them, [B, T, E]."""
    mlps = [b.mlp for b in model.transformer.h if isinstance(b.mlp, PlainExperts)]
    logits, choices = list[Tensor](), list[list[Any]]()
    for row in rows:
        edges = sorted({0, *(row == 0).nonzero()[:, 0].tolist(), len(row)})
        for a, b in pairwise(edges):
            logits.append(model(input_ids=row[None, a:b], use_cache=False).logits[0])
            choices.append([(mlp.logits, mlp.probabilities, mlp.chosen) for mlp in mlps])
    for mlp, of_documents in zip(mlps, zip(*choices, strict=True), strict=True):
        mlp.logits, mlp.probabilities, mlp.chosen = (
            torch.cat(parts, 1).view(*rows.shape, -1) for parts in zip(*of_documents, strict=True)
        )
    return torch.cat(logits)

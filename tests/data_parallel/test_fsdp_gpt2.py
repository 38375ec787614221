"""GPT-2 as its layers, sharded: the gradients and weights of one process, by its own names."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from data_parallel.fsdp import FullyShardedDataParallel
from tests.data_parallel.sharded_models import Result, check, whole
from tests.ranks import Ranks
from training.model import build_model, gpt2_config, gpt2_layers, initializer, loss_of_targets

STEPS, VOCAB = 10, 96
Batch = tuple[Tensor, Tensor]


def _config() -> GPT2Config:
    return gpt2_config("gpt2-mini", VOCAB, 16, dropout=0.0, n_layer=2, n_embd=20, n_head=2)


def _batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (6, 10), generator=generator)
    return ids, torch.randint(2, (6, 9), generator=generator)


def _optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _one_process() -> list[Result]:
    """The model's own forward, all logits, cross-entropy by hand."""
    model = build_model(_config(), seed=0).double()
    optimizer = _optimizer(list(model.parameters()))
    results = []
    for step in range(STEPS):
        ids, weights = _batch(step)
        logits = model(input_ids=ids[:, :-1]).logits
        chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        loss = -(chosen * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        weights_after = {n: p.detach().clone() for n, p in model.named_parameters()}
        results.append(Result(loss.item(), gradients, weights_after))
    return results


def _train(rank: int, _: int, zero: int) -> list[Result]:
    with torch.device("meta"):
        model = GPT2LMHeadModel(_config()).double()
    fsdp = FullyShardedDataParallel(
        gpt2_layers(model),
        _optimizer,
        names={p: name for name, p in model.named_parameters()},
        init=initializer(_config(), seed=0),
        zero=zero,
    )
    results = []
    for step in range(STEPS):
        ids, weights = _batch(step)
        mine = slice(0, 2 + step % 4) if rank == 0 else slice(2 + step % 4, 6)
        x, target = (ids[mine, :-1], weights[mine]), (ids[mine, 1:], weights[mine])
        loss = fsdp.train_step([x], [target], loss_of_targets, 1 / int(weights.sum()))
        gradients = whole(fsdp, "gradients")
        fsdp.optimizer_step()
        results.append(Result(loss.item(), gradients, whole(fsdp, "parameters")))
    dist.barrier()
    return results


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gpt2_is_that_of_one_process(ranks: Ranks, zero: int) -> None:
    check(ranks.run(_train, zero), _one_process())

"""The head over a vocabulary that is cut, and which cuts work. tests/equivalence checks that a cut
model trains as a whole one does."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.communicator import Communicator
from tensor_parallel import loss
from tensor_parallel.gpt2 import TensorShard, VocabularyParallelHead, cut_matrices, degrees
from tests import ranks as processes
from tests.plain_gpt2 import build_model
from training.tasks.gpt2 import gpt2_config

VOCABULARY = 67  # 3 does not divide it
N, C = 30, 24


def case() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states N C, the whole embedding V C, labels N."""
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, C, generator=g, dtype=torch.float64).requires_grad_()
    weight = torch.randn(VOCABULARY, C, generator=g, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (N,), generator=g)
    labels[::3] = (hidden @ weight.t()).argmax(-1)[::3]  # some are right
    return hidden, weight, labels


def on_ranks(rank: int, world_size: int) -> list[Tensor]:
    """The loss, its gradients of all hidden states and of this rank's rows, what validation counts,
    and the likeliest of all tokens and of the first five."""
    ranks = Communicator(torch.distributed.group.WORLD)
    hidden, whole, labels = case()
    part = TensorShard(tuple(whole.shape), 0, 1, rank, world_size)
    head = VocabularyParallelHead(nn.Parameter(part.of(whole)), VOCABULARY, ranks)
    args = hidden, head.known, labels, ranks, head.first
    with patch.dict(loss.LOGITS_AT_ONCE, cpu=200):  # logits, so that there are several chunks
        total = loss.head_loss(*args)
        (2 * total).backward()
        measured = loss.measure(*args)
    assert hidden.grad is not None and head.weight.grad is not None
    logits = (hidden @ head.weight.t()).detach()
    tokens = [loss.argmax(logits, n, ranks, head.first) for n in (VOCABULARY, 5)]
    rows = head.weight.grad[: len(head.known)]
    return [total.detach(), ranks.all_reduce(hidden.grad), rows, measured, *tokens]


def test_the_head_computes_what_one_process_does(three_ranks: processes.Ranks) -> None:
    hidden, weight, labels = case()
    logits = hidden @ weight.requires_grad_().t()
    total = F.cross_entropy(logits, labels, reduction="sum")
    (2 * total).backward()
    right = (logits.argmax(-1) == labels).sum()
    measured = torch.stack([total.detach(), right, right.new_tensor(N)])
    every = three_ranks.run(on_ranks)
    assert hidden.grad is not None and weight.grad is not None
    for found in every:
        wanted = [total.detach(), hidden.grad, found[2], measured]
        torch.testing.assert_close(found[:4], wanted)
        assert found[4].equal(logits.argmax(-1)) and found[5].equal(logits[:, :5].argmax(-1))
    torch.testing.assert_close(torch.cat([found[2] for found in every]), weight.grad)


def test_what_the_head_cannot_compute_is_not_silent() -> None:
    """A label that is no token; float64, which autocast leaves; a second derivative."""
    hidden, weight, labels = case()
    args = weight, labels, Communicator(), 0
    with torch.autocast("cpu", torch.bfloat16):
        total = loss.head_loss(hidden, *args)
    assert total.equal(loss.head_loss(hidden, *args)) and total.dtype == torch.float64
    assert loss.head_loss(hidden, weight, labels - 100, *args[2:]).isinf()
    (gradient,) = torch.autograd.grad(total.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    with pytest.raises(ValueError, match="0 rows of the embedding on a rank: 1 or more work"):
        loss.head_loss(hidden, weight[:0], *args[1:])
    with pytest.raises(ValueError, match="the largest logit of 0 tokens: 1 or more work"):
        loss.argmax(hidden @ weight.t(), 0, *args[2:])
    for blocks, rank in ((3, 0), (2, 2), (2, -1)):
        with pytest.raises(
            ValueError, match=f"part {rank} of 2, .* in {blocks} blocks: parts 0 to 1"
        ):
            TensorShard((4, 6), 0, blocks, rank, 2)


def test_the_degrees_that_work() -> None:
    assert degrees(6, 100) == [1, 2, 3, 6]
    assert degrees(4, 9) == [1, 2]  # of four ranks with three tokens each, one would have none
    with pytest.raises(ValueError, match=r"6 heads .* cannot be cut over 4 ranks; .*: 1, 2, 3, 6$"):
        ranks = Communicator()
        ranks.size = 4
        config = gpt2_config("gpt2-mini", 100, 24, n_layer=1, n_embd=24, n_head=6)
        cut_matrices(build_model(config, 0), ranks)
    ranks.size, config.n_inner = 3, 97
    with pytest.raises(ValueError, match=r"97 neurons .* cannot be cut over 3 ranks; 99 can"):
        cut_matrices(build_model(config, 0), ranks)


def test_a_model_is_cut_once_and_knows_its_tokens() -> None:
    """Of 9 tokens on two ranks the second has 4, and a row of none."""
    config = gpt2_config("gpt2-mini", 9, 24, n_layer=1, n_embd=24, n_head=6)
    model, ranks = build_model(config, 0), Communicator()
    cut_matrices(model, ranks)
    with pytest.raises(ValueError, match="cut already"):
        cut_matrices(model, ranks)
    embedding = model.transformer.wte
    assert embedding(torch.tensor([[0, 8]])).shape == (1, 2, 24)
    for token in (-1, 9):
        with pytest.raises(IndexError, match=f"no token {token}; 0 to 8 work"):
            embedding(torch.tensor([[1, token]]))

"""GPT-2 cut over ranks beside GPT-2 on one: loss, every gradient, logits, next tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime.ranks import Ranks
from tensor_parallel import loss
from tensor_parallel.gpt2 import HeadAndLoss, Part, cut, degrees
from tensor_parallel.loss import likeliest
from tests import ranks as processes
from training.model import build_model, gpt2_config, gpt2_layers, loss_of_targets

VOCABULARY = 67  # neither 2 nor 3 divides it
B, T = 4, 12


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, weights, keys, labels; some positions have no target."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (B, T), generator=g)
    labels = torch.randint(VOCABULARY, (B, T), generator=g)
    weights = (torch.rand(B, T, generator=g) < 0.6).long()
    return ids, weights, torch.arange(B) * 7919 + 2**40, labels


def config(tied: bool = True) -> Any:
    size = {"n_layer": 2, "n_embd": 24, "n_head": 6}
    found = gpt2_config("gpt2-mini", VOCABULARY, 2 * T, dropout=0.2, **size)
    found.tie_word_embeddings = tied
    return found


def one_process(tied: bool) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss, gradients and logits."""
    model = build_model(config(tied), 0).double()
    ids, weights, keys, labels = batch()
    layers = nn.Sequential(*gpt2_layers(model))
    loss = loss_of_targets(layers((ids, weights, keys)), (labels, weights))
    (2 * loss).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        return loss.detach(), gradients, layers.eval()((ids, weights))


def laid_out(
    ranks: Ranks, sequence_parallel: bool, tied: bool
) -> tuple[Any, list[Any], dict[str, Part]]:
    """The model with this rank's parts, its layers, and which parts those are."""
    from transformers import GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(config(tied))
    parts = cut(model, ranks, sequence_parallel)
    whole = dict(build_model(config(tied), 0).named_parameters())
    model.double().to_empty(device="cpu")
    if tied:
        model.lm_head.weight = model.transformer.wte.weight
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(parts[name].of(whole[name]) if name in parts else whole[name])
    layers: list[Any] = gpt2_layers(model)
    layers[-1] = HeadAndLoss(model.transformer.ln_f, model.lm_head, sequence_parallel)
    for layer in layers[:-1]:
        layer.shard = ranks.rank
    return model, layers, parts


def on_ranks(rank: int, world_size: int, sequence_parallel: bool, share: bool, tied: bool) -> Any:
    """What `one_process` gives, and the likeliest tokens."""
    del rank, world_size
    loss.CHUNK = 200  # logits, so that there are several chunks, the same on all ranks
    ranks = Ranks(torch.distributed.group.WORLD, share_memory=share)
    model, layers, parts = laid_out(ranks, sequence_parallel, tied)
    net = nn.Sequential(*layers)
    x = batch()
    total = net(x)
    (2 * total).backward()
    gradients = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        of_positions = sequence_parallel and name not in parts
        gradients[name] = ranks.all_reduce(p.grad) if of_positions else p.grad
    net.eval()
    with torch.no_grad():
        measured = net(x)
        logits = net(x[:2])
        tokens = [likeliest(logits, n, ranks, model.lm_head.first) for n in (VOCABULARY, 5)]
    return total.detach(), gradients, parts, measured, tokens


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_it_computes_what_one_process_does(
    three_ranks: processes.Ranks, sequence_parallel: bool
) -> None:
    """The vocabulary is padded, and there are tokens to choose: more in tests/equivalence."""
    tied, share = sequence_parallel, not sequence_parallel
    wanted_loss, gradients, logits = one_process(tied)
    _, weights, _, labels = batch()
    labels = labels[weights != 0]
    every = three_ranks.run(on_ranks, sequence_parallel, share, tied)
    for found, mine, parts, measured, tokens in every:
        torch.testing.assert_close(found, wanted_loss)
        assert mine.keys() == gradients.keys()
        for name, whole in gradients.items():
            wanted = parts[name].of(whole) if name in parts else whole
            torch.testing.assert_close(mine[name], wanted, rtol=1e-9, atol=1e-12, msg=name)
        right = (logits.argmax(-1) == labels).sum()
        plain = nn.functional.cross_entropy(logits, labels, reduction="sum")
        expected = torch.stack([plain, right, right.new_tensor(len(labels))]).double()
        torch.testing.assert_close(measured, expected)
        assert tokens[0].equal(logits.argmax(-1)) and tokens[1].equal(logits[:, :5].argmax(-1))


def test_the_degrees_that_work() -> None:
    assert degrees(6, 100) == [1, 2, 3, 6]
    with pytest.raises(ValueError, match=r"6 heads .* cannot be cut over 4 ranks; .*: 1, 2, 3, 6$"):
        ranks = Ranks()
        ranks.size = 4
        cut(build_model(config(), 0), ranks)


def test_a_part_says_where_its_rectangles_lie() -> None:
    whole = torch.arange(2 * 12).view(2, 12)
    part = Part((2, 12), 1, blocks=3, rank=1, size=2)
    mine = part.of(whole)
    assert mine[0].tolist() == [2, 3, 6, 7, 10, 11]
    for columns in ((0, 6), (1, 4), (3, 4), (5, 6)):
        piece = mine[1:, slice(*columns)]
        for at, view in part.rectangles((1, columns[0]), piece):
            assert view.equal(whole[at[0] : at[0] + 1, at[1] : at[1] + view.size(1)])
        assert sum(v.numel() for _, v in part.rectangles((1, columns[0]), piece)) == piece.numel()


def test_the_last_part_is_padded_and_its_rectangles_leave_that_out() -> None:
    whole = torch.arange(7 * 3).view(7, 3)
    parts = [Part((7, 3), 0, blocks=1, rank=rank, size=3) for rank in range(3)]
    every = [part.of(whole) for part in parts]
    assert [len(tensor) for tensor in every] == [3, 3, 3]
    assert every[2].tolist() == [[18, 19, 20], [0, 0, 0], [0, 0, 0]]
    found = [p.rectangles((0, 0), t) for p, t in zip(parts, every, strict=True)]
    assert torch.cat([view for ((_, view),) in found]).equal(whole)
    assert [at for ((at, _),) in found] == [(0, 0), (3, 0), (6, 0)]

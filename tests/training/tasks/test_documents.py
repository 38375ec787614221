"""Documents of a row that do not see each other: each is what it is alone, on every way that
attention takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime import documents, dropout
from runtime.dropout import attention
from tests.plain_gpt2 import build_model
from training.tasks.experts import LanguageWithExperts
from training.tasks.gpt2 import Sequences, gpt2_config, gpt2_layers
from training.tasks.language import LanguageTask

END = 0
B, H, E = 2, 2, 4
WAYS = {"a mask": 10**6, "stretches": 0}  # by runtime.dropout.SHORT


def starts_of(ids: Tensor, kept: Any = "apart") -> Tensor | None:
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda _: END)
    task: Any = SimpleNamespace(args=SimpleNamespace(documents=kept), tokenizer=tokenizer)
    return LanguageTask.starts(task, ids)


def document(seed: int, length: int) -> list[int]:
    """An end token, and others."""
    generator = torch.Generator().manual_seed(seed)
    return [END, *torch.randint(1, 320, (length - 1,), generator=generator).tolist()]


def test_a_document_starts_at_its_end_token_or_with_the_row() -> None:
    ids = torch.tensor([[5, 6, END, 7, 8, END], [END, 5, 6, 7, 8, 9]])
    found = starts_of(ids)
    assert found is not None and found.tolist() == [[0, 0, 2, 2, 2, 5], [0] * 6]
    assert LanguageWithExperts.starts is LanguageTask.starts
    assert starts_of(ids[1:]) is None and starts_of(ids, "together") is None


@pytest.mark.parametrize("way", WAYS)
def test_a_documents_loss_is_the_same_whatever_stands_beside_it(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Alone, and behind and before others, whole or cut, in another row and at another place."""
    monkeypatch.setattr(dropout, "SHORT", WAYS[way])
    monkeypatch.setattr(documents, "STRETCH", 40)  # several documents, or one
    config = gpt2_config("gpt2-mini", 320, 200, n_layer=2, n_embd=32, n_head=2, dropout=0.0)
    model = build_model(config, 0).double()
    layers = nn.Sequential(*gpt2_layers(model))
    watched, T = document(1, 50), 150

    def losses(row: int, before: list[int], kept: str = "apart") -> Tensor:
        rows = [document(2, 10) + document(3, 290)] * 2
        rows[row] = before + watched + document(4, 7) + document(5, 200)
        ids = torch.tensor([some[: T + 1] for some in rows])
        logits = layers(Sequences(ids[:, :-1], starts=starts_of(ids[:, :-1], kept)))
        at = slice(len(before), len(before) + len(watched))
        return F.cross_entropy(logits[row, at], ids[row, 1:][at], reduction="none")

    ids = torch.tensor([[*watched, END]])
    plain = model(input_ids=ids[:, :-1], use_cache=False).logits[0]
    alone = F.cross_entropy(plain, ids[0, 1:], reduction="none")
    for row, before in (0, []), (1, document(6, 3)), (0, document(7, 80)[1:]), (1, [END] * 41):
        assert (losses(row, before) - alone).abs().max() < 1e-12
    assert (losses(0, document(7, 80), "together") - alone).abs().max() > 1e-3


def functions(out: Tensor) -> set[str]:
    """The names of what autograd has recorded."""
    names, waiting = set[str](), [out.grad_fn]
    while waiting:
        if (node := waiting.pop()) is not None:
            names.add(node.name())
            waiting += [other for other, _ in node.next_functions]
    return names


@pytest.mark.parametrize("way", WAYS)
def test_fused_kernels_compute_it(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(dropout, "SHORT", WAYS[way])
    monkeypatch.setattr(documents, "STRETCH", 4)
    q = torch.randn(B, H, 24, E, requires_grad=True)
    starts = torch.tensor([[0] * 3 + [3] * 9 + [12] * 12] * B)
    names = functions(attention(q, q, q, None, 0.0, None, 7, 0, starts))
    assert "ScaledDotProductFlashAttentionForCpuBackward0" in names
    assert not [name for name in names if "Softmax" in name or "Bmm" in name]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_no_gradient_crosses(monkeypatch: pytest.MonkeyPatch, way: str, p: float) -> None:
    """Queries of one document give keys and values of others none; with hashed dropout, too."""
    monkeypatch.setattr(dropout, "SHORT", WAYS[way])
    monkeypatch.setattr(documents, "STRETCH", 4)
    T = 24
    starts = torch.tensor([[0] * 3 + [3] * 9 + [12] * 12, [0] * 20 + [20, 21, 22, 22]])
    q, k, v = torch.randn(3, B, H, T, E, dtype=torch.float64).requires_grad_()
    out = attention(q, k, v, None, p, torch.tensor([5, 6]), 7, 0, starts)
    for row, t in ((0, 2), (0, 3), (0, 11), (0, 23), (1, 19), (1, 21), (1, 23)):
        d_k, d_v = torch.autograd.grad(out[row, :, t].sum(), (k, v), retain_graph=True)
        first = int(starts[row, t])
        for gradient in (d_k, d_v):
            used = gradient.abs().sum((1, 3))  # B T
            used[row, first : t + 1] = 0
            assert not used.any()
        assert p or (d_v[row, :, first : t + 1] != 0).all()

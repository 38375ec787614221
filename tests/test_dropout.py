"""Dropout by hash: it drops what it should, in no pattern, whoever holds the activation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from runtime.dropout import attention, dropout, site_of

KEYS = torch.randint(2**62, (64,), generator=torch.Generator().manual_seed(0))
T = 32  # positions


def mask(keys: Tensor = KEYS, where: str = "drop", first: int = 0, end: int = T) -> Tensor:
    ones = torch.ones(len(keys), end - first, 128)
    return dropout(ones, 0.1, keys, site_of(where), first) == 0


@pytest.mark.parametrize("p", [0.01, 0.1, 0.9])
def test_the_share_that_is_dropped(p: float) -> None:
    left = dropout(torch.full((64, 32, 128), 3.0), p, KEYS, site_of("drop"))
    dropped = (left == 0).double()
    assert left.unique().tolist() == pytest.approx([0, 3 / (1 - p)])  # so that the mean stays
    for dims in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):  # of all, by example, position, channel
        share = dropped.mean(dims)
        deviation = (p * (1 - p) / (dropped.numel() / share.numel())) ** 0.5  # of the mean
        assert (share - p).abs().max() < (6 if share.dim() else 4) * deviation


def test_neighbours_examples_and_places_are_independent() -> None:
    one = mask()
    others = [
        one.roll(1, 0), one.roll(1, 1), one.roll(1, 2), one.roll(7, 2),
        mask(where="h.0.attn"), mask(KEYS + 1), mask(KEYS + 2**40),
    ]  # fmt: skip
    both = torch.stack([(one & other).double().mean() for other in others])
    deviation = (0.01 * 0.99 / one.numel()) ** 0.5
    assert ((both - 0.01).abs() < 5 * deviation).all(), both


def test_a_mask_does_not_depend_on_who_holds_the_activation() -> None:
    assert mask(KEYS[5:9]).equal(mask()[5:9])
    for first, end in ((0, 12), (8, 12)):
        assert mask(first=first, end=end).equal(mask()[:, first:end])


def test_the_gradient_is_dropped_where_the_value_is() -> None:
    x = torch.ones(64, 32, 128).requires_grad_()
    y = dropout(x, 0.3, KEYS, 5)
    y.sum().backward()
    assert x.grad is not None and x.grad.equal(y)


def test_attention_without_dropout_is_torchs_and_heads_are_independent() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).double()
    keys = KEYS[:2]
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention(q, k, v, None, 1e-12, keys, 3), plain)
    some = attention(q[:, 2:], k[:, 2:], v[:, 2:], None, 0.3, keys, 3, 2)
    assert some.equal(attention(q, k, v, None, 0.3, keys, 3)[:, 2:])
    uniform, ones = torch.zeros(64, 4, 32, 8), torch.ones(64, 4, 32, 8)
    # Position t has t + 1 weights, each 1 / (t + 1) or dropped.
    sums = attention(uniform, uniform, ones, None, 0.5, KEYS, 3)[..., 16:, 0]
    assert abs(sums.mean() - 1) < 0.02
    assert abs(torch.corrcoef(sums.transpose(0, 1).flatten(1))[0, 1]) < 0.1


class Seen(TorchFunctionMode):
    """The functions that a mode sees, as a stage's search for draws does."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **kwargs or {})


def test_hashing_is_not_searched_for_draws() -> None:
    x = torch.ones(64, T, 128)
    with Seen() as seen:
        dropout(x, 0.1, KEYS, site_of("drop"))
    assert "__xor__" not in seen.names and seen.names[-1] == "where"

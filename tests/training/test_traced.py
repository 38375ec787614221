"""Traced layers beside those by hand: each with the same parameters, and the same outputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from training.generation import newest_alone
from training.model import build_model, gpt2_config, gpt2_layers
from training.prefix import Prefix
from training.traced import traced_layers


@pytest.fixture(scope="module")
def model() -> Any:
    config = gpt2_config("gpt2-mini", 40, 16, dropout=0.0, n_layer=1, n_embd=16, n_head=2)
    return build_model(config, 0).double()


def test_they_are_the_layers_by_hand(model: Any) -> None:
    """For sentences of one token, too, in training and in evaluation; with a cache; and for ids
    alone, of which operations are counted."""
    by_hand, traced = gpt2_layers(model), traced_layers(model)
    assert [set(map(id, layer.parameters())) for layer in traced] == [
        set(map(id, layer.parameters())) for layer in by_hand
    ]
    keys = torch.zeros(3, dtype=torch.long)
    traced = copy.deepcopy(traced)  # as --balance auto measures them
    for ids in (torch.arange(3)[:, None], torch.arange(15).view(3, 5)):
        weights = (ids % 4 != 1).double()
        for mode, value in ((True, (ids, weights, keys)), (False, (ids, weights)), (False, ids)):
            outputs = [nn.Sequential(*layers).train(mode)(value) for layers in (by_hand, traced)]
            torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)

    def continued(layers: list[nn.Module]) -> list[Tensor]:
        ids, newest = torch.arange(15).view(3, 5), torch.arange(3)[:, None]
        prefix = Prefix([5, 5, 5])
        first = nn.Sequential(*layers).eval()((ids, newest_alone(ids), prefix))
        prefix.extend()
        return [first, nn.Sequential(*layers)((newest, newest_alone(newest), prefix))]

    with torch.no_grad():
        found, expected = continued(traced), continued(by_hand)
    assert all(map(torch.equal, found, expected))

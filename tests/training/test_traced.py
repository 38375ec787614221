"""Traced layers beside those by hand, in what tests/equivalence does not run."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from training.generation import newest_alone
from training.model import build_model, gpt2_config, gpt2_layers
from training.prefix import Prefix
from training.traced import traced_layers


def test_they_are_the_layers_by_hand() -> None:
    """Each has the same parameters. They take sentences of one token, too, in training and in
    evaluation; ids alone, of which operations are counted; and a cache."""
    config = gpt2_config("gpt2-mini", 40, 16, dropout=0.0, n_layer=1, n_embd=16, n_head=2)
    model = build_model(config, 0).double()
    by_hand, traced = gpt2_layers(model), traced_layers(model)
    parameters = [[set(layer.parameters()) for layer in layers] for layers in (by_hand, traced)]
    assert parameters[0] == parameters[1]
    traced = copy.deepcopy(traced)  # as --balance auto measures them
    keys = torch.zeros(3, dtype=torch.long)
    for ids in (torch.arange(3)[:, None], torch.arange(15).view(3, 5)):
        weights = (ids % 4 != 1).double()
        for mode, value in ((True, (ids, weights, keys)), (False, (ids, weights)), (False, ids)):
            outputs = [nn.Sequential(*layers).train(mode)(value) for layers in (by_hand, traced)]
            torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)

    def continued(layers: list[nn.Module]) -> list[Tensor]:
        ids, newest, prefix = torch.arange(15).view(3, 5), torch.arange(3)[:, None], Prefix([5] * 3)
        first = nn.Sequential(*layers).eval()((ids, newest_alone(ids), prefix))
        prefix.extend()
        return [first, nn.Sequential(*layers)((newest, newest_alone(newest), prefix))]

    with torch.no_grad():
        assert all(map(torch.equal, continued(traced), continued(by_hand)))

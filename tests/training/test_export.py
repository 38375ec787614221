"""An export is written from a stream of parameters, and transformers reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from training import export as module
from training.export import export
from training.model import build_model, gpt2_config
from training.world import World


@pytest.mark.parametrize(("file_bytes", "files"), [(1 << 30, 1), (20_000, 3)])
def test_transformers_loads_it_from_one_file_or_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int, files: int
) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", file_bytes)
    config = gpt2_config("gpt2-mini", 260, 64, n_layer=2, n_embd=16, n_head=2)
    model = build_model(config, seed=8)
    weights = ((name, p.detach()) for name, p in model.named_parameters())
    export(World(), tmp_path / "model", weights, config.save_pretrained)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == files
    again = dict(GPT2LMHeadModel.from_pretrained(tmp_path / "model").named_parameters())
    assert [n for n, p in model.named_parameters() if not torch.equal(p, again[n])] == []

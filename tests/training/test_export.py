"""An export is written from a stream of parameters, and transformers reads it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from tests.ranks import Ranks
from training import export as module
from training.checkpoint import SaveError
from training.export import export
from training.launch import World
from training.model import build_model, gpt2_config
from training.parallel import gather_on_main


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


def export_together(rank: int, world_size: int, folder: Path, full: bool) -> str:
    """Each rank has a parameter of its own; rank 0 may meet a full disk at once."""
    world, left = World(rank, world_size), [0]
    mine = {f"p{rank}": torch.nn.Parameter(torch.full((3,), float(rank)))}

    def noted() -> Iterator[tuple[str, Tensor]]:
        for pair in gather_on_main(world, mine):
            left[0] += 1
            yield pair

    def write_rest(aside: Path) -> None:
        (aside / "config.json").touch()
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    try:
        export(world, folder, noted(), write_rest)
    except SaveError as error:
        return str(error)
    return f"{left[0]} parameters"


def test_a_full_disk_does_not_leave_other_ranks_waiting(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert ranks.run(export_together, folder, False) == ["2 parameters", "0 parameters"]
    said = ranks.run(export_together, folder, True)
    assert said == [
        f"--export {folder}: cannot be written ([Errno 28] No space left on device)",
        "0 parameters",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

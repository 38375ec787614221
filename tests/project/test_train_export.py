"""project/train.py: what it exports, and starting from what others have exported."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

from project.train import parse
from tests.project.trained import GPT, ON_TWO, TINY, VGG, read_json, saved, trained
from tests.ranks import Ranks
from training.data import train_tokenizer
from training.export import put_in_place
from training.launch import UserError
from training.model import build_model, gpt2_config

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_the_exported_model_is_the_trained_one(ranks: Ranks) -> None:
    export = Path("exported").resolve()
    tensors = saved(ranks, f"pipeline {GPT} --export {export}")
    model = GPT2LMHeadModel.from_pretrained(export)
    names = [name for name, _ in model.named_parameters()]
    assert names.count("transformer.wte.weight") == 1 and len(names) > 20
    for name, p in model.named_parameters():
        assert torch.equal(p, tensors[f"model.{name}"]), name


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers writes it, in several files; our own tokens need a row more."""
    folder = tmp_path_factory.mktemp("weights")
    model = build_model(gpt2_config("gpt2-mini", 260, 64, n_layer=2, n_embd=16, n_head=2), seed=8)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    train_tokenizer([{"a": "Ja.", "b": "Yes."}], 259, "a", "b").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("strategy", ON_TWO)
def test_every_strategy_starts_from_given_weights(
    ranks: Ranks, weights: Path, strategy: str
) -> None:
    line = f"{TINY} --model {weights} --precision fp64 --n_test 2 --model_max_length 64"
    printed, error, _ = trained(ranks, f"{strategy} {line}")
    assert error is None, printed
    assert printed.count("agree with one process") == 2


def test_a_folder_says_how_many_layers_there_are(weights: Path) -> None:
    line = f"pipeline --model {weights} --model_max_length 64 --num_workers"
    assert parse(f"{line} 6".split()).num_workers == 6
    with pytest.raises(UserError, match=r"has 6 layers and every worker needs one"):
        parse(f"{line} 7".split())


def fill_the_disk(rank: int, patches: pytest.MonkeyPatch) -> None:
    """When the export is written, and not before."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def broken(folder: Path, write: Any) -> None:
        patches.setattr("os.fsync", full)
        put_in_place(folder, write)

    patches.setattr("project.tasks.put_in_place", broken)
    patches.setattr("training.export.put_in_place", broken)
    assert rank in range(2)


@pytest.mark.parametrize("line", [VGG, GPT], ids=["vgg", "gpt2"])
def test_an_export_that_fails_costs_nothing_else(ranks: Ranks, line: str) -> None:
    """One line on rank 0; the others end; what the run has found is there, and no half folder."""
    export = Path("exported").resolve()
    printed, error, summary = trained(ranks, f"ddp {line} --export {export}", fill_the_disk)
    assert error is not None and error.startswith(f"--export {export}: cannot be written"), printed
    assert "No space left" in error
    assert len(summary["loss"]) == 2
    assert sorted(path.name for path in Path().iterdir()) == ["work"]


def test_vgg16_is_exported_by_name(ranks: Ranks) -> None:
    export = Path("exported").resolve()
    tensors = saved(ranks, f"fsdp {VGG} --export {export}")
    found = load_file(export / "model.safetensors")
    assert [name for name, t in found.items() if not torch.equal(t, tensors[f"model.{name}"])] == []
    assert len(found) == 32
    assert len(read_json(export / "config.json")["classes"]) == 10

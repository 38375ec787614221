"""--export: transformers loads it and computes what the trained model does, and both programs can
start from it. And what --model refuses."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, GPT2LMHeadModel

from project.rules import check_model
from project.run_data_parallel import parse
from project.session import Session
from tests.project.test_resume import TINY, WHOLE, data_parallel, pipeline
from tests.ranks import Ranks
from training.export import export
from training.launch import UserError
from training.pieces import SaveError

SHORT = ["--n_epochs=1", "--lr_scheduler=constant", "--dropout=0"]
IDS = torch.arange(40).view(2, 20)


def logits(model: GPT2LMHeadModel) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """What a run of two stages exported, and the logits of its model at the end."""
    folder = tmp_path_factory.mktemp("exported")
    kept: list[Tensor] = []
    write = Session.export_model

    def note(session: Session) -> None:
        kept.append(logits(session.model))
        write(session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "export_model", note)
        pipeline(folder / "work", [*SHORT, WHOLE, f"--export={folder / 'model'}"])
    return folder / "model", kept[0]


def test_transformers_loads_it_with_equal_logits(exported: tuple[Path, Tensor]) -> None:
    folder, expected = exported
    assert torch.equal(logits(GPT2LMHeadModel.from_pretrained(folder)), expected)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("Häuser und 7")["input_ids"]) == "Häuser und 7"
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<eos_de>", "<eos_en>"]) == [0, 1, 2]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model", "work"]
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1  # who may read one file may read all


def test_blocks_export_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    """They train another module than the one that is exported."""
    pipeline(tmp_path / "a", [*SHORT, WHOLE, "--pipeline=blocks", f"--export={tmp_path / 'model'}"])
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    pipeline(
        tmp_path / "a",
        [*SHORT, "--resume", "--model_parallel_mode=none", f"--export={tmp_path / 'again'}"],
    )
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(model), logits(again))


def test_both_programs_train_what_was_exported(
    exported: tuple[Path, Tensor], ranks: Ranks, tmp_path: Path
) -> None:
    """Equal losses; the float32 bound is that of test_resume.py."""
    options = [*SHORT, f"--model={exported[0]}"]
    pipeline(tmp_path / "pp", [*options, WHOLE])
    ranks.run(data_parallel, tmp_path / "dp", options)
    found = [
        json.loads((tmp_path / folder / f"{prefix}_results_epoch0.json").read_text())
        for folder, prefix in (("pp", "eval"), ("dp", "rank0"))
    ]
    for key in ("training_loss", "validation_loss"):
        assert found[0][key] == pytest.approx(found[1][key], rel=1e-5)
    trained = exported[0].parent / "work" / "eval_results_epoch0.json"
    assert found[0]["training_loss"] < json.loads(trained.read_text())["training_loss"]


def test_an_export_replaces_an_earlier_one_and_nothing_else(
    exported: tuple[Path, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exported[0], folder)
    model = GPT2LMHeadModel.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (folder / "old.txt").touch()
    export(folder, model, tokenizer)
    assert not (folder / "old.txt").exists()
    assert torch.equal(logits(GPT2LMHeadModel.from_pretrained(folder)), exported[1])

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    (folder / "mark.txt").touch()
    with pytest.raises(SaveError, match=r"^--export .*model: cannot be written .*No space left"):
        export(folder, model, tokenizer)
    assert (folder / "mark.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("made", [Path.touch, lambda path: (path / "sub").mkdir(parents=True)])
def test_an_export_refuses_what_is_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    made(Path("mine"))
    with pytest.raises(UserError) as error:
        parse([*TINY, "--export", "mine"])
    assert str(error.value) == (
        "--export mine: something else is there; name a new folder, as --export mine_gpt2"
    )
    assert parse([*TINY, "--export", "a/new/mine_gpt2"]).export == Path("a/new/mine_gpt2")


# What --model refuses, before any process starts


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _larger_tokenizer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"word{i}" for i in range(40)])
    tokenizer.save_pretrained(folder)


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def _broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def _other_weights(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 301}))


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_no_weights, "the folder holds no weights (*.safetensors); presets need none: "),
        (_truncated, "no GPT-2 weights come from this folder (model.safetensors: Error while "),
        (
            _other_weights,
            "no GPT-2 weights come from this folder (wte.weight is [300, 16], config.json says "
            "[301, 16]); presets need none: ",
        ),
        (
            _no_tokenizer,
            "no tokenizer that fits comes with it (there is no tokenizer.json or vocab.json); "
            "save the one of these weights there, as --export does",
        ),
        (
            _broken_tokenizer,
            "no tokenizer that fits comes with it (it cannot be read: KeyError 'added_tokens'); ",
        ),
        (
            _larger_tokenizer,
            "no tokenizer that fits comes with it (it has 340 tokens, and the embedding 300 rows)",
        ),
    ],
)
def test_a_model_that_does_not_fit(
    exported: tuple[Path, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], None],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(exported[0], "model")
    check_model(parse(["--model=model", "--model_max_length=64"]))
    spoil(Path("model"))
    with pytest.raises(UserError) as error:
        parse(["--model=model", "--model_max_length=64"])
    assert str(error.value).startswith(f"--model model: {why}")
    assert "\n" not in str(error.value)

"""--export: transformers loads it and computes what the trained model does, and every program can
start from it. And what --model refuses."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, GPT2LMHeadModel

from project.generate import generate
from project.generate import parse as parse_generate
from project.utils import read_texts
from tests.project.conftest import ROOT
from tests.project.programs import FLOW, SAME, TINY, VGG, names_in, parse, run, summary
from tests.ranks import Ranks
from training.checkpoint import put_in_place
from training.errors import RunError, UserError
from training.export import export
from training.rules import check_model
from training.trained import load_trained
from training.world import World

pytestmark = pytest.mark.usefixtures("elsewhere")

SHORT = TINY + "--n_epochs 1 --dropout 0 "
IDS = torch.arange(40).view(2, 20)


def logits(folder: Path) -> Tensor:
    """Of what transformers loads."""
    with torch.no_grad():
        return GPT2LMHeadModel.from_pretrained(folder).eval()(input_ids=IDS).logits


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of two stages exported."""
    folder = tmp_path_factory.mktemp("exported")
    run(f"run_pipeline {FLOW} {SHORT} --workdir {folder}/work --export {folder}/model")
    return folder / "model"


def test_transformers_loads_it_and_finds_the_losses_of_the_run(exported: Path) -> None:
    """The validation loss, computed by transformers alone; the tokenizer is the run's."""
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.decode(tokenizer("Häuser und 7")["input_ids"]) == "Häuser und 7"
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<eos_de>", "<eos_en>"]) == [0, 1, 2]
    model = GPT2LMHeadModel.from_pretrained(exported).eval()
    total = count = 0.0
    pairs: Any = read_texts(parse(f"run_pipeline {SHORT}")).splits["validation"]
    for pair in pairs:
        source = tokenizer(pair["de"] + "<eos_de>")["input_ids"]
        ids = torch.tensor([(source + tokenizer(pair["en"] + "<eos_en>")["input_ids"])[:65]])
        with torch.no_grad():
            log_p = model(input_ids=ids[:, :-1]).logits.log_softmax(-1)
        losses = -log_p[0].gather(-1, ids[0, 1:, None])[len(source) - 1 :]
        total, count = total + losses.sum().item(), count + len(losses)
    expected = summary(exported.parent / "work")["validation_loss"]
    assert total / count == pytest.approx(expected, rel=1e-5)
    card = (exported / "README.md").read_text("utf-8")
    bleu = summary(exported.parent / "work")["bleu"]
    assert f"- validation loss {expected:.3f} nats per token, bleu {bleu:.1f}" in card
    assert "- builtin: 20 / 9 / 3 pairs to train / validate / test, de to en" in card
    assert names_in(exported.parent) == ["model", "work"]
    modes = {path.stat().st_mode for path in exported.iterdir()}
    assert len(modes) == 1  # who may read one file may read all


@pytest.mark.parametrize("page", [None, ROOT / "README.md"], ids=["its model card", "README.md"])
def test_the_snippet_translates_as_generate_py_does(
    exported: Path, page: Path | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the model itself ends its sentence, and where it runs into the length."""
    text = (page or exported / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (snippet,) = (block for block in blocks if "from_pretrained" in block)
    snippet = re.sub(r'from_pretrained\(".*?"\)', f'from_pretrained("{exported}")', snippet)
    source = re.findall(r'tokenizer\("(.*)<eos_de>"', snippet)[0]
    trained = load_trained(str(exported))
    (expected,) = generate(trained, [source], parse_generate([str(exported)]))
    exec(snippet, {})
    assert " ".join(capsys.readouterr().out.strip().splitlines()) == expected[0]
    # A model that likes nothing but to end: after the first token nothing follows.
    model, tokenizer = trained.model, trained.tokenizer
    model.transformer.ln_f.weight.zero_()
    model.transformer.ln_f.bias.copy_(100 * model.lm_head.weight[tokenizer.eos_token_id])
    ids = tokenizer([source + "<eos_de>", "Ei<eos_de>"], padding=True, return_tensors="pt")
    rows = model.generate(**ids)[:, ids.input_ids.size(1) :]
    assert rows.tolist() == [[tokenizer.eos_token_id]] * 2
    assert (tokenizer.model_max_length, tokenizer.padding_side) == (64, "left")


def test_every_program_starts_from_it(exported: Path, ranks: Ranks) -> None:
    """And finds the losses of any other."""
    sizes = "--model gpt2-mini --n_layer 2 --n_embd 16 --n_head 2 --vocab_size 300"
    line = SHORT.replace(sizes, f"--model {exported} --precision fp64")
    found = []
    for number, program in enumerate(
        ("train single", "run_data_parallel", f"run_pipeline {FLOW}", "train pipeline")
    ):
        on = ranks if program in ("run_data_parallel", "train pipeline") else None
        workdir = Path(str(number)).resolve()
        printed, error = run(f"{program} {line} --workdir {workdir}", on)
        assert error is None, printed
        found.append(summary(workdir)["loss"])
    assert found[1:] == [pytest.approx(found[0], rel=SAME)] * 3
    assert found[0][-1] < summary(exported.parent / "work")["loss"][0]


def test_vgg16_is_exported_by_name(ranks: Ranks) -> None:
    """And resumed, to train nothing more, one process exports the same."""
    line = VGG + "--num_batches 2 "
    run(f"train fsdp {line} --export {Path('first').resolve()}", ranks)
    run(f"train single {line} --resume --export second")
    found, again = (load_file(f"{folder}/model.safetensors") for folder in ("first", "second"))
    assert [name for name, t in found.items() if not torch.equal(t, again[name])] == []
    assert len(found) == len(again) == 32
    assert '"classes": [' in Path("first/config.json").read_text()


def full(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fill_the_disk(_: int, patches: pytest.MonkeyPatch) -> None:
    """When the export is written, and not before."""

    def broken(aside: Path, folder: Path) -> None:
        patches.setattr("os.fsync", full)
        put_in_place(aside, folder)

    patches.setattr("training.export.put_in_place", broken)


def test_an_export_that_fails_costs_nothing_else(ranks: Ranks) -> None:
    """One line on rank 0; the others end; what the run has found is there, and no half folder."""
    export = Path("exported").resolve()
    line = f"run_data_parallel {TINY} --num_batches 2 --export {export}"
    printed, error = run(line, ranks, fill_the_disk)
    assert error is not None and error.startswith(f"--export {export}: cannot be written"), printed
    assert "No space left" in error
    assert len(summary()["loss"]) == 2
    assert names_in(".") == ["work"]


def test_an_export_replaces_an_earlier_one_or_leaves_it(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    model = GPT2LMHeadModel.from_pretrained(folder)

    def write() -> None:
        export(World(), folder, model.named_parameters(), model.config.save_pretrained)

    (folder / "old.txt").touch()
    write()
    assert names_in(folder) == ["config.json", "model.safetensors"]
    assert torch.equal(logits(folder), logits(exported))

    monkeypatch.setattr("os.fsync", full)
    (folder / "mark.txt").touch()
    with pytest.raises(RunError, match=r"^--export .*model: cannot be written .*No space left"):
        write()
    assert (folder / "mark.txt").exists()
    assert names_in(tmp_path) == ["model"]


# What --model refuses, before any process starts

NONE = "no GPT-2 weights come from this folder"
SPOILT: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("model.safetensors", lambda good: good[:1000], f"{NONE} (Error while "),
    ("config.json", lambda good: good.replace(b'"vocab_size": 300', b'"vocab_size": 301'),
     f"{NONE} (transformer.wte.weight is [300, 16], config.json says [301, 16]); presets need"),
    ("tokenizer.json", lambda _: b"{}",
     "no tokenizer that fits comes with it (it cannot be read: KeyError 'added_tokens'); save "
     "the one of these weights there, as --export does"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "spoil", "why"), SPOILT, ids=[file for file, _, _ in SPOILT])
def test_a_model_that_does_not_fit(
    exported: Path, file: str, spoil: Callable[[bytes], bytes], why: str
) -> None:
    shutil.copytree(exported, "model")
    line = "run_data_parallel --model model --model_max_length 64"
    check_model(parse(line))
    path = Path("model", file)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(UserError) as error:
        parse(line)
    assert str(error.value).startswith(f"--model model: {why}")
    if file == "tokenizer.json":
        path.unlink()
        with pytest.raises(UserError, match="there is no tokenizer"):
            parse(line)

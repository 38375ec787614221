"""generate.py --export: transformers loads it and computes what the trained model does, and every
program can start from it. And what --model refuses."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

from project.generate import generate, main
from project.generate import parse as parse_generate
from project.utils import read_texts
from tests.project.conftest import ROOT
from tests.project.programs import FLOW, SAME, TINY, names_in, parse, run, summary
from tests.ranks import Ranks
from training.errors import RunError, UserError
from training.rules import check_model
from training.trained import load_trained

pytestmark = pytest.mark.usefixtures("elsewhere")

SHORT = TINY + "--n_epochs 1 --dropout 0 "


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two stages, as a folder for transformers."""
    folder = tmp_path_factory.mktemp("exported")
    run(f"run_pipeline {FLOW} {SHORT} --workdir {folder}/work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["x", f"{folder}/work", "--export", f"{folder}/model"])
        main()
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
    assert (
        f"- after 4 steps: validation loss {expected:.3f} nats per token, BLEU {bleu:.1f}" in card
    )
    assert "- trained on builtin in batches of 6, seed 0, with `python " in card
    assert names_in(exported.parent) == ["model", "work"]


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


def test_what_cannot_be_written(
    exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each; and nothing that is there is lost."""
    Path("full").mkdir()
    Path("full/notes.txt").touch()
    Path("file").touch()
    work = str(exported.parent / "work")
    for folder, why in (("full", "something is there"), ("file", "something is there"),
                        ("file/inner", "cannot be written")):  # fmt: skip
        monkeypatch.setattr("sys.argv", ["generate.py", work, "--export", folder])
        with pytest.raises((UserError, RunError), match=f"^--export {folder}: {why}"):
            main()
    assert names_in("full") == ["notes.txt"]
    monkeypatch.setattr("sys.argv", ["generate.py", work, "a text", "--export", "new"])
    with pytest.raises(SystemExit):
        main()
    assert "--export new generates nothing: leave out text and --input" in capsys.readouterr().err


# What --model refuses, before any process starts

SPOILT: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("model.safetensors", lambda good: good[:1000], "(SafetensorError Error while "),
    ("config.json", lambda good: good.replace(b'"vocab_size": 300', b'"vocab_size": 301'),
     "(ValueError transformer.wte.weight is [300, 16], config.json says [301, 16])"),
    ("tokenizer.json", lambda _: b"{}", "(KeyError 'added_tokens')"),
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
    assert str(error.value).startswith("--model model: neither ") and why in str(error.value)
    if file == "tokenizer.json":
        path.unlink()
        with pytest.raises(UserError, match="there is no tokenizer"):
            parse(line)

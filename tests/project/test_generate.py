"""project/generate.py: from whatever a run leaves, a line out per line in."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from project import generate
from tests.plain_gpt2 import build_model
from tests.project.conftest import Refusal
from tests.project.programs import (
    FLOW,
    TINY,
    VGG,
    large_weights,
    printed_by_generate,
    recomputed,
    run,
)
from training.launch.errors import UserError
from training.tasks.gpt2 import gpt2_config
from training.tasks.tokens import get_tokenizer
from training.trained import export, load_trained, source_end

pytestmark = pytest.mark.usefixtures("elsewhere")

LINES = ["Häuser", "Wir sehen den Mann", "Ei", "", "Der Mann sieht das große Haus und den Vogel"]


Trained = tuple[Any, Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A model whose outputs vary, and its tokenizer."""
    pairs, folder = [{"de": LINES[4], "en": "The man sees"}] * 2, tmp_path_factory.mktemp("made")
    tokenizer = get_tokenizer(pairs, 300, "de", "en", folder)
    tokenizer.model_max_length = 64
    config = gpt2_config("gpt2-mini", 320, 64, n_layer=2, n_embd=16, n_head=2)
    config.update({"eos_token_id": tokenizer.eos_token_id})
    model = build_model(config, seed=5).double()
    for name, p in model.named_parameters():
        large_weights(name, p)
    return model.eval().requires_grad_(False), tokenizer


def generated(trained: Trained, lines: list[str], *options: str) -> list[str]:
    return generate.continuations(*trained, lines, generate.parse_generate([".", *options]))


def alone(trained: Trained, line: str, most: int) -> str:
    """What follows one line, without a cache."""
    model, tokenizer = trained
    prompt = tokenizer(line + "<eos_de>")["input_ids"]
    ids = recomputed(model, prompt, len(tokenizer), 2, min(64, len(prompt) + most))
    text = tokenizer.decode(ids, skip_special_tokens=True).strip()
    return text.replace("\r\n", " ").replace("\n", " ")


def test_a_line_out_per_line_in_whatever_the_batch(trained: Trained) -> None:
    for most, batch_size in ((60, 128), (9, 2)):
        options = ["--max_new_tokens", str(most), "--batch_size", str(batch_size)]
        found = generated(trained, LINES, *options)
        assert found == [alone(trained, line, most) if line else "" for line in LINES]
        assert len({len(text) for text in found}) > 2


def test_what_is_drawn(trained: Trained) -> None:
    first = generated(trained, LINES, "--temperature", "0.7")
    assert first[3] == "" and generated(trained, LINES, "--temperature", "0.7") == first
    assert generated(trained, LINES, "--temperature", "0.7", "--seed", "1")[1] != first[1]
    likeliest = generated(trained, LINES[:3])
    assert first[:3] != likeliest
    assert generated(trained, LINES[:3], "--temperature", "1e-6") == likeliest


def test_the_lines_of_standard_input_or_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a line ends: test_texts.py."""
    content = io.BytesIO("\ufeffa\u2028\r\n\n b ".encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(content))
    assert generate.read_lines(generate.parse_generate(["."])) == ["a\u2028", "", " b "]
    args = generate.parse_generate([".", "--max-new-tokens=3", "--", "--foo-bar", "--a-b=c\nd"])
    assert (args.max_new_tokens, generate.read_lines(args)) == (3, ["--foo-bar", "--a-b=c", "d"])


def test_text_that_looks_like_a_token_is_text(trained: Trained) -> None:
    ids, other = generate.prompts_of(trained[1], ["Ei<eos_de>", "Ei"], "<eos_de>")
    assert (ids.count(1), ids[-1], other[-1]) == (1, 1, 1)
    assert trained[1].decode(ids, skip_special_tokens=True) == "Ei<eos_de>"


def test_what_is_no_model_is_known_from_the_command_line(refusal: Refusal) -> None:
    """Without torch: test_options.py."""
    Path("work").mkdir()
    for name in ("nowhere", "./nowhere", "work/nowhere", "a/b/c", "/a/b"):
        said = refusal(generate.parse_generate, [name])
        assert f"FOLDER {name}: there is no such folder; the --workdir of" in said
    said = refusal(generate.parse_generate, [])
    assert "the following arguments are required: FOLDER; --help" in said
    for name in ("work", "openai-community/gpt2"):
        assert generate.parse_generate([name]).trained == name


def test_workdir_checkpoint_and_export_give_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(f"run_pipeline {FLOW} {TINY} --num_batches 2")
    export(*load_trained("work"), Path("exported"))
    (checkpoint,) = Path("work/checkpoints").iterdir()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(LINES).encode())))
    folders, few = [str(checkpoint), "exported"], ["--max_new_tokens", "8"]
    said = [printed_by_generate("work", *few)]  # the lines of standard input
    said += [printed_by_generate(folder, *LINES, *few) for folder in folders]
    assert said[0].count("\n") == 5
    assert said == said[:1] * 3
    models: list[Any] = [load_trained(folder)[0].state_dict() for folder in ("work", "exported")]
    assert all(torch.equal(p, models[1][name]) for name, p in models[0].items())
    # Where a file was altered, the checkpoint before does, and is named.
    newer = Path("work/checkpoints/000009-epoch9-step9")
    shutil.copytree(checkpoint, newer)
    (newer / "state.json").write_text("{")
    capsys.readouterr()
    load_trained("work")
    said_of_it = capsys.readouterr().err
    assert said_of_it.startswith(f"{newer}: state.json is damaged (")
    assert said_of_it.endswith(f"; {checkpoint.name}, which is older, is taken\n")
    shutil.rmtree(newer)
    # There is none.
    with (checkpoint / "state.json").open("a") as file:
        file.write("]")
    refused(r"^every checkpoint is damaged \(work/.*state", load_trained, "work")
    shutil.rmtree("work/checkpoints")
    refused("^work: neither the workdir of a run with a checkpoint, nor ", load_trained, "work")


def test_a_language_may_have_any_name(trained: Trained, tmp_path: Path) -> None:
    """It is the key of its column, such as zh-CN."""
    tokenizer = get_tokenizer([{"zh-CN": "a", "en": "b"}], 300, "zh-CN", "en", tmp_path)
    assert source_end(tokenizer) == "<eos_zh-CN>"
    assert source_end(trained[1]) == "<eos_de>"


def refused(said: str, call: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(UserError, match=said):
        call(*args)


def test_what_cannot_generate(
    trained: Trained, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(f"train single {VGG} --num_batches 1")
    Path("empty").mkdir()
    nothing = "neither the workdir of a run with a checkpoint, nor "
    for name, said in (
        ("work", "it is of a model of pictures, and not of text"),
        ("./nowhere", rf"^\./nowhere: {nothing}.*Repo id must"),
        ("empty", rf"^empty: {nothing}[^.]*Unrecognized model in empty\); the --workdir of a run"),
        ("work/config.json", rf"^work/config\.json: {nothing}"),
    ):
        refused(said, load_trained, name)
    long = ["Ei", "Buch " * 40]
    refused(r"^line 2 has \d+ tokens, .* sequences of 64; 63 tokens", generated, trained, long)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Käse".encode("latin1"))))
    not_utf8 = r"^standard input: 'utf-8' codec can't [^;]*in line 1; text in UTF-8 works$"
    refused(not_utf8, generate.read_lines, generate.parse_generate(["work"]))
    for wrong, why in (
        (["-x"], "-x: there is no such option"),
        (["--batch-sizes=3"], "--batch-sizes=3: there is no such option; is it --batch_size?"),
        (["--temperature=-1"], "--temperature -1: it must be 0, or 1e-6 or more"),
        (["--temperature=1e-320"], "it must be 0, or 1e-6 or more"),
        (["Ei", "--export", "new"], "TEXT and --export: one works at a time"),
    ):
        assert why in refusal(generate.parse_generate, ["work", *wrong])

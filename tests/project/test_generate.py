"""project/generate.py: from whatever a run leaves, a line out per line in."""

from __future__ import annotations

import io
import shutil
from argparse import ArgumentError
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks.plain_gpt2 import build_model
from project import generate
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
from training.export import export
from training.launch.errors import UserError
from training.tasks.gpt2 import gpt2_config
from training.tasks.sampling import sample
from training.tasks.tokens import get_tokenizer
from training.trained import Trained, load_trained

pytestmark = pytest.mark.usefixtures("elsewhere")

LINES = ["Häuser", "Wir sehen den Mann", "Ei", "", "Der Mann sieht das große Haus und den Vogel"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A model whose outputs vary, in float64: in which batch a line is must not matter."""
    pairs, folder = [{"de": LINES[4], "en": "The man sees"}] * 2, tmp_path_factory.mktemp("made")
    tokenizer = get_tokenizer(pairs, 300, "de", "en", folder)
    config = gpt2_config("gpt2-mini", 320, 64, n_layer=2, n_embd=16, n_head=2)
    model = build_model(config, seed=5).double()
    for name, p in model.named_parameters():
        large_weights(name, p)
    return Trained(model.eval().requires_grad_(False), tokenizer, 64)


def generated(trained: Trained, lines: list[str], *options: str) -> list[list[str]]:
    return generate.continuations(trained, lines, generate.parse_generate(["somewhere", *options]))


def alone(trained: Trained, line: str, most: int) -> str:
    """What follows one line, without a cache."""
    model, tokenizer = trained.model, trained.tokenizer
    prompt = tokenizer(line + "<eos_de>")["input_ids"]
    ids = recomputed(model, prompt, len(tokenizer), 2, min(64, len(prompt) + most))
    return " ".join(tokenizer.decode(ids, skip_special_tokens=True).strip().splitlines())


def test_a_line_out_per_line_in_whatever_the_batch(trained: Trained) -> None:
    for most, batch_size in ((60, 128), (9, 2)):
        options = ["--max_new_tokens", str(most), "--batch_size", str(batch_size)]
        found = generated(trained, LINES, *options)
        assert found == [[alone(trained, line, most) if line else ""] for line in LINES]
        assert len({len(text) for (text,) in found}) > 2


@pytest.mark.parametrize(("without", "dtype"), [("mps", "float64"), ("meta", "float32")])
def test_weights_are_rounded_for_a_device_without_float64(
    trained: Trained, without: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = replace(trained, model=deepcopy(trained.model))
    monkeypatch.setattr("training.trained._of_transformers", lambda _: copied)
    monkeypatch.setattr("runtime.float64.WITHOUT", (without,))
    assert load_trained("nowhere", "meta").model.dtype == getattr(torch, dtype)


def test_what_is_drawn_depends_on_the_seed_and_the_line_alone(trained: Trained) -> None:
    options = ["--num_samples", "3", "--top_k", "20", "--temperature", "0.7"]
    first = generated(trained, LINES, *options)
    assert [len(texts) for texts in first] == [3] * 5
    assert len(set(first[1])) == 3
    assert generated(trained, LINES, *options, "--batch_size", "2") == first
    assert generated(trained, LINES[:2], *options) == first[:2]
    assert generated(trained, LINES, *options, "--seed", "1")[1] != first[1]
    likeliest = generated(trained, LINES[:3])
    assert generated(trained, LINES[:3], "--temperature", "1e-6") == likeliest
    assert generated(trained, LINES[:3], "--top_k", "1") == likeliest


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    """Of 1/2, 1/4, 1/8, 1/8 and a row of no token; a chance in every tenth."""
    logits = torch.tensor([[4.0, 2.0, 1.0, 1.0, 9.0]]).log().expand(10, 5)
    chances = torch.arange(10, dtype=torch.float64) / 10 + 0.04
    assert sample(logits, 4, chances, 1.0, None).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2, 3]
    assert sample(logits, 4, chances, 1.0, 2).tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    # Squared: 16, 4, 1, 1 of 22.
    assert sample(logits, 4, chances, 0.5, None).tolist() == [0] * 7 + [1, 1, 2]


def test_workdir_checkpoint_and_export_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    run(f"run_pipeline {FLOW} {TINY} --num_batches 2")
    export(load_trained("work"), Path("exported"))
    (checkpoint,) = Path("work/checkpoints").iterdir()
    Path("lines.txt").write_text("\n".join(LINES), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path("lines.txt").read_bytes())))
    folders, few = ["work", "work/checkpoints", str(checkpoint)], ["--max_new_tokens", "8"]
    said = [printed_by_generate(folder, "--input", "lines.txt", *few) for folder in folders]
    said.append(printed_by_generate("exported", *few))  # the lines of standard input
    assert said[0].count("\n") == 5
    assert said == said[:1] * 4
    models: list[Any] = [load_trained(folder).model.state_dict() for folder in ("work", "exported")]
    assert all(torch.equal(p, models[1][name]) for name, p in models[0].items())
    # Where a file was altered, the checkpoint before would do; there is none.
    with (checkpoint / "state.json").open("a") as file:
        file.write(" ")
    refused(r"^work: every checkpoint of this run is damaged \(.*state", load_trained, "work")
    shutil.rmtree("work/checkpoints")
    refused("^work: this run has no checkpoint yet; there is one aft", load_trained, "work")


def test_a_language_may_have_any_name(trained: Trained, tmp_path: Path) -> None:
    """It is the key of its column, such as zh-CN."""
    tokenizer = get_tokenizer([{"zh-CN": "a", "en": "b"}], 300, "zh-CN", "en", tmp_path)
    assert Trained(trained.model, tokenizer, 64).source_end == "<eos_zh-CN>"
    assert trained.source_end == "<eos_de>"


def refused(said: str, call: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(UserError, match=said):
        call(*args)


def test_what_argparse_raises_is_one_line(
    monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    """From Python 3.12.5 on a word that no option takes is an error that is raised."""
    unknown = Mock(side_effect=ArgumentError(None, "unrecognized arguments: -x"))
    monkeypatch.setattr("argparse.ArgumentParser.parse_intermixed_args", unknown)
    said = refusal(generate.parse_generate, ["work", "-x"])
    assert said.endswith("error: unrecognized arguments: -x; --help explains all\n")


def test_what_cannot_generate(trained: Trained, refusal: Refusal) -> None:
    run(f"train single {VGG} --num_batches 1")
    Path("empty").mkdir()
    nothing = "neither the workdir of a run, nor a checkpoint"
    for name, said in (
        ("work", "it is of a model of pictures, and not of text"),
        ("./nowhere", rf"^\./nowhere: {nothing}.*Repo id must"),
        ("empty", rf"^empty: {nothing}[^.]*Unrecognized model in empty\); the --workdir of a run"),
        ("work/config.json", rf"^work/config\.json: {nothing}"),
    ):
        refused(said, load_trained, name)
    long = ["Ei", "Buch " * 40]
    refused(r"^line 2 has \d+ tokens, .* sequences of 64; 63 tokens", generated, trained, long)
    Path("latin1.txt").write_bytes("Käse".encode("latin1"))
    for name, said in (
        ("missing", r"it cannot be read \(No such file"),
        ("latin1", r"it cannot be read \(it is not UTF-8"),
    ):
        args = generate.parse_generate(["work", "--input", f"{name}.txt"])
        refused(rf"^--input {name}\.txt: {said}", generate.read_lines, args)
    for wrong, why in (
        (["--temperature=-1"], "--temperature -1: it must be 0 or more"),
        (["--temperature", "0", "--top_k", "3"], "--temperature 0.8 works"),
        (["Ei", "--input", "x"], "there is text on the command line"),
        (["Ei", "--export", "new"], "--export new generates nothing: leave out text and --input"),
    ):
        assert why in refusal(generate.parse_generate, ["work", *wrong])

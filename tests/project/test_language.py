"""Plain text: every layout of every program models it as one process does, and transformers finds
the losses of the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

from project.generate import generate
from project.generate import parse as parse_generate
from project.utils import read_texts
from tests.project.programs import FLOW, parse, read_json, run, summary
from tests.ranks import Ranks
from training.errors import UserError
from training.language import LanguageTask
from training.text import END
from training.trained import load_trained
from training.world import World

pytestmark = pytest.mark.usefixtures("elsewhere")

# 20 sequences of 16 tokens and one more, in batches of 6: of the last, two ranks have 2 and 1.
TEXT = END.join(f"Line {i} of {i * 7 % 31} is here.\nIt is not {i % 3}!\n" for i in range(21))
SIZES = (
    "--batch_size 6 --n_train 21 --n_validation 5 --device cpu --model gpt2-mini --n_layer 2 "
    "--n_embd 16 --n_head 2 --vocab_size 300 --model_max_length 16 --learning_rate 1e-2 --keep 9 "
    "--precision fp64 --n_epochs 2 "
)
SAME = 1e-9  # see test_losses.py


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The options of every run."""
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return f"--dataset {path} {SIZES}"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, line: str) -> Path:
    """The workdirs of runs on one process, with dropout and without."""
    folder = tmp_path_factory.mktemp("one")
    for p in ("0", "0.1"):
        more = f"--dropout {p} --workdir {folder / p} --export {folder}/exported{p}"
        printed, error = run(f"train single {line} {more}")
        assert error is None, printed
    return folder


def made(line: str) -> LanguageTask:
    args = parse(f"train single {line}")
    return LanguageTask(args, World(), read_texts(args))


def test_every_token_is_predicted_once_in_an_epoch(line: str) -> None:
    task = made(f"{line} --n_train all --n_validation all")
    tokenizer, split = task.tokenizer, task.texts.splits["train"]
    end = tokenizer.convert_tokens_to_ids(END)
    every = [t for text in split for t in (*tokenizer(text)["input_ids"], end)]
    assert end not in tokenizer("".join(split))["input_ids"]
    examples = task.examples["train"]
    assert [t for example in examples for t in example.ids[1:]] == every
    assert {len(example.ids) for example in examples[:-1]} == {17}
    assert examples[0].ids[0] == end
    steps = list(task.steps(0, 0, 1, None))
    labels = [y[w != 0] for step in steps for y, w in step.targets]
    assert sorted(torch.cat(labels).tolist()) == sorted(every)
    assert sum(step.count for step in steps) == len(every)
    orders = [[e[0].tolist() for s in task.steps(k, 0, 1, 1) for e in s.inputs] for k in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_transformers_finds_the_loss_of_the_run(one: Path, line: str) -> None:
    model = GPT2LMHeadModel.from_pretrained(one / "exported0").double().eval()
    tokenizer = AutoTokenizer.from_pretrained(one / "exported0")
    assert tokenizer.eos_token == tokenizer.pad_token == END
    behind: Any = read_texts(parse(f"train single {line}")).splits["validation"]
    assert TEXT.replace("\n" + END, END).rstrip().endswith(END.join(behind))
    ids = [tokenizer.eos_token_id]
    for text in behind:
        ids += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    total = 0.0
    with torch.no_grad():
        for at in range(0, len(ids) - 1, 16):
            part = torch.tensor([ids[at : at + 17]])
            log_p = model(input_ids=part[:, :-1]).logits.log_softmax(-1)
            total -= log_p[0].gather(-1, part[0, 1:, None]).sum().item()
    found = read_json(one / "0" / "rank0_results_epoch1.json")
    assert found["validation_loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["validation_loss"]))
    assert summary(one / "0")["perplexity"] == found["perplexity"]
    assert found["validation_loss"] < summary(one / "0")["loss"][0] - 0.3


def test_a_text_is_continued(one: Path) -> None:
    """By generate.py as at the end of the run."""
    shown = read_json(one / "0" / "rank0_gen_epoch1.json")
    trained = load_trained(str(one / "0"))
    most = str(min(24, 16 - 8))
    for row in shown:
        options = parse_generate(["somewhere", "--max_new_tokens", most])
        (said,) = generate(trained, [row["example"]], options)
        assert said[0].split()[:4] == (row["example"] + row["gen"]).split()[:4]


def test_an_empty_line_begins_a_text(one: Path) -> None:
    """As what follows the end of a document, line by line, whatever is beside it."""
    trained = load_trained(str(one / "0"))
    end = trained.tokenizer.convert_tokens_to_ids(END)
    ids = [end]
    while len(ids) < 9:
        logits = trained.model(input_ids=torch.tensor([ids])).logits[0, -1]
        ids.append(int(logits[: len(trained.tokenizer)].argmax()))
    text = trained.tokenizer.decode(ids[1:]).partition(END)[0]
    options = parse_generate(["somewhere", "--max_new_tokens", "8"])
    found = generate(trained, ["", "Line", ""], options)
    assert found[0] == found[2] == [" ".join(text.splitlines())]
    assert text and found[1][0].startswith("Line")


@pytest.mark.parametrize(
    "layout",
    [
        "run_data_parallel --num_microbatches 2", "train ddp --dropout 0.1", "train fsdp",
        "train pipeline --dropout 0.1", "train model", "train tensor --sequence_parallel",
        f"run_pipeline {FLOW} --n_chunk 4", f"run_pipeline {FLOW} --pipeline blocks --dropout 0",
    ],
)  # fmt: skip
def test_every_layout_computes_what_one_process_computes(
    one: Path, line: str, ranks: Ranks, layout: str
) -> None:
    """Losses of every step and of validation. test_train.py compares weights by their names, of
    tasks that differ from this one in nothing that a layout sees."""
    dropped = "--dropout 0.1" in layout or (layout.startswith("run_") and "--dropout" not in layout)
    printed, error = run(f"{layout} {line}", None if "run_pipeline" in layout else ranks)
    assert error is None, printed
    found, expected = summary(), summary(one / ("0.1" if dropped else "0"))
    assert found["loss"] == pytest.approx(expected["loss"], rel=SAME)
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=SAME)


def test_a_mesh_computes_it(line: str, four_ranks: Ranks) -> None:
    """Two replicas of matrices cut in two, weights compared by name."""
    more = "--dp 2 --tp 2 --check_weights --num_batches 4 --optimizer sgd --learning_rate 0.1"
    few = line.replace("--n_epochs 2", "").replace("--learning_rate 1e-2", "")
    printed, error = run(f"train 3d {few} {more}", four_ranks)
    assert error is None, printed
    assert "weights: agree with one process" in printed


def test_a_run_is_resumed_in_mid_epoch_with_every_bit(one: Path, line: str) -> None:
    run(f"train single {line} --dropout 0.1 --save_every 3", stop_at=6)
    printed, error = run(f"train single {line} --dropout 0.1 --resume")
    assert error is None and "6 steps done" in printed
    assert summary()["loss"] == summary(one / "0.1")["loss"]
    assert summary()["validation_loss"] == summary(one / "0.1")["validation_loss"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("--model_max_length 4000", r"--model_max_length 4000: the text has \d+ tokens, fewer "),
        ("--tgt fr", r"--tgt fr --dataset .*text.txt: it is for pairs of sentences, and this is"),
        ("--n_test 5", r"--n_test 5 --dataset .*text.txt: it is for pairs of sentences"),
    ],
)
def test_what_does_not_fit_plain_text(line: str, more: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        made(f"{line} {more}")

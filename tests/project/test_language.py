"""Plain text: every token is learned, and what was learned goes on with a text. (Under every
layout: see test_losses.py. With transformers: see test_export.py.)"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers.implementations import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing

from project.generate import continuations, parse_generate
from tests.project.conftest import Learn, Learned
from tests.project.programs import TEXT, parse, read_json, recomputed
from training.launch.errors import UserError
from training.launch.world import World
from training.tasks.language import LanguageTask
from training.tasks.text_files import END, Source
from training.tasks.texts import Texts, load_texts
from training.trained import load_trained

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def one(learned: Learn) -> Learned:
    return learned("text")


def made(line: str) -> LanguageTask:
    args = parse(f"train single {line}")
    return LanguageTask(args, World(), load_texts(args, World()))


def test_every_token_is_predicted_once_in_an_epoch(one: Learned) -> None:
    """But the first of each split: the last twentieth is held out."""
    task = made(f"{one.line} --n_train all --n_validation all")
    tokenizer, split = task.tokenizer, [*task.texts.pieces("train")]
    end = tokenizer.convert_tokens_to_ids(END)
    stream = [end]
    for piece in split:
        stream += [end] if piece is None else tokenizer(piece)["input_ids"]
    assert split.count(None) == stream.count(end) - 1 > 0
    n = len(stream) * 19 // 20
    for examples, tokens in zip(task.examples.values(), (stream[:n], stream[n:]), strict=True):
        assert [t for example in examples for t in example.ids[1:]] == tokens[1:]
        assert {len(example.ids) for example in [*examples][:-1]} <= {17}
        assert examples[0].ids[0] == tokens[0]
    steps = list(task.steps(0, 0, 1, None))
    labels = [y for step in steps for y in step.targets]
    assert sorted(torch.cat(labels).tolist()) == sorted(stream[1:n])
    assert sum(step.count for step in steps) == n - 1
    assert task.notes == ["no validation split: 5 % of the text is taken from its end."]


def test_documents_are_apart_in_training_validation_and_samples(
    one: Learned, tmp_path: Path
) -> None:
    """And the first lines say how they are told apart. A prompt begins with the last document that
    its tokens reach."""
    (tmp_path / "a.txt").write_text(END.join("ab cd ef gh" for _ in range(200)))
    line = f"{one.line} --dataset {tmp_path / 'a.txt'} --workdir {tmp_path}"
    apart, together = made(line), made(f"{line} --documents together")
    assert "which <|endoftext|> ends, of 5 tokens (median): none sees an" in apart.describe()
    assert "5 tokens (median): each sees those before it" in together.describe()
    end = apart.tokenizer.convert_tokens_to_ids(END)
    for task, kept in ((apart, True), (together, False)):
        train = [x for step in task.steps(0, 0, 1, None) for x in step.inputs]
        validation = [x for x, _ in task.validation_batches(0, 1, None)[1]]
        for x in train + validation:
            assert (x.starts is not None) is kept
            assert not kept or (x.hidden.gather(1, x.starts)[x.starts > 0] == end).all()
        assert any(end in prompt[1:] for prompt in task._prompts()) is not kept


def test_no_more_is_held_out_than_is_validated(
    one: Learned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is for training. A text of any size is validated in the same time."""
    monkeypatch.setattr("training.tasks.language.HELD_OUT", 2)
    whole, capped = (made(f"{one.line} --n_train all --n_validation {n}") for n in ("all", 2))
    assert len(capped.examples["validation"]) == 2 < len(whole.examples["validation"])
    tokens = [sum(len(x.part) for x in task.examples.values()) for task in (whole, capped)]
    assert tokens[0] == tokens[1]
    assert capped.notes == [
        "no validation split: 33 tokens (--n_validation) are taken from its end."
    ]


def test_a_text_is_continued_and_an_empty_line_begins_one(one: Learned) -> None:
    """As at the end of the run; and as what follows the end of a document, line by line, whatever
    is beside it."""
    model, tokenizer = load_trained(str(one.workdir))
    options = parse_generate([".", "--max_new_tokens", "8"])
    for row in read_json(one.workdir / "rank0_gen_epoch1.json"):
        (said,) = continuations(model, tokenizer, [row["example"]], options)
        assert said.split()[:4] == (row["example"] + row["gen"]).split()[:4]
    end = tokenizer.convert_tokens_to_ids(END)
    text = tokenizer.decode(recomputed(model, [end], len(tokenizer), end, 9))
    found = continuations(model, tokenizer, ["", "Line", ""], options)
    assert found[0] == found[2] == " ".join(text.split("\n"))
    assert found[1].startswith("Line")


def test_a_tokenizer_learns_nothing_of_what_is_held_out(
    one: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a validation split of its own, all of train is learned, also in a second start."""
    pieces = [*["ab ab ab ab ab ab ab", None] * 19, "zq zq zq", None]
    args = parse(f"train single {one.line} --workdir {tmp_path} --model_max_length 4")
    cases = (
        (["train"], 99, False),
        (["train", "validation"], 99, True),
        (["train", "validation", "test"], 13, False),  # of a large text some
    )
    for splits, most, learned in cases:
        monkeypatch.setattr("training.tasks.language.PIECES_FOR_BPE", most)
        source = Source(dict.fromkeys(splits, partial(iter, pieces)), splits, in_pieces=True)
        texts = Texts("", source, (), {})
        tokenizer = LanguageTask(args, World(), texts).tokenizer
        assert len(tokenizer(" ab")["input_ids"]) == 1
        assert (len(tokenizer(" zq")["input_ids"]) == 1) is learned


def test_a_given_tokenizer_is_used_as_it_is(
    one: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In GPT-2's form, or in that of `tokenizers`, with the same ids. Nothing is trained, text that
    looks like an end is text, and what the tokenizer itself puts around texts stays away."""
    monkeypatch.setattr(LanguageTask, "train_tokenizer", pytest.fail)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT], 300, special_tokens=[END], show_progress=False)
    forms = tmp_path / "gpt2", tmp_path / "tokenizers"
    for folder in forms:
        folder.mkdir()
    bpe.save_model(str(forms[0]))  # vocab.json and merges.txt
    bpe._tokenizer.post_processor = TemplateProcessing(f"{END} $A", special_tokens=[(END, 0)])
    bpe.save(str(forms[1] / "tokenizer.json"))
    of_gpt2, other = (
        made(f"{one.line} --vocab_size 320 --tokenizer {folder} --workdir {folder}")
        for folder in forms
    )
    n = bpe.get_vocab_size()
    assert of_gpt2.config.vocab_size == other.config.vocab_size == 320
    assert of_gpt2.about["train"]["hash"] == other.about["train"]["hash"]
    first = bpe.encode("Line 0 of 0 is here.", add_special_tokens=False).ids
    assert [*of_gpt2.examples["train"][0].ids[: len(first) + 1]] == [0, *first]
    assert of_gpt2.tokenizer.eos_token_id == of_gpt2.tokenizer.pad_token_id == 0
    with pytest.raises(
        UserError, match=rf"--vocab_size {n - 1} --tokenizer .*: it has {n} tokens; --v.*320"
    ):
        made(f"{one.line} --vocab_size {n - 1} --tokenizer {forms[0]}")
    for word in ("merges.txt", "vocab.json"):
        (forms[0] / word).unlink()
        with pytest.raises(
            UserError, match=r"^--tokenizer .*gpt2: neither a folder nor a name on the"
        ):
            made(f"{one.line} --tokenizer {forms[0]}")


def test_what_does_not_fit_plain_text(one: Learned, tmp_path: Path) -> None:
    why = r"--model_max_length 4000: train has \d+ tokens, fewer .*; more text works, or a smaller "
    with pytest.raises(UserError, match=why):
        made(f"{one.line} --model_max_length 4000")
    text = tmp_path / "short.txt"
    text.write_text("a")
    with pytest.raises(UserError, match=r"train has 0 tokens, fewer .*; more text works$"):
        made(f"{one.line} --dataset {text} --workdir {tmp_path}/short")

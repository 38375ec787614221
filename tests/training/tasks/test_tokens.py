"""Pairs become token ids, ids become rectangles, and every example is used once per epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from tests.equivalence.problems import POSITIONS, Held, Sentences
from tests.project.programs import TINY, full_disk, parse
from training.launch.errors import RunError, UserError
from training.launch.world import World
from training.options import Options
from training.tasks import translation
from training.tasks.sequences import SequenceTask
from training.tasks.task import Step
from training.tasks.text_files import Source, pieces
from training.tasks.texts import SPLITS, Texts, made_once
from training.tasks.tokens import (
    Encoded,
    Stream,
    Tokens,
    collate_batch,
    encode_in_memory,
    evenly,
    get_tokenizer,
    ids_of,
    load_tokenizer,
    read_tokenizer,
    tokenizer_files,
    tokens_of,
    write_tokens,
)
from training.tasks.translation import TranslationTask

PAIRS = [
    {"de": "Der Hund schläft.", "en": "The dog sleeps."},
    {"de": "Die Katze sieht den großen Hund im Garten.", "en": "The cat sees the big dog."},
    {"de": "Ja.", "en": "Yes, it does so every day in the garden of the neighbours."},
]


def texts_of(splits: Mapping[str, Any]) -> Texts:
    """As if they were read from files."""
    rows = {split: partial(iter, pairs) for split, pairs in splits.items()}
    return Texts("own", Source(rows, splits), ("de", "en"), dict.fromkeys(SPLITS))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return get_tokenizer(PAIRS, 300, "de", "en", tmp_path_factory.mktemp("tokenizer"))


def test_the_tokenizer_has_its_special_tokens_first_and_all_bytes(
    tokenizer: Any, tmp_path: Path
) -> None:
    """And is the same when it is read again."""
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer({path.name: path.read_bytes() for path in tmp_path.iterdir()})
    other = "Ünbekannt: 漢字 🙂\t\u2028\n zwei  Leerzeichen"
    for each in (tokenizer, again):
        assert each.convert_tokens_to_ids(["<pad>", "<eos_de>", "<eos_en>"]) == [0, 1, 2]
        assert each.pad_token_id == 0
        assert 259 < len(each) == len(tokenizer) <= 300
        ids = each(other)["input_ids"]
        assert min(ids) > 2
        assert each.decode(ids) == other
    assert again.padding_side == "left"  # generation appends on the right
    both = get_tokenizer([{"de": "ja ja ja", "en": "no no no"}], 270, "de", "en", tmp_path)
    assert [len(both(words)["input_ids"]) for words in ("ja ja", "no no")] == [2, 2]


def test_a_pair_is_source_end_target_end_and_is_cut(tokenizer: Any) -> None:
    """To one more than the length, for inputs and labels."""
    source = [*tokenizer("Der Hund schläft.")["input_ids"], 1]
    target = [*tokenizer("The dog sleeps.")["input_ids"], 2]
    whole, n = source + target, len(source)
    for length in (128, n + 1, n, n - 1, n - 2):
        (found,) = encode_in_memory(PAIRS[:1], tokenizer, "de", "en", length)
        assert rows([found]) == [(whole[: length + 1], min(n, length + 1), 0)]
        assert found.num_targets == max(0, min(len(whole), length + 1) - n)
    assert rows(encode_in_memory(PAIRS, tokenizer, "de", "en", n))[0] == (whole[: n + 1], n, 0)
    other = encode_in_memory(PAIRS[:1], tokenizer, "en", "de", 128)
    assert rows(other) == [([*target[:-1], 2, *source[:-1], 1], len(target), 0)]


def test_collate_batch_makes_a_rectangle_with_weights_on_targets(tokenizer: Any) -> None:
    """Pairs and encoded pairs give the same, however many there are."""
    assert collate_batch([], "de", "en", tokenizer, 40, "cpu")["labels"].shape == (0, 40)
    many = collate_batch(PAIRS[2:] * 4097, "de", "en", tokenizer, 8, "cpu")
    assert many["labels"].shape == (4097, 8)
    every = encode_in_memory(PAIRS, tokenizer, "de", "en", 40)
    longest = max(len(e.ids) for e in every) - 1
    for padding, T, examples in (("max_length", 40, PAIRS), ("longest", longest, every)):
        batch = collate_batch(examples, "de", "en", tokenizer, 40, "cpu", padding=padding)
        for i, e in enumerate(every):
            ids = (list(e.ids) + [0] * 41)[: T + 1]
            assert batch["input_ids"][i].tolist() == ids[:-1]
            assert batch["labels"][i].tolist() == ids[1:]
            weights = [0] * (e.num_source - 1) + [1] * e.num_targets + [0] * 40
            assert batch["label_token_weights"][i].tolist() == weights[:T]


def test_padding_is_the_tokenizers() -> None:
    """A pretrained one's is not token 0."""
    other: Any = SimpleNamespace(pad_token="<pad>", convert_tokens_to_ids=lambda _: 7)
    batch = collate_batch([Encoded([1, 2, 3], 1)], "de", "en", other, 4, "cpu")
    assert [batch[name].tolist() for name in ("input_ids", "labels")] == [
        [[1, 2, 3, 7]],
        [[2, 3, 7, 7]],
    ]


def test_a_tokenizer_learns_from_some_of_a_large_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("training.tasks.translation.PAIRS_FOR_BPE", 4)
    assert [list(evenly(range(n), n, 4)) for n in (0, 4, 9)] == [[], [0, 1, 2, 3], [0, 3, 6]]
    args = parse(f"train single {TINY} --workdir {tmp_path}")
    often, never = (dict.fromkeys(("de", "en"), f"{word} " * 3) for word in ("ja", "zz"))
    train = [often, never, often, never, often]
    task = TranslationTask(args, World(), texts_of(dict.fromkeys(SPLITS, train)))
    assert [len(task.tokenizer(word)["input_ids"]) for word in ("ja", "zz")] == [1, 2]


def test_all_cores_tokenize_and_a_rank_has_its_own_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = list[set[int]]()

    def noted(work: Callable[..., Any], *given: Any) -> Any:
        found.append(os.sched_getaffinity(0))
        return work(*given)

    for name in ("encode", "get_tokenizer"):
        monkeypatch.setattr(translation, name, partial(noted, getattr(translation, name)))
    before, args = os.sched_getaffinity(0), parse(f"train single {TINY} --workdir {tmp_path}")
    one = {max(before)}
    os.sched_setaffinity(0, one)
    try:
        TranslationTask(args, World(), texts_of(dict.fromkeys(SPLITS, PAIRS)))
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, before)
    assert found == [os.sched_getaffinity(os.getppid())] * 4


# Files of tokens


def rows(examples: Iterable[Encoded]) -> list[tuple[list[int], int, int]]:
    return [([int(t) for t in e.ids], e.num_source, e.number) for e in examples]


def test_tokens_are_read_from_two_files(tmp_path: Path) -> None:
    """As pairs, cut to a length, or as a stream that overlaps by a token. No mapping holds what was
    read."""
    path = tmp_path / "train"
    lists = [([5, 6, 7, 8, 60000], [2, 1, 1, 1]), ([9, 10, 11, 12], [1, 3])]
    write_tokens(path, [(np.array(ids), np.array(sizes)) for ids, sizes in lists], np.uint16)
    pairs = Tokens(path, np.uint16, 9)
    assert rows(pairs) == [([5, 6, 7], 2, 0), ([8, 60000], 1, 1), ([9, 10, 11, 12], 1, 2)]
    assert rows(pairs.__getitems__([2, 0])) == [rows(pairs)[2], rows(pairs)[0]]
    assert [list(of) for of in pairs.sizes([2, 0, 1])] == [[4, 3, 2], [3, 1, 1]]
    assert (len(pairs), pairs.num_cut()) == (3, 0)
    assert [*pairs[-1].ids] == [9, 10, 11, 12]
    for number in (-4, 3):
        with pytest.raises(IndexError):
            pairs[number]
    short = Tokens(path, np.uint16, 1)
    assert rows(short) == [([5, 6], 2, 0), ([8, 60000], 1, 1), ([9, 10], 1, 2)]
    assert [list(of) for of in short.sizes([0, 2])] == [[2, 2], [0, 1]]
    assert short.num_cut() == 2
    assert rows(Tokens(path, np.uint16, 0)) == [([5], 1, 0), ([8], 1, 1), ([9], 1, 2)]
    stream = Stream(path, np.uint16, 3)
    assert [list(of) for of in stream.sizes([2, 0])] == [[3, 4], [2, 3]]
    expected = [([5, 6, 7, 8], 1, 0), ([8, 60000, 9, 10], 1, 1), ([10, 11, 12], 1, 2)]
    assert rows(stream) == expected
    assert rows(Stream(path, np.uint16, 2).of(range(3, 8))) == [
        ([8, 60000, 9], 1, 0), ([9, 10, 11], 1, 1),
    ]  # fmt: skip
    part = pairs.of(range(1, 3))
    assert rows(part) == [([8, 60000], 1, 0), ([9, 10, 11, 12], 1, 1)]
    assert [list(of) for of in part.sizes([1])] == [[4], [3]]
    assert rows(Stream(path, np.uint16, 4)) == [
        ([5, 6, 7, 8, 60000], 1, 0), ([60000, 9, 10, 11, 12], 1, 1),
    ]  # fmt: skip
    maps = Path("/proc/self/maps").read_text()
    assert str(path) not in maps


class _Encoding(list[int]):
    @property
    def ids(self) -> list[int]:
        return [*self]


def test_ids_are_as_wide_as_the_vocabulary_needs(tmp_path: Path) -> None:
    for size, dtype in ((65536, np.uint16), (65537, np.int32)):
        ids = _Encoding([size - 1, 0])
        backend = SimpleNamespace(encode_batch_fast=lambda _, ids=ids, **__: [ids])
        tokenizer: Any = SimpleNamespace(backend_tokenizer=backend)
        encoded = (tokens_of([""], tokenizer)[0], np.ones(2, np.int64))
        task: Any = SimpleNamespace(
            tokenizer=range(size), texts=texts_of({"train": PAIRS}), files={}, notes=[],
            encoded=lambda _, some=encoded: [some], tokens_class=Tokens,
            args=Options(workdir=tmp_path / str(size), model_max_length=9),
        )  # fmt: skip
        found = SequenceTask._tokens(task, World())["train"]
        assert found.dtype == dtype
        assert rows(found) == [([size - 1, 0], 1, 0)]


def test_long_pairs_are_counted_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.tasks.tokens.AT_ONCE", 3)
    sizes = np.array([1, 1, 1, 2, 1, 4, 1, 3, 1, 1, 1, 1, 1, 9])  # 2, 3, 5, 4, 2, 2, 10 tokens
    write_tokens(tmp_path / "a", [(np.arange(sizes.sum()), sizes)], np.int32)
    counts = [Tokens(tmp_path / "a", np.int32, most).num_cut() for most in (9, 8, 2, 1)]
    assert counts == [0, 1, 3, 4]
    assert Tokens(tmp_path / "a", np.int32, 1).of(range(2, 6)).num_cut() == 2


def filled(folder: Path, *lists: Any) -> None:
    write_tokens(folder / "a", lists, np.uint16)


def test_a_vocabulary_has_room_for_all_bytes() -> None:
    task: Any = SimpleNamespace(args=Options(vocab_size=100), pretrained=None)
    with pytest.raises(UserError, match=r"^--vocab_size 100: .* 259 tokens, .* 259 works$"):
        SequenceTask.config_and_weights(task, 259)


@pytest.mark.parametrize(("tokens", "room"), [(13, 24), (1, 20)], ids=["ids", "bounds"])
def test_a_full_disk_leaves_no_tokens(tmp_path: Path, tokens: int, room: int) -> None:
    """Though a library keeps the last bytes to itself until the end."""
    one = np.arange(tokens), np.array([1, tokens - 1])
    said = r"/name: cannot be written .File too large"
    with full_disk(room), pytest.raises(RunError, match=said):
        made_once(tmp_path / "name", lambda new: filled(new, one))
    assert [*tmp_path.iterdir()] == []


def test_the_content_is_on_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, bool]] = []

    def sync(file: int) -> None:
        synced.append((os.fstat(file).st_size, (tmp_path / "name").exists()))

    monkeypatch.setattr("os.fsync", sync)
    one = np.array([5, 6, 7]), np.array([2, 1])
    made_once(tmp_path / "name", lambda new: filled(new, one))
    assert synced == [(6, False), (24, False)]
    assert rows(Tokens(tmp_path / "name" / "a", np.uint16, 9)) == [([5, 6, 7], 2, 0)]


def test_a_text_that_looks_like_a_special_token_is_text(tokenizer: Any, tmp_path: Path) -> None:
    """In training, in prompts, and in plain text: those are added by us alone."""
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer({path.name: path.read_bytes() for path in tmp_path.iterdir()})
    for word in ("<eos_en>", "<eos_de>", "<pad>"):
        for each in (again, tokenizer):
            alone, _ = tokens_of([word], each)
            assert min(alone) > 2
            source, target = f"a {word}b", f"{word} Hello"
            (pair,) = encode_in_memory([{"de": source, "en": target}], each, "de", "en", 99)
            ids = pair.ids
            assert [i for i in ids if i < 3] == [1, 2] and ids[pair.num_source - 1] == 1
            assert each.decode(ids[: pair.num_source - 1]) == source
            assert each.decode(ids[pair.num_source : -1]) == target
            found, _ = tokens_of([source, target], each)
            assert [*found] == [i for i in ids if i > 2]
            assert ids_of(["Ja.", source], each, "de")[1] == ids[: pair.num_source]


def test_files_have_what_is_encoded_in_memory_and_what_is_cut_is_said(tmp_path: Path) -> None:
    args = parse(f"train single {TINY} --model_max_length 20 --workdir {tmp_path}")
    splits = {"train": [*PAIRS, *PAIRS], "validation": PAIRS[:1], "test": PAIRS}
    task = TranslationTask(args, World(), texts_of(splits))
    long = 0
    for split, pairs in splits.items():
        expected = encode_in_memory(pairs, task.tokenizer, "de", "en", 20)
        assert rows(task.examples[split]) == rows(expected)
        whole = encode_in_memory(pairs, task.tokenizer, "de", "en", 99)
        long = sum(len(pair.ids) > 21 for pair in whole)
    assert 0 < long < 3
    assert task.notes == [
        f"train: {2 * long} of 6 pairs cut to --model_max_length 20 tokens.",
        f"test: {long} of 3 pairs cut to --model_max_length 20 tokens.",
    ]
    assert task.describe().splitlines()[2:] == task.notes


def test_a_long_text_has_the_same_tokens_in_pieces(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut at lines and, where a line is long, at words."""
    monkeypatch.setattr("training.tasks.text_files.PIECE", 5)
    text = "Der Hund.\n\nDie Katze \n im\r\nGarten.\n   Ja,\n\n\n\tsie\nsieht ihn.\nUnd\ndann \n"
    found = list(pieces(text))
    assert [text.index(piece) for piece in found[1:]] == [14, 20, 25, 48, 54, 60]
    assert "".join(found) == text
    ids, lengths = tokens_of(found, tokenizer)
    assert ids.tolist() == tokenizer(text)["input_ids"]
    assert lengths.tolist() == [len(tokenizer(piece)["input_ids"]) for piece in found]


def test_a_tokenizer_puts_no_space_before_the_parts_of_a_text(
    tokenizer: Any, tmp_path: Path
) -> None:
    """Whatever the one that is given does."""
    given = deepcopy(tokenizer)
    given.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    assert given.tokenize("Ja.") == given.tokenize(" Ja.")
    given.save_pretrained(tmp_path / "given")
    read_tokenizer(str(tmp_path / "given")).save_pretrained(tmp_path / "saved")
    again = load_tokenizer(tokenizer_files(tmp_path / "saved"))
    assert again.tokenize("Ja.") == tokenizer.tokenize("Ja.") != given.tokenize("Ja.")


def test_a_word_may_be_as_long_as_a_genome(tokenizer: Any) -> None:
    """It is cut, and the time grows with its length, not with the square; nothing is lost. A text
    with blanks is cut at them alone."""
    dna, text = "GATTACA" * 60_000, "a sentence of words, " * 3_000
    assert max(map(len, pieces(f"{dna} end"))) == 8192 and "".join(pieces(dna)) == dna
    assert all(piece.startswith(" ") for piece in [*pieces(text)][1:])
    ids, lengths = tokens_of([dna, None, text], tokenizer)
    assert tokenizer.decode(ids[: lengths[0]]) == dna and lengths[1] == 0
    assert ids[lengths[0] :].tolist() == tokenizer(text)["input_ids"]


# Steps


def numbered(n: int, batch_size: int) -> Any:
    """Example i begins with token i; lengths go from 3 to 7, of which 1 to 5 are the target's."""
    task: Any = Sentences(n, batch_size).task(World(), torch.float32)
    task.examples = {"train": Held(Encoded([i, 9] + [8] * (1 + i % 5), 2) for i in range(n))}
    return task


def numbers(step: Step) -> list[list[int]]:
    """The examples of each micro-batch."""
    return [ids[:, 0].tolist() for ids, *_ in step.inputs]


@pytest.mark.parametrize("num_microbatches", [None, 3])
@pytest.mark.parametrize(("n", "world_size"), [(48, 1), (45, 3), (41, 3)])
def test_the_ranks_parts_are_a_global_batch_that_the_seed_and_its_number_fix(
    n: int, world_size: int, num_microbatches: int | None
) -> None:
    """Each example once per epoch, in another order in the next; one can start later. Of the 41
    the last is rank 0's."""
    task = numbered(n, 8)
    alone = [[sorted(numbers(s)[0]) for s in task.steps(e, 0, 1, 1)] for e in (0, 1)]
    assert [sorted(i for batch in epoch for i in batch) for epoch in alone] == [list(range(n))] * 2
    assert alone[0] != alone[1]
    for start in (0, 2):
        ranks = [
            list(task.steps(1, r, world_size, num_microbatches, start)) for r in range(world_size)
        ]
        for k, of_ranks in enumerate(zip(*ranks, strict=True), start):
            mine = [i for step in of_ranks for part in numbers(step) for i in part]
            assert sorted(mine) == alone[1][k]
            examples = [task.examples["train"][i] for i in mine]
            count = sum(e.num_targets for e in examples)
            assert {step.count for step in of_ranks} == {count}
            assert sum(len(labels) for s in of_ranks for labels in s.targets) == count
            assert sum(s.tokens for s in of_ranks) == sum(len(e.ids) - 1 for e in examples)


def test_micro_batches_and_ranks_have_like_lengths() -> None:
    """Micro-batches on a CPU: of ten examples with 2, 2, 3, 3, 4, 4, 5, 5, 6, 6 inputs."""
    for most, lengths in (
        (1, [[2], [2], [3], [3], [4], [4], [5], [5], [6], [6]]),
        (17, [[2, 2, 3, 3], [4, 4, 5], [5, 6], [6]]),
    ):
        task = numbered(10, 10)
        task.cpu_positions = most
        (step,) = task.steps(0, 0, 1, None)
        found = [[len(task.examples["train"][i].ids) - 1 for i in part] for part in numbers(step)]
        assert found == lengths
        assert step.positions == sum(len(part) * part[-1] for part in lengths)
    task = numbered(20, 20)
    ranks = [next(task.steps(0, rank, 2, 1)) for rank in range(2)]
    found = [[len(task.examples["train"][i].ids) - 1 for i in numbers(s)[0]] for s in ranks]
    assert found == [[2, 2, 3, 3, 4, 4, 5, 5, 6, 6]] * 2
    task = numbered(3, 4)
    task.args, task.length = replace(task.args, padding="max_length"), POSITIONS
    (step,) = task.steps(0, 0, 1, None)
    assert (step.positions, step.tokens) == (3 * POSITIONS, 2 + 3 + 4)


def test_a_source_that_fills_the_length_leaves_nothing_to_learn(tmp_path: Path) -> None:
    args = parse(f"train single {TINY} --model_max_length 3 --workdir {tmp_path}")
    said = "--model_max_length 3: every source sentence fills it, .* --model_max_length 128 works"
    with pytest.raises(UserError, match=said):
        TranslationTask(args, World(), texts_of(dict.fromkeys(SPLITS, PAIRS)))

"""Pairs become token ids, ids become rectangles, and every example is used once per epoch."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.equivalence.problems import POSITIONS, Held, Sentences
from tests.project.programs import TINY, full_disk, parse
from training.launch.errors import RunError, UserError
from training.launch.world import World
from training.tasks.any_text import pieces
from training.tasks.task import Step
from training.tasks.texts import SPLITS, Texts
from training.tasks.tokens import (
    AHEAD,
    Encoded,
    Rows,
    Tokens,
    collate_batch,
    encode,
    evenly,
    get_tokenizer,
    load_tokenizer,
    tokens_of,
    write_tokens,
)
from training.tasks.translation import TranslationTask

PAIRS = [
    {"de": "Der Hund schläft.", "en": "The dog sleeps."},
    {"de": "Die Katze sieht den großen Hund im Garten.", "en": "The cat sees the big dog."},
    {"de": "Ja.", "en": "Yes, it does so every day in the garden of the neighbours."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return get_tokenizer(PAIRS, 300, "de", "en", tmp_path_factory.mktemp("tokenizer"))


def encoded(*args: Any) -> list[Encoded]:
    (found,) = encode(*args)
    return found.examples()


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


def test_a_pair_is_source_end_target_end_and_is_cut(tokenizer: Any) -> None:
    """To one more than the length, for inputs and labels."""
    source = [*tokenizer("Der Hund schläft.")["input_ids"], 1]
    target = [*tokenizer("The dog sleeps.")["input_ids"], 2]
    whole, n = source + target, len(source)
    for length in (128, n + 1, n, n - 1, n - 2):
        (found,) = encoded(PAIRS[:1], tokenizer, "de", "en", length)
        assert rows([found]) == [(whole[: length + 1], min(n, length + 1), 0)]
        assert found.num_targets == max(0, min(len(whole), length + 1) - n)
    assert rows(encoded(PAIRS, tokenizer, "de", "en", n))[0] == (whole[: n + 1], n, 0)
    other = encoded(PAIRS[:1], tokenizer, "en", "de", 128)
    assert rows(other) == [([*target[:-1], 2, *source[:-1], 1], len(target), 0)]


def test_collate_batch_makes_a_rectangle_with_weights_on_targets(tokenizer: Any) -> None:
    """Of pairs as of what is encoded, however many."""
    assert collate_batch([], "de", "en", tokenizer, 40, "cpu")["labels"].shape == (0, 40)
    many = collate_batch(PAIRS[2:] * 4097, "de", "en", tokenizer, 8, "cpu")
    assert many["labels"].shape == (4097, 8)
    every = encoded(PAIRS, tokenizer, "de", "en", 40)
    longest = max(len(e.ids) for e in every) - 1
    for padding, T, examples in (("max_length", 40, PAIRS), ("longest", longest, every)):
        batch = collate_batch(examples, "de", "en", tokenizer, 40, "cpu", padding=padding)
        for i, e in enumerate(every):
            ids = (list(e.ids) + [0] * 41)[: T + 1]
            assert batch["input_ids"][i].tolist() == ids[:-1]
            assert batch["labels"][i].tolist() == ids[1:]
            weights = [0] * (e.num_source - 1) + [1] * e.num_targets + [0] * 40
            assert batch["label_token_weights"][i].tolist() == weights[:T]


def test_a_tokenizer_learns_from_some_of_a_large_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.tasks.tokens.FOR_BPE", 4)
    assert [list(evenly(range(n))) for n in (0, 4, 9)] == [[], [0, 1, 2, 3], [0, 3, 6]]


# Files of tokens


def rows(examples: Iterable[Encoded]) -> list[tuple[list[int], int, int]]:
    return [([int(t) for t in e.ids], e.num_source, e.number) for e in examples]


def test_tokens_are_whole_or_not_there(tmp_path: Path) -> None:
    """What a killed run has left is no obstacle. One file gives rows, or stretches that overlap by
    a token. No mapping holds what was read."""
    written = [([5, 6, 7], 2, 0), ([8], 1, 1), ([9, 60000, 11, 12], 1, 2)]
    folder = tmp_path / "tokens" / "name"

    def examples(killed: bool) -> Iterator[Rows]:
        yield Rows(np.array([5, 6, 7, 8]), np.array([3, 1]), np.array([2, 1]))
        assert not folder.exists()
        if killed:
            raise KeyboardInterrupt
        yield Rows(np.array([9, 60000, 11, 12]), np.array([4]), np.array([1]))

    with pytest.raises(KeyboardInterrupt):
        write_tokens(folder, lambda: examples(killed=True), np.uint16)
    assert not folder.exists()
    write_tokens(folder, lambda: examples(killed=False), np.uint16)
    assert {path.name for path in folder.parent.iterdir()} == {"lock", "name"}
    found = Tokens(folder, np.uint16)
    assert rows(found) == written
    assert rows(found.__getitems__([2, 0])) == [written[2], written[0]]
    assert found.mapped().tolist() == [5, 6, 7, 8, 9, 60000, 11, 12]
    maps = Path("/proc/self/maps").read_text()
    assert [str(folder / name) in maps for name in ("index", "ids")] == [True, False]
    assert [list(of) for of in found.sizes([2, 0, 1])] == [[4, 3, 1], [3, 1, 0]]
    stretches = Tokens(folder, np.uint16, length=3)
    assert [list(of) for of in stretches.sizes([2, 0])] == [[2, 4], [1, 3]]
    assert rows(stretches) == [([5, 6, 7, 8], 1, 0), ([8, 9, 60000, 11], 1, 1), ([11, 12], 1, 2)]
    assert rows(Tokens(folder, np.uint16, length=3, most=1)) == rows(stretches)[:1]
    with pytest.raises(RunError, match=r"/file/name: cannot be written .*File exists"):
        (tmp_path / "file").touch()
        write_tokens(tmp_path / "file" / "name", list, np.uint16)


@pytest.mark.parametrize(("tokens", "room"), [(9, 12), (1, 8)], ids=["ids", "index"])
def test_a_full_disk_leaves_no_tokens(tmp_path: Path, tokens: int, room: int) -> None:
    """Though a library keeps the last bytes to itself until the end."""
    one = Rows(np.arange(tokens), np.array([tokens]), np.array([1]))
    said = r"/name: cannot be written .File too large"
    with full_disk(room), pytest.raises(RunError, match=said):
        write_tokens(tmp_path / "name", lambda: [one], np.uint16)
    assert not (tmp_path / "name").exists()


def test_the_content_is_on_disk_before_the_name_and_locks_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some file systems of clusters: there several ranks write at once, each its own."""
    synced: list[tuple[int, bool]] = []

    def sync(file: int) -> None:
        synced.append((os.fstat(file).st_size, (tmp_path / "name").exists()))

    monkeypatch.setattr("os.fsync", sync)
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOSYS, "No locks")))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "")
    monkeypatch.setenv("RANK", "0")
    one = Rows(np.array([5, 6, 7]), np.array([3]), np.array([2]))

    def slow() -> list[Rows]:
        monkeypatch.setenv("RANK", "1")  # which begins later, and ends before
        write_tokens(tmp_path / "name", lambda: [one], np.uint16)
        return [one]

    write_tokens(tmp_path / "name", slow, np.uint16)
    assert synced == [(6, False), (12, False), (6, True), (12, True)]
    assert rows(Tokens(tmp_path / "name", np.uint16)) == [([5, 6, 7], 2, 0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "name"]


def test_a_second_start_takes_the_tokens_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the text is another, or the length."""
    line = f"train single {TINY} --workdir {tmp_path} --model_max_length "
    made = []

    def noted(task: TranslationTask, split: str) -> Iterator[Rows]:
        made.append(split)
        return real(task, split)

    real = TranslationTask.encoded
    monkeypatch.setattr(TranslationTask, "encoded", noted)
    for length, validation, expected in (
        (60, PAIRS, [*SPLITS]), (60, PAIRS, []), (60, PAIRS[1:], ["validation"]),
        (61, PAIRS, [*SPLITS]),
    ):  # fmt: skip
        texts = Texts({"train": PAIRS, "validation": validation, "test": PAIRS})
        made.clear()
        task = TranslationTask(parse(f"{line}{length}"), World(), texts)
        assert made == expected
        found = rows(task.examples["validation"])
        assert found == rows(encoded(validation, task.tokenizer, "de", "en", length))


def test_a_long_text_has_the_same_tokens_in_pieces(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut at lines and, where a line is long, at words."""
    monkeypatch.setattr("training.tasks.any_text.PIECE", 5)
    text = "Der Hund.\n\nDie Katze \n im\r\nGarten.\n   Ja,\n\n\n\tsie\nsieht ihn.\nUnd\ndann \n"
    found = list(pieces(text))
    assert [text.index(piece) for piece in found[1:]] == [14, 20, 25, 48, 54, 60]
    assert "".join(found) == text
    every = tokens_of([found[:2], found[2:]], tokenizer)
    assert [t for ids, _ in every for t in ids.tolist()] == tokenizer(text)["input_ids"]


def test_lists_are_tokenized_in_order_and_a_few_ahead(tokenizer: Any) -> None:
    """Of more lists than are tokenized ahead: text larger than memory is not read at once."""
    lists = [[f"Der Hund {n}.", "Ja"][: 1 + n % 2] for n in range(3 * AHEAD)]
    read: list[int] = []

    def reading() -> Iterator[list[str]]:
        for number, some in enumerate(lists):
            read.append(number)
            yield some

    found, ahead = [], []
    for ids, lengths in tokens_of(reading(), tokenizer):
        found.append((ids.tolist(), lengths.tolist()))
        ahead.append(len(read) - len(found))
    every = [tokenizer(some)["input_ids"] for some in lists]
    assert found == [([*chain(*some)], [len(ids) for ids in some]) for some in every]
    assert ahead == [AHEAD] * 2 * AHEAD + [2, 1, 0]


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
        TranslationTask(args, World(), Texts(dict.fromkeys(SPLITS, PAIRS)))

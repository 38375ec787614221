"""Pairs become token ids, ids become rectangles, and every example is used once per epoch."""

from __future__ import annotations

from typing import Any

import pytest

from data_parallel.dataset import partition_dataset
from training.data import (
    Encoded,
    GlobalBatches,
    RankLoader,
    Step,
    encode,
    eos,
    load_tokenizer,
    to_batch,
    train_tokenizer,
)
from training.seeds import stream

PAIRS = [{"de": "Der Hund schläft.", "en": "The dog sleeps."}] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(PAIRS, 300, "de", "en")


def lists(batch: dict[str, Any]) -> dict[str, list[Any]]:
    return {key: value.tolist() for key, value in batch.items()}


# ------------------------------------------------------------------------------------- tokens


def test_the_tokenizer_has_its_special_tokens_first_and_all_bytes(tokenizer: Any) -> None:
    names = ["<pad>", "<eos_de>", "<eos_en>"]
    assert tokenizer.convert_tokens_to_ids(names) == [0, 1, 2]
    assert tokenizer.pad_token_id == 0
    assert 259 < len(tokenizer) <= 300
    other = "Ünbekannt: 漢字 🙂\t\u2028\n zwei  Leerzeichen"
    ids = tokenizer(other)["input_ids"]
    assert min(ids) > 2
    assert tokenizer.decode(ids) == other


def test_a_saved_tokenizer_is_the_same(tokenizer: Any, tmp_path: Any) -> None:
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    text = "Der Hund schläft." + eos("de") + "The dog"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (len(again), again.pad_token_id) == (len(tokenizer), 0)


def test_a_pair_is_source_end_target_end(tokenizer: Any) -> None:
    source = tokenizer("Der Hund schläft.")["input_ids"]
    target = tokenizer("The dog sleeps.")["input_ids"]
    assert encode(PAIRS[:1], tokenizer, "de", "en", 128) == [
        Encoded([*source, 1, *target, 2], len(source) + 1)
    ]
    # The other direction ends with the other tokens.
    assert encode(PAIRS[:1], tokenizer, "en", "de", 128) == [
        Encoded([*target, 2, *source, 1], len(target) + 1)
    ]
    assert encode([], tokenizer, "de", "en", 128) == []


def test_pairs_are_cut_to_one_more_than_the_length(tokenizer: Any) -> None:
    (whole,) = encode(PAIRS[:1], tokenizer, "de", "en", 128)
    n = whole.num_source
    assert whole.num_targets == len(whole.ids) - n
    cut = [encode(PAIRS[:1], tokenizer, "de", "en", k)[0] for k in (n + 1, n, n - 1, n - 2)]
    assert cut == [
        Encoded(whole.ids[: n + 2], n),
        Encoded(whole.ids[: n + 1], n),
        Encoded(whole.ids[:n], n),
        Encoded(whole.ids[: n - 1], n - 1),
    ]
    assert [example.num_targets for example in cut] == [2, 1, 0, 0]


# ------------------------------------------------------------------------------------ batches


def test_a_batch_is_a_rectangle_with_weights_on_targets() -> None:
    examples = [Encoded([5, 6, 7, 8, 9], 2), Encoded([3, 4, 2], 2), Encoded([3, 4], 2)]
    assert lists(to_batch(examples, 0, "cpu")) == {
        "input_ids": [[5, 6, 7, 8], [3, 4, 2, 0], [3, 4, 0, 0]],
        "labels": [[6, 7, 8, 9], [4, 2, 0, 0], [4, 0, 0, 0]],
        "label_token_weights": [[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]],
        "target_index": [1, 2, 3, 5],
    }


def test_a_batch_may_be_longer_than_its_examples() -> None:
    assert lists(to_batch([Encoded([3, 4, 2], 1)], 9, "cpu", 4)) == {
        "input_ids": [[3, 4, 2, 9]],
        "labels": [[4, 2, 9, 9]],
        "label_token_weights": [[1, 1, 0, 0]],
        "target_index": [0, 1],
    }


SIZES = [(1, 1), (1, 8), (7, 2), (8, 4), (9, 4), (100, 32), (64, 64), (65, 64)]


@pytest.mark.parametrize(("n", "batch_size"), SIZES)
def test_every_example_is_used_once_per_epoch(n: int, batch_size: int) -> None:
    batches = GlobalBatches(n, batch_size, 3)
    full, rest = divmod(n, batch_size)
    for epoch in (0, 1):
        order = batches.epoch(epoch)
        assert sorted(i for batch in order for i in batch) == list(range(n))
        sizes = sorted(map(len, order), reverse=True)
        assert sizes == [batch_size] * full + [rest] * (rest > 0)
        assert len(batches) == len(order)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    one, same, other = (GlobalBatches(40, 8, seed) for seed in (1, 1, 2))
    assert [one.epoch(e) for e in (2, 0, 1)] == [same.epoch(e) for e in (2, 0, 1)]
    assert one.epoch(0) != one.epoch(1)
    assert one.epoch(0) != other.epoch(0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("n", "batch_size"), [(64, 8), (61, 8), (3, 4), (13, 12)])
def test_an_epochs_order_is_one_that_the_partitioner_deals(
    n: int, batch_size: int, world_size: int
) -> None:
    order = GlobalBatches(n, batch_size, 7).epoch(0)
    for rank in range(world_size):
        dealt = partition_dataset(
            rank,
            world_size,
            list(range(n)),
            batch_size,
            collate_fn=list,
            seed=stream(7, "data order", 0),
        )
        parts = [batch[rank::world_size] for batch in order]
        assert list(dealt) == [part for part in parts if part]


# -------------------------------------------------------------------------------- rank loader


def numbered(n: int) -> list[Encoded]:
    """Example i begins with token i; lengths go from 3 to 7, of which 1 to 5 are the target's."""
    return [Encoded([i, 100] + [101] * (1 + i % 5), 2) for i in range(n)]


def steps(n: int, batch_size: int, rank: int, world_size: int, **options: Any) -> list[Step]:
    examples = numbered(n)
    batches = GlobalBatches(len(examples), batch_size, 5)
    loader = RankLoader(
        examples, batches, rank=rank, world_size=world_size, pad_id=0, device="cpu", **options
    )
    found = list(loader.steps(1))
    assert len(loader) == len(found)
    return found


def numbers(step: Step) -> list[list[int]]:
    """The examples of each micro-batch."""
    return [batch["input_ids"][:, 0].tolist() for batch in step.micro_batches]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("n", [48, 45])
def test_the_ranks_parts_are_the_global_batch(n: int, world_size: int, accumulation: int) -> None:
    examples = numbered(n)
    expected = GlobalBatches(len(examples), 8, 5).epoch(1)
    ranks = [steps(n, 8, rank, world_size, accumulation=accumulation) for rank in range(world_size)]
    parts = [[i for step in of_ranks for part in numbers(step) for i in part]
             for of_ranks in zip(*ranks, strict=True)]  # fmt: skip
    assert [sorted(part) for part in parts] == [sorted(batch) for batch in expected]
    targets = [sum(examples[i].num_targets for i in batch) for batch in expected]
    assert [[step.target_tokens for step in rank] for rank in ranks] == [targets] * world_size
    in_batches = [
        sum(len(b["target_index"]) for step in of_ranks for b in step.micro_batches)
        for of_ranks in zip(*ranks, strict=True)
    ]
    assert in_batches == targets
    tokens = [sum(len(examples[i].ids) - 1 for i in batch) for batch in expected]
    assert [sum(s.tokens for s in of_ranks) for of_ranks in zip(*ranks, strict=True)] == tokens


def test_a_rank_without_an_example_has_a_step_all_the_same() -> None:
    ranks = [steps(1, 4, rank, 4) for rank in range(4)]
    assert [[numbers(step) for step in rank] for rank in ranks] == [[[[0]]], [[]], [[]], [[]]]
    assert [(s.target_tokens, s.positions, s.tokens) for (s,) in ranks] == [
        (1, 2, 2), (1, 0, 0), (1, 0, 0), (1, 0, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("n", "accumulation", "expected"),
    [
        (5, 1, [5]), (5, 2, [3, 2]), (5, 4, [2, 1, 1, 1]), (3, 8, [1, 1, 1]), (6, 3, [2, 2, 2]),
        (8, 5, [2, 2, 2, 1, 1]),
    ],
)  # fmt: skip
def test_accumulation_cuts_a_ranks_part(n: int, accumulation: int, expected: list[int]) -> None:
    (step,) = steps(n, 8, 0, 1, accumulation=accumulation)
    assert [len(part) for part in numbers(step)] == expected


@pytest.mark.parametrize(
    ("max_positions", "lengths"),
    # ten examples with 2, 2, 3, 3, 4, 4, 5, 5, 6, 6 inputs
    [
        (1, [[2], [2], [3], [3], [4], [4], [5], [5], [6], [6]]),
        (12, [[2, 2, 3, 3], [4, 4], [5, 5], [6, 6]]),
        (17, [[2, 2, 3, 3, 4][:4], [4, 4, 5], [5, 6], [6]]),
        (60, [[2, 2, 3, 3, 4, 4, 5, 5, 6, 6]]),
    ],
)
def test_micro_batches_of_like_lengths(max_positions: int, lengths: list[list[int]]) -> None:
    examples = numbered(10)
    (step,) = steps(10, 10, 0, 1, max_positions=max_positions)
    assert [[len(examples[i].ids) - 1 for i in part] for part in numbers(step)] == lengths
    assert step.positions == sum(len(part) * part[-1] for part in lengths)


def test_ranks_have_like_lengths() -> None:
    examples = numbered(20)
    ranks = [steps(20, 20, rank, 2)[0] for rank in range(2)]
    lengths = [[len(examples[i].ids) for part in numbers(step) for i in part] for step in ranks]
    assert lengths == [[3, 3, 4, 4, 5, 5, 6, 6, 7, 7]] * 2


def test_positions_count_padding_and_tokens_do_not() -> None:
    (step,) = steps(3, 4, 0, 1)  # lengths 3, 4, 5: 2, 3, 4 inputs
    assert (step.positions, step.tokens, step.target_tokens) == (3 * 4, 2 + 3 + 4, 1 + 2 + 3)
    (step,) = steps(3, 4, 0, 1, length=10)
    assert (step.positions, step.tokens) == (3 * 10, 2 + 3 + 4)


def test_an_epoch_can_start_later() -> None:
    examples = numbered(20)
    batches = GlobalBatches(len(examples), 4, 5)
    loader = RankLoader(examples, batches, rank=0, world_size=2, pad_id=0, device="cpu")
    assert [numbers(s) for s in loader.steps(2, 3)] == [numbers(s) for s in loader.steps(2)][3:]

"""project/train.py: the trained model translates where it was trained, in its shards and stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from project import strategies
from project.recipes import plan_of
from project.task import materialize
from project.tasks import TextTask, make_task, read_data
from project.train import parse
from tests.project.trained import GPT, trained
from tests.ranks import Ranks
from training.launch import RunError, World

pytestmark = pytest.mark.usefixtures("elsewhere")

LENGTH = 64
UNCHECKED = GPT.replace("--check_weights --check_output ", "")


def refuse_the_whole(_: int, patches: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RunError("the whole model is asked for")

    for strategy in (strategies.Fsdp, strategies.Pipeline):
        patches.setattr(strategy, "whole_weights", refuse)


BF16 = ["fsdp --precision bf16", "pipeline --precision bf16"]


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline", "model", *BF16])
def test_no_rank_needs_the_whole_model(ranks: Ranks, strategy: str) -> None:
    """Unless it is to be exported, or compared; of this test_train.py tells."""
    printed, error, _ = trained(ranks, f"{strategy} {UNCHECKED} --num_batches 4", refuse_the_whole)
    assert error is None, printed
    assert "\nBLEU " in printed


TWO = [
    ("ddp", 7),
    ("fsdp --zero 1", 7),
    ("fsdp --zero 2", 7),
    ("fsdp --zero 3", 7),
    ("fsdp --zero 3", 1),  # the second rank has none
    ("pipeline", 7),
]


@pytest.mark.parametrize(("strategy", "num_sentences"), TWO)
def test_two_ranks_translate_as_one_process(
    ranks: Ranks, strategy: str, num_sentences: int
) -> None:
    compare(ranks, strategy, num_sentences)


@pytest.mark.parametrize("strategy", ["fsdp --zero 3", "pipeline", "pipeline --balance 1,4,1"])
def test_three_ranks_translate_as_one_process(three_ranks: Ranks, strategy: str) -> None:
    compare(three_ranks, strategy, 7)


def compare(ranks: Ranks, strategy: str, num_sentences: int) -> None:
    (got, plain), *others = ranks.run(translations, line_of(strategy, num_sentences))
    assert others == [([], [])] * len(others)
    assert got == [sentence for sentence, _ in plain]
    if num_sentences > 1:  # the examples are to show what can happen
        lengths = [length for _, length in plain]
        assert len(set(lengths)) > 2, lengths
        assert min(lengths) < LENGTH == max(lengths), lengths


def line_of(strategy: str, num_sentences: int) -> str:
    """In fp64: a cache sums in another order, and the largest logit should not depend on it."""
    sizes = f"--n_test {num_sentences} --precision fp64 --workdir {Path('work').resolve()}"
    return f"{strategy} {UNCHECKED} {sizes}"


def made(rank: int, world_size: int, line: str) -> tuple[TextTask, Any]:
    """A task, and a strategy with weights so large that what it writes varies."""
    args = parse([*line.split(), "--num_workers", str(world_size)])
    world = World(rank, world_size, rank)
    task = make_task(args, world, read_data(args))
    assert isinstance(task, TextTask)
    task.fill = large_weights
    return task, strategies.STRATEGIES[args.strategy](task, world, plan_of(args, world, task))


@torch.no_grad()
def large_weights(name: str, p: Tensor) -> None:
    if ".ln_" in name:
        p.fill_(name.endswith("weight"))
        return
    p.normal_(0, 0.5, generator=torch.Generator().manual_seed(sum(name.encode())))
    if "wte" in name:
        p[2] *= 5  # the end of a sentence: it comes soon in some, and late in others


def translations(rank: int, world_size: int, line: str) -> tuple[list[str], list[tuple[str, int]]]:
    """On rank 0: by the strategy, and by one process without a cache, a sentence at a time, with
    the length of source and translation in tokens."""
    task, strategy = made(rank, world_size, line)
    found = task.translations(strategy, strategy.part, strategy.parts)
    strategy.close()
    plain = []
    if rank == 0:
        model = materialize(task, torch.device("cpu"), torch.float64).eval()
        plain = [recomputed(model, pair["de"], task.tokenizer) for pair in task.data.splits["test"]]
    return found, plain


@torch.no_grad()
def recomputed(model: Any, source: str, tokenizer: Any) -> tuple[str, int]:
    prompt = [*tokenizer(source)["input_ids"], 1]
    ids = list(prompt)
    while len(ids) < LENGTH:
        token = int(model(input_ids=torch.tensor([ids])).logits[0, -1, : len(tokenizer)].argmax())
        if token == 2:
            break
        ids.append(token)
    return tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True).strip(), len(ids)

"""Evaluation and scoring hold no more than a step of training does."""

from __future__ import annotations

import ctypes

import psutil
import pytest
import torch

from project.train import lay_out
from tests.live_bytes import LiveBytes
from tests.project.programs import TINY, parse
from training.check import outputs_on_main
from training.launch.world import World
from training.layouts.layout import setup_of
from training.loop import evaluate_loss
from training.tasks.gpt2 import measured
from training.tasks.texts import load_texts
from training.tasks.translation import TranslationTask

pytestmark = pytest.mark.usefixtures("elsewhere")

RECOMPUTED = "--recompute always"


def test_evaluation_holds_no_more_than_a_step() -> None:
    """With many sentences to validate and to translate, of a model that never ends a sentence. With
    recomputation, whose activations are fewer, fewer are translated at once."""
    counts = "--n_train 64 --n_validation 128 --n_test 64 --batch_size 64"
    translating = {}
    for options, vocabulary in (("", 9000), ("--num_microbatches 8", 400), (RECOMPUTED, 400)):
        line = f"train single {TINY} {counts} --vocab_size {vocabulary} {options}"
        args, world = parse(line), World()
        task = TranslationTask(args, world, load_texts(args, world, translates=True))
        model = lay_out(task, world, setup_of(args, world))
        step = next(task.steps(0, 0, 1, model.num_microbatches))
        with LiveBytes() as training:
            model.backward(step)
        with LiveBytes() as validation, model.evaluating():
            evaluate_loss(world, task, model)
        with LiveBytes() as translation, model.evaluating():
            task.translated(world, model, [pair["de"] for pair in task.test_pairs])
        with LiveBytes() as outputs:
            outputs_on_main(model)
        peaks = validation.peak, translation.peak, outputs.peak
        assert max(peaks) <= training.peak, (options, training.peak, *peaks)
        translating[options] = translation.peak
    assert translating[RECOMPUTED] < 0.8 * translating["--num_microbatches 8"], translating


def test_the_loss_is_measured_of_a_few_million_logits_at_a_time() -> None:
    """A head that is cut holds no more in training."""
    hidden, weight = torch.randn(4096, 8), torch.randn(4096, 8)
    with LiveBytes() as bytes_, torch.no_grad():
        measured(hidden, weight, torch.zeros(4096, dtype=torch.long))
    assert bytes_.peak < 4 * 4096 * 4096  # all logits


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's")
def test_what_an_evaluation_frees_goes_back_to_the_system() -> None:
    """Small blocks that lie between others; malloc would keep them for an evaluation like it."""
    args, world = parse(f"train single {TINY}"), World()
    task = TranslationTask(args, world, load_texts(args, world, translates=True))
    model = lay_out(task, world, setup_of(args, world))
    process = psutil.Process()
    with model.evaluating():
        both = [bytearray(100_000) for _ in range(800)]  # of one size: they lie in turn
        kept, before = both[1::2], process.memory_info().rss
        del both
        assert process.memory_info().rss > before - 20e6
    assert process.memory_info().rss < before - 20e6
    assert len(kept) == 400

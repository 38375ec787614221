"""GPT-2 as a pipeline: its logits when it generates; and the course's GPT2ModelParallel and
GPT2LMHeadModelParallel, which compute what transformers' models do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.model_parallel import GPT2LMHeadModelParallel
from pipeline.pipe import Pipe
from tests.pipeline.pipeline_models import assert_close, gpt2, pipe_threads, take_gradients
from training.tasks.cache import Cache
from training.tasks.gpt2 import gpt2_layers, newest_tokens


@torch.no_grad()
def test_continued_sentences_have_the_logits_of_the_plain_model_under_autocast() -> None:
    """Two of 7 and 4 tokens, padded on the left, in steps of 5, 1 and 1 positions. A padding
    position sees no token: that must not become NaN. In float64: tests/project/test_generate.py."""
    model = gpt2().eval()
    ids = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(3))
    rows = [model(ids[:1]).logits[0], model(ids[1:, 3:]).logits[0]]
    layers = torch.nn.Sequential(*gpt2_layers(model.float()))
    cache = Cache([0, 1], [5, 2])
    for begin, end in ((0, 5), (5, 6), (6, 7)):
        new = ids[:, begin:end]
        with torch.autocast("cpu", torch.bfloat16):
            logits = layers(newest_tokens(new, cache))
        cache.extend()
        for got, row in zip(logits, rows, strict=True):
            expected = row[end - 8]
            size = (expected.abs().max() * 2**-5).item()
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=size)


IDS = torch.randint(40, (6, 7), generator=torch.Generator().manual_seed(1))


def check(plain: Any, parallel: Any, mask: Tensor | None = None) -> None:
    """Logits, loss and every gradient by name. A parallel model leaves out the cache."""
    inputs = {"attention_mask": mask, "labels": IDS, "use_cache": True}
    found, expected = (model(IDS, **inputs) for model in (parallel, plain))
    for output in (found, expected):
        output.loss.backward()
    assert_close(
        take_gradients(parallel) | {"logits": found.logits},
        take_gradients(plain) | {"logits": expected.logits},
    )


@pytest.mark.a4_2_2
@pytest.mark.a5_2_2
@pytest.mark.parametrize(
    ("attention", "device_map", "sizes"),
    [("sdpa", None, [2, 2]), ("eager", {"cpu:0": [0], "cpu:1": [1, 2], "cpu:2": [3]}, [1, 2, 1])],
)
def test_every_mode_computes_what_the_plain_model_computes(
    attention: str, device_map: Any, sizes: list[int]
) -> None:
    plain = gpt2(4)
    plain.set_attn_implementation(attention)
    parallel: Any = GPT2LMHeadModelParallel(plain.config).double()
    parallel.load_state_dict(plain.state_dict())
    mask = torch.ones(6, 7, dtype=torch.long)
    mask[1, 5:] = 0
    check(plain, parallel)
    parallel.parallelize(device_map)
    pipe = parallel.transformer.h_pp
    assert isinstance(pipe, Pipe)
    assert [len(partition) for partition in pipe.partitions] == sizes  # type: ignore[arg-type]
    events: list[Any] = []
    pipe.recorder = lambda *event: events.append(event[:3])
    check(plain, parallel)
    stages = range(len(sizes))  # one at a time
    assert events == [("F", s, 0) for s in stages] + [("B", s, 0) for s in reversed(stages)]
    check(plain, parallel, mask)
    for split_size in (1, 4, 50):
        parallel._prepare_pipeline_parallel(split_size=split_size)
        assert pipe.split_size == split_size
        check(plain, parallel, mask)
    assert list(parallel.state_dict()) == list(plain.state_dict())
    assert parallel.lm_head.weight is parallel.transformer.wte.weight
    parallel._finalize_pipeline_parallel()
    check(plain, parallel)
    parallel._prepare_pipeline_parallel(split_size=4)  # parallelizes, too
    check(plain, parallel)
    parallel._finalize_pipeline_parallel()
    assert pipe_threads() == []


def test_a_wrong_device_map_shows_a_right_one_and_a_cache_is_refused() -> None:
    parallel: Any = GPT2LMHeadModelParallel(gpt2(4).config)
    for blocks in ({"cpu:0": [0, 1], "cpu:1": [3, 2]}, {"cpu:0": [0, 1, 2]}):
        with pytest.raises(ValueError, match=r"e\.g\. \{'cpu:0': \[0, 1\], 'cpu:1': \[2, 3\]\}"):
            parallel.parallelize(blocks)
    parallel.parallelize()
    with pytest.raises(ValueError, match="pass use_cache=False"):
        parallel(input_ids=IDS, past_key_values=object())
    parallel.deparallelize()

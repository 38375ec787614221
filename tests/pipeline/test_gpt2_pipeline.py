"""GPT-2 as a pipeline: the logits of generation; and the course's GPT2ModelParallel and
GPT2LMHeadModelParallel, which compute what transformers' models do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from pipeline.model_parallel import GPT2LMHeadModelParallel, GPT2ModelParallel
from pipeline.pipe import Pipe
from tests.pipeline.pipeline_models import (
    assert_close,
    gpt2,
    pipe_threads,
    take_gradients,
)
from training.generation import newest_alone
from training.model import gpt2_layers
from training.prefix import Prefix


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@torch.no_grad()
def test_continued_sentences_have_the_logits_of_the_plain_model(precision: str) -> None:
    """Two of 7 and 4 tokens, padded on the left, in steps of 5, 1 and 1 positions. A padding
    position sees no token: that must not become NaN, nor under autocast."""
    model = gpt2().eval()
    bf16 = precision == "bf16"
    ids = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(3))
    rows = [model(ids[:1]).logits[0], model(ids[1:, 3:]).logits[0]]
    layers = torch.nn.Sequential(*gpt2_layers(model.float() if bf16 else model))
    prefix = Prefix([5, 2])
    for begin, end in ((0, 5), (5, 6), (6, 7)):
        new = ids[:, begin:end]
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = layers((new, newest_alone(new), prefix))
        prefix.extend()
        for got, row in zip(logits, rows, strict=True):
            expected = row[end - 8]
            size = (expected.abs().max() * (2**-5 if bf16 else 1e-13)).item()
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=size)


# The course's classes


def config(attention: str = "sdpa") -> GPT2Config:
    return GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=4, n_head=2, embd_pdrop=0.0,
        resid_pdrop=0.0, attn_pdrop=0.0, attn_implementation=attention,
    )  # fmt: skip


def pair(attention: str = "sdpa") -> tuple[Any, Any]:
    """The plain model and the parallel one, with the same weights."""
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(config(attention)).double()
    parallel = GPT2LMHeadModelParallel(config(attention)).double()
    parallel.load_state_dict(plain.state_dict())
    return plain, parallel


def ids() -> Tensor:
    return torch.randint(40, (6, 7), generator=torch.Generator().manual_seed(1))


def check(plain: Any, parallel: Any, **inputs: Any) -> None:
    """Logits, loss and every gradient by name."""
    outputs = [model(**inputs, labels=inputs["input_ids"]) for model in (parallel, plain)]
    for output in outputs:
        output.loss.backward()
    found, expected = (
        take_gradients(model) | {"logits": output.logits}
        for model, output in zip((parallel, plain), outputs, strict=True)
    )
    assert_close(found, expected)


@pytest.mark.a4_2_2
@pytest.mark.a5_2_2
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_mode_computes_what_the_plain_model_computes(attention: str) -> None:
    plain, parallel = pair(attention)
    mask = torch.ones(6, 7, dtype=torch.long)
    mask[1, 5:] = 0
    check(plain, parallel, input_ids=ids())
    parallel.parallelize()
    pipe = parallel.transformer.h_pp
    assert isinstance(pipe, Pipe)
    assert [len(partition) for partition in pipe.partitions] == [2, 2]  # type: ignore[arg-type]
    events: list[Any] = []
    pipe.recorder = lambda *event: events.append(event[:3])
    check(plain, parallel, input_ids=ids())
    one_at_a_time = [("F", 0, 0), ("F", 1, 0), ("B", 1, 0), ("B", 0, 0)]
    assert events == one_at_a_time
    check(plain, parallel, input_ids=ids(), attention_mask=mask)
    for split_size in (1, 4, 50):
        parallel._prepare_pipeline_parallel(split_size=split_size)
        assert pipe.split_size == split_size
        check(plain, parallel, input_ids=ids(), attention_mask=mask)
    assert list(parallel.state_dict()) == list(plain.state_dict())
    assert parallel.lm_head.weight is parallel.transformer.wte.weight
    parallel._finalize_pipeline_parallel()
    check(plain, parallel, input_ids=ids())
    assert pipe_threads() == []


def test_the_body_alone_and_a_device_map() -> None:
    torch.manual_seed(0)
    plain = GPT2Model(config()).double()
    parallel: Any = GPT2ModelParallel(config()).double()
    parallel.load_state_dict(plain.state_dict())
    parallel.parallelize({"cpu:0": [0], "cpu:1": [1, 2], "cpu:2": [3]})
    parallel._prepare_pipeline_parallel(split_size=4)
    assert [len(partition) for partition in parallel.h_pp.partitions] == [1, 2, 1]
    inputs = {"inputs_embeds": plain.wte(ids()), "position_ids": torch.arange(7).flip(0)[None]}
    found, expected = (model(**inputs, use_cache=False) for model in (parallel, plain))
    assert_close({"h": found.last_hidden_state}, {"h": expected.last_hidden_state})
    parallel.deparallelize()


def test_a_wrong_device_map_shows_a_right_one_and_a_cache_is_refused() -> None:
    _, parallel = pair()
    for blocks in ({"cpu:0": [0, 1], "cpu:1": [3, 2]}, {"cpu:0": [0, 1, 2]}):
        with pytest.raises(ValueError, match=r"e\.g\. \{'cpu:0': \[0, 1\], 'cpu:1': \[2, 3\]\}"):
            parallel.parallelize(blocks)
    parallel.parallelize()
    with pytest.raises(ValueError, match="pass use_cache=False"):
        parallel(input_ids=ids(), past_key_values=object())
    parallel.deparallelize()

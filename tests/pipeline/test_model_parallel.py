"""GPT2ModelParallel and GPT2LMHeadModelParallel: the course's, the plain model's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from pipeline.model_parallel import GPT2LMHeadModelParallel, GPT2ModelParallel
from pipeline.pipe import Pipe
from tests.pipeline.pipeline_models import assert_close, pipe_threads


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
    plain.zero_grad()
    parallel.zero_grad()
    expected = plain(**inputs, labels=inputs["input_ids"])
    found = parallel(**inputs, labels=inputs["input_ids"])
    expected.loss.backward()
    found.loss.backward()
    assert_close({"logits": found.logits}, {"logits": expected.logits})
    gradients = [{n: p.grad for n, p in m.named_parameters()} for m in (parallel, plain)]
    assert_close(gradients[0], gradients[1])


@pytest.mark.a4_2_2
@pytest.mark.a5_2_2
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_mode_computes_what_the_plain_model_computes(attention: str) -> None:
    plain, parallel = pair(attention)
    mask = torch.ones(6, 7, dtype=torch.long)
    mask[1, 5:] = 0
    check(plain, parallel, input_ids=ids())
    parallel.parallelize()
    check(plain, parallel, input_ids=ids())
    check(plain, parallel, input_ids=ids(), attention_mask=mask)
    for split_size in (1, 4, 6, 50):
        parallel._prepare_pipeline_parallel(split_size=split_size)
        check(plain, parallel, input_ids=ids())
    check(plain, parallel, input_ids=ids(), attention_mask=mask)
    parallel._finalize_pipeline_parallel()
    check(plain, parallel, input_ids=ids())
    assert pipe_threads() == []


def test_h_pp_is_the_pipe_over_the_blocks_and_not_in_the_state_dict() -> None:
    plain, parallel = pair()
    parallel._prepare_pipeline_parallel(split_size=2)
    pipe = parallel.transformer.h_pp
    assert isinstance(pipe, Pipe)
    assert [len(partition) for partition in pipe.partitions] == [2, 2]  # type: ignore[arg-type]
    assert pipe.split_size == 2
    assert list(parallel.state_dict()) == list(plain.state_dict())
    assert parallel.lm_head.weight is parallel.transformer.wte.weight
    pipe.close()


def test_model_parallel_mode_is_one_micro_batch() -> None:
    _, parallel = pair()
    parallel.parallelize()
    events: list[Any] = []
    parallel.transformer.h_pp.recorder = lambda *event: events.append(event[:3])
    parallel(input_ids=ids())
    assert events == [("F", 0, 0), ("F", 1, 0)]
    parallel.deparallelize()


def test_the_body_alone_and_a_device_map() -> None:
    torch.manual_seed(0)
    plain = GPT2Model(config()).double()
    parallel: Any = GPT2ModelParallel(config()).double()
    parallel.load_state_dict(plain.state_dict())
    parallel.parallelize({"cpu:0": [0], "cpu:1": [1, 2], "cpu:2": [3]})
    parallel._prepare_pipeline_parallel(split_size=4)
    assert [len(partition) for partition in parallel.h_pp.partitions] == [1, 2, 1]
    found = parallel(inputs_embeds=plain.wte(ids()), position_ids=torch.arange(7).flip(0)[None])
    expected = plain(inputs_embeds=plain.wte(ids()), position_ids=torch.arange(7).flip(0)[None])
    assert_close({"h": found.last_hidden_state}, {"h": expected.last_hidden_state})
    parallel.deparallelize()


@pytest.mark.parametrize(
    "blocks", [{"cpu:0": [0, 1], "cpu:1": [3, 2]}, {"cpu:0": [0, 1, 2]}, {"cpu:0": [0, 0, 1, 2, 3]}]
)
def test_a_wrong_device_map_shows_a_right_one(blocks: dict[str, list[int]]) -> None:
    _, parallel = pair()
    with pytest.raises(ValueError, match=r"e\.g\. \{'cpu:0': \[0, 1\], 'cpu:1': \[2, 3\]\}"):
        parallel.parallelize(blocks)


def test_a_cache_is_refused() -> None:
    _, parallel = pair()
    parallel.parallelize()
    with pytest.raises(ValueError, match="pass use_cache=False"):
        parallel(input_ids=ids(), past_key_values=object())
    parallel.deparallelize()

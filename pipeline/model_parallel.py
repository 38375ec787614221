"""GPT-2 of transformers with its blocks spread over devices: one at a time, or as a pipeline.

    model = GPT2LMHeadModelParallel(config)
    model.parallelize()                            # model parallel: one device computes at a time
    model._prepare_pipeline_parallel(split_size)   # pipeline: micro-batches, all devices compute
    model._finalize_pipeline_parallel()            # the plain model again

Embedding and head stay on the first device, the final norm on the last. Only the blocks are spread;
in both modes they run on one worker per device, each on its own cores. The logits and the names in
the ``state_dict`` are the same as the plain model's.

Only the plain model has a key-value cache for generation: pass ``use_cache=False`` here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from .partition import WithDevice, balance
from .pipe import Pipe

DeviceMap = Mapping[Any, Sequence[int]]  # device (or GPU number) -> block numbers


Value = Any  # hidden states B T C, or a tuple of them and an additive mask for every block


class Block(nn.Module):
    """A block of transformers; version 5 returns a tensor, version 4 a tuple. A mask that comes in
    with the hidden states is passed to the next block."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block: Any = block

    def forward(self, value: Value) -> Value:
        # hidden B T C; mask B 1 T T, if there is padding
        hidden, mask = value if isinstance(value, tuple) else (value, None)
        attention_mask = mask
        if mask is None and self.block.attn.config._attn_implementation == "eager":
            attention_mask = causal_mask(hidden)  # sdpa is causal without a mask, eager is not
        output = self.block(hidden, attention_mask=attention_mask)
        hidden = output[0] if isinstance(output, tuple) else output
        return hidden if mask is None else (hidden, mask)


def causal_mask(hidden: Tensor, keep: Tensor | None = None) -> Tensor:
    """Additive mask 1 1 T T for ``hidden`` B T C; B 1 T T if ``keep`` B T is 0 at padding."""
    T = hidden.size(1)
    allowed = torch.ones(T, T, dtype=torch.bool, device=hidden.device).tril()[None, None]
    if keep is not None:
        allowed = allowed & keep.to(hidden.device, torch.bool)[:, None, None, :]  # B 1 T T
    mask = torch.zeros(allowed.shape, dtype=hidden.dtype, device=hidden.device)
    return mask.masked_fill(~allowed, torch.finfo(hidden.dtype).min)  # -inf: NaN in masked rows


class GPT2ModelParallel(GPT2Model):
    """`GPT2Model` whose blocks run on the workers of ``h_pp``, a `Pipe`, once parallelized."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.pipeline_parallel = False
        self.device_map: dict[torch.device, list[int]] | None = None
        self.output_device: torch.device | None = None  # None: where the final norm is
        self._set_pipe(None)

    def parallelize(self, device_map: DeviceMap | None = None) -> None:
        """Spread the blocks: ``{"cpu:0": [0, 1], "cpu:1": [2, 3]}``; default: evenly over all.

        Raises ValueError unless each block is named once and in order.
        """
        self.deparallelize()
        self.device_map = _read_map(device_map, len(self.h))
        layers = []
        for device, numbers in self.device_map.items():
            for number in numbers:
                self.h[number].to(_physical(device))  # the block stays in `h`, too
                layers.append(WithDevice(Block(self.h[number]), device))
        # twice, so that a single device is both
        first, *_, last = [_physical(device) for device in self.device_map] * 2
        for module in (self.wte, self.wpe, self.drop):
            module.to(first)
        self.ln_f.to(last)
        self._set_pipe(Pipe(nn.Sequential(*layers)))

    def deparallelize(self) -> None:
        """Move the model back to one device, the first."""
        if self.h_pp is None:
            return
        assert self.device_map is not None
        self.h_pp.close()
        self._set_pipe(None)
        self.pipeline_parallel = False
        self.output_device = None
        self.to(_physical(next(iter(self.device_map))))  # before the map is gone
        self.device_map = None

    def _prepare_pipeline_parallel(self, split_size: int = 1) -> None:
        """From now on the blocks run as a pipeline, on micro-batches of ``split_size``."""
        if split_size < 1:
            raise ValueError(f"split_size={split_size}: at least 1 example per micro-batch, e.g. 8")
        if self.h_pp is None:
            self.parallelize()
        self.h_pp.split_size = split_size
        self.pipeline_parallel = True

    def _finalize_pipeline_parallel(self) -> None:
        self.deparallelize()

    def _set_pipe(self, pipe: Pipe | None) -> None:
        """Not as a submodule: the blocks are in ``h``, and would be in the state_dict twice."""
        object.__setattr__(self, "h_pp", pipe)

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Like `GPT2Model.forward`. ``attention_mask`` B T: 0 at padding."""
        if self.h_pp is None:
            return super().forward(
                input_ids=input_ids,
                past_key_values=past_key_values,
                attention_mask=attention_mask,
                token_type_ids=token_type_ids,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )
        if past_key_values is not None or kwargs.get("encoder_hidden_states") is not None:
            raise ValueError(
                "a parallelized GPT-2 keeps no key-value cache and has no encoder: pass "
                "use_cache=False, or call deparallelize() before generating"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = self._embed(input_ids, inputs_embeds, position_ids, token_type_ids)
        value: Value = hidden
        if attention_mask is not None and not bool(attention_mask.all()):  # there is padding
            value = (hidden, causal_mask(hidden, attention_mask))
        if not self.pipeline_parallel:
            self.h_pp.split_size = max(1, hidden.size(0))  # one micro-batch: one device at a time
        output = self.h_pp(value)
        hidden = self.ln_f(output[0] if isinstance(output, tuple) else output)  # on the last device
        hidden = hidden if self.output_device is None else hidden.to(self.output_device)
        if kwargs.get("return_dict") is False:
            return (hidden,)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)

    def _embed(
        self,
        ids: Tensor | None,
        embeds: Tensor | None,
        position_ids: Tensor | None,
        token_type_ids: Tensor | None,
    ) -> Tensor:
        device = self.wte.weight.device
        if embeds is None:
            assert ids is not None
            embeds = self.wte(ids.view(-1, ids.size(-1)).to(device))  # B T C
        if position_ids is None:
            position_ids = torch.arange(embeds.size(1), device=device)  # T
        hidden = embeds.to(device) + self.wpe(position_ids.to(device))  # B T C
        if token_type_ids is not None:
            hidden = hidden + self.wte(token_type_ids.to(device))
        return self.drop(hidden)


class GPT2LMHeadModelParallel(GPT2LMHeadModel):
    """`GPT2LMHeadModel` over a `GPT2ModelParallel`, with head and ``wte`` on the first device."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.transformer = GPT2ModelParallel(config)
        self.post_init()

    def parallelize(self, device_map: DeviceMap | None = None) -> None:
        self.transformer.parallelize(device_map)
        self.transformer.output_device = self.transformer.wte.weight.device  # where the head goes
        self.lm_head.to(self.transformer.output_device)

    def deparallelize(self) -> None:
        self.transformer.deparallelize()
        self.lm_head.to(self.transformer.wte.weight.device)

    def _prepare_pipeline_parallel(self, split_size: int = 1) -> None:
        if self.transformer.h_pp is None:
            self.parallelize()
        self.transformer._prepare_pipeline_parallel(split_size)

    def _finalize_pipeline_parallel(self) -> None:
        self.deparallelize()


def _read_map(device_map: DeviceMap | None, num_blocks: int) -> dict[torch.device, list[int]]:
    if device_map is None:
        gpus = [torch.device("cuda", k) for k in range(torch.cuda.device_count())]
        devices = gpus or [torch.device("cpu", k) for k in range(2)]
        devices = devices[:num_blocks]  # none without a block
        numbers = iter(range(num_blocks))
        sizes = balance([1.0] * num_blocks, len(devices))
        return {
            device: [next(numbers) for _ in range(size)]
            for device, size in zip(devices, sizes, strict=True)
        }
    result = {_device(key): list(numbers) for key, numbers in device_map.items()}
    named = [number for numbers in result.values() for number in numbers]
    if named != list(range(num_blocks)):
        half = math.ceil(num_blocks / 2)
        raise ValueError(
            f"device_map names the blocks {named}: name 0 to {num_blocks - 1} once each and in "
            f"order, e.g. {{'cpu:0': {list(range(half))}, "
            f"'cpu:1': {list(range(half, num_blocks))}}}"
        )
    return result


def _device(key: Any) -> torch.device:
    return torch.device("cuda", key) if isinstance(key, int) else torch.device(key)


def _physical(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "cpu" else device

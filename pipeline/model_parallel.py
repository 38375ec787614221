"""GPT-2 of transformers with its blocks spread over devices: one at a time, or as a pipeline.

    model = GPT2LMHeadModelParallel(config)
    model.parallelize()                            # model parallel: one device computes at a time
    model._prepare_pipeline_parallel(split_size)   # pipeline: micro-batches, all devices compute
    model._finalize_pipeline_parallel()            # the plain model again

Only the blocks are spread; in both modes they run on one worker per device, each on its own cores.
All else is transformers' own forward, on the first device: embedding, mask, final norm and head.
The logits and the names in the `state_dict` are the same as the plain model's.

Only the plain model has a key-value cache for generation: pass `use_cache=False` here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from runtime.graph import memory_of

from .partition import WithDevice, balance
from .pipe import Pipe

DeviceMap = Mapping[Any, Sequence[int]]  # device (or GPU number) -> block numbers


class Block(nn.Module):
    """A block of transformers; hands the mask on to the next block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, value: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        hidden, mask = value  # B T C; B 1 T T, or None if it is only causal
        return self.block(hidden, attention_mask=mask), mask


class AllBlocks(nn.Module):
    """Stands in `model` where its blocks stood, and runs them in its pipe."""

    def __init__(self, model: GPT2ModelParallel) -> None:
        super().__init__()
        self.model = [model]  # in a list: it is no submodule

    def forward(self, hidden: Tensor, _cache: None, mask: Tensor | None, *_: Any, **__: Any) -> Any:
        (model,) = self.model
        if not model.pipeline_parallel:
            model.h_pp.split_size = max(1, hidden.size(0))  # one micro-batch: one device at a time
        output, _ = model.h_pp((hidden, mask))
        return output.to(hidden.device)  # back to the first device


class GPT2ModelParallel(GPT2Model):
    """`GPT2Model` whose blocks run on the workers of `h_pp`, a `Pipe`, once parallelized."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.pipeline_parallel = False
        self.device_map: dict[torch.device, list[int]] | None = None
        self._set_pipe(None)

    def parallelize(self, device_map: DeviceMap | None = None) -> None:
        """Spreads the blocks: `{"cpu:0": [0, 1], "cpu:1": [2, 3]}`; default: evenly over all.

        Raises ValueError unless each block is named once and in order.
        """
        self.deparallelize()
        self.device_map = _read_map(device_map, len(self.h))
        self.to(memory_of(next(iter(self.device_map))))  # the first; some blocks move on:
        layers = []
        for device, numbers in self.device_map.items():
            for number in numbers:
                self.h[number].to(memory_of(device))  # the block stays in `h`, too
                layers.append(WithDevice(Block(self.h[number]), device))
        self._set_pipe(Pipe(nn.Sequential(*layers)))

    def deparallelize(self) -> None:
        """Moves the model back to one device, the first."""
        if self.h_pp is None:
            return
        self.h_pp.close()
        self._set_pipe(None)
        self.pipeline_parallel = False
        self.to(self.wte.weight.device)
        self.device_map = None

    def _prepare_pipeline_parallel(self, split_size: int = 1) -> None:
        """From now on the blocks run as a pipeline, on micro-batches of `split_size`."""
        if self.h_pp is None:
            self.parallelize()
        self.h_pp.split_size = split_size
        self.pipeline_parallel = True

    _finalize_pipeline_parallel = deparallelize

    def _set_pipe(self, pipe: Pipe | None) -> None:
        """Sets `h_pp`, not as a submodule: the state_dict would have the blocks, which are in `h`,
        twice."""
        object.__setattr__(self, "h_pp", pipe)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Like `GPT2Model.forward`, with its arguments. ValueError for a cache or an encoder."""
        if self.h_pp is None:
            return super().forward(*inputs, **kwargs)
        if any(kwargs.get(key) is not None for key in ("past_key_values", "encoder_hidden_states")):
            raise ValueError(
                "a parallelized GPT-2 keeps no key-value cache and has no encoder: pass "
                "use_cache=False, or call deparallelize() before generating"
            )
        blocks = self.get_submodule("h")
        self.h = nn.ModuleList([AllBlocks(self)])
        try:
            return super().forward(*inputs, **{**kwargs, "use_cache": False})
        finally:
            self.h = blocks


class GPT2LMHeadModelParallel(GPT2LMHeadModel):
    """`GPT2LMHeadModel` over a `GPT2ModelParallel`, with its head on the first device."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.transformer = GPT2ModelParallel(config)
        self.post_init()

    def parallelize(self, device_map: DeviceMap | None = None) -> None:
        self.transformer.parallelize(device_map)
        self.lm_head.to(self.transformer.wte.weight.device)

    def deparallelize(self) -> None:
        self.transformer.deparallelize()

    def _prepare_pipeline_parallel(self, split_size: int = 1) -> None:
        self.transformer._prepare_pipeline_parallel(split_size)
        self.lm_head.to(self.transformer.wte.weight.device)

    _finalize_pipeline_parallel = deparallelize


def _read_map(device_map: DeviceMap | None, num_blocks: int) -> dict[torch.device, list[int]]:
    if device_map is None:
        gpus = [torch.device("cuda", k) for k in range(torch.cuda.device_count())]
        devices = gpus or [torch.device("cpu", k) for k in range(2)]
        devices = devices[:num_blocks]  # none without a block
        edges = accumulate(balance([1.0] * num_blocks, len(devices)), initial=0)
        blocks = [list(range(a, b)) for a, b in pairwise(edges)]
        return dict(zip(devices, blocks, strict=True))
    result = {_device(key): list(numbers) for key, numbers in device_map.items()}
    named = [number for numbers in result.values() for number in numbers]
    if named != list(range(num_blocks)):
        right = {str(device): numbers for device, numbers in _read_map(None, num_blocks).items()}
        raise ValueError(
            f"device_map names the blocks {named}: name 0 to {num_blocks - 1} once each and in "
            f"order, e.g. {right}"
        )
    return result


def _device(key: Any) -> torch.device:
    return torch.device("cuda", key) if isinstance(key, int) else torch.device(key)

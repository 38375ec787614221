"""The whole GPT-2 as a list of layers that a pipeline can cut anywhere.

`h_pp`, the pipeline over the blocks alone, leaves the embedding and the head to one device, which
then works while all others idle. Here they are layers like the blocks:

    [ids, weights] ─▸ Embedding ─▸ Block 0 ─▸ … ─▸ Block L-1 ─▸ Head ─▸ logits
                      wte wpe drop                              ln_f lm_head

A block can also be cut in the middle, between attention and MLP: with the head on the last stage,
whole blocks are often too coarse for stages of equal cost (8 blocks and a vocabulary of 10000 on
two stages: 9 percent of the time).

The layers hold the parameters of the given `GPT2LMHeadModel`, not copies: its ``state_dict``, its
``train()`` and ``eval()``, its checkpoints stay what they are.

Half of the head's work is for positions without a target (the source sentence, the padding). With
the input ``(ids, weights)`` the weights travel along, and the head computes logits only for
positions whose weight is not 0: N of them in the micro-batch, N V instead of B T V.

With ``(ids, weights, prefix)`` sentences are continued: ids are the newest positions, ``prefix``
knows the earlier ones (see training/generation.py; any object with its ``keep``, ``cache`` and
``positions`` will do), and attention takes their keys and values from there and adds its own.

Tied weights: ``wte`` is used by the first layer and the last. On CPU both are one tensor. On two
GPUs the last stage gets a copy; `place` returns it in ``replicas``, and a `Pipe` given those adds
both gradients to the original and refreshes the copy before each step.

Shapes: B examples, T positions, C width, V vocabulary, N positions that have a target, S positions
of a prefix and the T newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .partition import WithDevice, measure_costs, parse_balance, refuse_hooks

if TYPE_CHECKING:  # it takes seconds to import, and nothing here needs it to run
    from transformers import GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

Value = Any  # hidden states B T C, or a tuple of them and what the layers pass on


class Embedding(nn.Module):
    """Token ids B T, or a tuple (ids, more...), to hidden states B T C (and more...)."""

    def __init__(self, wte: nn.Embedding, wpe: nn.Embedding, drop: nn.Dropout) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = wte, wpe, drop

    def forward(self, value: Value) -> Value:
        ids, *more = value if isinstance(value, tuple) else (value,)
        T, prefix = ids.size(-1), _prefix(more)
        positions = torch.arange(T, device=ids.device) if prefix is None else prefix.positions(T)
        hidden = self.drop(self.wte(ids) + self.wpe(positions))
        return (hidden, *more) if more else hidden


class HiddenLayer(nn.Module):
    """Changes the hidden states; what comes with them is passed on."""

    def forward(self, value: Value) -> Value:
        hidden, *more = value if isinstance(value, tuple) else (value,)
        hidden = self.transform(hidden, _prefix(more))
        return (hidden, *more) if more else hidden

    def transform(self, hidden: Tensor, prefix: Any) -> Tensor:
        raise NotImplementedError


class Attention(HiddenLayer):
    """The first half of a block: norm, attention, residual.

    Transformers' sdpa attention is causal without a mask, its eager attention only with one.
    """

    def __init__(self, block: GPT2Block) -> None:
        super().__init__()
        self.ln_1, self.attn = block.ln_1, block.attn

    def transform(self, hidden: Tensor, prefix: Any) -> Tensor:
        given = _given(self.attn, hidden, prefix)
        return hidden + self.attn(self.ln_1(hidden), **given)[0]


class FeedForward(HiddenLayer):
    """The second half of a block: norm, MLP, residual."""

    def __init__(self, block: GPT2Block) -> None:
        super().__init__()
        self.ln_2, self.mlp = block.ln_2, block.mlp

    def transform(self, hidden: Tensor, _: Any) -> Tensor:
        return hidden + self.mlp(self.ln_2(hidden))


class Block(HiddenLayer):
    """A whole block. Transformers 5 returns a tensor from it, version 4 a tuple."""

    def __init__(self, block: GPT2Block) -> None:
        super().__init__()
        self.block = block

    def transform(self, hidden: Tensor, prefix: Any) -> Tensor:
        return self._run(hidden, **_given(self.block.attn, hidden, prefix))

    def attend(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """``mask``: additive, B or 1, 1, T, T; None is causal."""
        return self.transform(hidden, None) if mask is None else self._run(hidden, mask)

    def _run(self, hidden: Tensor, attention_mask: Tensor | None, **cache: Any) -> Tensor:
        output = self.block(hidden, attention_mask=attention_mask, **cache)
        return output[0] if isinstance(output, tuple) else output


class Head(nn.Module):
    """Final norm and logits: B T V, or N V of (hidden states, weights B T)."""

    def __init__(self, ln_f: nn.LayerNorm, lm_head: nn.Linear) -> None:
        super().__init__()
        self.ln_f = ln_f
        self.weight = lm_head.weight  # not the module: on a second GPU this becomes a copy

    def forward(self, value: Value) -> Tensor:
        hidden, *more = value if isinstance(value, tuple) else (value,)
        if more:
            hidden = hidden[more[0] != 0]
        return F.linear(self.ln_f(hidden), self.weight)


def causal_mask(hidden: Tensor, keep: Tensor | None = None) -> Tensor:
    """Additive mask 1 1 T T for ``hidden`` B T C; with ``keep`` B S, 0 at padding: B 1 T S."""
    T = hidden.size(1)
    S = T if keep is None else keep.size(1)
    allowed = torch.ones(T, S, dtype=torch.bool, device=hidden.device).tril(S - T)[None, None]
    if keep is not None:
        allowed = allowed & keep.to(hidden.device, torch.bool)[:, None, None, :]
    mask = torch.zeros(allowed.shape, dtype=hidden.dtype, device=hidden.device)
    return mask.masked_fill(~allowed, torch.finfo(hidden.dtype).min)


def _prefix(more: Sequence[Any]) -> Any:
    """Of what comes with the ids or hidden states: (weights, prefix), or less."""
    return more[1] if len(more) > 1 else None


def _given(attention: Any, hidden: Tensor, prefix: Any) -> dict[str, Any]:
    """What an attention layer is called with besides ``hidden``."""
    if prefix is not None:
        mask = causal_mask(hidden, prefix.keep)
        return {"attention_mask": mask, "past_key_values": prefix.cache}
    eager = attention.config._attn_implementation == "eager"
    return {"attention_mask": causal_mask(hidden) if eager else None}


def loss_of_targets(logits: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """The weighted sum of the cross-entropies of logits N V; target: (ids B T, weights B T).

    Position t of ``logits`` is to predict ``ids[t]``: the shift by one is done by the caller.
    """
    ids, weights = target
    chosen = weights != 0
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    losses = F.cross_entropy(logits, ids[chosen], reduction="none")
    return (losses * weights[chosen]).sum()


def gpt2_layers(model: GPT2LMHeadModel, halves: bool = False) -> list[nn.Module]:
    """The layers of ``model``: embedding, every block (or its two halves), head.

    They share its parameters. Raises ValueError where a hook is on a module that they replace.
    """
    body = model.transformer
    blocks = [(f"transformer.h.{k}", block) for k, block in enumerate(body.h)]
    replaced = [("the model", model), ("transformer", body), ("lm_head", model.lm_head)]
    refuse_hooks([*replaced, *(blocks if halves else [])])
    layers: list[nn.Module] = [Embedding(body.wte, body.wpe, body.drop)]
    for block in body.h:
        layers += [Attention(block), FeedForward(block)] if halves else [Block(block)]
    return [*layers, Head(body.ln_f, model.lm_head)]


def cut_gpt2(
    model: GPT2LMHeadModel,
    devices: Sequence[str | torch.device],
    balance: str | Sequence[int],
    sample: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
) -> tuple[nn.Sequential, dict[nn.Parameter, nn.Parameter], str]:
    """The whole model for a `Pipe`: (module, replicas, the cut in words).

    ``balance``: ``uniform`` or ``4,4,4``, blocks per stage, the embedding with the first stage and
    the head with the last; or ``auto``: measured on a micro-batch ``sample`` (ids, weights) and
    its ``target``, and cut between halves of blocks, so that the head's cost can be made up for;
    or the layers per stage of an earlier cut.
    """
    n, num_blocks = len(devices), len(model.transformer.h)
    # Halves of blocks even where only whole ones are asked for: dropout is seeded by the layer's
    # number, and no cut may change a bit.
    layers = gpt2_layers(model, halves=True)
    if not isinstance(balance, str):
        sizes = list(balance)
    elif balance == "auto":
        costs = _costs(layers, sample, target)
        sizes = parse_balance(balance, len(layers), n, lambda: costs)
    else:
        sizes = [2 * size for size in parse_balance(balance, num_blocks, n, list)]
        sizes[0] += 1
        sizes[-1] += 1
    edges = [0.0, *((end - 1) / 2 for end in accumulate(sizes[:-1])), num_blocks]
    cut = " | ".join(f"{b - a:g}" for a, b in pairwise(edges))
    return *place(layers, sizes, devices), f"embedding {cut} head ({num_blocks} blocks)"


def _costs(layers: Sequence[nn.Module], sample: Any, target: Any) -> list[float]:
    """Seconds per layer; all blocks cost the same, so one is measured."""
    first, attention, feed_forward, *_, head = layers
    a, b, c, d = measure_costs(
        [first, attention, feed_forward, head],
        sample,
        lambda output: loss_of_targets(output, target),
    )
    return [a, *[b, c] * ((len(layers) - 2) // 2), d]


def place(
    layers: Sequence[nn.Module], sizes: Sequence[int], devices: Sequence[str | torch.device]
) -> tuple[nn.Sequential, dict[nn.Parameter, nn.Parameter]]:
    """Put ``sizes[s]`` layers on ``devices[s]``: the Sequential for a `Pipe`, and its replicas.

    A parameter that stages on different GPUs share stays with the first of them; the others get a
    copy: ``replicas[copy]`` is the parameter. The layers of those are changed in place.
    """
    if len(sizes) != len(devices) or sum(sizes) != len(layers):
        raise ValueError(
            f"sizes {list(sizes)} on {len(devices)} devices: one number per device, their sum the "
            f"{len(layers)} layers"
        )
    home: dict[nn.Parameter, torch.device] = {}
    replicas: dict[nn.Parameter, nn.Parameter] = {}
    placed: list[nn.Module] = []
    rest = iter(layers)
    for size, name in zip(sizes, devices, strict=True):
        device = torch.device(name)
        physical = torch.device("cpu") if device.type == "cpu" else device
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for _ in range(size):
            layer = next(rest)
            for module in layer.modules():
                for key, parameter in list(module._parameters.items()):
                    if parameter is not None and home.setdefault(parameter, physical) != physical:
                        if parameter not in copies:
                            copies[parameter] = _copy(parameter, physical)
                        module._parameters[key] = copies[parameter]
            placed.append(WithDevice(layer.to(physical), device))
        replicas.update((copy, original) for original, copy in copies.items())
    return nn.Sequential(*placed), replicas


def _copy(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to(device, copy=True), parameter.requires_grad)

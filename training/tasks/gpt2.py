"""GPT-2: sizes, initial weights, the model as a list of layers, and the loss over target tokens.

The parameters are those of `transformers`, with their names, so weights can be exchanged with other
tools; `wte` is tied: the first and the last layer use it. This project's choices:

- initial weights depend on the seed and on the parameter's *name*, so every layout starts from the
  same model, whichever rank holds a parameter;
- logits are computed at target positions only: `targets` are their numbers among all B T. The head
  is a [C, V] matrix product per position, and in translation half of all positions, source and
  padding, have no target;
- any layout can cut the list of layers anywhere. A block is cut between attention and MLP, too:
  with the head on the last stage, whole blocks are often too coarse for stages of equal cost;

      Sequences -> Embedding -> Attention -> FeedForward -> ... -> Head -> logits
                   wte wpe drop   ln_1 attn    ln_2 mlp             ln_f lm_head

- dropout depends on the example and on the place in the model (runtime/dropout.py): with `keys`,
  one per example, every layout drops the same;
- the activation is PyTorch's fused tanh-GELU: the function `gelu_new` of the published weights, in
  one pass over memory instead of eight.

With a `cache` the layers continue sentences (tasks/generation.py): ids are the newest positions,
the cache keeps the keys and values of earlier ones.

Shapes: B examples, T positions, C width, V vocabulary, N positions with a target, S columns of a
cache, including the T newest.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.documents import starts_at
from runtime.dropout import Index, Keys, attention, dropout, site_of
from training.launch.errors import UserError
from training.tasks.task import stream

from .cache import Cache

if TYPE_CHECKING:  # takes seconds to import, so functions import it themselves
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

PRESETS = {
    "gpt2-mini": {"n_layer": 4, "n_embd": 256, "n_head": 4},
    "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-large": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
    "gpt2-xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
}
# Fields of a GPT2Config that change what is computed, and that have only this value here.
COMPUTED = {
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "is_causal": True,
    "add_cross_attention": False, "quantization_config": None,
}  # fmt: skip
VOCAB_MULTIPLE = 64  # matrix units prefer it
MEASURED_AT_ONCE = 1 << 22  # logits, in evaluation


def round_vocab(size: int) -> int:
    """The next multiple of 64."""
    return -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def gpt2_size(preset: str, **given: int | None) -> dict[str, int]:
    """The n_layer, n_embd and n_head of a preset, except those that are given.

    Raises:
        UserError: the heads do not divide the width.
    """
    size = {**PRESETS[preset], **{name: n for name, n in given.items() if n is not None}}
    width, heads = size["n_embd"], size["n_head"]
    if width % heads:
        fits = next(n for n in range(min(heads, width), 0, -1) if width % n == 0)
        raise UserError(
            f"--n_embd {width} --n_head {heads}: the heads must divide the width; --n_head {fits} "
            "works"
        )
    return size


def gpt2_config(
    preset: str, vocab_size: int, max_length: int, *, dropout: float = 0.1, **given: int | None
) -> GPT2Config:
    """The configuration of a preset. `given` and errors as in `gpt2_size`."""
    from transformers import GPT2Config

    return GPT2Config(
        **gpt2_size(preset, **given),
        vocab_size=vocab_size,
        n_positions=max(max_length, 1024 if preset != "gpt2-mini" else 0),  # published: 1024
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )


def initializer(config: GPT2Config, seed: int) -> Callable[[str, Tensor], None]:
    """Returns a function that fills a parameter by name, as GPT-2 does: biases 0, norms 1, matrices
    normal with deviation 0.02, divided by sqrt(2 * n_layer) for those that feed the residual."""

    @torch.no_grad()
    def fill(name: str, p: Tensor) -> None:
        if name.endswith("bias"):
            p.zero_()
        elif ".ln_" in name:
            p.fill_(1)
        else:
            generator = generator_for(seed, name)
            std = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 0.02
            p.copy_(torch.empty(p.shape).normal_(0, std, generator=generator))  # drawn on the CPU

    return fill


def generator_for(seed: int, name: str) -> torch.Generator:
    """The random generator of a parameter's initial weights."""
    return torch.Generator().manual_seed(stream(seed, "initial weights", name))


class Sequences(NamedTuple):
    """A micro-batch on its way through the layers. Each layer replaces `hidden`; the rest stays.

    Attributes:
        hidden: [B, T], the token ids, before the embedding; [B, T, C], hidden states, after it.
        targets: where logits are wanted, [N]: the positions' numbers among all B T. Or, where a
            batch is to be cut along B, weights [B, T], not 0 at targets. None: everywhere.
        keys: one per example, for dropout (runtime/dropout.py).
        labels: [N], the tokens to predict; [B, T] if `targets` are weights. A head that is fused
            with the loss needs them (tensor_parallel/gpt2.py), and in evaluation every head.
        cache: that of this process, if sentences are continued.
        positions: [T], their numbers in the sequence, if other ranks have different positions
            (layouts/context.py). None: this process has all of them.
        balance: in training, what experts add to the loss, and what that is computed from
            (experts/routing.py).
        starts: [B, T], where the document of each position starts in its row, if none sees another
            (runtime/documents.py): of all positions, even those of other ranks. None: each row is
            one document.
    """

    hidden: Tensor
    targets: Tensor | None = None
    keys: Keys = None
    labels: Tensor | None = None
    cache: Cache | None = None
    positions: Tensor | None = None
    balance: Any = None
    starts: Tensor | None = None


def newest_tokens(ids: Tensor, cache: Cache | None = None) -> Sequences:
    """The newest tokens of sentences, [B, T], whose next ones are wanted: the last position alone
    has a target."""
    B, T = ids.shape
    return Sequences(ids, torch.arange(T - 1, B * T, T, device=ids.device), cache=cache)


class Layer(nn.Module):
    """A layer of GPT-2 that knows its place in the model.

    Attributes:
        shard: this rank's place on the tensor-parallel axis: which heads it has.
        sequence_parallel: in training it also has only this rank's part of the positions
            (tensor_parallel/gpt2.py).
    """

    shard = 0
    sequence_parallel = False

    def __init__(self, name: str) -> None:
        super().__init__()
        self.where = site_of(name)

    def place(self, hidden: Tensor, x: Sequences) -> Index:
        """Which positions of their sequences the hidden states B T C are."""
        T = hidden.size(1)
        first = self.shard * T if self.sequence_parallel and self.training else 0
        return first if x.positions is None else x.positions[first : first + T]

    def drop(self, hidden: Tensor, p: float, x: Sequences) -> Tensor:
        """Dropout of hidden states B T C, in training."""
        if not self.training:
            return hidden
        return dropout(hidden, p, x.keys, self.where, self.place(hidden, x))


class Embedding(Layer):
    """Token ids [B, T] to hidden states [B, T, C]."""

    def __init__(self, body: GPT2Model) -> None:
        super().__init__("drop")
        self.wte, self.wpe, self.p = body.wte, body.wpe, body.drop.p

    def forward(self, x: Sequences) -> Sequences:
        hidden = self.wte(x.hidden)  # B T C, or this rank's part of T
        positions = self.place(hidden, x)
        if x.cache is not None:
            positions = x.cache.positions(hidden)  # [B, T]
        elif isinstance(positions, int):
            positions = torch.arange(positions, positions + hidden.size(1), device=hidden.device)
        if x.starts is not None:  # each document counts its own
            positions = positions - starts_at(x.starts, positions)  # [B, T]
        # Padding may lie beyond the model's last position; nothing sees it.
        positions = positions.clamp(max=self.wpe.num_embeddings - 1)
        return x._replace(hidden=self.drop(hidden + self.wpe(positions), self.p, x))


class Attention(Layer):
    """The first half of a block: norm, attention, residual.

    Attributes:
        across_ranks: computes attention if other ranks have different positions.
    """

    across_ranks: Callable[..., Tensor]

    def __init__(self, name: str, block: GPT2Block) -> None:
        super().__init__(f"{name}.attn")
        self.ln_1, self.attn = block.ln_1, block.attn
        self.weights_where = site_of(f"{name}.attn.weights")  # of the dropout inside

    def forward(self, x: Sequences) -> Sequences:
        attn, mask = self.attn, None
        qkv = attn.c_attn(self.ln_1(x.hidden))  # all T, even if hidden states are a part of them
        B, T, width = qkv.shape  # of this rank's heads H, 3 H E
        qkv = qkv.view(B, T, 3, width // (3 * attn.head_dim), attn.head_dim)  # B T 3 H E
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each B H T E
        if x.cache is not None:
            mask = x.cache.mask(x.hidden)  # B 1 T S
            k, v = x.cache.update(attn.layer_idx, k, v)  # B H S E, with earlier positions
        first = self.shard * q.size(1)  # the number of its first head in the model
        p = attn.attn_dropout.p if self.training else 0.0
        attend = attention if x.positions is None else self.across_ranks
        y = attend(q, k, v, mask, p, x.keys, self.weights_where, first, x.starts)  # B H T E
        y = attn.c_proj(y.transpose(1, 2).flatten(2))  # B T C, as hidden
        return x._replace(hidden=x.hidden + self.drop(y, attn.resid_dropout.p, x))


class FeedForward(Layer):
    """The second half of a block: norm, MLP, residual."""

    def __init__(self, name: str, block: GPT2Block) -> None:
        super().__init__(f"{name}.mlp")
        self.ln_2, self.mlp = block.ln_2, block.mlp

    def forward(self, x: Sequences) -> Sequences:
        mlp = self.mlp
        y = mlp.c_proj(mlp.act(mlp.c_fc(self.ln_2(x.hidden))))  # C to 4C, this rank's, and back
        return x._replace(hidden=x.hidden + self.drop(y, mlp.dropout.p, x))


class Head(nn.Module):
    """Final norm and logits: N V at the targets, or all B T V. With labels, in evaluation, it
    returns what `measured` does: then no rank holds all logits."""

    def __init__(self, ln_f: nn.LayerNorm, lm_head: nn.Linear) -> None:
        super().__init__()
        self.ln_f = ln_f
        self.weight = lm_head.weight  # not the module: on a second GPU this becomes a copy

    def forward(self, x: Sequences) -> Tensor:
        hidden = x.hidden if x.targets is None else at_targets(x.hidden, x.targets)
        hidden, labels = self.ln_f(hidden), x.labels
        if labels is None:
            return F.linear(hidden, self.weight)
        if x.targets is not None and labels.dim() == 2:
            labels = labels[x.targets != 0]
        return measured(hidden, self.weight, labels)


def at_targets(hidden: Tensor, targets: Tensor) -> Tensor:
    """Hidden states B T C at the `targets` of `Sequences`: N C. With weights, the host waits
    for a GPU to count them."""
    if targets.dim() == 2:
        targets = numbers_of_targets(targets)
    hidden = hidden.flatten(0, 1)
    if len(targets) == len(hidden):  # all of them, as in plain text: in their order
        return hidden
    return hidden.index_select(0, targets)


def numbers_of_targets(weights: Tensor) -> Tensor:
    """[N]: where weights [B, T] are not 0, among all B T."""
    return weights.flatten().nonzero()[:, 0]


def loss_of_targets(logits: Tensor, labels: Tensor) -> Tensor:
    """The summed cross-entropy, in nats, of logits N V; labels N: the tokens to predict."""
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    return F.cross_entropy(logits, labels, reduction="none").sum()  # in this order on every rank


def measured(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """[1, 3], float64: the loss of N positions, how many have their label as the most probable
    token, and N. A few million logits at a time: in training they are the largest tensor, too, but
    evaluation must hold no more than training with a head that is cut (tensor_parallel/loss.py).

    Args:
        hidden: [N, C], after the final norm.
        weight: [V, C], the output embedding.
        labels: [N], the tokens to predict.
    """
    sums = hidden.new_zeros(2, dtype=torch.float64)
    at_once = max(1, MEASURED_AT_ONCE // len(weight))
    for some, own in zip(hidden.split(at_once), labels.split(at_once), strict=True):
        logits = F.linear(some, weight)
        right = (logits.argmax(-1) == own).sum()
        sums += torch.stack([loss_of_targets(logits, own), right]).double()
    return torch.cat([sums, sums.new_tensor([len(labels)])])[None]


def check_computed(model: GPT2LMHeadModel) -> None:
    """Raises ValueError, naming the field, if `model.config` asks for what no layer here computes.
    (reorder_and_upcast_attn takes the same sums in its own order, as PyTorch's attention does.)"""
    config = model.config
    for field, computed in COMPUTED.items():
        if (value := getattr(config, field, computed)) != computed:
            raise ValueError(f"its {field} is {value}, and here it can only be {computed}")
    if any(True for block in model.transformer.h for _ in block.mlp.act.parameters()):
        raise ValueError(
            f"its activation_function is {config.activation_function}, which has parameters"
        )


def gpt2_layers(model: GPT2LMHeadModel) -> list[nn.Module]:
    """The layers of `model`: embedding, two halves of every block, head. They share its parameters;
    hooks on the modules that they replace never run. Raises what `check_computed` does."""
    check_computed(model)
    body = model.transformer
    layers: list[nn.Module] = [Embedding(body)]
    for k, block in enumerate(body.h):
        layers += [Attention(f"h.{k}", block), FeedForward(f"h.{k}", block)]
    return [*layers, Head(body.ln_f, model.lm_head)]

"""Dropout whose bits do not depend on thread timing.

Problem. Torch has one default CPU generator for all threads. Two stages that draw their dropout
masks from it at the same time get different masks in every run.

Idea. Each (layer, micro-batch) draws from a source of its own, seeded from the default generator
of the caller: `torch.manual_seed` governs all of it, the same seed gives the same bits under every
schedule and every cut of the layers (a cut by measured costs may differ from run to run), and a
step that draws nothing leaves the default generator untouched.

How the draws are redirected. Modules call `F.dropout` and `F.scaled_dot_product_attention`
without a generator argument, and some (GPT-2's attention) call them as functions, so replacing
`nn.Dropout` modules would miss them. A `TorchFunctionMode` is thread-local and sees all calls
of torch functions: those that draw get the stage's generator, all others pass through. Rejected:
a `TorchDispatchMode` (Python for every kernel, several times the cost), patching
`torch.nn.functional` (global), a lock around the default generator (stages wait for each other).

Cost: about 1.5 us per torch call in Python, 0.1 ms for a GPT-2 block's forward, which computes
for 10 to 100 ms; none in eval mode. Masks are as fast as torch's own. Functions that take no
generator (recurrent layers, alpha dropout) borrow the default one, one thread at a time.

Backward draws nothing, unless it runs a forward again (activation checkpointing): with other masks
its gradients would be wrong, so `NoDraws` refuses. It sees Python's calls only; a plain backward
has none.

On CUDA the fused kernels stay: there the default generator of the *device* is seeded before the
first draw of an action and put back after it; only one worker uses a device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_DEFAULT_GENERATOR = threading.Lock()  # whoever draws from the process's generator holds it

_TAKES_GENERATOR = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.bernoulli, torch.normal,
    torch.multinomial, torch.poisson, Tensor.bernoulli, Tensor.bernoulli_, Tensor.uniform_,
    Tensor.normal_, Tensor.random_, Tensor.exponential_, Tensor.multinomial, Tensor.geometric_,
    Tensor.cauchy_, Tensor.log_normal_, torch.binomial,
}  # fmt: skip
_TAKES_NONE = {
    F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu,
    F.gumbel_softmax, torch.native_dropout, torch.rand_like, torch.randn_like, torch.randint_like,
    torch.rrelu, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
}  # fmt: skip


class StepSeed:
    """One number for a whole step, drawn from the default generator when first asked for."""

    def __init__(self) -> None:
        self._value: int | None = None

    def get(self) -> int:
        with _DEFAULT_GENERATOR:
            if self._value is None:
                self._value = int(torch.randint(2**62, (), device="cpu"))
            return self._value


class StageRandomness(TorchFunctionMode):
    """Inside ``with randomness.of(step, layer, i):`` torch draws from their own source."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._cuda = device if device.type == "cuda" else None
        self._generator = torch.Generator()
        self._step = StepSeed()
        self._layer = self._microbatch = 0
        self._seeded = False
        self._cuda_state: Tensor | None = None

    def of(self, step: StepSeed, layer: int, microbatch: int) -> StageRandomness:
        self._step, self._layer, self._microbatch = step, layer, microbatch
        self._seeded = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        if self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._cuda or "cuda")
            self._cuda_state = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        draw = _DRAWS.get(func)
        return func(*args, **kwargs) if draw is None else draw(self, func, *args, **kwargs)

    def generator(self) -> torch.Generator:
        """The source of this (layer, micro-batch), seeded when first asked for."""
        if not self._seeded:
            seed = _mix(self._step.get(), self._layer, self._microbatch)
            self._generator.manual_seed(seed)
            if self._cuda is not None:
                self._cuda_state = torch.cuda.get_rng_state(self._cuda)
                with torch.cuda.device(self._cuda):
                    torch.cuda.manual_seed(seed)
            self._seeded = True
        return self._generator

    def _is_cuda(self) -> bool:
        """Whether the device's own generator serves; it is seeded then."""
        if self._cuda is not None:
            self.generator()
        return self._cuda is not None

    def _with_generator(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_cuda() and kwargs.get("generator") is None:
            kwargs["generator"] = self.generator()
        return func(*args, **kwargs)

    def _with_default(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Functions without a generator argument: lend them the process's, seeded, in turn."""
        if not kwargs.get("training", True) or self._is_cuda():
            return func(*args, **kwargs)
        seed = int(torch.randint(2**62, (), generator=self.generator(), device="cpu"))
        with _DEFAULT_GENERATOR:
            state = torch.default_generator.get_state()
            torch.default_generator.manual_seed(seed)
            try:
                return func(*args, **kwargs)
            finally:
                torch.default_generator.set_state(state)

    def _dropout(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """`F.dropout`, with the arithmetic of torch's CPU kernel."""
        if not training or not 0.0 < p < 1.0 or self._is_cuda():
            return func(input, p, training, inplace)
        mask = torch.empty_like(input).bernoulli_(1 - p, generator=self.generator()).div_(1 - p)
        return input.mul_(mask) if inplace else input * mask

    def _torch_dropout(self, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
        del func
        return self._dropout(F.dropout, input, p, train)

    def _multi_head(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        dropout_p = kwargs["dropout_p"] if "dropout_p" in kwargs else args[10]
        if not kwargs.get("training", True) or dropout_p == 0.0:
            return func(*args, **kwargs)
        return self._with_default(func, *args, **kwargs)

    def _recurrent(self, func: Any, *args: Any) -> Any:
        """torch.lstm etc.: ..., has_biases, num_layers, dropout, training, ..."""
        first = next(k for k, arg in enumerate(args) if isinstance(arg, bool))
        _, num_layers, dropout_p, training = args[first : first + 4]
        if not training or dropout_p == 0.0 or num_layers == 1:
            return func(*args)
        return self._with_default(func, *args)

    def _attention(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention B H T E with dropout; torch's CPU has no fused kernel for it either."""
        if dropout_p == 0.0 or self._is_cuda():
            return func(query, key, value, attn_mask, dropout_p, is_causal,
                        scale=scale, enable_gqa=enable_gqa)  # fmt: skip
        if enable_gqa:
            groups = query.size(-3) // key.size(-3)
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        scores = (query * factor) @ key.transpose(-2, -1)
        # As torch: a row that is masked everywhere gives 0. A causal one never is.
        softmax = torch.softmax if attn_mask is None else torch._safe_softmax
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._dropout(F.dropout, softmax(scores, -1), dropout_p) @ value


class NoDraws(StageRandomness):
    """Inside ``with``, a draw raises. Around a backward."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))  # of all devices: none has a source of its own here

    def generator(self) -> torch.Generator:
        raise RuntimeError(
            "a random number is drawn in a stage's backward. If this is activation checkpointing: "
            "the forward that it repeats would get other dropout masks, and the gradients would be "
            "wrong. Set dropout to 0, or do not checkpoint inside a Pipe"
        )


_DRAWS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_TAKES_GENERATOR, StageRandomness._with_generator),
    **dict.fromkeys(_TAKES_NONE, StageRandomness._with_default),
    F.dropout: StageRandomness._dropout,
    torch.dropout: StageRandomness._torch_dropout,
    F.scaled_dot_product_attention: StageRandomness._attention,
    F.multi_head_attention_forward: StageRandomness._multi_head,
    **dict.fromkeys(
        (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), StageRandomness._recurrent
    ),
}


def _mix(step: int, layer: int, microbatch: int) -> int:
    """A well-spread 63-bit seed (the finaliser of splitmix64)."""
    z = (step + 0x9E3779B97F4A7C15 * ((layer << 32) + microbatch + 1)) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) >> 1

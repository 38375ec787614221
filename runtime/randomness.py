"""Random draws, such as dropout masks, that do not depend on thread timing.

Problem. Torch has one default CPU generator for all threads. Two stages that draw their dropout
masks from it at the same time get different masks in every run.

Idea. Each (layer, micro-batch) has a seed of its own, made from one number per step, which is drawn
from the caller's default generator. So `torch.manual_seed` governs every draw, and the same seed
gives the same bits under every schedule and every cut of the layers (a cut by measured costs may
differ from run to run).

A rank, which is a process with one worker, seeds the default generators before each layer
(`OfProcess`), and restores them after the step. Threads share the CPU's default generator, so each
stage has a generator of its own, and draws are redirected to it (`OfThread`). On a GPU, which only
one worker uses, kernels draw from the device's generator, seeded and restored in the same way.

How draws are redirected. Torch tags every operator that draws. A `TorchFunctionMode` is
thread-local and sees each torch function called from Python. Tagged functions run under a
`TorchDispatchMode`, and so do functions written in Python that may call tagged ones. The dispatch
mode sees the kernels inside and gives the stage's generator to the kernels that draw. So dropout in
an LSTM, `torch.distributions`, `nn.init` and future operators need no list, and arithmetic stays
torch's own. Rejected: a `TorchDispatchMode` over the whole forward (Python for every kernel, 0.3 ms
for a GPT-2 block), patching `torch.nn.functional` (global), a lock around the default generator
(stages wait for each other).

Not seen: draws by `torch.jit`, torch.compile'd code, C++ extensions, numpy and Python itself.

Cost: a few microseconds per torch call from Python, including reads of a tensor's property; ten
times that per kernel inside a function that may draw (in recurrent layers: per step of the
sequence). Whether a Python function of torch's may draw is told by the names in its code. To save
that cost, between checked steps (guards.py) only layers that have drawn before are watched. A layer
that begins to draw then draws from the default generator, and `Pipe` sees it at the step's end: in
this one step its masks depend on timing. Layers that are recomputed are always watched: different
masks in the second forward would make gradients wrong.

Where a mode is on, torch's own transformer layers do not take the fast path that they take in
evaluation. This path draws nothing, so the mode is off for it (`FAST_PATHS`), whether a step is
checked or not: the fast path leaves padded positions 0, and the slow one does not.

Backward draws nothing, unless it repeats a forward (activation checkpointing). Different masks
would make its gradients wrong, so a draw raises there, in checked steps. Only calls from Python are
seen.

A layer may seed a draw itself (dropout.py): there the stage's seed is not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.dropout import mixed, seed_gpu

# Tagged as drawing, but they draw nothing: the second is the CPU's attention, without dropout.
_DRAW_NOTHING = ("_fused_sdp_choice", "_scaled_dot_product_flash_attention_for_cpu")


def step_seed() -> int:
    """The number of a step, drawn from the caller's default generator."""
    return int(torch.randint(2**62, (), device="cpu"))


class OfProcess:
    """The generators of this process and of its device, seeded before each layer by `seed`, the
    number of the step. Use it inside `torch.random.fork_rng`."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device, self._seed = device, seed

    def of(self, layer: int, microbatch: int, checked: bool) -> AbstractContextManager[object]:
        """The context of a layer's forward."""
        del checked  # whatever draws finds the generators seeded
        seed = mixed(self._seed, layer, microbatch)
        torch.default_generator.manual_seed(seed)
        seed_gpu(self._device, seed)
        return nullcontext()

    def in_backward(self) -> AbstractContextManager[object]:
        """A forward that is repeated there restores the generators itself."""
        return nullcontext()


class OfThread(TorchFunctionMode):
    """Inside `with randomness.of(layer, i, checked):` torch draws from that layer's generator, on a
    GPU from the device's. Use it inside `gpu_restored`.

    Args:
        seed: the number of the step.
        drawing: the numbers of the layers that have drawn; those that do are added.
    """

    def __init__(self, device: torch.device, seed: int, drawing: set[int] | None = None) -> None:
        super().__init__()
        self._device, self._seed = device, seed
        self._drawing = set[int]() if drawing is None else drawing
        self._note: Callable[[], None] = lambda: None  # that the layer draws
        self._generator = torch.Generator()
        self.generator: torch.Generator | None = None  # None: in a backward

    def of(self, layer: int, microbatch: int, checked: bool) -> AbstractContextManager[object]:
        """The context of a layer's forward. A layer that has drawn nothing yet is watched only if
        `checked`."""
        seed = mixed(self._seed, layer, microbatch)
        self.generator = self._generator.manual_seed(seed)
        seed_gpu(self._device, seed)
        self._note = functools.partial(self._drawing.add, layer)
        return self if checked or layer in self._drawing else nullcontext()

    def in_backward(self) -> OfThread:
        """A draw raises there."""
        self.generator = None
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if not _may_draw(func):
            return func(*args, **kwargs)
        with _Kernels(self.generator, self._note):
            return func(*args, **kwargs)


class _Kernels(TorchDispatchMode):
    """Inside `with`, kernels draw from the generator, and call `note`."""

    def __init__(self, generator: torch.Generator | None, note: Callable[[], None]) -> None:
        super().__init__()
        self._generator, self._note = generator, note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if not _may_draw(func) or kwargs.get("generator") is not None:  # or the caller's own
            return func(*args, **kwargs)
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        if func.has_kernel_for_dispatch_key(composite):  # in inference mode it comes here whole
            with self:
                return func._op_dk(composite, *args, **kwargs)
        if self._generator is None:
            raise RuntimeError(
                "a random number is drawn in a stage's backward. If this is activation "
                "checkpointing: the forward that it repeats would draw new dropout masks, and the "
                "gradients would be wrong. Set dropout to 0, or do not checkpoint inside a Pipe: "
                "recompute='always' does so for it"
            )
        tensor = next((value for value in args if isinstance(value, Tensor)), None)
        device = kwargs.get("device") or (torch.device("cpu") if tensor is None else tensor.device)
        if device.type != "cpu":
            return func(*args, **kwargs)  # from the device's generator, seeded
        self._note()
        # A function without this argument, such as rand, has another overload that takes it. Where
        # none does, as of native_dropout, torch raises.
        return func.overloadpacket(*args, **{**kwargs, "generator": self._generator})


@functools.lru_cache(4096)
def _may_draw(func: Any) -> bool:
    """Whether a function called from Python, or a kernel, may draw: by the tags of its operators,
    if any."""
    if isinstance(func, FunctionType):
        # Names in the code of torch's own functions tell. What others call inside is unknown.
        own = func.__module__ in ("torch.nn.functional", "torch.functional", "torch._tensor")
        return not own or any(map(_is_tagged, _names_in(func, {func})))
    if isinstance(func, OpOverload):
        name = func.overloadpacket.__name__
        return name not in _DRAW_NOTHING and torch.Tag.nondeterministic_seeded in func.tags
    return _is_tagged(getattr(func, "__name__", ""))


def _is_tagged(name: str) -> bool:
    """Whether an operator of this name draws."""
    packet = getattr(torch.ops.aten, name, None)
    names = packet.overloads() if isinstance(packet, OpOverloadPacket) else []
    tags = (tag for overload in names for tag in getattr(packet, overload).tags)
    return name not in _DRAW_NOTHING and torch.Tag.nondeterministic_seeded in tags


def _names_in(func: FunctionType, seen: set[FunctionType]) -> set[str]:
    """The names in a function's code, and in the code of functions of its module that it names or,
    where torch chooses one of two by a flag, has in its closure."""
    names = set(func.__code__.co_names)
    named = [func.__globals__.get(name) for name in names]
    for inner in (*named, *(cell.cell_contents for cell in func.__closure__ or ())):
        if not isinstance(inner, FunctionType) or inner in seen:
            continue
        if inner.__module__ == func.__module__:
            seen.add(inner)
            names |= _names_in(inner, seen)
    return names


def _out_of_sight(module: nn.Module, *given: Any, **kwargs: Any) -> Any:
    """A module's own forward, with the mode off where it draws nothing."""
    may_draw = (m.training or not m.__module__.startswith("torch.nn.") for m in module.modules())
    with nullcontext() if any(may_draw) else torch._C.DisableTorchFunction():
        return type(module).forward(module, *given, **kwargs)


# Forwards with which torch's transformer layers take their fast paths, watched or not.
FAST_PATHS = {
    f"torch.nn.modules.{name}": _out_of_sight
    for name in (
        "activation.MultiheadAttention", "transformer.TransformerEncoder",
        "transformer.TransformerEncoderLayer",
    )
}  # fmt: skip


@contextmanager
def gpu_restored(device: torch.device) -> Iterator[None]:
    """Afterwards the generator of a GPU is as it was before."""
    if device.type == "cpu":
        yield
        return
    module = torch.get_device_module(device)
    state = module.get_rng_state(device)
    try:
        yield
    finally:
        module.set_rng_state(state, device)

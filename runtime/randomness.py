"""Random draws, such as dropout masks, that do not depend on thread timing.

Problem. Torch has one default CPU generator for all threads. Two stages that draw their dropout
masks from it at the same time get different masks in every run.

Idea. Each (layer, micro-batch) has a seed of its own, made from one number of the step that comes
from the caller's default generator. So `torch.manual_seed` governs every draw, and the same seed
gives the same bits under every schedule and every cut of the layers (a cut by measured costs may
differ from run to run).

A process with one worker, a rank, seeds the default generators before each layer (`OfProcess`), and
restores them after the step. Threads share them, so each stage has a generator of its own, and
draws are redirected to it (`OfThread`); a step that draws nothing leaves the default generator
untouched.

How draws are redirected. Torch tags every operator that draws. A `TorchFunctionMode` is
thread-local and sees each torch function called from Python. Tagged functions run under a
`TorchDispatchMode`, and so do functions written in Python, which may call tagged ones. The dispatch
mode sees the kernels inside and gives the stage's generator to the kernels that draw. So dropout in
an LSTM, `torch.distributions`, `nn.init` and future operators need no list, and arithmetic stays
torch's own. Rejected: a `TorchDispatchMode` over the whole forward (Python for every kernel, 0.3 ms
for a GPT-2 block), patching `torch.nn.functional` (global), a lock around the default generator
(stages wait for each other).

Not seen: draws by `torch.jit`, torch.compile'd code, C++ extensions, numpy and Python itself.

Cost: about 1 us per torch call in Python, 0.1 ms for a GPT-2 block's forward, which computes for
10 to 100 ms; about 6 us per kernel inside a function that may draw (recurrent layers: per step of
the sequence).

Backward draws nothing, unless it repeats a forward (activation checkpointing). Other masks would
make its gradients wrong, so `NoDraws` refuses. It sees only calls from Python; a plain backward
makes none.

A GPU keeps its fused kernels: the *device's* default generator is seeded before the first draw of
an action and restored after it. Only one worker uses a device. A layer may seed a draw itself
(dropout.py): there the stage's seed is not used.
"""

from __future__ import annotations

import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.dropout import mixed


class StepSeed:
    """One number for a whole step, drawn from the default generator when first asked for."""

    def __init__(self) -> None:
        self._value: int | None = None
        self._lock = threading.Lock()  # the stages of a step ask at the same time

    def get(self) -> int:
        with self._lock:
            if self._value is None:
                default = torch.default_generator  # named, so that the draw is not redirected
                self._value = int(torch.randint(2**62, (), generator=default, device="cpu"))
            return self._value


class OfProcess:
    """The generators of this process and of its device, seeded before each layer by ``seed``, the
    number of the step. Use it inside `torch.random.fork_rng`."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device, self._seed = device, seed

    def of(self, layer: int, microbatch: int) -> AbstractContextManager[object]:
        """For a layer's forward."""
        seed = mixed(self._seed, layer, microbatch)
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            with torch.accelerator.device_index(self._device.index):
                torch.get_device_module(self._device).manual_seed(seed)
        return nullcontext()

    def in_backward(self) -> AbstractContextManager[object]:
        """A forward that is repeated there restores the generators itself."""
        return nullcontext()


class OfThread(TorchFunctionMode):
    """Inside ``with randomness.of(layer, i):`` torch draws from that layer's generator."""

    def __init__(self, device: torch.device, step: StepSeed) -> None:
        super().__init__()
        self._gpu = None if device.type == "cpu" else device
        self._generator = torch.Generator()
        self._step = step
        self._place = 0, 0  # layer, micro-batch
        self._seeded = False  # for this place
        self._gpu_state: Tensor | None = None  # of its generator, from before its first draw

    def of(self, layer: int, microbatch: int) -> OfThread:
        """For a layer's forward."""
        self._place = layer, microbatch
        self._seeded = False  # only a first draw seeds: an action without one pays nothing
        return self

    def in_backward(self) -> OfThread:
        """A draw raises there."""
        return NoDraws()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if self._gpu is not None and self._gpu_state is not None:
            module = torch.get_device_module(self._gpu)
            module.set_rng_state(self._gpu_state, self._gpu)
            self._gpu_state = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if not _may_draw(func):
            return func(*args, **kwargs)
        with _Kernels(self):
            return func(*args, **kwargs)

    def generator(self) -> torch.Generator:
        """The generator of this (layer, micro-batch). The first call seeds it, and the device's,
        with the same seed."""
        if not self._seeded:
            seed = mixed(self._step.get(), *self._place)
            self._generator.manual_seed(seed)
            if self._gpu is not None:
                module = torch.get_device_module(self._gpu)
                self._gpu_state = module.get_rng_state(self._gpu)
                with torch.accelerator.device_index(self._gpu.index):
                    module.manual_seed(seed)
            self._seeded = True
        return self._generator


class NoDraws(OfThread):
    """Inside ``with``, a draw raises. For backwards."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), StepSeed())  # for all devices: none is seeded here

    def generator(self) -> torch.Generator:
        raise RuntimeError(
            "a random number is drawn in a stage's backward. If this is activation checkpointing: "
            "the forward that it repeats would get other dropout masks, and the gradients would be "
            "wrong. Set dropout to 0, or do not checkpoint inside a Pipe: recompute='always' does "
            "so for it"
        )


class _Kernels(TorchDispatchMode):
    """Inside ``with``, kernels draw from the generator of ``randomness``."""

    def __init__(self, randomness: OfThread) -> None:
        super().__init__()
        self._randomness = randomness

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if not _draws(func) or kwargs.get("generator") is not None:  # or the caller's own
            return func(*args, **kwargs)
        generator = self._randomness.generator()
        tensor = next((value for value in args if isinstance(value, Tensor)), None)
        device = kwargs.get("device") or (torch.device("cpu") if tensor is None else tensor.device)
        if device.type != "cpu":
            return func(*args, **kwargs)  # from the device's default generator, seeded above
        # For functions without the argument, such as rand, another overload takes it. Where none
        # does, as of native_dropout, torch raises.
        return func.overloadpacket(*args, **{**kwargs, "generator": generator})


@functools.lru_cache(4096)
def _may_draw(func: Any) -> bool:
    """Whether a function called from Python may draw, by the tags of its operators, if any."""
    if isinstance(func, FunctionType):
        return True  # what it calls inside is unknown
    name = getattr(func, "__name__", "").split(".")[0]  # an overload's name ends in .overload
    packet = getattr(torch.ops.aten, name, None)
    return isinstance(packet, OpOverloadPacket) and any(
        _is_tagged(getattr(packet, overload)) for overload in packet.overloads()
    )


@functools.lru_cache(4096)
def _draws(overload: Any) -> bool:
    """Whether a kernel draws. The CPU's attention kernel is tagged, but refuses dropout."""
    chooses = ("_fused_sdp_choice", "_scaled_dot_product_flash_attention_for_cpu")
    return _is_tagged(overload) and overload.overloadpacket.__name__ not in chooses


def _is_tagged(overload: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in overload.tags

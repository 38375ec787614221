"""What `torch.cuda` and `torch.distributed` say of the device.

Devices, streams, events and generators are torch's own, over guard.cpp. NCCL's place is taken by
gloo on the CPU's memory; whoever asks for the name of the backend gets NCCL's.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from . import seen
from .tensors import DeviceTensor, aten, dispatch, index_of

MOST = 16  # as in guard.cpp
_keep: list[Any] = []  # libraries of operators, what C++ calls, and the guard


def install(guard: ctypes.CDLL, number: int) -> None:
    """Makes cuda:0 ... cuda:number-1 available in this process."""
    _keep.append(guard)
    guard.claim()  # now: a torch that is built for CUDA has claimed the device
    guard.set_number(number)
    told = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda why: seen.wait(why.decode()))
    guard.set_on_wait(told)
    _keep.append(told)
    warnings.filterwarnings("ignore", message=".*overrid.*kernel.*", category=UserWarning)
    _put_cuda(lambda: int(guard.get_number()))
    _put_operators()
    _put_parameters()
    _put_distributed()


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0) -> Any:
        return torch.Stream(torch.device("cuda", index_of(device)), priority=priority)


def _within(stream: Any) -> Any:
    """`torch.cuda.stream(s)`, in which None changes nothing."""
    return nullcontext() if stream is None else stream


def _on(device: Any) -> Any:
    """`torch.cuda.device(d)`."""
    return torch.accelerator.device_index(index_of(device))


def _put_cuda(number: Callable[[], int]) -> None:
    cuda = torch.cuda
    generators = [torch.Generator(f"cuda:{k}") for k in range(MOST)]
    properties = {
        "name": "no hardware", "major": 9, "minor": 0, "total_memory": 1 << 33,
        "multi_processor_count": 1,
    }  # fmt: skip

    def generator(device: Any = None) -> torch.Generator:
        return generators[index_of(device)]

    def seed_all(seed: int) -> None:
        for each in generators:
            each.manual_seed(int(seed))

    nothing = lambda *_, **__: None  # noqa: E731
    replaced: dict[str, Any] = {
        # devices
        "is_available": lambda: True, "is_initialized": lambda: True, "init": nothing,
        "_lazy_init": nothing, "_is_in_bad_fork": lambda: False, "_is_compiled": lambda: False,
        "device_count": number, "current_device": torch._C._accelerator_getDeviceIndex,
        "set_device": lambda device: torch._C._accelerator_setDeviceIndex(index_of(device)),
        "device": _on, "_DeviceGuard": _on,
        "synchronize": lambda d=None: torch._C._accelerator_synchronizeDevice(index_of(d)),
        "get_device_properties": lambda d=None: SimpleNamespace(**properties, uuid=index_of(d)),
        "get_device_capability": lambda _=None: (9, 0), "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda *_, **__: True,
        # streams
        "Stream": Stream,
        "stream": _within, "StreamContext": _within,
        "set_stream": torch.accelerator.set_stream,
        "current_stream": lambda d=None: torch._C._accelerator_getStream(index_of(d)),
        "is_current_stream_capturing": lambda: False,
        # memory
        "empty_cache": nothing, "ipc_collect": nothing, "reset_peak_memory_stats": nothing,
        "max_memory_allocated": lambda _=None: 1, "memory_allocated": lambda _=None: 1,
        # random numbers
        "default_generators": generators, "manual_seed_all": seed_all,
        "manual_seed": lambda seed: generator().manual_seed(int(seed)),
        "get_rng_state": lambda d="cuda": generator(d).get_state(),
        "set_rng_state": lambda state, d="cuda": generator(d).set_state(state),
    }  # fmt: skip
    for name, value in replaced.items():
        setattr(cuda, name, value)
        if hasattr(cuda.random, name):
            setattr(cuda.random, name, value)
    torch.backends.cuda.is_built = lambda: True
    for name in ("max_memory_allocated", "memory_allocated", "reset_peak_memory_stats"):
        setattr(torch.accelerator, name, replaced[name])


def _put_operators() -> None:
    """The operators that get no tensor of the device yet: the dispatcher finds them by its key."""
    library = torch.library.Library("aten", "IMPL", "CUDA")

    def empty(size: Any, **kwargs: Any) -> DeviceTensor:
        return DeviceTensor(torch.empty(size, **_on_cpu(kwargs)), index_of(kwargs.get("device")))

    def empty_strided(size: Any, stride: Any, **kwargs: Any) -> DeviceTensor:
        raw = torch.empty_strided(size, stride, **_on_cpu(kwargs))
        return DeviceTensor(raw, index_of(kwargs.get("device")))

    def factory(name: str) -> Callable[..., DeviceTensor]:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(aten, packet), overload or "default")

        def make(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Any:  # noqa: ARG001
            seen.kernel(packet, index_of(device))
            return DeviceTensor(func(*args, device="cpu", **kwargs), index_of(device))

        return make

    library.impl("empty.memory_format", empty)
    library.impl("empty_strided", empty_strided)
    for name in (
        "arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "logspace",
        "tril_indices", "triu_indices",
    ):  # fmt: skip
        library.impl(name, factory(name))
    for key in ("CUDA", "AutogradCUDA"):
        composite = torch.library.Library("aten", "IMPL", key)
        composite.impl("scaled_dot_product_attention", attention)
        _keep.append(composite)
    library.impl("copy_", lambda *args, **kwargs: dispatch(aten.copy_.default, args, kwargs))
    others = torch.library.Library("_", "IMPL", "CUDA")
    others.fallback(lambda func, *args, **kwargs: dispatch(func, args, kwargs))
    _keep.extend([library, others])


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None, p: float = 0.0,
    is_causal: bool = False, **more: Any,
) -> Any:  # fmt: skip
    """Operator by operator. A torch that is built for CUDA would ask the driver for a kernel."""
    if mask is not None and mask.dtype == torch.bool:  # as torch's own does before it chooses
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(
            ~mask, -torch.inf
        )
    return aten._scaled_dot_product_attention_math(q, k, v, mask, p, is_causal, None, **more)[0]


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    wanted = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format") and v is not None}
    return {**wanted, "device": "cpu"}


def _put_parameters() -> None:
    """`parameter.data = x` with x on the device, as module.to(device) does: the object stays."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    data = torch.Tensor.data

    def put(self: Any, other: Any) -> None:
        if isinstance(other, DeviceTensor) and not isinstance(self, DeviceTensor):
            parameter = torch.nn.Parameter(other.detach(), self.requires_grad)
            torch.utils.swap_tensors(self, parameter)
        else:
            data.__set__(self, other)  # type: ignore[attr-defined]

    torch.nn.Parameter.data = property(lambda self: data.__get__(self), put)  # type: ignore
    for module in (optimizer, _foreach_utils):
        if hasattr(module, "_foreach_supported_types"):
            module._foreach_supported_types.append(DeviceTensor)


def _put_distributed() -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    init, new_group, backend_of = c10d.init_process_group, c10d.new_group, c10d.get_backend
    # By group, where it is not its own. A group that nobody else has ends, with its connections.
    names = weakref.WeakKeyDictionary[Any, str]()

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        nccl = "nccl" in str(backend)
        init("gloo" if nccl else backend, *args, **kwargs)
        if nccl:
            names[c10d._get_default_group()] = str(backend)

    def make_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs.pop("device_id", None)
        name = backend or get_backend()
        group = new_group(ranks, timeout, "gloo" if "nccl" in name else backend, *args, **kwargs)
        if isinstance(group, c10d.ProcessGroup):  # this rank is a member
            names[group] = name
        return group

    def get_backend(group: Any = None) -> str:
        group = group or c10d._get_default_group()
        return names.get(group) or backend_of(group)

    for module in (dist, c10d):
        module.is_nccl_available = lambda: True  # type: ignore[attr-defined]
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
        module.new_group, module.get_backend = make_group, get_backend  # type: ignore

"""Tensors of the device: the CPU computes, the rules are CUDA's.

Every operator comes to `dispatch`: it refuses what CUDA refuses, notes what CUDA would launch or
wait for, and runs the operator on the CPU's memory. An operator counts as one kernel, a foreach
operator too, a view as none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import flash, grouped, seen

aten = torch.ops.aten
STAND_INS: dict[str, Any] = {  # kernels that only CUDA has
    "_scaled_dot_product_flash_attention": flash.forward,
    "_scaled_dot_product_flash_attention_backward": flash.backward,
    "_grouped_mm": grouped.product,
}
COPIES = {aten._to_copy.default, aten.copy_.default, aten.copy.default}
INDEXING = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default,
    aten._index_put_impl_.default,
}  # fmt: skip
WAITS = {  # the host needs their result, or its size
    "_local_scalar_dense": "item", "nonzero": "nonzero", "equal": "equal",
    "is_nonzero": "is_nonzero", "masked_select": "masked_select", "_unique2": "unique",
    "unique_consecutive": "unique", "unique_dim": "unique", "bincount": "bincount",
}  # fmt: skip
FREE = {  # no view, and nothing is launched
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias",
    "_unsafe_view", "lift_fresh", "is_same_size", "_reshape_alias", "resize_", "set_",
    "_local_scalar_dense", "record_stream",
}  # fmt: skip


class DeviceTensor(Tensor):
    """A tensor of device number `at`. `raw` is its memory, on the CPU."""

    raw: Tensor
    at: int

    @staticmethod
    def __new__(cls, raw: Tensor, at: int) -> DeviceTensor:
        self = Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(),
            dtype=raw.dtype, device=torch.device("cuda", at),
        )  # fmt: skip
        self.raw, self.at = raw, at
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.raw!r} on cuda:{self.at}"

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(
            f"can't convert cuda:{self.at} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )

    @property
    def data(self) -> Any:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: Any) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.raw, self.at = other.raw, other.at

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})


def index_of(device: Any) -> int:
    """The number of a device, given as torch takes it."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch._C._accelerator_getDeviceIndex() if index is None else index


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an operator of which some argument is, or the result will be, on a device."""
    library, name = func._schema.name.split("::")
    leaves: list[Any] = []
    mapped(leaves.append, [args, kwargs])
    mine = [x for x in leaves if isinstance(x, DeviceTensor)]
    at = _place(func, args, kwargs, mine)
    if library == "aten":
        _refuse(func, name, args, leaves, mine)
        _note(func, name, args, kwargs, at)
    elif library == "c10d":
        _refuse_gaps(name, mine)
        seen.collective(name)
    out = _computed(func, name, mapped(_plain, args), mapped(_plain, kwargs), at)
    known = {id(x.raw): x for x in mine}  # an operator that works in place returns its argument
    if name.startswith("_foreach") and isinstance(out, list):  # of one device each
        places = [x.at if isinstance(x, DeviceTensor) else None for x in args[0]]
        return [_given(x, known, k) for x, k in zip(out, places, strict=True)]
    return mapped(lambda x: _given(x, known, at) if isinstance(x, Tensor) else x, out)


def mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """An operator's arguments or results, each changed, in the lists that hold them. (torch's own
    pytree knows more kinds, and took half of a test's time.)"""
    kind = type(x)
    if kind is list or kind is tuple:
        return kind([mapped(change, each) for each in x])
    if kind is dict:
        return {name: mapped(change, each) for name, each in x.items()}
    return change(x)


def _place(func: Any, args: Any, kwargs: Any, mine: list[DeviceTensor]) -> int | None:
    """The device of the result; None is the CPU."""
    if func is aten.copy_.default:
        return args[0].at if isinstance(args[0], DeviceTensor) else None
    wanted = kwargs.get("device")
    if wanted is not None:
        return index_of(wanted) if torch.device(wanted).type == "cuda" else None
    return mine[0].at if mine else None


def _plain(x: Any) -> Any:
    if isinstance(x, DeviceTensor):
        return x.raw
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == "cuda" else x


def _given(x: Tensor, known: dict[int, DeviceTensor], at: int | None) -> Tensor:
    if id(x) in known:
        return known[id(x)]
    return x if at is None or isinstance(x, DeviceTensor) else DeviceTensor(x, at)


def _refuse(func: Any, name: str, args: Any, leaves: list[Any], mine: list[DeviceTensor]) -> None:
    """Tensors of two devices do not mix; nor do the CPU's, but for one number, or an index."""
    if func in COPIES:
        return
    found = [f"cuda:{k}" for k in sorted({x.at for x in mine})]
    if name.startswith("_foreach"):  # goes tensor by tensor
        found = found[:1]
    indices = args[1] if func in INDEXING else []
    for x in leaves:
        if isinstance(x, Tensor) and not isinstance(x, DeviceTensor):
            single = x.dim() == 0 and name not in ("cat", "stack")
            index = any(x is i for i in indices) and isinstance(args[0], DeviceTensor)
            if not single and not index:
                found.append("cpu")
                break
    if len(found) > 1 or (func in INDEXING and not isinstance(args[0], DeviceTensor)):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(found[:2])}! (in aten::{name})"
        )


def _refuse_gaps(name: str, mine: list[DeviceTensor]) -> None:
    """NCCL sends memory from its address on: gloo, which stands for it, takes some strides."""
    for x in mine:
        if not x.raw.is_contiguous(memory_format=torch._prims_common.suggest_memory_format(x.raw)):
            raise ValueError(
                f"Tensors must be contiguous (in c10d::{name}, of {tuple(x.shape)} with strides "
                f"{x.stride()})"
            )


def _note(func: Any, name: str, args: Any, kwargs: Any, at: int | None) -> None:
    if func in COPIES:
        _note_copy(func, args, kwargs, at)
        return
    counted = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
    if name in WAITS or counted:
        seen.wait(WAITS.get(name, name))
    if func in INDEXING and any(
        isinstance(i, DeviceTensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    ):
        seen.wait("boolean index")
        seen.kernel("nonzero", index_of(at))
    if not _is_free(func, name):
        seen.kernel(name, index_of(at))


def _note_copy(func: Any, args: Any, kwargs: Any, at: int | None) -> None:
    """A blocking copy waits, and one that is not does if the CPU's end is pageable memory."""
    to_copy = func is aten._to_copy.default
    source = args[0] if to_copy else args[1]
    begin = source.at if isinstance(source, DeviceTensor) else None
    if begin == at and at is not None:
        seen.kernel(func._schema.name.split("::")[1], at)
        return
    seen.copy(begin, at)
    non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and not to_copy and args[2])
    if begin is None:
        if source.numel() and not (non_blocking and source.is_pinned()):
            seen.wait("copy from the CPU" + (", pageable" if non_blocking else ""))
    elif at is None:
        pinned = to_copy or args[0].is_pinned()  # torch pins what it makes for such a copy
        if not (non_blocking and pinned):
            seen.wait("copy to the CPU" + (", pageable" if non_blocking else ""))


_free: dict[Any, bool] = {}


def _is_free(func: Any, name: str) -> bool:
    if func not in _free:
        results = func._schema.returns
        views = [r.alias_info is not None and not r.alias_info.is_write for r in results]
        _free[func] = name in FREE or (bool(views) and all(views))
    return _free[func]


# ---------------------------------------------------------------------------------- random numbers

_drawing = threading.Lock()
_generator = torch.Generator()  # of the CPU, in the state of the device's while it draws


def _computed(func: Any, name: str, args: Any, kwargs: Any, at: int | None) -> Any:
    if torch.Tag.nondeterministic_seeded not in func.tags or at is None:
        return _without_draws(func, name, args, kwargs)
    given = kwargs.get("generator")
    if given is not None and given.device.type != "cuda":
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    own = torch.cuda.default_generators[at] if given is None else given
    with _drawing:
        _generator.set_state(own.get_state())
        try:
            return _drawn(func, name, args, {**kwargs, "generator": _generator})
        finally:
            own.set_state(_generator.get_state())


def _without_draws(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name in STAND_INS:
        return STAND_INS[name](*args, **kwargs)
    if func is aten.is_pinned.default or func is aten.record_stream.default:
        return False if func is aten.is_pinned.default else None
    return func(*args, **kwargs)


def _drawn(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """An operator that draws, by the given generator, also where it takes none."""
    if name in STAND_INS:
        return STAND_INS[name](*args, **kwargs)
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func(*args, **kwargs)
    generator = kwargs.pop("generator")
    if name == "native_dropout":
        x, p, train = args
        if not train:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        keep = torch.empty_like(x, dtype=torch.float32).uniform_(generator=generator) >= p
        return x * keep / (1 - p) if p < 1 else torch.zeros_like(x), keep
    raise NotImplementedError(f"the device without hardware cannot draw {name}")

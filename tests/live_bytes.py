"""Counts the bytes of live tensors exactly; resident memory includes too much else."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """The bytes of all live tensors that operators have made inside, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _tensors(args)}
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in given:
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._seen:
            nbytes = storage.nbytes()

            def gone(_: Any) -> None:
                self.now -= nbytes
                del self._seen[key]

            self._seen[key] = weakref.ref(storage, gone)
            self.now += nbytes
            self.peak = max(self.peak, self.now)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]

"""Cut a batch into micro-batches and join the results again.

A value in the pipeline is a tensor, or tuples, lists and dicts of tensors and anything else. Every
tensor has the batch as its first dimension and is cut along it. Other values (a flag, None) and
tensors without dimensions go to every micro-batch unchanged. Outputs are concatenated: tensors with
the batch as first dimension, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from runtime.even import even_sizes
from runtime.guards import refuse_hidden


class MicroBatches(list[Any]):
    """A batch already cut: its micro-batches may differ in more than their first dimension, e.g.
    when each holds sentences of similar length."""


def batch_size(value: Any) -> int:
    """The common first dimension of all tensors; ValueError if there is none, or several;
    TypeError if an object hides tensors from pytree."""
    refuse_hidden(value, "the batch holds")
    sizes = {leaf.size(0) for leaf in pytree.tree_leaves(value) if _is_batched(leaf)}
    if len(sizes) != 1:
        different = ", ".join(map(str, sorted(sizes))) or "no tensor"
        raise ValueError(
            f"the batch is the first dimension of every tensor, but there: {different}; "
            "give tensors whose first dimensions are equal"
        )
    return int(sizes.pop())


def sizes_by_split(batch: int, split_size: int) -> list[int]:
    """The sizes of micro-batches of ``split_size`` examples; the last may be smaller."""
    if split_size < 1:
        raise ValueError(f"split_size={split_size}: at least 1 example, e.g. {max(batch // 4, 1)}")
    whole, rest = divmod(batch, split_size)
    return [split_size] * whole + [rest] * (rest > 0) or [0]  # [0]: one empty micro-batch


def sizes_by_number(batch: int, num_microbatches: int) -> list[int]:
    """``num_microbatches`` sizes that differ by at most one; fewer if the batch is smaller."""
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches}: at least 1, e.g. 4")
    return even_sizes(batch, max(1, min(num_microbatches, batch)))


def split_batch(value: Any, sizes: Sequence[int]) -> list[Any]:
    """One value per micro-batch; its tensors are views of the given ones."""
    leaves, spec = pytree.tree_flatten(value)
    columns = [  # by leaf, then by micro-batch
        leaf.split(list(sizes)) if _is_batched(leaf) else [leaf] * len(sizes) for leaf in leaves
    ]
    return [pytree.tree_unflatten([column[i] for column in columns], spec)
            for i in range(len(sizes))]  # fmt: skip


def cut_batch(
    x: Any, target: Any, sizes: Callable[[int], Sequence[int]]
) -> tuple[list[Any], list[Any]]:
    """The micro-batches of x and of the target; ``sizes`` maps the batch size to their sizes.

    `MicroBatches` are not cut again.
    """
    if isinstance(x, MicroBatches):
        if not isinstance(target, MicroBatches) or len(x) != len(target):
            raise ValueError(
                f"{len(x)} micro-batches, but the target is a {type(target).__name__}: give "
                "it as MicroBatches too, as many"
            )
        return x, target
    of_each = sizes(batch_size((x, target)))  # x and target must agree
    return split_batch(x, of_each), split_batch(target, of_each)


def join(values: Sequence[Any]) -> Any:
    """Tensors concatenated along the batch, or None.

    Raises ValueError if the micro-batches cannot be joined to one value of the batch.
    """
    if len(values) == 1:
        return values[0]
    flat = [pytree.tree_flatten(value) for value in values]  # by micro-batch: leaves, nesting
    _, spec = flat[0]
    for i, (_, other) in enumerate(flat):
        if other != spec:
            raise ValueError(_NOT_JOINED.format(f"{spec} for micro-batch 0, {other} for {i}"))
    columns = zip(*(leaves for leaves, _ in flat), strict=True)  # by leaf, then by micro-batch
    return pytree.tree_unflatten([_joined(column) for column in columns], spec)


_NOT_JOINED = (
    "the outputs of the micro-batches cannot be put together to one of the batch ({}): let the "
    "last layer return tensors with the batch as first dimension, in every micro-batch as many, "
    "and give train_step a loss_fn that sums"
)


def _joined(column: Sequence[Any]) -> Any:
    """Join one leaf of all micro-batches."""
    if all(_is_batched(leaf) for leaf in column):
        return torch.cat(list(column))  # [b_0, ...], [b_1, ...] -> [B, ...]
    if all(leaf is None for leaf in column):
        return None
    raise ValueError(_NOT_JOINED.format(", ".join(type(leaf).__name__ for leaf in column)))


def _is_batched(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0

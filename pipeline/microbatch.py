"""Cut a batch into micro-batches and join the results again.

A value in the pipeline is a tensor, or tuples, lists and dicts of tensors and flags. Every tensor
has the batch as its first dimension and is cut along it. Flags (numbers, texts, None) and tensors
without dimensions go to every micro-batch unchanged. Outputs are None, or tensors with the batch as
first dimension, which are concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from runtime.even import even_sizes

_FLAGS = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, type(None))


class MicroBatches(list[Any]):
    """A batch already cut: its micro-batches may differ in more than their first dimension, e.g.
    when each holds sentences of similar length."""


def batch_size(value: Any) -> int:
    """The common first dimension of all tensors; ValueError if there is none, or several, or if a
    tensor could hide in an object."""
    leaves = pytree.tree_leaves(value)
    hidden = [type(x).__name__ for x in leaves if not isinstance(x, (Tensor, *_FLAGS))]
    if hidden:
        raise ValueError(
            f"the batch holds a {hidden[0]}, whose tensors would not be cut: give tensors, or "
            "tuples, lists and dicts of them"
        )
    sizes = {leaf.size(0) for leaf in leaves if _is_batched(leaf)}
    if len(sizes) != 1:
        different = ", ".join(map(str, sorted(sizes))) or "no tensor"
        raise ValueError(
            f"the batch is the first dimension of every tensor, but here: {different}; give "
            "tensors, or tuples, lists and dicts of them, whose first dimensions are equal"
        )
    return int(sizes.pop())


def sizes_by_split(batch: int, split_size: int) -> list[int]:
    """The sizes of micro-batches of `split_size` examples; the last may be smaller."""
    if split_size < 1:
        raise ValueError(f"split_size={split_size}: at least 1 example, e.g. {max(batch // 4, 1)}")
    whole, rest = divmod(batch, split_size)
    return [split_size] * whole + [rest] * (rest > 0) or [0]  # [0]: one empty micro-batch


def split_batch(value: Any, sizes: Sequence[int]) -> list[Any]:
    """One value per micro-batch; its tensors are views of the given ones."""
    leaves, spec = pytree.tree_flatten(value)
    columns = [  # by leaf, then by micro-batch
        leaf.split(list(sizes)) if _is_batched(leaf) else [leaf] * len(sizes) for leaf in leaves
    ]
    return [pytree.tree_unflatten([c[i] for c in columns], spec) for i in range(len(sizes))]


def cut_batch(
    x: Any, target: Any, num_microbatches: int | None, split_size: int = 1
) -> tuple[list[Any], list[Any]]:
    """The micro-batches of x and of the target: `num_microbatches` whose sizes differ by at most
    one, fewer if the batch is smaller; or, without a number, of `split_size`.

    `MicroBatches` are not cut again.
    """
    if isinstance(x, MicroBatches):
        if not isinstance(target, MicroBatches) or len(x) != len(target):
            raise ValueError(
                f"{len(x)} micro-batches, but the target is a {type(target).__name__}: give "
                "it as MicroBatches, too, one for each of the input's"
            )
        return [*x], [*target]
    batch = batch_size((x, target))  # x and target must agree
    if num_microbatches is not None and num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches}: at least 1, e.g. {min(batch, 4)}")
    sizes = sizes_by_split(batch, split_size)
    if num_microbatches is not None:
        sizes = even_sizes(batch, max(1, min(num_microbatches, batch)))  # an empty batch runs
    return split_batch(x, sizes), split_batch(target, sizes)


def join(values: Sequence[Any]) -> Any:
    """Tensors concatenated along the batch, or None; a single micro-batch as it is.

    Raises ValueError if there are other values, or the micro-batches differ in their nesting.
    """
    flat = [pytree.tree_flatten(value) for value in values]  # by micro-batch: leaves, nesting
    (first, spec), *others = flat
    if not others and all(leaf is None or isinstance(leaf, Tensor) for leaf in first):
        return values[0]
    columns = [*zip(*(leaves for leaves, _ in flat), strict=False)]  # by leaf, then by micro-batch
    if all(other == spec for _, other in others) and all(map(_can_be_joined, columns)):
        joined = [None if column[0] is None else torch.cat(column) for column in columns]
        return pytree.tree_unflatten(joined, spec)
    kinds = pytree.tree_map(lambda leaf: type(leaf).__name__, values[0])
    raise ValueError(
        "the outputs of the micro-batches cannot be joined to that of the batch (the first: "
        f"{kinds}): let the last layer return tensors with the batch as first dimension, the "
        "same number in every micro-batch, and give train_step a loss_fn that sums"
    )


def _can_be_joined(leaf_of_each: Sequence[Any]) -> bool:
    return all(map(_is_batched, leaf_of_each)) or all(leaf is None for leaf in leaf_of_each)


def _is_batched(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0

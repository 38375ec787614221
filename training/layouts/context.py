"""Sequences cut over the ranks of a context axis, for layouts on a mesh.

Every rank of the axis gets the same micro-batches and takes its own positions of them: token ids,
labels of targets, and the positions' global numbers, which embeddings and dropout go by. So a rank
has the label of its stretch's last position, which is the first token of another rank's stretch,
and the loss of a rank is the sum over its own targets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from context_parallel.heads import heads_attention
from context_parallel.positions import multiple, zigzag
from context_parallel.ring import ring_attention
from runtime.communicator import Communicator
from runtime.dropout import mixed
from training.tasks.experts import RoutedFeedForward
from training.tasks.gpt2 import Attention, Sequences, numbers_of_targets

ATTENTION: dict[str, Callable[..., Tensor]] = {"ring": ring_attention, "heads": heads_attention}
NO_LABEL = -1


def attend_across(layers: list[nn.Module], ranks: Communicator, kind: str) -> None:
    """Tells layers that need all positions of a sequence how to meet other ranks."""
    for layer in layers:
        if isinstance(layer, Attention):
            layer.across_ranks = partial(ATTENTION[kind], ranks)
        if isinstance(layer, RoutedFeedForward):  # the balance of a sequence
            layer.contexts = ranks


def own_positions(
    x: Sequences, labels: Tensor, ranks: Communicator, tensor_ranks: int = 1
) -> tuple[Sequences, Tensor]:
    """This rank's positions of a micro-batch, and the labels of the targets among them. It is
    padded, so that ranks have equally many, and `tensor_ranks` can divide them again. The host
    waits for a GPU only if some positions have no target."""
    B, T = x.hidden.shape
    assert x.targets is not None
    targets = numbers_of_targets(x.targets) if x.targets.dim() == 2 else x.targets
    grid = x.hidden.new_full((B * T,), NO_LABEL).index_copy(0, targets, labels).view(B, T)
    padding = -T % multiple(ranks.size, tensor_ranks)
    positions = zigzag(ranks.rank, ranks.size, T + padding, x.hidden.device)
    ids = F.pad(x.hidden, (0, padding)).index_select(1, positions)
    own_labels = F.pad(grid, (0, padding), value=NO_LABEL).index_select(1, positions).flatten()
    if len(targets) == B * T and not padding:
        own_targets = torch.arange(len(own_labels), device=own_labels.device)
    else:
        own_targets = (own_labels != NO_LABEL).nonzero()[:, 0]
    keys = mixed(x.keys, 0, ranks.rank) if isinstance(x.keys, int) else x.keys  # a seed
    x = x._replace(hidden=ids, targets=own_targets, keys=keys, positions=positions)
    return x, own_labels[own_targets]


def rows_in_order(rows: Tensor, places: Tensor, ranks: Communicator) -> Tensor | None:
    """The rows of all ranks, each at its place in the whole, on the first rank; elsewhere None."""
    numbers = ranks.gather_numbers([len(rows)], rows.device)
    lengths = [[n] + [0] * (ranks.size - 1) for (n,) in numbers]  # all to the first
    rows, places = ranks.all_to_all(rows, lengths), ranks.all_to_all(places, lengths)
    return rows[places.argsort()] if ranks.rank == 0 else None

"""The tensors of a checkpoint as files, by `torch.distributed.checkpoint`.

The library wants to know which rectangles of which tensors a rank holds (a save plan), and where
they are in memory. It decides which of several ranks writes a rectangle that all of them hold.

training/checkpoint.py imports this module only where it writes or reads, since importing the
library takes a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .launch.world import World
from .layouts.layout import Held


class RectanglesPlanner(DefaultSavePlanner):
    """A plan to save what this rank holds, the largest rectangle first. Of the ranks that hold the
    same rectangle, the library picks the one with the least to write so far: in this order the
    ranks are balanced."""

    def __init__(self, held: Iterable[Held]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        largest_first = sorted(held, key=lambda x: -x.tensor.nbytes)
        self.held = {(x.name, x.offsets): x for x in largest_first if x.tensor.numel()}

    def create_local_plan(self) -> SavePlan:
        """The rectangles to write."""
        items = []
        for (name, offsets), x in self.held.items():
            chunk = ChunkStorageMetadata(torch.Size(offsets), x.tensor.shape)
            data = TensorWriteData(chunk, TensorProperties(x.tensor.dtype), torch.Size(x.shape))
            index = MetadataIndex(name, chunk.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The memory of a rectangle."""
        assert index.offset is not None
        return self.held[index.fqn, tuple(index.offset)].tensor.detach()


def write(folder: Path, held: Iterable[Held], world: World) -> None:
    """Writes what the ranks hold; all call it together. Raises, on all ranks, the error of one."""
    planner, alone = RectanglesPlanner(held), world.world_size == 1
    writer: Any = FileSystemWriter(folder)
    options = {"process_group": world.group, "no_dist": alone}
    writer.write_data = world.last.during("checkpoint")(writer.write_data)
    try:
        with world.last.waiting():  # except while it writes
            save({}, storage_writer=writer, planner=planner, **options)
    except CheckpointException as raised:
        raise next(iter(raised.failures.values()))[0] from None


def read(folder: Path, metadata: Any, name: str, tensor: Tensor) -> None:
    """Fills a whole tensor from all rectangles that were written of it, on this rank alone."""
    reader = FileSystemReader(folder)
    reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]
    load({name: tensor}, storage_reader=reader, no_dist=True)

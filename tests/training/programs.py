"""What ranks run in the tests of the launcher. It imports little, since every rank imports it.

python -m tests.training.programs NAME        runs NAME on two ranks of one program
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

import psutil
import torch
import torch.distributed as dist

from training.launch import launch as launcher
from training.launch.errors import UserError, refuse, torchrun_world_size
from training.launch.signals import ENDING_SIGNALS, end_process, handlers
from training.launch.world import World
from training.options import Options


def describe(world: World, folder: Path, *_: object) -> None:
    """Writes what the rank knows of itself, and the sum of all ranks + 1."""
    total = torch.tensor([world.rank + 1])
    dist.all_reduce(total)
    process = psutil.Process()
    known = {
        "place": [world.rank, world.world_size, world.local_rank, str(world.device), world.is_main],
        "sum": total.item(),
        "cores": process.cpu_affinity(),
        "threads": torch.get_num_threads(),
        "ips": [c.laddr.ip for c in process.net_connections()],
        "returned": [returned(process, size << 20) for size in (16, 48)],
    }
    dist.barrier()  # nobody has left while another looks for its sockets
    (folder / f"{world.rank}.json").write_text(json.dumps(known))


def returned(process: psutil.Process, size: int) -> bool:
    """Whether the system gets memory of this many bytes back when it is freed."""
    memory = bytearray(size)
    held = process.memory_info().rss
    del memory
    return held - process.memory_info().rss > size // 2


def raise_on_one(world: World) -> None:
    """Rank 1 has a bug; rank 0 waits for it, and would for minutes."""
    if world.rank == 1:
        raise ValueError("the bug of rank 1")
    dist.barrier()


def meet(world: World, folder: Path) -> NoReturn:
    """Writes down whom the ranks have met, by the parents of all; and stays."""
    parent = torch.tensor([os.getppid()])
    parents = [torch.zeros_like(parent) for _ in range(world.world_size)]
    dist.all_gather(parents, parent)
    aside = folder / f".{world.rank}"
    aside.write_text(json.dumps([int(p) for p in parents]))
    aside.rename(folder / f"{world.rank}.json")
    while True:
        threading.Event().wait()


def misfortunes(world: World, folder: Path) -> None:
    """What befalls the attempts that torchrun makes of one run, one after the other."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (folder / f"attempt{attempt}").touch()
    if attempt == 0:
        raise_on_one(world)
    else:
        meet(world, folder)


if __name__ == "__main__":
    launcher.libraries = lambda args: []  # noqa: ARG005 (they make no optimizer)
    name, *folders = sys.argv[1:]
    settings = Options(
        world_size=torchrun_world_size() or 2, model="vgg16", device="cpu", timeout=60
    )
    with handlers(ENDING_SIGNALS, end_process):
        try:
            launcher.launch(globals()[name], settings, *map(Path, folders))
        except UserError as error:
            refuse(f"{error}\n")

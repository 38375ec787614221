"""Reports ranks that share CPU cores. That is allowed, e.g. to try more ranks than there are cores,
but then speeds say little about ranks with their own cores."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

from runtime.cores import core_slice

from .world import World, gather_over_ranks


def core_notes(world: World) -> list[str]:
    """The notes of `sharing` about the ranks of a run. All ranks call it together, each already
    bound to its cores. On GPUs there are none."""
    if world.device.type != "cpu" or world.world_size == 1:
        return []
    return sharing(gather_over_ranks((socket.gethostname(), core_slice(0, 1)), world))


def sharing(cores: Iterable[tuple[str, Sequence[int]]], who: str = "ranks") -> list[str]:
    """A line for every host on which workers share cores; `cores` has each worker's host and the
    cores to which it is bound there."""
    hosts: dict[str, list[Sequence[int]]] = {}
    for host, mine in cores:
        hosts.setdefault(host, []).append(mine)
    lines = []
    for host, workers in hosts.items():
        wanted, there = sum(map(len, workers)), len(set().union(*workers))
        if wanted > there:
            where = f" on {host}" if len(hosts) > 1 else ""
            lines.append(
                f"{len(workers)} {who}{where} want {wanted} CPU cores and share {there}: they take "
                "turns, and steps take longer."
            )
    return lines

"""Ranks find each other: on one machine over loopback alone, under torchrun in its store.

A process group needs a store, in which ranks leave their addresses. On one machine the program that
starts the ranks hosts it, on a socket that it has bound to 127.0.0.1 before.

torchrun has a store, too, and keeps it for all its attempts. Restarted ranks would find addresses
of the attempt before, and connect to ranks that are gone. On one host the number of the attempt
(TORCHELASTIC_RESTART_COUNT) keeps them apart; several hosts count differently. With
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun opens a new store for every attempt: several hosts
that may restart are refused without it.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from .errors import RunError, UserError

PORT = 11868  # for ranks that are given no store
LOOPBACK = "127.0.0.1"


def setup(
    rank: int,
    world_size: int,
    backend: str,
    *,
    timeout: float = 300.0,
    store: Any = None,
    host: str = LOOPBACK,
) -> None:
    """Joins the default process group, over the interface that reaches `host`.

    The ranks meet in `store`; without it in one that rank 0 hosts on this machine, on PORT.

    Raises:
        OSError: rank 0 cannot listen on the port.
        torch.distributed.DistError: a rank did not join within `timeout` seconds.
    """
    if store is None:
        store = connect(PORT, timeout) if rank else host_store(listen(PORT), timeout)
    stay_on_interface_to(host)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


def listen(port: int = 0) -> socket.socket:
    """A socket that listens on the loopback interface, on `port`; by default on a free one."""
    return socket.create_server((LOOPBACK, port), backlog=128)


def host_store(listener: socket.socket, timeout: float) -> Any:
    """The store of a process group, at a socket that it takes over. It waits for nobody."""
    port, limit = listener.getsockname()[1], timedelta(seconds=timeout)
    return dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK, port, None, True, limit, False, master_listen_fd=listener.detach()
    )


def connect(port: int, timeout: float) -> Any:
    """The store that another process of this machine hosts."""
    limit = timedelta(seconds=timeout)
    return dist.TCPStore(LOOPBACK, port, None, False, limit, False)  # type: ignore[attr-defined]


def stay_on_interface_to(host: str) -> None:
    """Makes ranks communicate over the interface that reaches `host`: loopback on one machine, the
    one that reaches torchrun's store on several, whatever their hostnames resolve to; or over the
    one that the user has chosen."""
    # Without a route torch chooses.
    with suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing: only looks up the route
        if host != LOOPBACK and probe.getpeername()[0].startswith("127."):  # Debian: its own name
            probe.connect(("192.0.2.1", 1))  # no machine has it (RFC 5737): the default route
        own_address = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if own_address in [address.address for address in addresses]:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                # NCCL takes a bare name for a prefix: eth1 would match eth10, too.
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def agree_on_backend(store: Any, rank: int, world_size: int, gpu: str) -> str:
    """NCCL if every rank has its own GPU, and gloo for what their hosts tell each other, so that
    these need not wait for the GPUs; gloo alone otherwise. All ranks call it together.

    Args:
        gpu: the UUID of this rank's GPU; empty without one. How many GPUs a rank sees does not tell
            whose they are: a scheduler may show each rank its own alone, or the same to all.

    Raises:
        RunError: ranks did not come within the time-out of the store; it names them.
    """
    keys = [f"GPU of rank {r}" for r in range(world_size)]
    store.set(keys[rank], gpu)
    try:
        gpus = store.multi_get(keys)  # waits for all
    except dist.DistError:
        missing = [str(r) for r, key in enumerate(keys) if not store.check([key])]
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise RunError(
            f"rank {rank} has waited {store.timeout.total_seconds():g} s at the start, and {who} "
            f"of {world_size} did not come: look at their hosts, or give them longer with --timeout"
        ) from None
    return "cpu:gloo,cuda:nccl" if len({*gpus} - {b""}) == world_size else "gloo"


def meet(timeout: float) -> Any:
    """A store that only the ranks of this attempt of torchrun have. All call it together.

    Raises:
        UserError: the next attempt would find what this one leaves there.
    """
    attempt, shared = "", os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared:
        several, restarts = os.environ["GROUP_WORLD_SIZE"], os.environ["TORCHELASTIC_MAX_RESTARTS"]
        if int(several) > 1 and int(restarts):
            raise UserError(
                f"torchrun --max-restarts {restarts} on {several} hosts: restarted ranks would "
                "look for those of the attempt before; export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
                "on every host, before torchrun --rdzv-backend c10d, gives each attempt its store"
            )
        attempt = f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}"
    store, *_ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    return dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]

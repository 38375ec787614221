"""Ranks find each other: on one machine over loopback alone, under torchrun in its store.

A process group needs a store, in which ranks leave their addresses. On one machine the process that
starts the ranks hosts it, on a socket that it has bound to 127.0.0.1 before. torchrun has one, too.

Problem: torchrun keeps one store for all its attempts and never clears it, so restarted ranks find
addresses of the attempt before, and connect to ranks that are gone. The hosts' counts of restarts
(TORCHELASTIC_RESTART_COUNT) differ, as does the number of ranks if a host has left.

Idea: every rank writes a new random word. Rank 0 reads the words of all, and proposes their list.
A rank that finds its own word in the list confirms it. If all have confirmed it, no word was left
by a rank that is gone, and rank 0 closes the meeting; otherwise it reads the words again.

Cost: a few messages of a rank, and at most BEAT seconds after the last has come.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswerError
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import psutil
import torch.distributed as dist

from .errors import RunError, UserError

T = TypeVar("T")
DEFAULT_PORT = 11868
LOOPBACK = "127.0.0.1"
BEAT = 0.02  # seconds between looks


def setup(
    rank: int,
    world_size: int,
    backend: str,
    *,
    port: int = DEFAULT_PORT,
    timeout: float = 300.0,
    store: Any = None,
    host: str = LOOPBACK,
) -> None:
    """Joins the default process group, over the interface that reaches `host`.

    The ranks meet in `store`; without it in one that rank 0 hosts on this machine, on `port`.

    Raises:
        UserError: rank 0 cannot listen on the port.
        torch.distributed.DistError: a rank did not join within `timeout` seconds.
    """
    if store is None:
        hosts = rank == 0
        store = host_store(listen(port), timeout) if hosts else connect(LOOPBACK, port, timeout)
    stay_on_interface_to(host)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


def listen(port: int = 0) -> socket.socket:
    """A socket that listens on the loopback interface, on `port`; by default on a free one. Raises
    UserError if it cannot."""
    try:
        return socket.create_server((LOOPBACK, port), backlog=128)
    except (OSError, OverflowError) as error:  # the latter: no such port
        reason = getattr(error, "strerror", None) or "ports go from 0 to 65535"
        raise UserError(
            f"--master_port {port}: {reason}; without the option a free port is chosen"
        ) from None


def host_store(listener: socket.socket, timeout: float) -> Any:
    """The store of a process group, at a socket that it takes over. It waits for nobody."""
    port, limit = listener.getsockname()[1], timedelta(seconds=timeout)
    return dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK, port, None, True, limit, False, master_listen_fd=listener.detach()
    )


def connect(host: str, port: int, timeout: float, hosted_here: bool = False) -> Any:
    """A store that a process on `host` hosts, or this one on all its interfaces."""
    limit = timedelta(seconds=timeout)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, hosted_here, limit, False
    )


def stay_on_interface_to(host: str) -> None:
    """Makes ranks communicate over the interface that reaches `host`: loopback on one machine, the
    one that reaches torchrun's store on several, whatever their hostnames resolve to. On several
    machines the user's own choice is kept."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    if str(address[0]).startswith("127.") and address[0] != LOOPBACK:  # Debian's, of its own name
        address = ("192.0.2.1", 1)  # no machine's (RFC 5737): the interface of the default route
    with socket.socket(family, kind) as probe:
        with suppress(OSError):  # no route: torch chooses
            probe.connect(address)  # sends nothing: only looks up the route
        here = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if here in [address.address for address in addresses]:
            # NCCL takes a bare name for a prefix: eth1 would match eth10, too.
            exact = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
            for variable, value in exact.items():
                if host == LOOPBACK or variable not in os.environ:
                    os.environ[variable] = value


def agree_on_backend(store: Any, rank: int, world_size: int, gpu: str) -> str:
    """NCCL where every rank has a GPU of its own, and gloo for what their hosts tell each other, so
    that they need not wait for the GPUs; gloo alone otherwise. All ranks call it together.

    Args:
        gpu: the UUID of this rank's GPU; empty without one. How many GPUs a rank sees does not tell
            whose they are: a scheduler may show each rank its own alone, or the same to all.
    """
    keys = [f"GPU of rank {r}" for r in range(world_size)]
    store.set(keys[rank], gpu)
    gpus = store.multi_get(keys)  # waits for all
    return "cpu:gloo,cuda:nccl" if len({*gpus} - {b""}) == world_size else "gloo"


def in_time(seconds: float, ask: Callable[[], T]) -> T:
    """What ask() returns or raises. NoAnswerError if that takes longer: a store whose host is
    stopped keeps who asks it waiting for ever."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # ended with the process
    return answer.result(seconds)


def meet(rank: int, world_size: int, timeout: float) -> Any:
    """A store that only the ranks of this attempt of torchrun have. All call it together.

    Raises:
        RunError: a rank did not come, or the store did not answer, within `timeout` seconds.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted_here = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    began = time.monotonic()

    def come() -> Any:
        store = connect(host, port, timeout, hosted_here)
        return fresh_part(store, rank, world_size, timeout, began)

    try:
        return in_time(timeout + 1, come)  # it gives up by itself if the store answers
    except NoAnswerError:
        raise RunError(
            f"rank {rank} has waited {timeout:g} s at the start, and torchrun's store did not "
            f"answer: look at its host, {host}, or give it longer with --timeout"
        ) from None


def fresh_part(
    store: Any, rank: int, world_size: int, timeout: float, began: float | None = None
) -> Any:
    """The part of torchrun's store that only the ranks of this attempt have. All call it together.

    Raises:
        RunError: a rank did not come within `timeout` seconds of `began`, by default of the call;
            it names those that are missing.
    """
    word, end = uuid4().hex, (began or time.monotonic()) + timeout
    words = [f"word {r} of {world_size}" for r in range(world_size)]
    proposed = f"list of {world_size}"
    store.set(words[rank], word)
    while time.monotonic() < end:
        if rank == 0 and store.check(words):
            store.set(proposed, " ".join(store.get(key).decode() for key in words))
        if store.check([proposed]):
            found = store.get(proposed).decode()
            if found.split()[rank] == word:
                store.set(f"{found} {rank}", "confirmed")
                if rank == 0 and store.check([f"{found} {r}" for r in range(world_size)]):
                    store.set(f"{found} closed", "")
                if store.check([f"{found} closed"]):
                    own = found.split()[0]  # rank 0's, which no other attempt has
                    return dist.PrefixStore(own, store)  # type: ignore[attr-defined]
        time.sleep(BEAT)
    there = store.get(proposed).decode() if store.check([proposed]) else ""
    keys = [f"{there} {r}" for r in range(world_size)] if word in there else words
    missing = [r for r, key in enumerate(keys) if not store.check([key])] or [0]
    ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    raise RunError(
        f"rank {rank} has waited {timeout:g} s at the start, and {ranks} of {world_size} did not "
        "come: look at their hosts, or give them longer with --timeout"
    )

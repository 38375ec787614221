"""Hosts that share no folder: network namespaces, joined by a switch.

    host 0: 10.213.7.1 --- port0 --+
    host 1: 10.213.7.2 --- port1 --+-- switch
    host 2: 10.213.7.3 --- port2 --+

Several hosts need root and `ip`. A single host is this machine itself, and needs neither.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

ADDRESS = "10.213.7.{}"


class MissingError(Exception):
    """What cannot be tested here, and why."""


def command(words: str) -> None:
    """Runs `ip`, say. Raises MissingError if it cannot."""
    try:
        subprocess.run(words.split(), check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()
        raise MissingError(f"NOT TESTED: `{words}`: {why}") from None


class Hosts:
    """`number` hosts that reach each other and nothing else. To be used with `with`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.names = [f"host{i}-{os.getpid()}" for i in range(number)]
        self.switch = f"switch-{os.getpid()}"

    def __enter__(self) -> Hosts:
        try:
            self._build()
        except MissingError:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        if self.number == 1:
            return
        command(f"ip netns add {self.switch}")
        command(f"ip -n {self.switch} link add bridge0 type bridge")
        command(f"ip -n {self.switch} link set bridge0 up")
        for i, name in enumerate(self.names):
            command(f"ip netns add {name}")
            ends = f"port{i} type veth peer link{i} netns {name}"
            command(f"ip -n {self.switch} link add {ends}")
            command(f"ip -n {self.switch} link set port{i} master bridge0 up")
            command(f"ip -n {name} addr add {self.address(i)}/24 dev link{i}")
            command(f"ip -n {name} link set link{i} up")
            command(f"ip -n {name} link set lo up")

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self.switch) if self.number > 1 else ():
            with suppress(MissingError):
                command(f"ip netns del {name}")

    def address(self, host: int) -> str:
        """The address of a host, for the others."""
        return ADDRESS.format(host + 1) if self.number > 1 else "127.0.0.1"

    def inside(self, host: int) -> list[str]:
        """The words before a command that is run on a host."""
        return ["ip", "netns", "exec", self.names[host]] if self.number > 1 else []

    def cut(self, host: int) -> None:
        """Whatever is sent to the host or by it is lost from now on."""
        command(f"ip -n {self.switch} link set port{host} down")

    def mend(self, host: int) -> None:
        """Undoes `cut`."""
        command(f"ip -n {self.switch} link set port{host} up")

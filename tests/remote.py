"""Tests whose body runs in processes that a fixture has started: ranks, or one with a device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

Test = Callable[..., None]


def remote(
    fixture: str, send: Callable[[Any, Test, list[Any]], object], added: int = 0
) -> Callable[[Test], Test]:
    """A decorator: pytest calls `send` with the fixture, the test and its arguments, less the first
    ones, which are `added` there. The other process finds the test by its name, and unwraps it."""

    def decorate(test: Test) -> Test:
        names = [*inspect.signature(test).parameters][added:]

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            send(arguments[fixture], run, [arguments[name] for name in names])

        asked = [Parameter(name, Parameter.KEYWORD_ONLY) for name in (*names, fixture)]
        run.__signature__ = Signature(asked)  # type: ignore[attr-defined]
        return run

    return decorate


on_device = remote("device", lambda device, test, args: device.run(test, *args))


def on_ranks(number: int) -> Callable[[Test], Test]:
    """The body runs on each of so many ranks: it gets its rank and their number, and behind these
    what pytest gives."""
    return remote("world_of", lambda world_of, test, args: world_of(number).run(test, *args), 2)

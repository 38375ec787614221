"""A recorder for tests."""

from __future__ import annotations


class Paused:
    """One that is not to be called: it does not record now."""

    recording = False

    def __call__(self, *_: object) -> None:
        raise AssertionError("nothing is recorded now")

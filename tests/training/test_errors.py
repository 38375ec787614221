"""A process that is asked to end does so by way of its own ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from training.errors import Interrupted, signals_end


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    """The signals are as in a new process, whatever other tests have done to them."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_being_asked_to_end(number: signal.Signals) -> None:
    """What the end of the terminal breaks besides is not the reason."""
    with pytest.raises(Interrupted) as end, signals_end():
        try:
            os.kill(os.getpid(), number)
        finally:
            if number == signal.SIGHUP:
                raise OSError("a progress bar that cannot be drawn any more")
    assert end.value.code == 128 + number
    assert signal.getsignal(number) is signal.SIG_DFL


def test_what_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_end():
        os.kill(os.getpid(), signal.SIGHUP)


def test_ranks_of_torchruns_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with signals_end():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

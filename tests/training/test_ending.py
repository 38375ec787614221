"""A process that is asked to end does so by way of its own ends."""

from __future__ import annotations

import os
import signal

import pytest

from training.ending import Interrupted, signals_end


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_being_asked_to_end(name: str) -> None:
    number = signal.Signals[name]
    assert signal.getsignal(number) is signal.SIG_DFL
    cleaned = []
    with pytest.raises(Interrupted) as end, signals_end():
        try:
            os.kill(os.getpid(), number)
        finally:
            cleaned.append(True)
    assert (end.value.code, cleaned) == (128 + number, [True])
    assert signal.getsignal(number) is signal.SIG_DFL


def test_what_the_end_of_the_terminal_breaks_is_not_the_reason() -> None:
    with pytest.raises(Interrupted) as end, signals_end():
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        finally:
            raise OSError("a progress bar that cannot be drawn any more")
    assert end.value.code == 129


def test_what_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_end():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ranks_of_torchruns_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with signals_end():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

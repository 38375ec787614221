"""Fixtures of these tests: sentence pairs in files, and the one run of two ranks that all share."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from tests.training.programs import describe
from training.launch import DEFAULT_PORT, LOOPBACK, Settings, launch


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is out of bounds, and nobody is torchrun's child."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


@dataclass(frozen=True)
class Described:
    """What `describe` found out on each of two ranks, and what the parent printed."""

    ranks: list[dict[str, Any]]
    stderr: str


@pytest.fixture(scope="session")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Described]:
    """A run of two ranks while port 11868 is taken, with more work than fits a pipe's buffer."""
    folder = tmp_path_factory.mktemp("described")
    capture = pytest.MonkeyPatch()
    printed: list[str] = []
    with socket.socket() as taken:
        with suppress(OSError):  # another program's; as good
            taken.bind((LOOPBACK, DEFAULT_PORT))
            taken.listen()
        capture.setattr("sys.stderr.write", printed.append, raising=False)
        try:
            launch(describe, Settings(2, device="cpu", timeout=60), folder, "x" * 1_000_000)
        finally:
            capture.undo()
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    yield Described(ranks, "".join(printed))

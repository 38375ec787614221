"""Fixtures of these tests: sentence pairs in files, and the one run of two ranks that all share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.training.programs import describe
from training import launch as launcher
from training.launch import Settings, launch, listen


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
    taken_port: int


@pytest.fixture(scope="session")
def described(tmp_path_factory: pytest.TempPathFactory) -> Described:
    """A run of two ranks while the default port is taken, with more work than a pipe holds."""
    folder = tmp_path_factory.mktemp("described")
    capture = pytest.MonkeyPatch()
    printed: list[str] = []
    with listen(0) as taken:
        port = taken.getsockname()[1]
        capture.setattr(launcher, "DEFAULT_PORT", port)  # 11868 may be another program's
        capture.setattr("sys.stderr.write", printed.append, raising=False)
        try:
            launch(describe, Settings(2, device="cpu", timeout=60), folder, "x" * 1_000_000)
        finally:
            capture.undo()
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return Described(ranks, "".join(printed), port)

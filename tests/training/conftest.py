"""What all of these tests need."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is out of bounds, and nobody is torchrun's child."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

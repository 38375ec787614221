"""From what this computer was measured to do to the figures of a machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from planning import calibrate
from planning.describe import machine
from planning.passes import group


def test_a_machine_has_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-reduce that is predicted takes as long as one that was measured."""
    measured = [100e-6 + size * 1024 / 2e9 for size in calibrate.MESSAGES]

    def spawn(_: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
        assert nprocs == args[2] == 2
        figures = {
            "best": 80e9, "flops": 60e9, "added": 40e9, "moved": 10e9, "kernel": 2e-6,
            "skew": 0.1, "peak": 0.3,
        }  # fmt: skip
        sums = zip(calibrate.MESSAGES, measured, strict=True)
        figures |= {f"{kib} KiB": took for kib, took in sums}
        Path(args[1]).write_text(json.dumps(figures))

    monkeypatch.setattr(calibrate, "spawn", spawn)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(calibrate.calibrate()))
    mine = machine(str(path))
    assert mine.per_second("fp32") == pytest.approx(60e9)
    assert mine.memory_per_second == pytest.approx(10e9)
    assert (mine.gpus_per_node, mine.reserve_gb, mine.kernel_us, mine.skew) == (2, 0.3, 2.0, 0.1)
    predicted = [group(mine, 2, 1).reduce(1024 * size) for size in calibrate.MESSAGES]
    assert predicted == pytest.approx(measured, rel=0.01)
    # Four ranks on two cores compute and copy in turns, each half as fast.
    half, ring = mine.shared(4), group(replace(mine, gpus_per_node=4), 4, 1)
    assert half.per_second("fp32") == mine.per_second("fp32") / 2
    assert half.kernel_us == 2 * mine.kernel_us
    assert group(half, 4, 1).reduce(1e6) == pytest.approx(2 * ring.reduce(1e6))
    assert mine.shared(2) == mine

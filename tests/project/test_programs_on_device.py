"""Every program on the device without hardware: what it learns in two epochs, interrupted and
resumed in the second, evaluates and translates is what one process does on the CPU, by name.
Without dropout, whose masks a device draws in its own way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.session import NCCL, Device, ranks
from tests.project.conftest import Learn
from tests.project.programs import FLOW, assert_same_run, finish, printed_by_generate

pytestmark = pytest.mark.usefixtures("elsewhere")

LAYOUTS = [
    (1, "train single"),
    (1, f"run_pipeline {FLOW} --schedule zbv"),
    (2, "train fsdp"),  # four ranks, and other axes: tests/device/test_processes.py
    (2, "train ddp --check_weights --check_output"),
]


def on_device(line: str, n: int, workdir: Path) -> str:
    """Interrupted after step 5 of 8, one after a checkpoint. What the rest says."""
    world = ranks(n, NCCL) if n > 1 else None
    line += f" --device cuda --save_every 2 --resume --workdir {workdir}"
    finish(line, world, stop_at=5)
    return finish(line, world)


@pytest.mark.parametrize(("n", "line"), LAYOUTS, ids=[line for _, line in LAYOUTS])
def test_a_program_learns_on_a_device_what_it_learns_on_the_cpu(
    device: Device, learned: Learn, tmp_path: Path, n: int, line: str
) -> None:
    one, workdir = learned("pairs"), tmp_path / "work"
    printed = device.run(on_device, f"{line} {one.line}", n, workdir)
    assert ": 4 steps done." in printed and "cuda" in printed
    assert_same_run(workdir, one.workdir)


def test_generate_on_a_device_translates_as_on_the_cpu(device: Device, learned: Learn) -> None:
    words = [str(learned("pairs").workdir), "Der Mann", "Wir sehen zwei Häuser", "--device"]
    found = device.run(printed_by_generate, *words, "cuda")
    assert found.count("\n") == 2
    assert found == printed_by_generate(*words, "cpu")

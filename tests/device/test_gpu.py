"""`make gpu` as far as it goes without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.device.session import Device, on_device, ranks
from tests.project.programs import parse
from training.launch.world import World


def found(section: str) -> list[tuple[str, bool | None]]:
    from benchmarks import gpu  # on the device

    return [(line.name, line.ok) for line in gpu.SECTIONS[section]()]


def test_sections_run(device: Device) -> None:
    """Those that need hardware say so. Not here: `verify`, which has tests of its own
    (test_processes.py), and `races`, whose bits only a GPU could change."""
    assert device.run(found, "waits") == [
        ("transformers, a plain loop", None),
        ("one process", True),
        ("one process, 4 micro-batches", True),
    ]
    for section in ("checks", "memory", "speed"):
        assert [ok for _, ok in device.run(found, section)] == [None]


def test_gpus_that_torch_cannot_use_are_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a driver that is too old: else all would run without hardware, and hold."""
    from benchmarks import gpu

    monkeypatch.setattr("sys.argv", ["gpu"])
    monkeypatch.setattr("os.execve", lambda *_: pytest.fail("it goes on without hardware"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit):
        gpu.main()
    assert "cannot use the 1 GPU here: a newer driver" in capsys.readouterr().err


def test_a_program_that_does_not_end_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import gpu

    monkeypatch.setattr(gpu, "LIMIT", 1.0)
    program = "import time; print('step 41', flush=True); time.sleep(60)"
    assert gpu._ended([sys.executable, "-c", program], tmp_path) == "had not ended after 1 s"
    assert "step 41" in capsys.readouterr().out


def memory(rank: int, world_size: int, folder: Path) -> list[dict[str, int]]:
    """What rank 0 holds of whole replicas, and under ZeRO 1, 2 and 3."""
    import torch

    from benchmarks import gpu

    found = []
    world = World(rank, world_size, rank, torch.device("cuda", 0))
    for zero in range(4):
        gpu._memory_rank(world, zero, folder)
        if rank == 0:  # which writes it
            found.append(json.loads((folder / "memory.json").read_text())[0])
    return found


@on_device
def test_memory_is_measured_of_every_stage(tmp_path: Path) -> None:
    whole, *zeros = ranks(2).run(memory, tmp_path)[0]
    shares = [{kind: zero[kind] / whole[kind] for kind in whole} for zero in zeros]
    assert all(share["optimizer"] < 0.55 and share["gradients"] < 0.55 for share in shares), shares
    assert [share["parameters"] < 1 for share in shares] == [False, False, True]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_its_command_lines_fit_any_number_of_gpus(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import gpu

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: n)
    lines = [line.replace(".py", "", 1) for chain in gpu.programs(n) for line in chain]
    found = [parse(f"{line} --device cuda") for line in lines if not line.startswith("generate")]
    assert len(found) == 9
    assert [args.tp for args in found if args.strategy == "tensor"] == [{3: 2, 8: 4}.get(n, n)]

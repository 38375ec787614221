"""`make gpu` as far as it goes without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.gpu import __main__ as gpu
from tests.project.programs import parse
from tests.which import see_gpus


def test_gpus_that_torch_cannot_use_are_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a driver that is too old. Where there is none it says so, and fails nothing."""
    monkeypatch.setattr("sys.argv", ["gpu"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit):
        gpu.main()
    assert "cannot use the 1 GPU here: a newer driver" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    gpu.main()
    assert "skipped: no GPU" in capsys.readouterr().out


def test_a_program_that_does_not_end_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "LIMIT", 1.0)
    program = "import time; print('step 41', flush=True); time.sleep(60)"
    assert gpu.failure_of([sys.executable, "-c", program], tmp_path) == "had not ended after 1 s"
    assert "step 41" in capsys.readouterr().out


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_its_command_lines_fit_any_number_of_gpus(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    see_gpus(n, monkeypatch)
    lines = [line.replace(".py", "", 1) for chain in gpu.programs(n) for line in chain]
    found = [parse(f"{line} --device cuda") for line in lines if not line.startswith("generate")]
    assert len(found) == 10
    assert [args.tp for args in found if args.strategy == "tensor"] == [{3: 2, 8: 4}.get(n, n)]

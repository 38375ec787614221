"""`make report`: runs that are kept, and a page whose numbers are those of their files."""

from __future__ import annotations

import json
import re
import shlex
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import torch

from project import report
from project.figures.style import STYLE
from tests.project.programs import on_rank, run
from tests.ranks import Ranks
from training.launch.errors import RunError

pytestmark = pytest.mark.usefixtures("elsewhere")

TINY = {
    "n_layer": "2", "n_embd": "16", "n_head": "2", "vocab_size": "300", "model_max_length": "64",
    "batch_size": "8", "n_validation": "9", "n_test": "3", "learning_rate": "0.01",
}  # fmt: skip
SIZES = ["--n_train", "24", "--n_epochs", "3", "--workdir", "runs", "--output", "figures"]
NAMES = ["dp1", "dp2", "mp", "pp", "gradients1", "gradients2"]
FIGURES = {
    "data_parallel_training_time.png", "data_parallel_throughput.png", "losses.png",
    "pipeline_training_time.png", "pipeline_throughput.png", "schedule_pp.png",
    "timeline_dp2.png", "timeline_pp.png",
}  # fmt: skip


def in_folder(folder: Path, _: int, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(folder)


def make_here(ranks: Ranks, made: list[str], planned: report.MadeRun) -> None:
    """Runs it on the ranks of the tests, which have imported their libraries."""
    program, *options = planned.command
    line = f"{Path(program).stem} {shlex.join(options)}"
    made.append(planned.folder.name)
    planned.folder.mkdir(parents=True, exist_ok=True)
    alone = "--world_size=2" not in options
    if "pytest" in planned.options:
        line = line.replace(f"--workdir={planned.folder}", "--workdir=.")
        tamper = partial(in_folder, planned.folder.resolve())
        found = [on_rank(0, 1, line, tamper)] if alone else ranks.run(on_rank, line, tamper)
        assert [error for _, error in found] == [None] * len(found)
    else:
        line = line.replace(f"--workdir={planned.folder}", f"--workdir={planned.folder.resolve()}")
        assert run(line, None if alone else ranks)[1] is None


def test_the_page_of_tiny_runs(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    monkeypatch.setattr(report, "make", partial(make_here, ranks, made))
    monkeypatch.setattr(report, "COMMON", report.COMMON | TINY)
    monkeypatch.setitem(STYLE, "savefig.dpi", 30)  # pictures take longer than the runs
    monkeypatch.setattr("os.cpu_count", lambda: 1000)
    report.main(SIZES)
    assert made == NAMES
    assert {path.name for path in Path("figures").iterdir()} == FIGURES

    page = Path("runs/report.html").read_text("utf-8")
    loads = re.findall(r'(?:src|href)\s*=\s*"?(.{0,26})', page)
    assert loads == ["data:image/png;base64,iVBOR"[:26]] * len(FIGURES) and "<script" not in page
    text = " ".join(re.sub("<[^>]*>", "", page).split())

    def results(name: str, key: str) -> list[float]:
        paths = [Path(f"runs/{name}_epoch{epoch}.json") for epoch in (1, 2)]
        return [json.loads(path.read_text())[key] for path in paths]

    one, model, flow = (
        fmean(results(name, "training_time"))
        for name in ("dp1/rank0_results", "mp/eval_results", "pp/eval_results")
    )
    both = (results(f"dp2/rank{rank}_results", "training_time") for rank in range(2))
    two = fmean(map(max, zip(*both, strict=True)))
    assert f"two processes than one? {one / two:.2f}x by the time of an epoch" in text
    assert f"one stage at a time? {model / flow:.2f}x by the time of an epoch" in text
    assert "predicted 7.7%: 2(n-1)/(3m+2(n-1)) for n = 2, m = 8" in text  # 2 of 26
    assert "Do parallel runs learn the same? Yes." in text and "In none of 9 steps" in text
    assert "Do all ranks have the same gradients? Yes, to the last bit" in text

    # A page says so if the machine had other work.
    assert "do not trust the times" not in text
    path = Path("runs/dp2/summary.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"load": 1201.0}))
    report.main(SIZES)
    page = Path("runs/report.html").read_text("utf-8")
    assert "The load reached 1,201 on 1000 cores: other programs ran, or had just ended:" in page

    # What is finished is kept; a run whose options changed, or that lost its end, is made again.
    monkeypatch.setattr(report, "write_page", lambda *_: "")
    made.clear()
    Path("runs/pp/summary.json").unlink()
    capsys.readouterr()
    report.main(SIZES)
    assert made == ["pp"]
    assert "[2/6] two processes: finished before, in runs/dp2/" in capsys.readouterr().out
    runs = report.planned(Path("runs"), 24, 4)
    assert [run.finished() for run in runs.values()] == [False] * 4 + [True] * 2
    path = Path("runs/dp1/summary.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_epochs": 4}))
    assert runs["dp1"].finished() and runs["dp1"].summary["n_epochs"] == 4  # made again meanwhile

    # A rank with another gradient is found.
    path = Path("runs/gradients2/tests/model1_gradients.pth")
    gradients = torch.load(path, weights_only=True)
    gradients["transformer.h.1.ln_1.bias"][3] += 0.5
    torch.save(gradients, path)
    rows = report.compare_gradients(runs["gradients1"], runs["gradients2"])
    assert {row["name"]: row["ranks"] for row in rows if row["ranks"]} == {
        "transformer.h.1.ln_1.bias": pytest.approx(0.5)
    }
    assert all(row["alone"] < 1e-6 < row["largest"] for row in rows)


def test_a_run_that_fails_ends_the_report(tmp_path: Path) -> None:
    bad = report.MadeRun(tmp_path / "bad", "bad", {"num_devices": "none"}, ("summary.json",))
    with pytest.raises(RunError, match="the run bad ended with status 2; its command was: python "):
        report.make(bad)
    assert not bad.finished()


def test_one_epoch_is_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.parse(["--n_epochs", "1"])
    assert "--n_epochs 1: the first epoch is left out" in capsys.readouterr().err

"""The files and the table of a run."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from project.figures.epochs import read_epochs
from project.utils import run_program
from tests.project.programs import names_in, read_json
from training.files import moving, show, write_json
from training.launch.errors import RunError, UserError
from training.launch.world import World
from training.options import Options
from training.results import (
    Results,
    Totals,
    _wandb,
    check_trackers,
    holds_run,
    peak_bytes,
    set_aside,
    spread,
)
from training.tasks.task import Score

FULL = OSError(errno.ENOSPC, "No space left on device")
PAIRS = [{"de": "Bär", "en": "bear"}, {"de": "a", "en": "b"}]
TOTALS = Totals(loss_sum=3.0, count=2, positions=25_000, tokens=20_000, seconds=12.5)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """The results of a translation run on one rank."""
    units = ("positions/s", "real tokens/s")
    task: Any = SimpleNamespace(
        score_name="BLEU", score_title="BLEU", score_details={"bleu_tokenizer": "13a"},
        units=units, scored_examples=lambda: PAIRS,
    )  # fmt: skip
    model: Any = SimpleNamespace(results_per_rank=True, dp_rank=0, world=World(), task=task)
    return Results(Options(workdir=tmp_path), model)


class _OfTwoReplicas(World):
    def of_parts(self, part: int, value: Any) -> list[Any]:  # noqa: ARG002
        return [value, value]

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


def test_of_a_pipeline_rank_0_writes_for_all_stages_and_replicas(
    results: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else each rank for itself, also the second one of another host."""
    results.model.results_per_rank = False
    for rank in range(2):
        results.world = _OfTwoReplicas(rank)
        results.end_epoch(3, 1, TOTALS, 2.25, Score(33.125, ["Bäh", "b"]))
    assert names_in(tmp_path) == ["eval_results_epoch3.json", "gen_epoch3.json"]
    assert capsys.readouterr().out.count("Epoch 3") == 1
    assert read_json(tmp_path / "eval_results_epoch3.json") == {
        "training_loss": 1.5, "validation_loss": 2.25, "bleu": 33.125, "training_time": 12.5,
        "tokens_per_sec": 2 * 2000.0, "real_tokens_per_sec": 2 * 1600.0, "skipped_steps": 0,
        "bleu_tokenizer": "13a",
    }  # fmt: skip
    pairs = [{"example": PAIRS[0], "gen": "Bäh"}, {"example": PAIRS[1], "gen": "b"}]
    assert read_json(tmp_path / "gen_epoch3.json") == pairs
    assert "Bäh" in (tmp_path / "gen_epoch3.json").read_text("utf-8")  # not escaped
    results.model.results_per_rank, results.world = True, _OfTwoReplicas(3, 1, 1)
    results.end_epoch(4, 1, TOTALS, 2.25, Score(33.125, ["Bäh", "b"]))
    assert names_in(tmp_path)[2:] == ["rank3_gen_epoch4.json", "rank3_results_epoch4.json"]
    assert read_json(tmp_path / "rank3_results_epoch4.json")["tokens_per_sec"] == 2000.0
    assert results.history == 3 * [(12.5, 4000.0)]  # of all ranks


def test_the_table_and_the_lines_of_the_course(
    results: Results, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latter in a file, or if the course's script asks."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    results.say_start(7.25, Score(0.5))
    results.end_epoch(8, 1, TOTALS, 2.25, Score())  # too few steps to be scored
    results.args.benchmark_only = True
    results.end_epoch(0, 1, TOTALS, math.nan, Score())
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    results.args.benchmark_only, results.model.results_per_rank = False, False
    results.end_epoch(0, 1, TOTALS, 2.25, Score(33.125))
    assert capsys.readouterr().out.split("\n")[:-1] == [
        # epoch   train loss   valid. loss      BLEU    time   positions/s   real tokens/s
        "start                      7.250       0.5",
        "    9        1.500         2.250         -     12s         2,000           1,600",
        "    1        1.500             -         -     12s         2,000           1,600",
        "Epoch 0 on Rank 0: Training Time = 12.50, Tokens_per_sec = 2000.0",
        "    1        1.500         2.250      33.1     12s         2,000           1,600",
        "Epoch 0: Training Time = 12.50, Tokens_per_sec = 2000.0",
    ]
    results.generated, results.history = [], [(99.0, 1.0), (12.0, 102.0), (14.0, 104.0)]
    results.close()
    closing = "per epoch, without the first: 13.0 ± 1.4 s, 103 ± 1 positions/s\n\n"
    assert capsys.readouterr().out == closing
    assert [spread(s, "s") for s in ([4.0, 6.0], [50.0], [400.0])] == [
        "5.0 ± 1.4 s", "50.0 s", "400 s"
    ]  # fmt: skip


def test_a_summary_is_of_all_ranks_and_steps(results: Results, tmp_path: Path) -> None:
    ranks = [(10, {"parameters": 4}), (20, {"parameters": 5})]  # their memory and its parts
    results.world = Mock(is_main=True, device=torch.device("cpu"), gather=lambda _: ranks)
    results.model = Mock(description="two", stage_sizes=(1, 2), schedule=None, num_microbatches=3)
    lines: list[dict[str, Any]] = [{"loss": 3.0, "seconds": 9.0}, {"loss": None, "seconds": 2.0}]
    lines.insert(1, {"validation_loss": 7.0, "training_loss": 3.0, "bleu": 0.5})
    lines.append({"validation_loss": 2.0, "training_loss": 1.0, "bleu": 1.5})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text, "utf-8")
    results.summarize()
    summary = read_json(tmp_path / "summary.json")
    expected = {
        "peak_rss_bytes": [10, 20], "state_bytes": {"parameters": [4, 5]}, "loss": [3.0, None],
        "step_seconds": [9.0, 2.0], "validation_loss": 2.0, "bleu": 1.5, "num_microbatches": 3,
        "stage_sizes": [1, 2], "bleu_tokenizer": "13a",
    }  # fmt: skip
    assert {name: summary[name] for name in expected} == expected


def test_a_peak_stays_when_the_memory_is_given_back() -> None:
    before, size = psutil.Process().memory_info().rss, 300 << 20
    torch.ones(size, dtype=torch.uint8)
    assert peak_bytes(torch.device("cpu")) > before + 0.9 * size


def test_results_are_read_in_the_order_of_epochs(tmp_path: Path) -> None:
    """JSON has null where there is no number: readers of other languages refuse NaN."""
    losses = {"training_loss": 2.0, "validation_loss": 3.0}
    for epoch in (10, 9, 2):
        write_json(tmp_path / f"rank0_results_epoch{epoch}.json", losses | {"bleu": epoch})
    write_json(tmp_path / "rank1_results_epoch0.json", losses)
    write_json(tmp_path / "eval_results_epoch11.json", losses)  # resumed under another layout
    expected = [losses | {"bleu": epoch, "epoch": epoch + 1} for epoch in (2, 9, 10)]
    assert read_epochs(tmp_path, "rank0_results") == expected
    both = read_epochs(tmp_path, "rank0_results", "eval_results")
    assert both == [*expected, losses | {"epoch": 12}]
    path = tmp_path / "gen_epoch0.json"
    write_json(path, {**losses, "training_loss": math.nan, "b": [1.5, (-math.inf, 2)], "c": None})
    assert read_json(path) == {**losses, "training_loss": None, "b": [1.5, [None, 2]], "c": None}
    assert math.isnan(read_epochs(tmp_path, "gen")[0]["training_loss"])


def test_a_full_disk_leaves_what_was_there_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"loss": 1})

    monkeypatch.setattr(Path, "replace", Mock(side_effect=FULL))
    with pytest.raises(RunError) as error:
        write_json(path, {"loss": 2})
    assert str(error.value) == (
        f"{path}: cannot be written ({FULL.strerror}); make room there, or write elsewhere"
    )
    assert read_json(path) == {"loss": 1} and names_in(tmp_path) == ["summary.json"]


def test_an_earlier_run_is_set_aside(tmp_path: Path) -> None:
    """All that it has left, each time into a folder of its own, and nothing else. A user's own
    files that a run would replace go there, too, whether or not a run was there."""
    kept = ["my_notes.json", "exported", "options.json"]
    for name in kept:
        (tmp_path / name).write_text("mine")
    assert set_aside(tmp_path) is None  # no run was here, and the options are of the one to come
    for n, name in enumerate(("metrics.jsonl", "checkpoints/000001-epoch0-step4"), 1):
        left = [
            "training.png", "timeline_w.png", "rank0_results_epoch0.json", "config.json", name,
            "tokenizer.json", "options.json",
        ]  # fmt: skip
        (tmp_path / "checkpoints").mkdir()
        assert not holds_run(tmp_path)
        for file in left:
            (tmp_path / file).write_text(str(n))
        assert holds_run(tmp_path)
        assert set_aside(tmp_path) == tmp_path / f"earlier_{n}"
        assert [(tmp_path / f"earlier_{n}" / file).read_text() for file in left] == [str(n)] * 7
    for name in ("summary.json", "config.json", "tokenizer_config.json", "checkpoints"):
        (tmp_path / name).write_text("mine")
        assert set_aside(tmp_path) is not None
    kept.remove("options.json")
    assert names_in(tmp_path) == sorted([*kept, *(f"earlier_{n}" for n in range(1, 7))])


def test_wandb_asks_for_a_login_before_the_run_and_says_what_it_lacks_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    args = Options(workdir=tmp_path, wandb=True)
    with pytest.raises(UserError, match=r"^--wandb: nobody is logged in; `wandb login`, or WANDB_"):
        check_trackers(args)
    (tmp_path / ".netrc").touch()
    check_trackers(args)
    monkeypatch.setattr("wandb.init", Mock(side_effect=wandb.errors.UsageError("No API key")))
    with pytest.raises(RunError, match=r"^--wandb: No API key; `wandb login`, or WANDB_MODE=off"):
        _wandb(args)


def test_output_that_nobody_reads_any_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after `| head` has ended: a line of a run, nothing of another program, no traceback. A
    full disk is said."""
    for write, said in (
        (Mock(side_effect=FULL), r".*No space left on device; make room there, .*\n"),
        (lambda: show("a row"), r".* standard output: cannot be written \(Broken pipe\); .*\n"),
        (partial(print, "a row"), ""),  # written by Python itself, at its end
    ):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as pipe, monkeypatch.context() as patch:
            patch.setattr("sys.stdout", pipe)
            patch.setattr("os._exit", sys.exit)
            with pytest.raises(SystemExit) as end:
                run_program(write)
            with Path(os.devnull).open("w") as devnull:
                os.dup2(devnull.fileno(), writer)  # for what its buffer still holds
        assert end.value.code == 1
        assert re.fullmatch(said, capsys.readouterr().err)


def test_in_a_log_what_lasts_writes_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole ones, of which none is erased. On one rank, and not of what takes a moment."""
    assert [*moving("ab", "Short", 2, "step")] == ["a", "b"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("training.files.EVERY", 0.0)
    assert [*moving("ab", "Other rank", 2, "step", shown=False)] == ["a", "b"]
    with moving(None, "Epoch 1", 3, "step", done=1) as line:
        line.set_postfix_str("loss 3.2", refresh=False)
        line.update(2)
    assert [*moving("ab", "Tokenizing train", None, "pair", size=1024)] == ["a", "b"]
    said = capsys.readouterr().err
    assert re.sub(r"\d\d:\d\d|\?", "TIME", said).split("\n") == [
        "Epoch 1: step 1 of 3, TIME left", "Epoch 1: step 3 of 3, loss 3.2, TIME left",
        *(f"Tokenizing train: pair {n}, TIME" for n in (0, 1024, 2048)), "",
    ]  # fmt: skip

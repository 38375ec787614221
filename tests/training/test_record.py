"""The files and the table of a run."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from training.record import (
    HEADER,
    EpochResult,
    clear_results,
    epoch_line,
    read_results,
    write_epoch,
    write_json,
)

RESULT = EpochResult(
    training_loss=1.5,
    validation_loss=2.25,
    bleu=33.125,
    training_time=12.5,
    tokens_per_sec=1234.5,
    real_tokens_per_sec=1000.0,
)


def test_an_epoch_is_written_under_the_names_of_the_rank(tmp_path: Path) -> None:
    pairs = [{"de": "Bär", "en": "bear"}, {"de": "a", "en": "b"}]
    write_epoch(tmp_path, 3, RESULT, pairs, ["Bäh", "b"], rank=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "rank1_gen_epoch3.json",
        "rank1_results_epoch3.json",
    ]
    assert json.loads((tmp_path / "rank1_results_epoch3.json").read_text()) == {
        "training_loss": 1.5,
        "validation_loss": 2.25,
        "bleu": 33.125,
        "training_time": 12.5,
        "tokens_per_sec": 1234.5,
        "real_tokens_per_sec": 1000.0,
        "skipped_steps": 0,
    }
    text = (tmp_path / "rank1_gen_epoch3.json").read_text(encoding="utf-8")
    assert "Bäh" in text
    assert json.loads(text) == [
        {"example": {"de": "Bär", "en": "bear"}, "gen": "Bäh"},
        {"example": {"de": "a", "en": "b"}, "gen": "b"},
    ]


def test_an_epoch_without_rank_is_a_pipelines(tmp_path: Path) -> None:
    write_epoch(tmp_path, 0, RESULT, [{"de": "a", "en": "b"}], ["c"])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "eval_results_epoch0.json",
        "gen_epoch0.json",
    ]


def test_results_are_read_in_the_order_of_epochs(tmp_path: Path) -> None:
    for epoch in (10, 9, 2):
        write_json(tmp_path / f"rank0_results_epoch{epoch}.json", {"bleu": epoch})
    write_json(tmp_path / "rank1_results_epoch0.json", {"bleu": 0})
    assert read_results(tmp_path, "rank0_results") == [{"bleu": 2}, {"bleu": 9}, {"bleu": 10}]
    assert read_results(tmp_path, "eval_results") == []


def test_json_has_null_where_there_is_no_number(tmp_path: Path) -> None:
    """Readers of other languages refuse NaN and Infinity."""
    content = {"a": math.nan, "b": [1.5, math.inf, (-math.inf, 2)], "c": None}
    write_json(tmp_path / "x.json", content)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == {"a": None, "b": [1.5, None, [None, 2]], "c": None}
    assert "NaN" not in text and "Infinity" not in text
    write_epoch(tmp_path, 0, dataclasses.replace(RESULT, training_loss=math.nan), [], [], 0)
    assert "NaN" not in (tmp_path / "rank0_results_epoch0.json").read_text()
    (result,) = read_results(tmp_path, "rank0_results")
    assert math.isnan(result["training_loss"]) and result["validation_loss"] == 2.25


def test_results_of_an_earlier_run_are_removed_and_nothing_else(tmp_path: Path) -> None:
    stale = [
        "rank0_results_epoch0.json",
        "rank11_gen_epoch12.json",
        "eval_results_epoch1.json",
        "gen_epoch1.json",
        "options.json",
        "training.png",
    ]
    kept = ["config.json", "my_rank0_results_epoch0.json", "tokenizer.json"]
    for name in stale + kept:
        (tmp_path / name).touch()
    clear_results(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == kept


def test_rows_stand_under_their_header() -> None:
    assert [
        HEADER,
        epoch_line("start", 0.5, 7.25),
        epoch_line("9", 33.125, 2.25, RESULT, (2e6, 1e4)),
    ] == [
        "epoch   train loss   valid. loss    BLEU    time   positions/s   real tokens/s",
        "start                      7.250     0.5",
        "    9        1.500         2.250    33.1     12s     2,000,000          10,000",
    ]


def test_a_run_that_goes_on_keeps_the_epochs_before(tmp_path: Path) -> None:
    kept = ["rank0_results_epoch1.json", "gen_epoch0.json", "notes.json", "rank0_results_epoch1"]
    gone = ["rank0_results_epoch2.json", "eval_results_epoch10.json", "rank12_gen_epoch3.json",
            "options.json", "training.png", "options.json.part"]  # fmt: skip
    for name in kept + gone:
        (tmp_path / name).touch()
    clear_results(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)

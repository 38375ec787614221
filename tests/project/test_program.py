"""run_data_parallel.py, as a person runs it: what it prints and what it leaves."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from project.run_data_parallel import DataParallelOptions
from project.utils import evaluate_bleu
from tests.project.conftest import write_pairs
from tests.project.programs import ROOT, names_in, read_json
from tests.warm import run_warm

PROGRAM = str(ROOT / "project" / "run_data_parallel.py")
TINY = [
    "--model", "gpt2-mini", "--n_layer", "1", "--n_embd", "32", "--n_head", "2",
    "--vocab_size", "320", "--model_max_length", "32", "--batch_size", "8", "--n_epochs", "2",
    "--learning_rate", "1e-2", "--seed", "11", "--device", "cpu", "--timeout", "60",
    "--dataset", "pairs", "--workdir", "work",
]  # fmt: skip
TEST_PAIRS = [
    {"de": f"Wir sehen {i} Häuser und test.", "en": f"We see {i} houses and test."}
    for i in range(7)
]
HEADER = "epoch   train loss   valid. loss      BLEU    time   positions/s   real tokens/s"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompletedProcess[str]]:
    """Two epochs on two ranks, with a timeline, where an earlier, larger run has left results: the
    workdir, and the finished program."""
    folder = tmp_path_factory.mktemp("program")
    write_pairs(folder / "pairs")
    work = folder / "work"
    work.mkdir()
    for stale in ("rank2_results_epoch0.json", "timeline_rank5.json", "metrics.jsonl"):
        (work / stale).write_text("{}")
    (work / "notes.txt").write_text("mine")
    return work, run_warm([PROGRAM, "--num_workers", "2", "--timeline", "2", *TINY], folder)


def results(workdir: Path, key: str) -> list[list[float]]:
    """By epoch, the ranks' values."""
    return [
        [read_json(workdir / f"rank{rank}_results_epoch{epoch}.json")[key] for rank in range(2)]
        for epoch in range(2)
    ]


def test_it_says_what_it_trains_and_how_well_and_nothing_else(
    trained: tuple[Path, CompletedProcess[str]],
) -> None:
    _, done = trained
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # nothing of the line that moves on a terminal
    layout, *lines = done.stdout.split("\n")
    assert layout == "ddp: 2 ranks, micro-batches: automatic, 2 epochs"
    assert lines[0].startswith("gpt2-mini: 1 block of width 32, vocabulary 320, 0.024 M parameters")
    assert lines[1].endswith(
        "pairs: 40 / 9 / 7 pairs to train / validate / test, de to en; batches of 8, fp32, cpu"
    )
    assert lines[2] == "train: skipped 1 rows with an empty text."
    table = lines.index(HEADER)
    rows = [" ".join(row.split()[:5]) for row in lines[table : table + 8]]
    assert [row.split()[0] for row in rows if "Rank" not in row] == ["epoch", "start", "1", "2"]
    # Standard output is a file.
    assert [row for row in rows if "Rank" in row] == [
        f"Epoch {epoch} on Rank {rank}:" for epoch in range(2) for rank in range(2)
    ]
    assert done.stdout.rstrip().split("\n")[-1] == (
        "Results are in work/; the curves are drawn in work/training.png."
    )


def test_it_leaves_exactly_the_files_of_this_run(
    trained: tuple[Path, CompletedProcess[str]],
) -> None:
    """Its options with what it chose itself; results of all ranks."""
    work, _ = trained
    of_epochs = [
        f"rank{rank}_{kind}_epoch{epoch}.json"
        for rank in range(2)
        for kind in ("gen", "results")
        for epoch in range(2)
    ]
    others = [
        "checkpoints", "config.json", "earlier_1", "metrics.jsonl", "notes.txt", "options.json",
        "summary.json", "tokenizer.json", "tokenizer_config.json", "training.png",
        "timeline_rank0.json", "timeline_rank1.json", "tokens",
    ]  # fmt: skip
    assert names_in(work) == sorted(of_epochs + others)
    assert names_in(work / "checkpoints") == ["000001-epoch0-step5", "000002-epoch1-step5"]
    options = read_json(work / "options.json")
    expected = {
        "n_layer": 1, "world_size": 2, "bucket_mb": 4.0, "gradient_sync": "overlap",
    }  # fmt: skip
    assert {key: options[key] for key in expected} == expected
    names = {field.name for field in fields(DataParallelOptions)}
    assert options.keys() == names | {"strategy", "command"}
    for rank in range(2):
        for epoch in range(2):
            result = read_json(work / f"rank{rank}_results_epoch{epoch}.json")
            assert result["tokens_per_sec"] >= result["real_tokens_per_sec"] > 0
            rows = read_json(work / f"rank{rank}_gen_epoch{epoch}.json")
            assert [row["example"] for row in rows] == TEST_PAIRS  # all, in order
            bleu = evaluate_bleu(TEST_PAIRS, [row["gen"] for row in rows], "en")["bleu"]
            assert bleu == result["bleu"]
    for key in ("training_loss", "validation_loss", "bleu"):
        (first, other), (second, another) = results(work, key)
        assert first == other and second == another
        assert key == "bleu" or max(first, second) < math.log(320)

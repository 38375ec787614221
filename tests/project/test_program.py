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


def test_what_it_prints(trained: tuple[Path, CompletedProcess[str]]) -> None:
    """To a file: nothing of the line that moves on a terminal."""
    _, done = trained
    assert (done.returncode, done.stderr) == (0, "")
    layout, *lines = done.stdout.rstrip().split("\n")
    assert layout == "ddp: 2 ranks, micro-batches: automatic, 2 epochs"
    assert [row.split(":")[0] for row in lines if "Rank" in row] == [
        f"Epoch {epoch} on Rank {rank}" for epoch in range(2) for rank in range(2)
    ]
    assert lines[-1] == "Results are in work/; the curves are drawn in work/training.png."


def test_it_leaves_exactly_the_files_of_this_run(
    trained: tuple[Path, CompletedProcess[str]],
) -> None:
    """Its options with what it chose itself; results of all ranks."""
    work, _ = trained
    places = [(rank, epoch) for rank in range(2) for epoch in range(2)]
    of_epochs = [f"rank{r}_{kind}_epoch{e}.json" for r, e in places for kind in ("gen", "results")]
    others = [
        "checkpoints", "config.json", "earlier_1", "metrics.jsonl", "notes.txt", "options.json",
        "summary.json", "tokenizer.json", "tokenizer_config.json", "training.png",
        "timeline_rank0.json", "timeline_rank1.json", "tokens",
    ]  # fmt: skip
    assert names_in(work) == sorted(of_epochs + others)
    assert names_in(work / "checkpoints") == ["000001-epoch0-step5", "000002-epoch1-step5"]
    options = read_json(work / "options.json")
    expected = {"n_layer": 1, "world_size": 2, "bucket_mb": 4.0, "gradient_sync": "overlap"}
    assert {key: options[key] for key in expected} == expected
    names = {field.name for field in fields(DataParallelOptions)}
    assert options.keys() == names | {"command"}
    for rank, epoch in places:
        result = read_json(work / f"rank{rank}_results_epoch{epoch}.json")
        assert result["tokens_per_sec"] >= result["real_tokens_per_sec"] > 0
        rows = read_json(work / f"rank{rank}_gen_epoch{epoch}.json")
        assert [row["example"] for row in rows] == TEST_PAIRS  # all, in order
        bleu = evaluate_bleu(TEST_PAIRS, [row["gen"] for row in rows], "en")["bleu"]
        assert bleu == result["bleu"]
        first = read_json(work / f"rank0_results_epoch{epoch}.json")
        for key in ("training_loss", "validation_loss"):  # of all ranks together
            assert result[key] == first[key] < math.log(320)

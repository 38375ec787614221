"""run_data_parallel.py, as a person runs it: what it prints, what it leaves, and that it repeats
itself, also where a rank is killed on the way."""

from __future__ import annotations

import math
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from project.run_data_parallel import DataParallelOptions
from project.utils import evaluate_bleu
from tests.project.conftest import PROGRAM, TINY, Run
from tests.project.programs import names_in, read_json
from tests.warm import run_warm
from training.perfetto import read_timelines
from training.timeline import COMMUNICATION, COMPUTE

TEST_PAIRS = [
    {"de": f"Wir sehen {i} Häuser und test.", "en": f"We see {i} houses and test."}
    for i in range(7)
]
HEADER = "epoch   train loss   valid. loss      BLEU    time   positions/s   real tokens/s"


def results(workdir: Path, key: str) -> list[list[float]]:
    """By epoch, the ranks' values."""
    return [
        [read_json(workdir / f"rank{rank}_results_epoch{epoch}.json")[key] for rank in range(2)]
        for epoch in range(2)
    ]


def test_it_says_what_it_trains_and_how_well_and_nothing_else(trained: Run) -> None:
    assert trained.status == 0, trained.stderr
    bars = ("Epoch ", "Validating", "Translating", "Port 11868 ")
    lines = trained.stderr.replace("\r", "\n").split("\n")
    assert [line for line in lines if line.strip() and not line.startswith(bars)] == []
    layout, *lines = trained.stdout.split("\n")
    assert layout == "ddp: 2 ranks, micro-batches: automatic, 2 epochs"
    assert lines[0].startswith("gpt2-mini: 1 block of width 32, vocabulary 320, 0.024 M parameters")
    assert lines[1].endswith(
        "pairs: 40 / 9 / 7 pairs to train / validate / test, de to en; batches of 8, fp32, cpu"
    )
    assert lines[2] == "train: skipped 1 rows with an empty text."
    table = lines.index(HEADER)
    assert [row.split()[0] for row in lines[table : table + 4]] == ["epoch", "start", "1", "2"]
    work = trained.workdir
    assert trained.stdout.rstrip().split("\n")[-1] == (
        f"Results are in {work}/; the curves are drawn in {work}/training.png."
    )


def test_it_leaves_exactly_the_files_of_this_run(trained: Run) -> None:
    """Among them its options, with what it chose itself, and what transformers loads."""
    work = trained.workdir
    of_epochs = [
        f"rank{rank}_{kind}_epoch{epoch}.json"
        for rank in range(2)
        for kind in ("gen", "results")
        for epoch in range(2)
    ]
    others = [
        "checkpoints", "config.json", "earlier_1", "metrics.jsonl", "notes.txt", "options.json",
        "summary.json", "tokenizer.json", "tokenizer_config.json", "training.png",
        "timeline_rank0.json", "timeline_rank1.json",
    ]  # fmt: skip
    assert names_in(work) == sorted(of_epochs + others)
    assert names_in(work / "checkpoints") == ["000001-epoch0-step5", "000002-epoch1-step5"]
    options = read_json(work / "options.json")
    expected = {
        "model": "gpt2-mini", "n_layer": 1, "world_size": 2, "learning_rate": 1e-2, "device": "cpu",
        "bucket_mb": 4.0, "gradient_sync": "overlap", "workdir": str(work),
        "strategy": "ddp", "timeline": 2, "dropout": 0.1,
    }  # fmt: skip
    assert {key: options[key] for key in expected} == expected
    names = DataParallelOptions.__dataclass_fields__.keys()
    assert options.keys() == names | {"strategy", "command"}
    tokenizer = AutoTokenizer.from_pretrained(work)
    assert tokenizer.decode(tokenizer("Häuser und 7")["input_ids"]) == "Häuser und 7"
    config = AutoConfig.from_pretrained(work)
    sizes = (config.model_type, config.n_layer, config.n_embd, config.n_head, config.vocab_size)
    assert sizes == ("gpt2", 1, 32, 2, 320)


def test_results_are_of_all_ranks(trained: Run) -> None:
    """Losses are, and fall; every rank has the whole test split in order."""
    for rank in range(2):
        for epoch in range(2):
            result = read_json(trained.workdir / f"rank{rank}_results_epoch{epoch}.json")
            assert result["tokens_per_sec"] >= result["real_tokens_per_sec"] > 0
            rows = read_json(trained.workdir / f"rank{rank}_gen_epoch{epoch}.json")
            assert [row["example"] for row in rows] == TEST_PAIRS
            bleu = evaluate_bleu(TEST_PAIRS, [row["gen"] for row in rows], "en")["bleu"]
            assert bleu == result["bleu"]
    for key in ("training_loss", "validation_loss", "bleu"):
        (first, other), (second, another) = results(trained.workdir, key)
        assert first == other and second == another
        assert key == "bleu" or max(first, second) < math.log(320)
    summary = read_json(trained.workdir / "summary.json")
    assert len(summary["loss"]) == len(summary["step_seconds"]) == 10
    assert len(summary["peak_rss_bytes"]) == 2
    assert summary["validation_loss"] == results(trained.workdir, "validation_loss")[1][0]


def test_the_first_steps_are_on_the_timeline(trained: Run) -> None:
    """Five steps an epoch; 2 + 1 of the first epoch are recorded. What was recorded changes
    nothing: see the comparison with torchrun's run, which records nothing."""
    workers, about = read_timelines(trained.workdir)
    assert (list(workers), about) == (["rank 0", "rank 1"], {"strategy": "ddp"})
    for recorded in workers.values():
        assert sorted({event.step for event in recorded}) == [0, 1, 2]
        for step in range(3):
            events = [event for event in recorded if event.step == step]
            assert [(e.kind, e.microbatch) for e in events if e.lane == COMPUTE] == [
                ("F", 0), ("B", 0), ("optimizer", -1)
            ]  # fmt: skip
            assert {e.kind for e in events if e.lane == COMMUNICATION} == {"all_reduce", "barrier"}


def test_torchrun_starts_it_and_a_killed_rank_costs_a_restart_and_nothing_else(
    trained: Run, trained_by_torchrun: Run
) -> None:
    """Bit for bit the run that nobody killed, dropout on: same layout, same order of every sum."""
    again = trained_by_torchrun
    assert again.status == 0, again.stderr
    for key in ("training_loss", "validation_loss", "bleu"):
        assert results(trained.workdir, key) == results(again.workdir, key)
    assert len({str(read_json(r.workdir / "summary.json")["loss"]) for r in (trained, again)}) == 1
    folder = again.workdir / "checkpoints"
    notes = [line for line in again.stdout.split("\n") if "checkpoints" in line]
    assert notes == [
        f"--resume: {folder} has no checkpoint; starting from scratch.",
        f"Resumed from {folder}/000003-epoch1-step1: 6 steps done.",
    ]
    assert names_in(folder) == ["000004-epoch1-step4", "000005-epoch1-step5"]
    timeline = {"timeline_rank0.json", "timeline_rank1.json"}
    expected = set(names_in(trained.workdir)) - timeline - {"notes.txt", "earlier_1"}
    assert set(names_in(again.workdir)) == expected


def test_a_users_mistake_is_one_line(tmp_path: Path) -> None:
    line = [PROGRAM, *TINY, "--batch_size", "1", "--workdir", "work"]
    done = run_warm(line, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "run_data_parallel.py: error: --batch_size 1 --world_size 2: each rank needs an example; "
        "--world_size 1 works\n"
    )
    assert names_in(tmp_path) == []

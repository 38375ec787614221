"""The program, as a person runs it: what it prints, what it leaves, and that it repeats itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from project.run_data_parallel import parse
from project.utils import evaluate_bleu
from tests.project.conftest import PROGRAM, TINY, Run, run
from tests.project.test_resume import assert_same
from training.launch import core_slice
from training.record import HEADER
from training.timeline import COMMUNICATION, COMPUTE, read_timelines

TEST_PAIRS = [
    {"de": f"Wir sehen {i} Häuser und test.", "en": f"We see {i} houses and test."}
    for i in range(7)
]


def read(workdir: Path, name: str) -> Any:
    return json.loads((workdir / name).read_text(encoding="utf-8"))


def results(workdir: Path, key: str) -> list[list[float]]:
    """By epoch, the ranks' values."""
    return [
        [read(workdir, f"rank{rank}_results_epoch{epoch}.json")[key] for rank in range(2)]
        for epoch in range(2)
    ]


def test_it_ends_well_and_is_quiet(trained: Run) -> None:
    assert trained.status == 0, trained.stderr
    unexpected = [
        line
        for line in trained.stderr.replace("\r", "\n").split("\n")
        if line.strip()
        and not line.startswith(("Epoch ", "Validating", "Translating", "Port 11868 "))
    ]
    assert unexpected == []


def test_it_says_what_it_trains_and_how_well(trained: Run) -> None:
    lines = trained.stdout.split("\n")
    assert lines[0].startswith("gpt2-mini: 1 blocks of width 32, vocabulary 320, 0.0 M parameters")
    assert lines[1].endswith(
        "pairs: 40 / 9 / 7 pairs to train / validate / test, de to en; batches of 8, fp32, cpu"
    )
    assert lines[2:7] == [
        "train: skipped 1 pairs with an empty side.",
        "train: 40 pairs, all there are (5000 were asked for).",
        "validation: 9 pairs, all there are (1000 were asked for).",
        "test: 7 pairs, all there are (100 were asked for).",
        HEADER,
    ]
    table = 6
    assert [row.split()[0] for row in lines[table : table + 4]] == ["epoch", "start", "0", "1"]
    assert trained.stdout.count(HEADER) == 1
    last = trained.stdout.rstrip().split("\n")[-1]
    assert last == (
        f"Results, translations and tokenizer are in {trained.workdir}/; "
        f"loss and BLEU are drawn in {trained.workdir}/training.png."
    )


def test_it_leaves_exactly_the_files_of_this_run(trained: Run) -> None:
    names = sorted(path.name for path in trained.workdir.iterdir())
    of_epochs = [
        f"rank{rank}_{kind}_epoch{epoch}.json"
        for rank in range(2)
        for kind in ("gen", "results")
        for epoch in range(2)
    ]
    others = [
        "checkpoints", "config.json", "notes.txt", "options.json", "tokenizer.json",
        "tokenizer_config.json", "training.png", "timeline_rank0.json", "timeline_rank1.json",
        "trace.json",
    ]  # fmt: skip
    assert names == sorted(of_epochs + others)
    checkpoints = sorted(path.name for path in (trained.workdir / "checkpoints").iterdir())
    assert checkpoints == ["000001-epoch0-step5", "000002-epoch1-step5"]


def test_it_writes_its_options_with_what_it_chose_itself(trained: Run) -> None:
    options = read(trained.workdir, "options.json")
    line = [*TINY, "--world_size", "2", "--timeline", "2", "--workdir", str(trained.workdir)]
    given = vars(parse(line))
    chosen = {
        "model": "gpt2-mini", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 320,
        "learning_rate": 1e-2, "device": "cpu",
    }  # fmt: skip
    assert options.pop("cores") in (None, max(1, len(core_slice(0, 1)) // 2))
    assert options == {
        **given, **chosen, "workdir": str(trained.workdir), "dataset": options["dataset"]
    }  # fmt: skip
    assert Path(options["dataset"]).name == "pairs"


def test_results_have_the_keys_that_figures_are_drawn_from(trained: Run) -> None:
    keys = {
        "training_loss", "validation_loss", "bleu", "training_time", "tokens_per_sec",
        "real_tokens_per_sec", "skipped_steps",
    }  # fmt: skip
    for rank in range(2):
        for epoch in range(2):
            result = read(trained.workdir, f"rank{rank}_results_epoch{epoch}.json")
            assert set(result) == keys
            assert all(math.isfinite(value) for value in result.values())
            assert result["tokens_per_sec"] >= result["real_tokens_per_sec"] > 0


def test_the_timeline_tells_what_each_rank_did_in_the_first_steps(trained: Run) -> None:
    """40 pairs in batches of 8 are 5 steps an epoch; 2 + 1 of the first epoch are recorded. What
    was recorded changes nothing: see the comparison with torchrun's run, which records nothing."""
    for rank, timeline in enumerate(read_timelines(trained.workdir)):
        assert (timeline.rank, timeline.workers, timeline.about) == (
            rank, "rank", {"strategy": "ddp"}
        )  # fmt: skip
        assert sorted({event.step for event in timeline.events}) == [0, 1, 2]
        for step in range(3):
            events = [event for event in timeline.events if event.step == step]
            assert [(e.kind, e.microbatch) for e in events if e.lane == COMPUTE] == [
                ("F", 0), ("B", 0), ("optimizer", -1)
            ]  # fmt: skip
            assert {e.kind for e in events if e.lane == COMMUNICATION} == {"all_reduce", "barrier"}
            times = [e.start for e in events if e.lane == COMPUTE]
            times += [e.end for e in events if e.kind == "optimizer"]
            assert times == sorted(times)
    assert read(trained.workdir, "trace.json")["traceEvents"]


def test_losses_are_of_all_ranks_and_fall(trained: Run) -> None:
    for key in ("training_loss", "validation_loss", "bleu"):
        assert [len(set(ranks)) for ranks in results(trained.workdir, key)] == [1, 1]
    for key in ("training_loss", "validation_loss"):
        (first, _), (second, _) = results(trained.workdir, key)
        assert second < first < math.log(320) + 0.5


def test_every_rank_has_the_whole_test_split_in_order(trained: Run) -> None:
    for epoch in range(2):
        first, second = (
            read(trained.workdir, f"rank{rank}_gen_epoch{epoch}.json") for rank in range(2)
        )
        assert [row["example"] for row in first] == TEST_PAIRS
        assert first == second
        bleu = evaluate_bleu(TEST_PAIRS, [row["gen"] for row in first], "en")["bleu"]
        assert results(trained.workdir, "bleu")[epoch] == [bleu, bleu]


def test_tokenizer_and_config_load_with_transformers(trained: Run) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained.workdir)
    assert tokenizer.decode(tokenizer("Häuser und 7")["input_ids"]) == "Häuser und 7"
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<eos_de>", "<eos_en>"]) == [0, 1, 2]
    config = AutoConfig.from_pretrained(trained.workdir)
    sizes = (config.model_type, config.n_layer, config.n_embd, config.n_head, config.vocab_size)
    assert sizes == ("gpt2", 1, 32, 2, 320)


def test_torchrun_starts_it_and_the_same_seed_gives_the_same_run(
    trained: Run, trained_by_torchrun: Run
) -> None:
    """Dropout is on. Bitwise: same layout, same order of every sum."""
    assert trained_by_torchrun.status == 0, trained_by_torchrun.stderr
    for key in ("training_loss", "validation_loss", "bleu"):
        assert results(trained.workdir, key) == results(trained_by_torchrun.workdir, key)
    same = trained.stdout.split("\n")[:3]
    assert trained_by_torchrun.stdout.split("\n")[:3] == same


def test_a_killed_rank_costs_a_restart_and_nothing_else(
    trained: Run, trained_by_torchrun: Run
) -> None:
    """Weights, optimizer, generators and results, bit for bit, of the run that nobody killed."""
    workdir = trained_by_torchrun.workdir
    folder = workdir / "checkpoints"
    said = trained_by_torchrun.stdout.split("\n")
    assert [line for line in said if line.startswith(("From ", "--resume"))] == [
        f"--resume: {folder} has no checkpoint; from the beginning.",
        f"From {folder}/000003-epoch1-step1: epoch 1, 1 steps done.",
    ]
    assert_same(workdir, trained.workdir)
    assert sorted(path.name for path in folder.iterdir()) == [
        "000004-epoch1-step4", "000005-epoch1-step5"
    ]  # fmt: skip
    names, expected = ({path.name for path in run.workdir.iterdir()} for run in
                       (trained_by_torchrun, trained))  # fmt: skip
    timeline = {"timeline_rank0.json", "timeline_rank1.json", "trace.json"}
    assert names == expected - timeline - {"notes.txt"}


def test_a_users_mistake_is_one_line(tmp_path: Path) -> None:
    done = run(
        tmp_path / "work", PROGRAM, *TINY, "--batch_size", "1", "--workdir", str(tmp_path / "work")
    )
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr == (
        "run_data_parallel.py: error: --world_size 2 --batch_size 1: each rank needs an example; "
        "--world_size 1 or less works\n"
    )
    assert not (tmp_path / "work").exists()

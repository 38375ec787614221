"""run_pipeline.py: what it refuses, and that every mode, schedule and cut gives the same losses."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from pipeline.schedule import SCHEDULES
from project.run_pipeline import choose_devices, parse, run_pp
from tests.project.conftest import ROOT, run
from training.breakdown import bubble, in_step
from training.launch import RunError, UserError
from training.timeline import by_worker, read_timelines

PROGRAM = str(ROOT / "project" / "run_pipeline.py")
TINY = [
    "--n_layer", "2", "--n_embd", "32", "--n_head", "2", "--vocab_size", "320",
    "--model_max_length", "32", "--batch_size", "8", "--n_epochs", "2", "--learning_rate", "1e-2",
    "--device", "cpu",
]  # fmt: skip
MODEL, PIPELINE = (f"--model_parallel_mode={mode}_parallel" for mode in ("model", "pipeline"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default workdir is made in the current folder."""
    monkeypatch.chdir(tmp_path)


# What argparse refuses by itself: the options, and what its line must contain.
BAD_VALUES: list[tuple[str, list[str]]] = [
    ("--n_chunk 0", ["--n_chunk", "0 must be a whole number, 1 or more"]),
    ("--num_devices two", ["--num_devices", "two must be a whole number, 1 or more"]),
    ("--schedule pipedream", ["--schedule", "'pipedream'", "gpipe", "1f1b"]),
    ("--schedule sequential", ["--schedule", "'sequential'", "gpipe", "1f1b"]),
    ("--model_parallel_mode pipeline", ["--model_parallel_mode", "'pipeline_parallel'"]),
    ("--pipeline all", ["--pipeline", "'all'", "'whole'", "'blocks'"]),
    ("--precision fp8", ["--precision", "'fp8'", "fp32", "bf16"]),
    ("--world_size 2", ["unrecognized arguments: --world_size 2"]),
]


@pytest.mark.parametrize(("line", "words"), BAD_VALUES, ids=[line for line, _ in BAD_VALUES])
def test_bad_values(line: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(line.split())
    assert end.value.code == 2
    said = capsys.readouterr().err.rstrip().split("\n")[-1]
    assert [word for word in words if word not in said] == [], said


# What does not fit together, in mode pipeline_parallel and with the 4 blocks of gpt2-mini: the
# options, how the line begins, and how it ends.
BAD_COMBINATIONS: list[tuple[str, str, str]] = [
    ("--n_chunk 65", "--n_chunk 65 --batch_size 64: ", "--n_chunk 64 or less works"),
    ("--n_chunk 4 --batch_size 3", "--n_chunk 4 --batch_size 3: ", "--n_chunk 3 or less works"),
    (
        "--num_devices 11",
        "--num_devices 11 --balance auto: the model has 10 layers (embedding, halves of blocks, ",
        "--num_devices 10 or less works, or a larger --n_layer",
    ),
    (
        "--num_devices 3 --n_layer 2 --balance uniform",
        "--num_devices 3 --balance uniform: the model has 2 blocks and every stage needs one; ",
        "--num_devices 2 or less works, or a larger --n_layer",
    ),
    (
        "--num_devices 5 --pipeline blocks",
        "--num_devices 5 --balance auto: the model has 4 blocks and every stage needs one; ",
        "--num_devices 4 or less works, or a larger --n_layer",
    ),
    ("--balance 3,3", "--num_devices 2 --balance='3,3': ", "e.g. auto, uniform or 2,2"),
    ("--balance 2,1,1", "--num_devices 2 --balance='2,1,1': ", "e.g. auto, uniform or 2,2"),
    ("--balance 4,0", "--num_devices 2 --balance='4,0': ", "e.g. auto, uniform or 2,2"),
    ("--balance 5,-1", "--num_devices 2 --balance='5,-1': ", "e.g. auto, uniform or 2,2"),
    ("--balance 2;2", "--num_devices 2 --balance='2;2' is no list ", "e.g. auto, uniform or 2,2"),
    ("--balance even", "--num_devices 2 --balance='even' is no list ", "auto, uniform or 2,2"),
    ("--balance 2,2 --pipeline blocks --n_layer 6", "--num_devices 2 --bal", "uniform or 3,3"),
    ("--n_head 3", "--n_layer 4 --n_embd 256 --n_head 3: ", "--n_embd 256 --n_head 4"),
]


@pytest.mark.parametrize(
    ("line", "begin", "end"), BAD_COMBINATIONS, ids=[line for line, _, _ in BAD_COMBINATIONS]
)
def test_bad_combinations(line: str, begin: str, end: str) -> None:
    with pytest.raises(UserError) as error:
        parse([PIPELINE, "--device=cpu", "--num_devices=2", *line.split()])
    said = str(error.value)
    assert (said[: len(begin)], said[-len(end) :]) == (begin, end)
    assert "\n" not in said
    assert not Path("workdir").exists()


@pytest.mark.parametrize(
    "line",
    [
        "--n_chunk 64", "--n_chunk 3 --batch_size 3", "--num_devices 10", "--balance 2,2",
        "--num_devices 2 --n_layer 2 --balance uniform", "--num_devices 4 --pipeline blocks",
        "--pipeline blocks --balance 3,1", *(f"--schedule {s}" for s in ("gpipe", "1f1b", "zb")),
    ],
)  # fmt: skip
def test_what_messages_propose_works(line: str) -> None:
    args = parse([PIPELINE, "--device=cpu", "--num_devices=2", *line.split()])
    assert list(args.workdir.iterdir()) == []


def test_torchrun_would_start_it_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError) as error:
        parse([PIPELINE])
    assert str(error.value) == (
        "torchrun started 2 ranks: run_pipeline.py is one process; start it without torchrun, or "
        "take project/train.py pipeline, whose stages are ranks"
    )
    monkeypatch.setenv("WORLD_SIZE", "1")
    parse([PIPELINE])


def test_every_schedule_but_the_baseline_is_offered() -> None:
    offered = set(SCHEDULES) - {"sequential"}
    assert {parse([PIPELINE, "--schedule", name]).schedule for name in offered} == offered


# What is not said: the options, and what they mean.
SETTLED: list[tuple[str, tuple[int, str, str, int]]] = [
    ("", (1, "uniform", "sequential", 4)),
    ("--num_devices 1 --n_chunk 2", (1, "uniform", "sequential", 2)),
    ("--pipeline blocks", (1, "uniform", "sequential", 1)),
    (MODEL, (2, "auto", "sequential", 4)),
    (f"{MODEL} --num_devices 3 --balance 1,1,2 --n_chunk 8", (3, "1,1,2", "sequential", 8)),
    (f"{MODEL} --pipeline blocks", (2, "auto", "sequential", 1)),
    (PIPELINE, (2, "auto", "1f1b", 4)),
    (f"{PIPELINE} --pipeline blocks --schedule gpipe --n_chunk 8", (2, "auto", "gpipe", 8)),
]


@pytest.mark.parametrize(("line", "settled"), SETTLED, ids=[line for line, _ in SETTLED])
def test_what_is_not_given(line: str, settled: tuple[int, str, str, int]) -> None:
    args = parse(["--device=cpu", *line.split()])
    assert (args.num_devices, args.balance, args.schedule, args.n_chunk) == settled
    assert choose_devices(args) == [torch.device("cpu", i) for i in range(settled[0])]


FLOW, WHOLE = "--model_parallel_mode pipeline_parallel", "--pipeline whole"
NONE, ONE = (f"--model_parallel_mode {mode}" for mode in ("none", "model_parallel"))
# What was given and would have no effect: the options, the line, and what it proposes.
WITHOUT_EFFECT: list[tuple[str, str, str]] = [
    ("--num_devices 999", f"--num_devices 999 {NONE}: there is one device", FLOW),
    ("--balance nonsense", f"--balance nonsense {NONE}: nothing is cut", FLOW),
    ("--schedule zb", f"--schedule zb {NONE}: one device computes at a time", FLOW),
    (f"{ONE} --schedule gpipe", f"--schedule gpipe {ONE}: one device computes at a time", FLOW),
    (
        f"{ONE} --pipeline blocks --schedule 1f1b",
        f"--schedule 1f1b {ONE}: one device computes at a time",
        f"{FLOW} {WHOLE}",
    ),
    (
        f"{FLOW} --pipeline blocks --schedule zb",
        "--schedule zb --pipeline blocks: its order is GPipe's",
        WHOLE,
    ),
    (
        f"{ONE} --pipeline blocks --n_chunk 3",
        f"--n_chunk 3 {ONE} --pipeline blocks: the batch is not cut",
        WHOLE,
    ),
    (
        "--pipeline blocks --n_chunk 3",
        f"--n_chunk 3 {NONE} --pipeline blocks: the batch is not cut",
        WHOLE,
    ),
]


@pytest.mark.parametrize(
    ("line", "said", "instead"), WITHOUT_EFFECT, ids=[line for line, _, _ in WITHOUT_EFFECT]
)
def test_what_would_have_no_effect_is_refused(line: str, said: str, instead: str) -> None:
    with pytest.raises(UserError) as error:
        parse(["--device=cpu", *line.split()])
    assert str(error.value) == f"{said}; leave it out, or take {instead}"


def test_what_is_proposed_instead_works() -> None:
    for line, _, instead in WITHOUT_EFFECT:
        if "999" not in line and "nonsense" not in line:
            parse(["--device=cpu", *line.split(), *instead.split()])


def test_a_users_mistake_is_one_line(tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    done = run(
        workdir, PROGRAM, *TINY, "--workdir", str(workdir), PIPELINE, "--num_devices=2",
        "--balance", "1,2",
    )  # fmt: skip
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr == (
        "run_pipeline.py: error: --num_devices 2 --balance='1,2': 2 numbers, each at least 1, must "
        "add up to the 2 layers: e.g. auto, uniform or 1,1\n"
    )
    assert not workdir.exists()


@dataclass
class Trainer:
    """Runs the program in this process, in a workdir of its own each time."""

    pairs: Path
    folder: Path
    runs: int = 0

    def __call__(self, *options: str) -> Path:
        self.runs += 1
        workdir = self.folder / f"run{self.runs}"
        before = set(threading.enumerate())
        stages = ["--num_devices=2"] * bool({MODEL, PIPELINE} & set(options))
        args = parse(
            [*TINY, "--dataset", str(self.pairs), "--workdir", str(workdir), *stages, *options]
        )
        try:
            run_pp(args, choose_devices(args))
        finally:
            left = [t for t in threading.enumerate() if t not in before and t.name != "tqdm"]
            assert [t for t in left if type(t).__name__ != "TMonitor"] == []
        return workdir


@pytest.fixture(scope="module")
def train(pairs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(pairs_folder, tmp_path_factory.mktemp("pipeline"))


def read(workdir: Path, name: str) -> Any:
    return json.loads((workdir / name).read_text(encoding="utf-8"))


def losses(workdir: Path) -> list[float]:
    """Training and validation loss of both epochs."""
    results = [read(workdir, f"eval_results_epoch{epoch}.json") for epoch in range(2)]
    return [result[f"{kind}_loss"] for result in results for kind in ("training", "validation")]


@pytest.fixture(scope="module")
def reference(train: Trainer) -> Path:
    """One device, the full batch."""
    return train("--dropout=0", "--n_chunk=1")


def test_it_leaves_exactly_the_files_of_this_run(reference: Path) -> None:
    assert sorted(path.name for path in reference.iterdir()) == [
        "checkpoints", "config.json", "eval_results_epoch0.json", "eval_results_epoch1.json",
        "gen_epoch0.json", "gen_epoch1.json", "options.json", "tokenizer.json",
        "tokenizer_config.json", "training.png",
    ]  # fmt: skip
    keys = {
        "training_loss", "validation_loss", "bleu", "training_time", "tokens_per_sec",
        "real_tokens_per_sec", "skipped_steps",
    }  # fmt: skip
    for epoch in range(2):
        result = read(reference, f"eval_results_epoch{epoch}.json")
        assert set(result) == keys
        assert all(math.isfinite(value) for value in result.values())
        rows = read(reference, f"gen_epoch{epoch}.json")
        assert [set(row) for row in rows] == [{"example", "gen"}] * 7
        assert rows[3]["example"]["en"] == "We see 3 houses and test."
    assert losses(reference)[2] < losses(reference)[0] < math.log(320) + 0.5


# In fp32 the order of a sum of some hundred terms (positions of a batch) changes a gradient g by
# e, about 1e-6 of its size, and Adam, which divides g by its size, moves the parameter by up to
# lr * e / |g| differently in each step. To first order that changes the loss by g times as much:
# lr * e, whatever g. With N = 36,000 parameters, gradients of 1 / sqrt(N) = 5e-3 (a norm of 1),
# lr = 1e-2 and 10 steps, all of one sign, these are 36,000 * 5e-9 * 1e-2 * 10 = 2e-5 of a loss
# above 2. (A micro-batch that counts twice, or not, changes it in the second digit.)
SAME = 1e-5


@pytest.mark.parametrize(
    "options",
    [
        ("--n_chunk=3",),  # the last micro-batch is smaller
        (MODEL, "--n_chunk=4"),
        (PIPELINE, "--n_chunk=4", "--schedule=1f1b"),
        (PIPELINE, "--n_chunk=3", "--schedule=gpipe"),
        (PIPELINE, "--n_chunk=4", "--schedule=zb"),
        (PIPELINE, "--n_chunk=8", "--schedule=1f1b", "--balance=uniform"),
        (MODEL, "--pipeline=blocks"),
        (PIPELINE, "--n_chunk=4", "--pipeline=blocks"),
    ],
    ids=" ".join,
)
def test_without_dropout_all_compute_what_one_device_computes(
    train: Trainer, reference: Path, options: tuple[str, ...]
) -> None:
    assert losses(train("--dropout=0", *options)) == pytest.approx(losses(reference), rel=SAME)


@pytest.mark.parametrize(
    "options",
    [(MODEL,), (PIPELINE, "--n_chunk=4")],  # of blocks alone verify.py's rows tell
    ids=" ".join,
)
def test_with_dropout_the_same_seed_gives_the_same_bits(
    train: Trainer, options: tuple[str, ...]
) -> None:
    """Although --balance auto measures, and may cut differently each time."""
    first, second, other = (
        losses(train("--dropout=0.1", f"--seed={seed}", *options)) for seed in (3, 3, 4)
    )
    assert first == second
    assert first[0] != other[0]


@pytest.mark.parametrize(
    ("options", "about", "kinds"),
    [
        ((PIPELINE, "--schedule=zb"), ("pipeline_parallel", "zb"), "FIW"),
        ((PIPELINE, "--pipeline=blocks"), ("pipeline_parallel", "gpipe"), "FB"),
    ],
    ids=["zb", "blocks"],
)
def test_a_timeline_has_every_action_of_the_schedule(
    train: Trainer, options: tuple[str, ...], about: tuple[str, str], kinds: str
) -> None:
    """Of the steps alone: validation runs through the same stages and is not recorded."""
    workdir = train("--n_chunk=4", "--balance=1,1", "--timeline=1", *options)
    (timeline,) = read_timelines(workdir)
    assert timeline.about == dict(zip(("strategy", "schedule"), about, strict=True))
    expected = [(s, k, s, i) for s in range(2) for k in kinds for i in range(4)]
    work = [e for e in timeline.events if e.kind != "optimizer"]
    assert sorted((e.step, e.kind, e.stage, e.microbatch) for e in work) == sorted(
        (step, kind, stage, i) for step in range(2) for _, kind, stage, i in expected
    )
    workers = by_worker([timeline])
    assert list(workers) == ["stage 0", "stage 1"]
    assert 0 < bubble(in_step(workers, 1)) < 1
    assert "optimizer" in {event.kind for event in workers["stage 0"]}


def test_dropout_knows_nothing_of_cut_or_schedule(train: Trainer) -> None:
    """Dropout is drawn per layer and micro-batch; and the gradient's norm, by which all are
    clipped here, is added up parameter by parameter."""
    clipped = ("--dropout=0.1", "--n_layer=4", "--max_grad_norm=0.1")
    one, two, three = (
        losses(train(*clipped, PIPELINE, "--n_chunk=4", *options))
        for options in (("--balance=1,3",), ("--balance=3,1",), ("--schedule=gpipe",
                                                                 "--balance=2,2"))
    )  # fmt: skip
    assert one == two == three


def test_bf16(train: Trainer, reference: Path) -> None:
    """8 bits of mantissa: 2^-9 per rounding. The loss is a mean of thousands of terms whose errors
    are independent, so 1 percent is far more than they add up to in ten steps."""
    found = losses(train("--dropout=0", PIPELINE, "--precision=bf16"))
    assert found == pytest.approx(losses(reference), rel=1e-2)
    assert found != losses(reference)


@pytest.mark.parametrize("pipeline", ["whole", "blocks"])
def test_a_loss_that_is_not_a_number_ends_the_run(train: Trainer, pipeline: str) -> None:
    """The first step is finite, and moves every weight by 1e30."""
    with pytest.raises(RunError, match=r"^epoch 0, step 2 of 5: the loss is nan; try "):
        train(PIPELINE, "--learning_rate=1e30", f"--pipeline={pipeline}")


def test_or_its_steps_are_left_out_and_counted(
    train: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = train(PIPELINE, "--learning_rate=1e30", "--on_nan=skip", "--dropout=0")
    results = [read(workdir, f"eval_results_epoch{epoch}.json") for epoch in range(2)]
    assert [result["skipped_steps"] for result in results] == [4, 5]
    assert results[0]["training_loss"] == pytest.approx(math.log(320), abs=0.5)  # of the first step
    assert results[1]["training_loss"] is None  # JSON has no NaN
    said = [line for line in capsys.readouterr().out.split("\n") if "left out" in line][:-1]
    assert said == [
        f"epoch {epoch}, step {step} of 5: the loss is nan; the step was left out"
        for epoch, first in ((0, 2), (1, 1))
        for step in range(first, 6)
    ]


@pytest.mark.parametrize("pipeline", ["whole", "blocks"])
def test_a_stage_that_raises_ends_the_run_and_all_threads(
    train: Trainer, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a training step. That no thread is left is checked in every run."""
    forward, forwards = GPT2MLP.forward, []

    def fuse(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        forwards.append(threading.current_thread())
        if self.training and len(forwards) > 20:
            raise ArithmeticError("blown")
        return forward(self, hidden)

    monkeypatch.setattr(GPT2MLP, "forward", fuse)
    with pytest.raises(ArithmeticError, match="blown"):
        train(PIPELINE, "--balance=uniform", f"--pipeline={pipeline}")
    assert forwards[-1] is not threading.main_thread()

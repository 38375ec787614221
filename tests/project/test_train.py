"""project/train.py: a strategy trains what one process trains, and it is said where it does not."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel

from data_parallel.ddp import DistributedDataParallel
from project import check, strategies
from project.checkpoints import find
from project.recipes import plan_of
from project.tasks import read_data
from project.train import parse
from project.worker import run_worker
from tests.project.conftest import ROOT, Run, run
from tests.ranks import Ranks
from training.checkpoint import newest
from training.launch import RunError, UserError, World
from training.timeline import read_timelines
from training.vgg import vgg16

PROGRAM = str(ROOT / "project" / "train.py")
TINY = (
    "--num_workers 2 --num_batches 2 --batch_size 6 --n_train 22 --n_validation 9 --device cpu "
    "--optimizer sgd --learning_rate 0.02 --check_weights --check_output "
)
VGG = TINY + "--vgg_width 4 "
GPT = TINY + (
    "--model gpt2-mini --n_layer 2 --n_embd 16 --n_head 2 --vocab_size 300 --n_test 2 "
    "--model_max_length 64 "
)
ON_TWO = [name for name in strategies.STRATEGIES if name != "single"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default workdir is made in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def work(rank: int, world_size: int, line: str, tamper: Callable[[int], None] | None) -> Any:
    """What one rank prints, and how it ends: the text of a RunError, or None."""
    printed = io.StringIO()
    args = parse(line.split())
    with pytest.MonkeyPatch.context() as patches, contextlib.redirect_stdout(printed):
        if tamper is not None:
            tamper(rank, patches)  # type: ignore[call-arg]
        try:
            data = read_data(args)
            run_worker(World(rank, world_size, rank), args, data, find(args, data))
        except RunError as error:
            return printed.getvalue(), str(error)
    return printed.getvalue(), None


def trained(ranks: Ranks, line: str, tamper: Any = None) -> tuple[str, str | None, dict[str, Any]]:
    """What rank 0 prints, how it ends, and its summary."""
    workdir = Path("work").resolve()
    (printed, error), (silence, fine) = ranks.run(work, f"{line} --workdir {workdir}", tamper)
    assert (silence, fine) == ("", None)
    return printed, error, json.loads((workdir / "summary.json").read_text())


# Whatever a strategy does on two ranks must come out as on one, for either model and at odd sizes:
# batches of 6, 6, 6, 4, then of the next epoch; rank 1 has 2 of the 4.
CASES = [
    (VGG + "--num_batches 5 --max_grad_norm 0.5 --warmup_steps 1", "vgg in fp32"),
    (GPT + "--num_batches 5 --precision fp64 --num_microbatches 2", "gpt2 in fp64"),
]


@pytest.mark.parametrize("line", [c[0] for c in CASES], ids=[c[1] for c in CASES])
@pytest.mark.parametrize("strategy", ON_TWO)
def test_it_trains_what_one_process_trains(ranks: Ranks, strategy: str, line: str) -> None:
    if strategy == "model":
        line = line.replace("--num_microbatches 2", "")
    printed, error, summary = trained(ranks, f"{strategy} {line}")
    assert error is None, printed
    assert "weights: agree with one process" in printed
    assert "outputs: agree with one process" in printed
    assert {what: verdict["agrees"] for what, verdict in summary["checks"].items()} == {
        "weights": True,
        "outputs": True,
    }
    timelines = read_timelines(Path("work"))
    assert [line.rank for line in timelines] == [0, 1]
    for timeline in timelines:
        kinds = {event.kind for event in timeline.events}
        assert {"F", "optimizer"} < kinds, kinds
        assert max(event.step for event in timeline.events) == 4


def test_the_summary_has_what_figures_are_drawn_from(ranks: Ranks) -> None:
    printed, _, summary = trained(ranks, "ddp " + VGG)
    assert {key: summary[key] for key in ("strategy", "num_workers", "model", "batch_size")} == {
        "strategy": "ddp", "num_workers": 2, "model": "vgg16", "batch_size": 6,
    }  # fmt: skip
    assert len(summary["loss"]) == len(summary["step_seconds"]) == 2
    assert summary["loss"][0] == pytest.approx(math.log(10), abs=0.3)
    assert summary["examples_per_sec"] == pytest.approx(6 / summary["step_seconds"][1], rel=0.5)
    assert summary["positions_per_sec"] == summary["examples_per_sec"]
    whole = 4 * sum(p.numel() for p in vgg16(width=4).parameters())
    assert summary["state_bytes"] == {
        "parameters": [whole, whole], "gradients": [whole, whole], "optimizer": [whole, whole],
    }  # fmt: skip
    assert len(summary["peak_rss_bytes"]) == 2
    assert all(50e6 < peak < 5e9 for peak in summary["peak_rss_bytes"])
    assert printed.startswith("ddp, 2 workers: vgg16, 0.1 M parameters; 2 steps of 6, sgd at 0.02")


def forget_to_average(_: int, patches: pytest.MonkeyPatch) -> None:
    patches.setattr("data_parallel.gradients.GradientBuckets._receive", lambda *_: None)


def average_by_ranks(_: int, patches: pytest.MonkeyPatch) -> None:
    """A rank divides by its own number of examples: wrong where they differ."""
    backward = strategies.Single.backward

    def wrong(self: Any, step: Any) -> Any:
        return backward(self, type(step)(**{**vars(step), "count": step.examples * self.parts}))

    patches.setattr(strategies.Single, "backward", wrong)


def scale_by_a_thousandth(_: int, patches: pytest.MonkeyPatch) -> None:
    average = DistributedDataParallel.average_gradients

    def wrong(self: Any) -> None:
        average(self)
        for p in self.parameters():
            p.grad *= 1.001

    patches.setattr(DistributedDataParallel, "average_gradients", wrong)


def move_one_weight(_: int, patches: pytest.MonkeyPatch) -> None:
    weights = strategies.Ddp.whole_weights

    def wrong(self: Any) -> Any:
        found = weights(self)
        if found:
            found["conv3_2.bias"] = found["conv3_2.bias"].clone()
            found["conv3_2.bias"][3] += 1e-4
        return found

    patches.setattr(strategies.Ddp, "whole_weights", wrong)


def lose_one_weight(_: int, patches: pytest.MonkeyPatch) -> None:
    weights = strategies.Ddp.whole_weights
    patches.setattr(
        strategies.Ddp,
        "whole_weights",
        lambda self: {k: v for k, v in weights(self).items() if k != "fc7.weight"},
    )


def move_one_output(rank: int, patches: pytest.MonkeyPatch) -> None:
    outputs = strategies.Single.outputs

    def wrong(self: Any, x: Any) -> Any:
        found = outputs(self, x)
        assert found is not None
        found = found.clone()
        found[1, 2] += 1e-4 * rank
        return found

    patches.setattr(strategies.Single, "outputs", wrong)


TAMPERED = [
    ("--num_batches 4", forget_to_average, "weights", "times its rounding"),
    ("--batch_size 5", average_by_ranks, "weights", "times its rounding"),
    ("--precision fp64", scale_by_a_thousandth, "weights", "times its rounding"),
    ("", move_one_weight, "weights", "conv3_2.bias: off by 1.0e-04"),
    ("", lose_one_weight, "weights", "missing: fc7.weight"),
    ("", move_one_output, "outputs", "outputs, part 1: off by 1.0e-04"),
]


@pytest.mark.parametrize(
    ("line", "tamper", "what", "named"), TAMPERED, ids=[case[1].__name__ for case in TAMPERED]
)
def test_what_is_wrong_turns_red(
    ranks: Ranks, line: str, tamper: Any, what: str, named: str
) -> None:
    printed, error, summary = trained(ranks, f"ddp {VGG} {line}", tamper)
    assert error is not None and error.startswith("ddp: "), printed
    assert what in error
    assert f"{what}: DISAGREE with one process" in printed
    assert named in printed
    assert not summary["checks"][what]["agrees"]


def drift(rank: int, patches: pytest.MonkeyPatch) -> None:
    """Rank 1 alone: rank 0, whose weights are compared, is as it should be."""
    if rank == 1:
        differing = strategies.Ddp.differing

        def first_move(self: Any) -> Any:
            with torch.no_grad():
                dict(self.model.named_parameters())["fc6.bias"][0] += 1e-7
            return differing(self)

        patches.setattr(strategies.Ddp, "differing", first_move)


def test_copies_that_have_come_apart_are_an_error(ranks: Ranks) -> None:
    _, error, _ = trained(ranks, "ddp " + VGG, drift)
    assert error == "ddp: copies of fc6.bias have come apart"


def test_a_tensor_is_compared_with_its_own_rounding() -> None:
    exact = {"a": torch.tensor([1.0, 2.0], dtype=torch.float64), "b": torch.zeros(1).double()}
    plain = {"a": torch.tensor([1.0, 2.0 + 4e-7]), "b": torch.zeros(1)}
    rounding = abs(plain["a"][1].item() - 2)
    for factor, agrees in ((0.9, True), (1.1, False)):
        off = factor * check.FACTOR * rounding
        got = {"a": plain["a"].double() + torch.tensor([0, off]), "b": torch.zeros(1)}
        verdict = check.compare("weights", got, plain, exact, torch.float32)
        assert verdict.agrees is agrees
        assert verdict.worst.name == "a"
        assert verdict.worst.times_rounding == pytest.approx(factor * check.FACTOR, rel=1e-3)
    for value in (1e-12, math.nan):  # what must not move at all, and what is no number
        got = {"a": plain["a"], "b": torch.tensor([value])}
        verdict = check.compare("weights", got, plain, exact, torch.float32)
        assert not verdict.agrees
        assert verdict.worst.name == "b"


COURSE = (
    "--num_workers 2 --num_batches 2 --learning_rate 1e-3 --batch_size 32 --check_weights "
    "--check_output --vgg_width 4 --n_train 64 --n_validation 8"
)


@pytest.fixture(scope="module")
def by_command(tmp_path_factory: pytest.TempPathFactory) -> Run:
    workdir = tmp_path_factory.mktemp("train") / "workdir" / "ddp2"
    done = run(workdir.parent, PROGRAM, "ddp", *COURSE.split())
    return Run(workdir, done.status, done.stdout, done.stderr)


def test_the_courses_command(by_command: Run) -> None:
    assert by_command.status == 0, by_command.stderr
    lines = by_command.stdout.split("\n")
    assert lines[0].startswith("ddp, 2 workers: vgg16, 0.1 M parameters; 2 steps of 32, adamw at ")
    assert by_command.stdout.count("agree with one process") == 2
    assert lines[-2] == "Results are in workdir/ddp2/."
    names = ["summary.json", "timeline_rank0.json", "timeline_rank1.json", "trace.json"]
    assert sorted(path.name for path in by_command.workdir.iterdir()) == names


def test_torchrun_starts_it_and_trains_the_same(by_command: Run, tmp_path: Path) -> None:
    """Bitwise: the same layout, the same order of every sum."""
    work = tmp_path / "work"
    done = run(
        work, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM,
        "ddp", *COURSE.replace("--num_workers 2 ", "").split(), "--workdir", str(work),
    )  # fmt: skip
    assert done.status == 0, done.stderr
    summaries = [
        json.loads((folder / "summary.json").read_text()) for folder in (work, by_command.workdir)
    ]
    assert summaries[0]["loss"] == summaries[1]["loss"]
    assert summaries[0]["checks"] == summaries[1]["checks"]


# Runs that another strategy goes on from, in the middle of an epoch.
RESUMED = list(zip(ON_TWO, [*ON_TWO[1:], ON_TWO[0]], [VGG, GPT] * 2, strict=True))


@pytest.mark.parametrize(
    ("first", "second", "model"), RESUMED, ids=[f"{a} to {b}" for a, b, _ in RESUMED]
)
def test_any_strategy_goes_on_from_any_other(
    ranks: Ranks, first: str, second: str, model: str
) -> None:
    """With momentum; what comes out is what one process trains in one go."""
    line = model + "--precision fp64 --max_grad_norm 1 "
    trained(ranks, f"{first} {line} --num_batches 3 --save_every 3")
    printed, error, summary = trained(ranks, f"{second} {line} --num_batches 6 --resume")
    assert "3 steps done" in printed
    assert error is None, printed
    assert len(summary["loss"]) == len(summary["step_seconds"]) == 6


def test_going_on_at_the_same_layout_is_bit_for_bit(ranks: Ranks) -> None:
    line = VGG.replace("--check_weights --check_output", "--optimizer adamw --save_every 2")
    whole = saved(ranks, f"ddp {line} --num_batches 6")
    assert sum(name.startswith("optimizer.exp_avg_sq.") for name in whole) == 32
    saved(ranks, f"ddp {line} --num_batches 4")
    again = saved(ranks, f"ddp {line} --num_batches 6 --resume")
    assert list(again) == list(whole)
    assert [name for name in whole if not torch.equal(again[name], whole[name])] == []


def saved(ranks: Ranks, line: str) -> dict[str, torch.Tensor]:
    """The tensors of a run's last checkpoint."""
    trained(ranks, line)
    checkpoint, _ = newest(Path("work/checkpoints"))
    assert checkpoint is not None
    tensors = checkpoint.tensors
    types = {"random": torch.uint8, "model": torch.float32, "optimizer": torch.float32}
    return {name: tensors.tensor(name, types[name.split(".")[0]]) for name in sorted(tensors)}


def test_the_exported_model_is_the_trained_one(ranks: Ranks) -> None:
    export = Path("exported").resolve()
    tensors = saved(ranks, f"pipeline {GPT} --export {export} --save_every 2")
    model = GPT2LMHeadModel.from_pretrained(export)
    names = [name for name, _ in model.named_parameters()]
    assert names.count("transformer.wte.weight") == 1 and len(names) > 20
    for name, p in model.named_parameters():
        assert torch.equal(p, tensors[f"model.{name}"]), name


# Options that cannot work: the line, how what is said begins, and how it ends.
BAD: list[tuple[str, str, str]] = [
    ("ddp --num_workers 3 --batch_size 2", "--batch_size 2 --num_workers 3: ", "2 or less works"),
    ("ddp --num_workers 3 --n_train 2", "--n_train 2 --num_workers 3: ", "2 or less works"),
    ("fsdp --num_workers 3 --n_validation 2", "--n_validation 2 --num_workers 3: ", "less works"),
    ("single --num_workers 2", "single --num_workers 2: ", "ddp takes several"),
    ("pipeline --num_workers 17", "pipeline --num_workers 17: vgg16 has 16 ", "16 or less works"),
    (
        "model --num_workers 7 --model gpt2-mini --n_layer 2",
        "model --num_workers 7: gpt2-mini has 6 layers",
        "--num_workers 6 or less works",
    ),
    ("pipeline --balance 9,8", "--num_workers 2 --balance='9,8': ", "uniform or 8,8"),
    ("ddp --balance uniform", "ddp --balance uniform: ", "option of pipeline and model"),
    ("ddp --schedule gpipe", "ddp --schedule gpipe: ", "option of pipeline"),
    ("pipeline --zero 2", "pipeline --zero 2: ", "option of fsdp"),
    ("model --num_microbatches 2", "model --num_microbatches 2: ", "it is pipeline"),
    (
        "pipeline --num_microbatches 33",
        "--num_microbatches 33 --batch_size 32: ",
        "--num_microbatches 32 or less works",
    ),
    ("ddp --model gpt3", "--model gpt3: ", "gpt2-large, gpt2-xl"),
    ("ddp --model gpt2 --n_embd 770", "--n_layer 12 --n_embd 770 --n_head 12: ", "--n_head 4"),
    ("ddp --n_layer 2", "--n_layer 2 --model vgg16: ", "gpt2-large, gpt2-xl"),
    ("ddp --dropout 0.1", "--dropout 0.1 --model vgg16: ", "gpt2-large, gpt2-xl"),
    (
        "ddp --model gpt2-mini --dropout 0.1 --check_weights",
        "--dropout 0.1 with --check_weights or --check_output: ",
        "--dropout 0 works",
    ),
    ("ddp --save_every 3 --keep 0", "--save_every 3 --keep 0: ", "--keep 1 works"),
    ("ddp --workdir file", "--workdir file: nothing can be written", "--workdir workdir"),
]


@pytest.mark.parametrize(("line", "begin", "end"), BAD, ids=[line for line, _, _ in BAD])
def test_bad_options(line: str, begin: str, end: str) -> None:
    Path("file").touch()
    with pytest.raises(UserError) as error:
        parse(line.split())
    said = str(error.value)
    assert (said[: len(begin)], said[-len(end) :]) == (begin, end)
    assert "\n" not in said


@pytest.mark.parametrize(
    "line",
    ["", "dpp", "ddp --num_workers 0", "fsdp --zero 4", "pipeline --schedule sequential",
     "ddp --optimizer lamb", "ddp --precision fp8", "ddp --momentum 1", "ddp --vgg_width 0"],
)  # fmt: skip
def test_bad_values(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(line.split())
    assert end.value.code == 2
    assert "error: " in capfd.readouterr().err


def test_warm_ups_end_before_the_run() -> None:
    for line in ("--num_batches 5 --warmup_steps 5", "--n_train 64 --warmup_steps 2"):
        with pytest.raises(UserError, match=r"^--warmup_steps .* works$"):
            read_data(parse(["ddp", *line.split()]))
    read_data(parse(["ddp", "--num_batches", "5", "--warmup_steps", "4", "--n_train", "64"]))


def test_a_neighbour_may_be_silent_for_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun nobody else notices that a rank is stopped."""
    args = parse(["pipeline", "--timeout", "7"])
    task: Any = SimpleNamespace(
        dtype=torch.float32, skeleton=lambda: nn.Linear(1, 1), layers=lambda model: [model],
        initialize=None,
    )  # fmt: skip
    pipes: list[dict[str, Any]] = []

    def make(*_: Any, **options: Any) -> Any:
        pipes.append(options)
        raise LookupError

    monkeypatch.setattr(strategies, "cut_into_stages", lambda *_: [1])
    monkeypatch.setattr(strategies, "ProcessPipe", make)
    with pytest.raises(LookupError):
        strategies.Pipeline(task, World(), plan_of(args, World(), task))
    assert [pipe["timeout"] for pipe in pipes] == [7.0]


def test_what_is_not_given() -> None:
    args = parse(["pipeline"])
    assert (args.num_workers, args.workdir, args.model) == (2, Path("workdir/pipeline2"), "vgg16")
    assert (args.schedule, args.balance, args.dropout, args.n_epochs) == ("1f1b", "auto", 0.0, 1)
    assert (args.batch_size, args.cores_per_worker, args.num_batches) == (32, 1, None)
    assert parse(["single"]).workdir == Path("workdir/single1")
    assert parse(["fsdp", "--num_workers", "3"]).zero == 3


def test_torchrun_decides_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert parse(["ddp"]).num_workers == 3
    with pytest.raises(UserError, match="torchrun started 3 ranks; leave it out"):
        parse(["ddp", "--num_workers", "2"])

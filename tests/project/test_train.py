"""project/train.py: a strategy trains what one process trains, and it is said where it does not."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_parallel.ddp import DistributedDataParallel
from project import check, strategies
from project.tasks import read_data
from project.train import parse
from project.worker import run_worker
from tests.project.conftest import ROOT, Run, run
from tests.ranks import Ranks
from training.launch import RunError, World
from training.vgg import vgg16

PROGRAM = str(ROOT / "project" / "train.py")
TINY = (
    "--num_workers 2 --num_batches 2 --batch_size 6 --n_train 22 --n_validation 9 --device cpu "
    "--optimizer sgd --learning_rate 0.02 --check_weights --check_output "
)
VGG = TINY + "--vgg_width 4 "
GPT = TINY + (
    "--model gpt2-mini --n_layer 2 --n_embd 16 --n_head 2 --vocab_size 300 --n_test 2 "
    "--model_max_length 24 "
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
            run_worker(World(rank, world_size, rank), args, read_data(args))
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
    (VGG + "--num_batches 5", "vgg in fp32"),
    (VGG + "--precision fp64 --optimizer adamw --learning_rate 1e-3", "vgg in fp64, adamw"),
    (GPT + "--precision fp64 --num_batches 5", "gpt2 in fp64"),
    (GPT + "--num_microbatches 2 --max_grad_norm 0.5 --warmup_steps 1", "gpt2, clipped"),
]


@pytest.mark.parametrize("line", [c[0] for c in CASES], ids=[c[1] for c in CASES])
@pytest.mark.parametrize("strategy", ON_TWO)
def test_it_trains_what_one_process_trains(ranks: Ranks, strategy: str, line: str) -> None:
    printed, error, summary = trained(ranks, f"{strategy} {line}")
    assert error is None, printed
    assert "weights: agree with one process" in printed
    assert "outputs: agree with one process" in printed
    assert {what: verdict["agrees"] for what, verdict in summary["checks"].items()} == {
        "weights": True,
        "outputs": True,
    }


def test_the_summary_has_what_figures_are_drawn_from(ranks: Ranks) -> None:
    printed, _, summary = trained(ranks, "ddp " + VGG)
    assert {key: summary[key] for key in ("strategy", "num_workers", "model", "batch_size")} == {
        "strategy": "ddp", "num_workers": 2, "model": "vgg16", "batch_size": 6,
    }  # fmt: skip
    assert len(summary["loss"]) == len(summary["step_seconds"]) == 2
    assert summary["loss"][0] == pytest.approx(math.log(10), abs=0.05)
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
    ("--num_batches 4", forget_to_average, "weights", "conv1_1"),
    ("--batch_size 5", average_by_ranks, "weights", "conv1_1"),
    ("--precision fp64", scale_by_a_thousandth, "weights", "conv1_1"),
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
    assert [path.name for path in by_command.workdir.iterdir()] == ["summary.json"]

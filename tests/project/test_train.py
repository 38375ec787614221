"""project/train.py: --check_weights and --check_output find that a strategy computes what one
process does, and say so if it does not."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from project.figures.runs import Run
from tests.project.programs import TINY, VGG, course_commands, finish, read_json, run, summary
from tests.ranks import Ranks
from training import check
from training.checkpoint import weights_of
from training.layouts.replicated import Replicated
from training.tasks.vgg import vgg16

pytestmark = pytest.mark.usefixtures("elsewhere")

CHECKED = "--num_batches 5 --check_weights --check_output "
# An odd number of tokens: a rank that has a part of them has a row too many.
GPT = f"{TINY} --vocab_size 301 {CHECKED} --dropout 0 --optimizer sgd --learning_rate 0.02 "

DECAYING = GPT.replace("--num_batches 5", "--n_epochs 2 --lr_scheduler cosine --warmup_steps 2")

# Whatever a strategy does on two ranks must come out as on one: batches of 6, 6, 6, 2, then of the
# next epoch. The first lines are the course's, on less data.
OF_COURSE = [
    line.removeprefix("train ") for line in course_commands("brown_cs1390", "--check_weights")
]
LINES = [
    *(f"{line} {VGG} {CHECKED} --max_grad_norm 0.5 --warmup_steps 1" for line in OF_COURSE),
    f"pipeline --schedule zb --num_microbatches 3 --precision fp64 {DECAYING}",
    f"ddp --precision bf16 {GPT}",
    f"context {GPT.replace('--num_batches 5', '--n_epochs 4 --max_batches 2')}",
    f"tensor {GPT.replace('--dropout 0', '--dropout 0.1')}",  # outputs have none
    f"fsdp --precision bf16 {VGG} {CHECKED}",
]


@pytest.mark.parametrize("line", LINES, ids=[" ".join(line.split()[:3]) for line in LINES])
def test_it_trains_what_one_process_trains(ranks: Ranks, line: str) -> None:
    printed = finish(f"train {line}", ranks)
    for what in ("weights", "outputs"):
        assert f"{what}: agree with one process" in printed
        assert summary()["checks"][what]["agrees"]
        if "bf16" not in line:  # what drops differently twice would be taken for rounding
            assert summary()["checks"][what]["worst"]["rounding"] < 1e-4
    assert sorted(line.split()[0] for line in OF_COURSE) == ["ddp", "fsdp", "model", "pipeline"]
    peaks, held = summary()["peak_rss_bytes"], summary()["state_bytes"]
    assert len(peaks) == 2 and all(50e6 < peak < 5e9 for peak in peaks)
    whole = sum(p.numel() for p in vgg16(3, width=4).parameters())
    if line.startswith("fsdp --precision bf16"):  # half in fp32, and in bf16 what others gather
        assert held["parameters"] == pytest.approx([(4 + 2) * whole / 2] * 2, rel=0.05)
    if line.startswith("ddp") and "bf16" not in line:
        kinds = ("parameters", "gradients", "optimizer")  # the latter is sgd's momentum
        assert held == {kind: [4 * whole] * 2 for kind in kinds}
    for events in Run(Path("work")).timeline.values():
        assert {"F", "optimizer"} < {event.kind for event in events}
        assert max(event.step for event in events) == (7 if "--n_epochs" in line else 4)


def test_none_is_one_process_that_prints_every_step() -> None:
    """With the short options of the handout, and its losses are those of single."""
    printed = finish(f"train -n 3 -b 7 -l 0.02 -m 1 none {SMALL_VGG}")
    steps = re.findall(r"^step (\d): loss ([\d.]+), [\d.]+ s$", printed, re.MULTILINE)
    assert [int(number) for number, _ in steps] == [1, 2, 3]
    of_none = summary()["loss"]
    assert [float(loss) for _, loss in steps] == pytest.approx(of_none, abs=1e-4)
    run(f"train single --num_batches 3 --batch_size 7 --learning_rate 0.02 {SMALL_VGG}")
    assert summary()["loss"] == of_none


def tamper_at_the_end(rank: int, patches: pytest.MonkeyPatch) -> None:
    """With a weight, a name, and an output of rank 1."""
    outputs = Replicated.outputs

    def wrong_weights(checkpoint: Any) -> Any:
        found = weights_of(checkpoint)
        found["conv3_2.bias"][3] += 1e-4
        del found["fc7.weight"]
        return found

    def wrong_outputs(self: Any, x: Any) -> Any:
        found = outputs(self, x)
        assert found is not None
        found = found.clone()
        found[-1, 2] += 1e-4 * rank
        return found

    patches.setattr(check, "weights_of", wrong_weights)
    patches.setattr(Replicated, "outputs", wrong_outputs)


SMALL_VGG = "--n_train 20 --n_validation 9 --device cpu --vgg_width 4 --optimizer sgd --keep 0"
WRONG = "weights are not those of one process"
BEYOND = ["conv3_2.bias: off by 1.0e-04", "missing: fc7.weight", "outputs, part 1: off by 1.0e-04"]


def test_what_is_wrong_turns_red(ranks: Ranks) -> None:
    line = f"train ddp {VGG} {CHECKED} --num_batches 2"
    printed, error = run(line, ranks, tamper_at_the_end)
    wrong = f"ddp: {WRONG}; outputs are not those of one process"
    assert error is not None and error.startswith(wrong), (error, printed)
    said = [*BEYOND, "weights: DISAGREE with one process"]
    assert [text for text in said if text not in printed] == []
    assert not summary()["checks"]["weights"]["agrees"]


def test_a_tensor_is_compared_with_its_own_rounding() -> None:
    exact = {"a": torch.tensor([1.0, 2.0], dtype=torch.float64), "b": torch.zeros(1).double()}
    plain = {"a": torch.tensor([1.0, 2.0 + 4e-7]), "b": torch.zeros(1)}
    rounding = abs(plain["a"][1].item() - 2)
    for factor, agrees in ((0.9, True), (1.1, False)):
        off = factor * check.FACTOR * rounding
        got = {"a": plain["a"].double() + torch.tensor([0, off]), "b": torch.zeros(1)}
        verdict = check.verdict_of("weights", got, plain, exact, torch.float32)
        assert verdict.agrees is agrees
        assert verdict.worst.name == "a"
        assert verdict.worst.times_rounding == pytest.approx(factor * check.FACTOR, rel=1e-3)
    for value in (1e-12, math.nan):  # what must not move at all, and what is no number
        got = {"a": plain["a"], "b": torch.tensor([value])}
        verdict = check.verdict_of("weights", got, plain, exact, torch.float32)
        assert not verdict.agrees
        assert verdict.worst.name == "b"
    missing = check.verdict_of("weights", {"a": plain["a"]}, plain, exact, torch.float32)
    assert missing.missing == ["b"] and not missing.agrees
    assert not check.verdict_of("weights", {}, {}, {}, torch.float32).agrees  # of nothing


def test_a_difference_of_experts_in_bf16_may_be_no_mistake() -> None:
    """A rounded position may choose another expert."""
    for precision, doubted in (("bf16", True), ("fp32", False)):
        args: Any = SimpleNamespace(
            experts=4, precision=precision, check_weights=False, check_output=True
        )
        setup: Any = SimpleNamespace(args=args, dtype=torch.float32)
        model: Any = SimpleNamespace(task=Mock(), setup=setup, devices=[torch.device("cpu")])
        one = torch.ones(2)
        with patch.object(check, "Plain") as plain:
            plain.return_value.outputs.return_value = {"outputs": one.double()}
            same, other = (check.check(model, {0: (None, got)})[0] for got in (one, one + 1))
        assert "different expert" not in same.say()
        assert not other.agrees and ("different expert" in other.say()) is doubted


def test_a_profile_has_the_actions_around_their_operators(ranks: Ranks) -> None:
    """The profile has the second step alone."""
    line = f"train pipeline {TINY} --num_batches 3 --num_microbatches 3 --profile 1"
    printed = finish(line, ranks)
    assert "work/profile_rank*.json: open them in https://ui.perfetto.dev.\n" in printed
    assert Path("work/profile_rank1.json").exists()
    trace = read_json("work/profile_rank0.json")["traceEvents"]
    actions = [e for e in trace if e["name"].startswith(("forward, ", "backward, "))]
    assert sorted(e["name"] for e in actions) == [
        f"{kind}, micro-batch {i}, stage, layer or bucket 0"
        for kind in ("backward", "forward") for i in range(3)
    ]  # fmt: skip
    for action in actions:
        begin, end = action["ts"], action["ts"] + action["dur"]
        within = [e for e in trace if e.get("tid") == action["tid"] and begin < e["ts"] < end]
        assert {e["cat"] for e in within} >= {"cpu_op"}

"""project/train.py: a strategy trains what one process trains, and it is said where it does not."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_parallel.ddp import DistributedDataParallel
from data_parallel.fsdp import FullyShardedDataParallel
from project import check, strategies
from project.strategy import Plan
from tests.project.conftest import ROOT, Run, run
from tests.project.trained import GPT, ON_TWO, VGG, trained, work
from tests.ranks import Ranks
from training.launch import RunError, World
from training.optimization import Optimizers
from training.timeline import read_timelines
from training.vgg import vgg16

PROGRAM = str(ROOT / "project" / "train.py")
pytestmark = pytest.mark.usefixtures("elsewhere")

# Whatever a strategy does on two ranks must come out as on one, for either model and at odd sizes:
# batches of 6, 6, 6, 4, then of the next epoch; rank 1 has 2 of the 4.
CASES = [
    (VGG + "--num_batches 5 --max_grad_norm 0.5 --warmup_steps 1", "vgg in fp32"),
    (GPT + "--num_batches 5 --precision fp64 --num_microbatches 2", "gpt2 in fp64"),
]


# What else a strategy can be asked for.
FP64 = GPT + "--num_batches 4 --precision fp64 "
OTHERS = [
    "fsdp --zero 1 --num_microbatches 2 " + FP64,
    "fsdp --zero 2 --num_microbatches 2 " + FP64,
    "pipeline --schedule zb --num_microbatches 3 " + FP64,
    "pipeline --schedule gpipe --balance 5,1 " + FP64,
    "ddp --precision bf16 " + GPT,
    "fsdp --precision bf16 " + GPT,
    "pipeline --precision bf16 " + VGG,
    *(f"{strategy} --precision fp64 {VGG}" for strategy in ON_TWO),
]


@pytest.mark.parametrize("line", OTHERS, ids=[" ".join(line.split()[:3]) for line in OTHERS])
def test_options_of_strategies(ranks: Ranks, line: str) -> None:
    printed, error, _ = trained(ranks, line)
    assert error is None, printed
    assert printed.count("agree with one process") == 2


@pytest.mark.parametrize("line", [VGG, GPT], ids=["vgg", "gpt2"])
def test_one_worker(line: str, tmp_path: Path) -> None:
    """The plain loop it is compared with is another: no micro-batches, and in check.py."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        more = "--num_workers 1 --precision fp64 --num_microbatches 2 --workdir work"
        printed, error = work(0, 1, f"single {line} {more}", None)
    finally:
        dist.destroy_process_group()
    assert error is None, printed
    assert printed.count("agree with one process") == 2


def test_sharded_bf16_gathers_half_the_bytes_and_computes_losses_in_fp32(ranks: Ranks) -> None:
    """A rank has half of all weights in fp32, and in bf16 what others gather. (Under autocast whole
    weights would be gathered, and their copies kept.)"""
    printed, error, summary = trained(ranks, "fsdp --precision bf16 " + VGG, look_at_losses)
    assert error is None, printed
    assert printed.count("agree with one process") == 2
    whole = sum(p.numel() for p in vgg16(width=4).parameters())
    for held in summary["state_bytes"]["parameters"]:
        assert held == pytest.approx((4 + 2) * whole / 2, rel=0.05)


def look_at_losses(_: int, patches: pytest.MonkeyPatch) -> None:
    forward, entropy = FullyShardedDataParallel.forward, torch.nn.functional.cross_entropy

    def in_bf16(self: Any, x: Any) -> Any:
        output = forward(self, x)
        assert output is None or output.dtype == torch.bfloat16
        return output

    def in_fp32(logits: Tensor, *args: Any, **options: Any) -> Tensor:
        assert logits.dtype != torch.bfloat16
        return entropy(logits, *args, **options)

    patches.setattr(FullyShardedDataParallel, "forward", in_bf16)
    patches.setattr("torch.nn.functional.cross_entropy", in_fp32)


def test_three_workers(three_ranks: Ranks) -> None:
    """Batches of 6, 6, 6 and 4; a worker's share is not a half. The losses are the same, too."""
    losses = []
    for strategy in ("ddp", "fsdp --zero 3", "pipeline --schedule zb", "model"):
        printed, error, summary = trained(three_ranks, f"{strategy} {FP64}")
        assert error is None, printed
        losses.append(summary["loss"])
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-12)] * 3


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
    schedule, m = {"pipeline": ("1f1b", 4), "model": ("1f1b", 1)}.get(strategy, (None, None))
    m = 2 if "--num_microbatches 2" in line else m
    for timeline in timelines:
        assert timeline.about == {
            "strategy": strategy, "schedule": schedule, "num_microbatches": m
        }  # fmt: skip
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
    """Rank 1 alone moves all of its weights by little, after each step."""
    if rank == 1:
        step = Optimizers.step

        def move(self: Optimizers, *args: Any) -> Any:
            left_out = step(self, *args)
            with torch.no_grad():
                for group in self.optimizers[0].param_groups:
                    torch._foreach_add_(group["params"], 1e-6)
            return left_out

        patches.setattr(Optimizers, "step", move)


@pytest.mark.parametrize(
    ("line", "tamper", "names"),
    [
        ("ddp " + VGG, drift, "conv1_1.weight"),
        ("ddp " + VGG, forget_to_average, "conv1_1.weight"),
        ("pipeline --balance 3,3 " + GPT, drift, "transformer.wte.weight"),
    ],
)
def test_copies_that_have_come_apart_are_an_error(
    ranks: Ranks, line: str, tamper: Any, names: str
) -> None:
    _, error, _ = trained(ranks, line, tamper)
    expected = f"replicas have come apart after step 2: {names} (rank 1, against rank 0)"
    assert error is not None and error.startswith(expected)


def test_shards_are_not_compared(ranks: Ranks) -> None:
    """Their weights are, with those of one process."""
    _, error, _ = trained(ranks, "fsdp " + VGG, drift)
    assert error is not None and error.startswith("fsdp: weights are not those of one process")


def replicated(rank: int, world_size: int) -> list[str]:
    """Names of what is compared, of a model with a buffer."""
    model = nn.ModuleDict({"head": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)}).to("meta")
    task: Any = SimpleNamespace(
        skeleton=lambda: model, layers=lambda model: [model["norm"], model["head"]],
        initialize=lambda _, p: nn.init.zeros_(p),
    )  # fmt: skip
    plan = Plan(lambda parameters: torch.optim.SGD(parameters, 0.1), nullcontext)
    strategy = strategies.Ddp(task, World(rank, world_size, rank), plan)
    names = list(strategy.copies())
    strategy.close()
    return names


def test_a_buffer_is_a_ranks_own(ranks: Ranks) -> None:
    """As the averages of a batch norm; weights have their names in the model."""
    names = ["head.weight", "head.bias", "norm.weight", "norm.bias"]
    assert ranks.run(replicated) == [names] * 2


def refuse_to_gather(_: int, patches: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> Any:
        raise RunError("the whole model is asked for")

    patches.setattr(strategies.Fsdp, "whole_weights", refuse)


def test_the_whole_model_is_gathered_only_to_be_used_and_after_the_summary(ranks: Ranks) -> None:
    unused = "fsdp " + VGG.replace("--check_weights ", "")
    printed, error, summary = trained(ranks, unused, refuse_to_gather)
    assert (error, list(summary["checks"])) == (None, ["outputs"]), printed
    assert names_in("work") == [*WRITTEN, *TIMELINES]
    for used in ("fsdp " + VGG, f"{unused} --export {Path('exported').resolve()}"):
        _, error, summary = trained(ranks, used, refuse_to_gather)
        assert error == "the whole model is asked for"
        assert (len(summary["loss"]), summary["checks"]) == (2, {})


WRITTEN = ["checkpoints", "summary.json"]
TIMELINES = ["timeline_rank0.json", "timeline_rank1.json", "trace.json"]


def names_in(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def test_without_a_timeline_none_is_left(ranks: Ranks) -> None:
    """Nor that of an earlier run."""
    Path("work").mkdir()
    for name in TIMELINES:
        Path("work", name).touch()
    line = f"ddp {VGG} --timeline 0".replace("--check_weights --check_output", "")
    assert trained(ranks, line)[1] is None
    assert names_in("work") == WRITTEN


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


def test_a_comparison_of_nothing_does_not_agree() -> None:
    one = {"a": torch.ones(1)}
    for plain, missing in (({}, []), (one, ["a"])):
        verdict = check.compare("weights", {}, plain, plain, torch.float32)
        assert not verdict.agrees
        assert verdict.as_dict()["missing"] == missing
        assert verdict.as_dict()["worst"]["name"] == "nothing"
        assert "largest difference 0.0e+00 (nothing)" in verdict.say()


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
    assert names_in(by_command.workdir) == [*WRITTEN, *TIMELINES]


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

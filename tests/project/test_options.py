"""The command lines of the three programs: values, defaults, aliases, files of options, help."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from pipeline.schedules.catalogue import SCHEDULES
from project.run_data_parallel import DataParallelOptions
from project.run_pipeline import PipelineOptions, choose_devices
from project.strategies import ONLY, STRATEGIES, owners, page_of
from project.train import TrainOptions
from tests.project.conftest import Refusal
from tests.project.programs import FLOW, KINDS, ROOT, parse
from tests.ranks import under_torchrun
from tests.which import see_gpus
from training.launch.errors import UserError
from training.options import SCHEDULE_NAMES, Options, option_names
from training.resume import DECIDE, OF_LAYOUT

pytestmark = pytest.mark.usefixtures("elsewhere")

DP, PP, TRAIN = "run_data_parallel ", "run_pipeline ", "train ddp "


def refused(line: str, refusal: Refusal) -> str:
    """The line that the parser says, less its end."""
    said = refusal(parse, line)
    assert said.endswith("; --help explains all\n")
    return said.partition(": error: ")[2].removesuffix("; --help explains all\n")


UNNAMED = f"one strategy must be named: {', '.join([*STRATEGIES][:-1])} or 3d"
COUNT = f"a whole number from 1 to {2**32 - 1}"
REFUSED = {  # per kind of value
    "n_epochs": (["0", "-1", "1.5", "many", "9" * 20], COUNT),
    "n_train": (["0", "every"], COUNT),
    "keep": (["-1", "0.5", str(2**32)], f"a whole number from 0 to {2**32 - 1}"),
    "bucket_mb": (["0", "-1", "-.5", "nan", "big"], "positive and finite"),
    "dropout": (["1", "-0.1", "nan"], "from 0 to below 1, e.g. 0.1"),
    "betas": (["0.9", "0.9,1", "0.9,x", "0.9,0.9,0.9"], "two numbers, at least 0, below 1"),
    "timeout": (["0.001", "0.99", "-1", "nan", "1814401"], "from 1 to 1814400 seconds, e.g. 300"),
    "pytest": (["perhaps", "2"], "true or false"),
}


def test_a_value_that_an_option_cannot_have(refusal: Refusal) -> None:
    """In one line, with the value and the rule."""
    for name, (values, rule) in REFUSED.items():
        for value in values:
            said = refused(f"{DP}--{name} {value}", refusal)
            assert said.startswith(f"--{name} {value}: it must be {rule}")
    Path("self.txt").write_text("@self.txt")
    for line, said in (
        (DP + "--dataset ./nowhere", "--dataset ./nowhere: there is no such file or folder"),
        (DP + "twice", "twice: there is no such option"),
        ("train ", UNNAMED),
        ("train --workdir ddp", UNNAMED),
        ("train -w 2 DDP", "DDP: there is no such strategy; is it ddp?"),
        ("train fspd", "fspd: there is no such strategy; is it fsdp?"),
        (
            "train zero3",
            "zero3: there is no such strategy; there are "
            "none, single, ddp, fsdp, pipeline, model, tensor, context and 3d",
        ),
        (DP + "--workdir", "--workdir expected one argument"),
        (DP + "--workdir= -b 8", "--workdir is empty; leave it out, or give it a value"),
        (PP + "--n_chunk 0", f"--num_microbatches 0: it must be {COUNT}"),
        (DP + "--num-workers two", f"--world_size two: it must be {COUNT}"),
        (TRAIN + "--wandb=yes", "--wandb ignored explicit argument 'yes'"),
        (PP + "--n_chunks=2", "--n_chunks=2: there is no such option; is it --n_chunk?"),
        # Of another program, or strategy, by its other names too.
        (PP + "-w 2", "-w: there is no such option; train.py ddp has it"),
        (DP + "--zero=3", "--zero=3: there is no such option; train.py fsdp has it"),
        (
            TRAIN + "--num-devices 2",
            "--num-devices: there is no such option; run_pipeline.py has it",
        ),
        (PP + "--mode x", "--mode: there is no such option; is it --model_parallel_mode?"),
        (DP + "--epochs 3", "--epochs: there is no such option; is it --n_epochs?"),
        (DP + "@self.txt", "@FILE: it includes itself; options alone work"),
        (TRAIN + "--chunks=2", "--chunks: pipeline and 3d alone can have it; leave it out"),
        (TRAIN + "--tp 2", "--tp: 3d alone can have it; leave it out"),
        ("train fsdp --compile", "--compile: none, single and ddp alone can have it; leave it out"),
    ):
        assert refused(line, refusal) == said


def test_flags_and_values() -> None:
    assert parse(DP + "--resume --keep 3").resume is True
    assert parse(DP).resume is False
    for flag, given in (("", False), ("--pytest true", True), ("--pytest=False", False)):
        assert parse(f"{DP} {flag}").pytest is given
    args = parse(DP + "--n_train all --pytest True --learning_rate 3e-4 --n_test 5")
    assert (args.n_train, args.pytest, args.learning_rate, args.n_test) == (None, True, 3e-4, 5)
    args = parse(DP + "--n-epochs 3 --num-workers=4 --workdir my-runs --gradient-sync flat")
    assert (args.n_epochs, args.world_size, args.gradient_sync) == (3, 4, "flat")
    assert args.workdir == Path("my-runs")
    args = parse(DP + "--cores_per_worker 1 --accumulation_steps=5")
    assert (args.cores_per_rank, args.num_microbatches) == (1, 5)
    assert parse(DP + "-l1e-3").learning_rate == 1e-3


WORDS = "--zero=2 -w 3 -n5 -m 4 -b 24 -c 1 -l 0.5 --workdir ddp --check_weights"


@pytest.mark.parametrize("place", range(len(WORDS.split()) + 1))
def test_the_strategy_may_stand_anywhere(place: int) -> None:
    """But between an option and its value, where it is the value."""
    words = WORDS.split()
    before = words[place - 1] if place else ""
    if before in ("-w", "-m", "-b", "-c", "-l"):
        return
    line = ["train", *words[:place], "fsdp", *words[place:]]
    if before == "--workdir":
        line = ["train", *words[:place], "pipeline", "fsdp", *words[place + 1 :]]
    args = parse(" ".join(line))
    assert (args.strategy, args.zero, args.world_size, args.num_batches) == ("fsdp", 2, 3, 5)
    assert (args.num_microbatches, args.batch_size, args.cores_per_rank) == (4, 24, 1)
    assert (args.learning_rate, args.check_weights) == (0.5, True)
    assert args.workdir == Path("pipeline" if "pipeline" in line else "ddp")


def test_options_come_from_a_file_and_what_comes_later_counts(refusal: Refusal) -> None:
    """As they are typed, the strategy too; and from an editor on Windows."""
    first = "\ufeff--batch_size 8 --n-epochs=3  # as typed\n"
    Path("run.txt").write_text(first + "\n--resume\nfsdp -w 3\n")
    for line, epochs in (("@run.txt -c 1 --n_epochs 4", 4), ("--n_epochs 4 @run.txt", 3)):
        args = parse(f"train {line}")
        assert (args.strategy, args.world_size, args.batch_size) == ("fsdp", 3, 8)
        assert (args.n_epochs, args.resume) == (epochs, True)
    said = "@none.txt: No such file or directory; a file with options, as they are typed here, "
    assert refused(DP + "@none.txt", refusal) == said + "works"
    Path("wrong.txt").write_text("--batchsize 8\n")
    said = "--batchsize: there is no such option; is it --batch_size?"
    assert refused(DP + "@wrong.txt", refusal) == said
    for content, why in ((b"--src 'de", "No closing quotation"), (b"\xff", "'utf-8' codec can't")):
        Path("wrong.txt").write_bytes(content)
        said = f"@wrong.txt: it holds no options as they are typed ({why}"
        assert refused(DP + "@wrong.txt", refusal).startswith(said)


HELP = """
import runpy, sys

for line in sys.argv[1:]:
    program, *words = line.split()
    sys.argv = [f"{program}.py", *words]
    try:
        runpy.run_path(f"project/{program}.py", run_name="__main__")
    except SystemExit as end:
        assert (end.code or 0) == (0 if "--help" in words else 2), end.code
    print("=====")
print(*(name for name in ("torch", "transformers", "matplotlib") if name in sys.modules))
"""


# Each has a page of help of its own, which shows the options of one program, or of one strategy.
EXPLAINED = {
    DP: {*option_names(*DataParallelOptions.GROUPS)},
    PP: {*option_names(*PipelineOptions.GROUPS)},
    **{
        f"train {strategy}": {
            name for name in option_names(*TrainOptions.GROUPS) if strategy in owners(name)
        }
        for strategy in STRATEGIES
    },
}
OTHERS = ("generate", "plot timeline", "plan search")
# Words that would be of other programs.
FOREIGN = {
    DP: "vgg16 stages fsdp", PP: "vgg16 rank ranks ddp", "train tensor": "--chunks --dp",
    "train ddp": "--zero --pp", "train fsdp": "--schedule --tp",
}  # fmt: skip


def test_help_is_short_complete_and_answered_without_torch() -> None:
    """For which everybody would wait, for seconds. So are misspelt values and folders."""
    lines = ["run_pipeline --schedule 1fb1", "plot timelin x", "generate nowhere"]
    lines += [f"{line} --help" for line in (*OTHERS, *EXPLAINED, "train")]
    done = subprocess.run(
        [sys.executable, "-c", HELP, *lines], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "COLUMNS": "118"},
    )  # fmt: skip
    _, _, _, *pages, strategies, imported = done.stdout.split("=====\n")
    for line in OTHERS:
        program, _, command = line.partition(" ")
        assert pages.pop(0).startswith(" ".join((f"usage: {program}.py", command)))
    assert imported.split() == []
    word, choice, folder = done.stderr.splitlines()
    assert " 1fb1: it must be one of gpipe, " in word and " invalid choice: 'timelin' " in choice
    assert folder.startswith("generate.py: error: FOLDER nowhere: there is no such folder; ")
    for page, (line, options) in zip(pages, EXPLAINED.items(), strict=True):
        assert page.startswith(f"usage: {line.split()[0]}.py")
        assert 40 < page.count("\n") < 170
        assert max(map(len, page.splitlines())) <= 118
        there = {*re.findall(r"^  --(\w+)", page, re.MULTILINE)}
        assert there == options, line
        assert ("--num_workers N" in page) == ("world_size" in options)
        assert {*FOREIGN.get(line, "").split()} & {*re.findall(r"(?:--)?\w+", page)} == set()
    assert strategies.count("\n") < 25 and "train.py ddp --help" in strategies
    assert re.findall(r"^ {4}(\w+) {2}", strategies, re.MULTILINE) == list(STRATEGIES)


def test_the_options_of_a_layout_are_resumed_together() -> None:
    """Or none is. Experts are of the model."""
    assert ONLY.keys() <= OF_LAYOUT | DECIDE


def test_every_option_is_one_of_a_program() -> None:
    assert {group for kind in KINDS for group in kind.GROUPS} == {*Options.__bases__}


def test_every_schedule_can_be_typed() -> None:
    """But the one for a device at a time, which run_pipeline.py chooses."""
    assert [*SCHEDULE_NAMES] == [name for name in SCHEDULES if name != "sequential"]


def test_examples_of_help_can_be_typed() -> None:
    for strategy in STRATEGIES:
        examples = re.findall(r"^python project/train\.py (.*)$", page_of(strategy), re.MULTILINE)
        assert [parse(f"train {line}").strategy for line in examples] == [strategy] * 2


MODEL = "--model_parallel_mode model_parallel "
# The line, and a part of what it means.
CHOSEN: dict[str, dict[str, object]] = {
    DP: {
        "world_size": 2, "model": "gpt2-mini", "learning_rate": 1e-3, "workdir": Path("workdir"),
        "n_train": 5000, "strategy": "ddp", "timeline": 20,
    },
    # Of your own data all is used.
    DP + "--dataset mine": {"n_train": None, "n_validation": 1000, "n_test": None},
    DP + "--dataset mine --n_validation all": {"n_validation": None},
    PP + "--n_train 7 --n_test all": {"n_train": 7, "n_validation": 1000, "n_test": None},
    DP + "--model gpt2": {"learning_rate": 1e-4},
    DP + "--model gpt2 --n_embd 384": {"learning_rate": 1e-3},
    "train pipeline": {
        "world_size": 2, "workdir": Path("workdir/pipeline2"), "model": "vgg16", "dropout": 0.0,
        "schedule": "1f1b", "balance": "auto", "n_epochs": 1, "batch_size": 32,
        "cores_per_rank": 1, "learning_rate": 3e-4,
    },
    "train fsdp --num_workers 3 --optimizer sgd": {"learning_rate": 30 * 3e-4, "zero": 3},
    PP: {"num_devices": 1, "schedule": "sequential", "num_microbatches": 4, "timeline": 20},
    PP + "--timeline 0": {"timeline": 0},
    PP + "--pipeline blocks": {"num_devices": 1, "num_microbatches": 1},
    f"{PP} {MODEL} --num_devices 3 --balance 1,1,2 --n_chunk 8": {
        "num_devices": 3, "balance": "1,1,2", "schedule": "sequential", "num_microbatches": 8,
    },
    PP + FLOW: {"num_devices": 2, "balance": "auto", "schedule": "1f1b", "num_microbatches": 4},
    f"{PP} {FLOW} --pipeline blocks --schedule gpipe --n_chunk 8": {"num_microbatches": 8},
}  # fmt: skip


@pytest.mark.parametrize("line", CHOSEN)
def test_what_is_not_given_is_chosen(line: str) -> None:
    args = parse(line)
    assert {name: getattr(args, name) for name in CHOSEN[line]} == CHOSEN[line]
    assert {type(x) for x in vars(args).values() if isinstance(x, float)} == {float}  # for compile
    if line.startswith(PP):
        devices = [torch.device("cpu", i) for i in range(args.num_devices)]
        assert choose_devices(args) == devices


Started = tuple[int, int] | None
GPUS = (
    "fsdp --world_size {} --device auto: {} of this machine, and each needs one; {} ranks on a "
    "machine, or --device cpu, work"
)
# The GPUs of this machine; the ranks that torchrun has started, in all and here; the line; and the
# ranks that it means, or what is said.
MACHINES: list[tuple[int, Started, str, int | str]] = [
    (0, (4, 4), DP, 4),
    (0, (4, 4), TRAIN.replace("ddp", "3d") + "--pp 2 --zero 1", 4),  # two replicas, or one:
    (0, (2, 2), TRAIN.replace("ddp", "3d") + "--pp 2 --zero 1", 2),  # dp follows
    (0, (3, 3), TRAIN.replace("ddp", "3d") + "--pp 2",
     "3d --world_size 3: dp x cp x pp x tp is 2; start 2 ranks: torchrun --nproc-per-node 2 works"),
    (0, (2, 2), DP + "-w 2", 2),
    (0, (2, 2), DP + "-w 4", "--world_size 4: torchrun started 2; leave it out"),
    (0, (4, 4), PP, "--model_parallel_mode none: torchrun started 4 ranks, and run_pipeline.py is "
     "one process; start it without torchrun, or take project/train.py pipeline, whose stages are "
     "ranks"),
    (0, (1, 1), PP, 1),
    (0, (2, 2), "train single",
     "single --world_size 2: single is one process; ddp takes several"),
    # Ranks that hand each other tensors need a GPU each, or none; whole models may share one.
    (1, None, "train fsdp", GPUS.format(2, "1 GPU for 2 ranks", 1)),
    (1, None, "train ddp --device cuda", 2),
    (2, None, DP, 2),
    (1, None, f"{PP} {FLOW} --device cuda", "--num_devices 2 --device cuda: 1 GPU can be seen; "
     "--num_devices 1, or --device cpu, works"),
    (3, (8, 2), "train fsdp", 8),  # on each of four machines
    (3, (8, 4), "train fsdp", GPUS.format(8, "3 GPUs for 4 ranks", 3)),
]  # fmt: skip


def test_a_host_with_fewer_gpus_has_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ranks that are compared at the start would not be the same."""
    found = []
    for gpus in (1, 2):
        see_gpus(gpus, monkeypatch)
        found.append(parse(DP))
    assert found[0] == found[1]


def test_under_torchrun_the_first_rank_of_each_host_checks() -> None:
    """Rules may ask the hub. Of a resume rank 0, since other hosts may have no checkpoint."""
    for rank, local_rank, line, checks in (
        (0, 0, "", True), (1, 1, "", False), (2, 0, "", True), (2, 0, "--resume", False)
    ):  # fmt: skip
        refused = pytest.raises(UserError) if checks else nullcontext()
        with under_torchrun(rank, 4, local_rank), refused:
            parse(f"{DP} --n_head 3 {line}")


@pytest.mark.parametrize(("gpus", "started", "line", "expected"), MACHINES)
def test_what_torchrun_and_the_machine_allow(
    gpus: int, started: Started, line: str, expected: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_gpus(gpus, monkeypatch)
    found: int | str
    with under_torchrun(0, started[0], each=started[1]) if started else nullcontext():
        try:
            args = parse(line)
            assert args.timeline == (0 if gpus and "cpu" not in line else 20)  # it would wait
            found = args.world_size
            if line.startswith(PP):
                choose_devices(args)
        except UserError as error:
            found = str(error)
    assert found == expected

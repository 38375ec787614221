"""What cannot work, typed at each program: one line with the value, the rule and what works; status
2, no traceback, and before a process or a thread is started."""

from __future__ import annotations

import argparse
import shlex
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from project import options, run_data_parallel, run_pipeline, train
from project.folders import alone_in_workdir
from project.options import plain, run_program
from project.tasks import read_data
from tests.project.conftest import write_pairs
from training.checkpoint import Saver
from training.data import train_tokenizer
from training.model import build_model, gpt2_config

DP, PP, TRAIN = PROGRAMS = (run_data_parallel, run_pipeline, train)
TWO_STAGES = "--model_parallel_mode pipeline_parallel --num_devices 2 "
PRESETS = "gpt2-mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl"
NAME = "000001-here"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default workdir is made in the current folder. There are a file, a folder with nothing in
    it, no GPU, and what a run would begin with is forbidden."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    Path("file").touch()
    Path("empty").mkdir()
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def begin(*_: object) -> None:
        raise AssertionError("it has begun")

    monkeypatch.setattr(DP, "launch", begin)
    monkeypatch.setattr(TRAIN, "launch", begin)
    monkeypatch.setattr(PP, "open_session", begin)  # before that nothing is on any thread


def ended(program: ModuleType, line: str, capfd: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """The status with which a command line ends, and what it says."""
    name = f"{program.__name__.split('.')[-1]}.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [f"project/{name}", *shlex.split(line)])
        with pytest.raises(SystemExit) as end:
            run_program(program.main)
    printed = capfd.readouterr()
    assert printed.out == ""
    return end.value.code, printed.err.removeprefix(f"{name}: error: ")


# ------------------------------------------------------------------ values that no option can have

NUMBER = "must be a whole number, 1 or more"
RULES: dict[Any, tuple[list[str], str]] = {
    options.count: (["0", "-1", "1.5", "many"], NUMBER),
    options.count_or_all: (["0", "-1", "none"], NUMBER),
    options.positive: (["0", "-1", "nan", "inf"], "must be a positive, finite number, as 0.5"),
    options.seconds: (["0", "-1", "inf"], "must be a positive, finite number, as 0.5"),
    options.fraction: (["1", "-0.1", "nan"], "must be at least 0 and less than 1, as 0.1"),
    options.whole_number: (["-1", "0.5"], f"must be a whole number from 0 to {2**32 - 1}"),
    options.port: (["-1", "65536"], "must be a port from 0 (any free one) to 65535"),
    options.boolean: (["yes"], "is neither True nor False"),
}
HELP = "; --help explains every option\n"


def parser_of(program: ModuleType) -> argparse.ArgumentParser:
    """That of a program."""
    found: list[Any] = []

    def note(parser: Any, _: object) -> None:
        found.append(parser)
        raise LookupError

    with pytest.MonkeyPatch.context() as patch, suppress(LookupError):
        patch.setattr("argparse.ArgumentParser.parse_args", note)
        program.parse([])
    return found[0]


def bad_values(action: argparse.Action) -> list[tuple[str, list[str]]]:
    """Values that an option must refuse, and what it must say, the beginning first. None, where
    whatever is typed may be meant."""
    option = f"argument {action.option_strings[0]}: "
    if action.choices is not None:
        wrong = "0" if action.type is int else "'0'"
        return [("0", [f"{option}invalid choice: {wrong} ", *map(str, action.choices)])]
    values, rule = RULES[action.type] if action.type not in (None, Path) else ([], "")
    return [(value, [f"{option}{value} {rule}"]) for value in values]


@pytest.mark.parametrize("program", PROGRAMS)
def test_zero_negative_and_unknown_values_of_every_option(
    program: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    before = "ddp " if program is TRAIN else ""
    refused = 0
    for action in parser_of(program)._actions:
        if not action.option_strings or action.nargs == 0:
            continue
        for value, (begin, *words) in bad_values(action):
            line = f"{before}{action.option_strings[0]} {value}"
            status, said = ended(program, line, capfd)
            assert (status, said.count("\n")) == (2, 1), line
            assert said.startswith(begin) and said.endswith(HELP), said
            assert [word for word in words if word not in said] == [], said
            refused += 1
    assert refused > 50


# ----------------------------------------------------------------------- what does not fit together

FEW = "ddp --n_train 40 --n_validation 8 "

# Program, options, and the line.
TABLE: dict[str, list[tuple[ModuleType, str, str]]] = {
    "more ranks than examples": [
        (DP, "--world_size 4 --n_train 3",
         "--world_size 4 --n_train 3: each rank needs an example; --world_size 3 or less works"),
        (DP, "--world_size 4 --n_train 8 --n_validation 8 --n_test 3",
         "--dataset builtin: test has 3 pairs for 4 ranks, and each rank needs one; --world_size 3 "
         "or less, or more pairs, works"),
        (TRAIN, "ddp --num_workers 4 --n_train 3",
         "--n_train 3 --num_workers 4: each worker needs an example; --num_workers 3 or less "
         "works"),
        (TRAIN, "fsdp --num_workers 10 --model gpt2-mini --dataset pairs",
         "--num_workers 10 --dataset pairs: validation has 9 examples, and each worker needs one; "
         "--num_workers 9 or less works"),
    ],
    "more ranks than the batch has examples": [
        (DP, "--world_size 4 --batch_size 3",
         "--world_size 4 --batch_size 3: each rank needs an example; --world_size 3 or less "
         "works"),
        (TRAIN, "ddp --num_workers 4 --batch_size 3",
         "--batch_size 3 --num_workers 4: each worker needs an example; --num_workers 3 or less "
         "works"),
    ],
    "more stages than layers": [
        (PP, TWO_STAGES + "--num_devices 11",
         "--num_devices 11 --balance auto: the model has 10 layers (embedding, halves of blocks, "
         "head) and every stage needs one; --num_devices 10 or less works, or a larger --n_layer"),
        (TRAIN, "pipeline --num_workers 17",
         "pipeline --num_workers 17: vgg16 has 16 layers and every worker needs one; --num_workers "
         "16 or less works"),
        (TRAIN, "model --num_workers 11 --model gpt2-mini",
         "model --num_workers 11: gpt2-mini has 10 layers and every worker needs one; "
         "--num_workers 10 or less works"),
    ],
    "micro-batches beyond the batch": [
        (DP, "--accumulation_steps 33",
         "--accumulation_steps 33 --batch_size 64 --world_size 2: a micro-batch needs an example; "
         "--accumulation_steps 32 or less works"),
        (PP, TWO_STAGES + "--n_chunk 65",
         "--n_chunk 65 --batch_size 64: a micro-batch needs an example; --n_chunk 64 or less "
         "works"),
        (TRAIN, "pipeline --num_microbatches 33",
         "--num_microbatches 33 --batch_size 32: a micro-batch needs an example; "
         "--num_microbatches 32 or less works"),
        (TRAIN, "ddp --num_microbatches 10 --batch_size 17",
         "--num_microbatches 10 --batch_size 17 --num_workers 2: a micro-batch needs an example; "
         "--num_microbatches 9 or less works"),
    ],
    "an option without effect": [
        (DP, "--gradient_sync flat --bucket_mb 8",
         "--bucket_mb 8 --gradient_sync flat: only --gradient_sync overlap has buckets"),
        (PP, "--schedule zb",
         "--schedule zb --model_parallel_mode none: one device computes at a time; leave it out, "
         "or take --model_parallel_mode pipeline_parallel"),
        (TRAIN, "ddp --schedule zb", "ddp --schedule zb: it is an option of pipeline"),
        (TRAIN, "ddp --momentum 0.5",
         "--momentum 0.5 --optimizer adamw: only --optimizer sgd has a use for it"),
        (TRAIN, "ddp --model gpt2-mini --vgg_width 8",
         "--vgg_width 8 --model gpt2-mini: only --model vgg16 has a use for it"),
        *((TRAIN, f"ddp --{name} {value}",
           f"--{name} {value} --model vgg16: only models of sentences have a use for it: {PRESETS}")
          for name, value in (("n_test", "all"), ("padding", "max_length"), ("src", "en"),
                              ("tgt", "de"), ("model_max_length", "64"), ("n_layer", "2"))),
    ],
    "a model folder without weights": [
        *((program, f"{strategy}--model empty",
           "--model empty: the folder holds no weights (*.safetensors); presets need none: "
           + PRESETS) for program, strategy in ((DP, ""), (PP, ""), (TRAIN, "ddp "))),
    ],
    "a tokenizer that does not fit": [
        *((program, f"{strategy}--model misfit --model_max_length 32",
           "--model misfit: no tokenizer that fits comes with it (it has 340 tokens, and the "
           "embedding 300 rows); save the one of these weights there, as --export does")
          for program, strategy in ((DP, ""), (PP, ""), (TRAIN, "ddp "))),
    ],
    "a workdir that cannot be written": [
        *((program, f"{strategy}--workdir file/here",
           "--workdir file/here: nothing can be written there (Not a directory); name a folder of "
           "your own, as --workdir workdir")
          for program, strategy in ((DP, ""), (PP, ""), (TRAIN, "ddp "))),
    ],
    "a workdir in which another run writes": [
        *((program, f"{strategy}--workdir taken",
           "--workdir taken: another run is writing there; --workdir taken_2 works")
          for program, strategy in ((DP, ""), (PP, ""), (TRAIN, "ddp "))),
    ],
    "a resume with other options": [
        *((program, f"{strategy}--workdir {kept} --resume --seed 3",
           f"--seed 3 with --resume: {NAME} was made with --seed 0; --seed 0 goes on from it, "
           "another --workdir starts anew")
          for program, strategy, kept in
          ((DP, "", "of_dp"), (PP, "", "of_dp"), (TRAIN, FEW, "of_train"))),
        *((program, f"{strategy}--workdir {kept} --resume",
           f"--resume: {NAME} was not made by {by}, and no other is gone on from here; another "
           "--workdir starts anew")
          for program, strategy, kept, by in
          ((DP, "", "of_train", "run_data_parallel.py or run_pipeline.py"),
           (PP, "", "of_train", "run_data_parallel.py or run_pipeline.py"),
           (TRAIN, FEW, "of_dp", "train.py"))),
        (TRAIN, FEW + "--workdir of_train --resume --num_batches 3",
         f"--num_batches 3 with --resume: {NAME} has done 4 steps; --num_batches 4 or more works"),
        (TRAIN, FEW + "--workdir of_train --resume --n_epochs 1",
         f"--n_epochs 1 with --resume: {NAME} has done 4 steps; --n_epochs 2 or more works"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def misfit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of 300 tokens, with a tokenizer of 340."""
    folder = tmp_path_factory.mktemp("weights") / "misfit"
    config = gpt2_config("gpt2-mini", 300, 32, n_layer=1, n_embd=16, n_head=2)
    build_model(config, 0).save_pretrained(folder)
    tokenizer = train_tokenizer([{"de": "ja", "en": "yes"}], 259, "de", "en")
    tokenizer.add_tokens([f"word{i}" for i in range(340 - len(tokenizer))])
    tokenizer.save_pretrained(folder)
    return folder


def checkpoint(workdir: str, program: ModuleType, line: str, more: dict[str, Any]) -> None:
    """A checkpoint of a run with these options."""
    args = plain(vars(program.parse([*line.split(), "--workdir", workdir])))
    chosen = {**args, "model": args["model"].replace("auto", "gpt2-mini")}
    state = {"position": {"epoch": 0, "step": 4}, "steps": 4, "options": args, "resolved": chosen}
    Saver(Path(workdir, "checkpoints"), 2).save("here", [], state | more)


def test_the_table_is_whole() -> None:
    """Each program in each row; but one process has no ranks."""
    missing = {
        what: [p.__name__.split(".")[1] for p in PROGRAMS if p not in {row[0] for row in rows}]
        for what, rows in TABLE.items()
    }
    assert {what: programs for what, programs in missing.items() if programs} == {
        "more ranks than examples": ["run_pipeline"],
        "more ranks than the batch has examples": ["run_pipeline"],
        "more stages than layers": ["run_data_parallel"],
    }


@pytest.mark.parametrize("what", TABLE)
def test_one_line(what: str, misfit: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_pairs(Path("pairs"))
    Path("misfit").symlink_to(misfit)
    Path("taken").mkdir()
    texts = read_data(train.parse(FEW.split())).fingerprint()
    checkpoint("of_dp", DP, "", {"totals": [], "texts": ""})
    checkpoint("of_train", TRAIN, FEW, {"log": {}, "texts": texts})
    with alone_in_workdir(argparse.Namespace(workdir=Path("taken"), export=None)):
        found = [ended(program, line, capfd) for program, line, _ in TABLE[what]]
    assert found == [(2, f"{said}\n") for _, _, said in TABLE[what]]

"""Options that do not fit together: one line, with the values, the rule and what works, before
anything starts."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from project.command_line import parse_options
from project.utils import run_program
from tests.project.conftest import write_pairs
from tests.project.programs import FLOW, KINDS, PROGRAMS, TINY, names_in, parse, run
from tests.ranks import under_torchrun
from training.launch.errors import UserError
from training.launch.world import World
from training.options import Options
from training.resume import DECIDE, OF_RATES, find_resume
from training.tasks.sequences import SequenceTask
from training.tasks.texts import load_texts
from training.tasks.tokens import TOKENIZER_FILES
from training.tasks.translation import TranslationTask
from training.tasks.vgg import PictureTask
from training.workdir import alone_in_workdir

pytestmark = pytest.mark.usefixtures("elsewhere")

DP, PP = "run_data_parallel ", "run_pipeline "


def begin(*_: object) -> None:
    """In the place of what makes the model, after the data were read."""
    raise AssertionError("it has begun")


def ended(line: str, capfd: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """The status with which a command line ends before a run begins, and what it says."""
    program, *options = shlex.split(line)
    kind, (module, _) = KINDS[[*PROGRAMS].index(program)], PROGRAMS[program]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [f"project/{program}.py", *options])
        patch.setattr(module, "launch", lambda run, _, args: run(World(), args), raising=False)
        patch.setattr(SequenceTask, "config_and_weights", begin)
        patch.setattr(PictureTask, "__init__", begin)
        with pytest.raises(SystemExit) as end:
            run_program(lambda: module.main(parse_options(kind, module.__doc__)))
    printed = capfd.readouterr()
    assert printed.out == ""
    return end.value.code, printed.err.removeprefix(f"{program}.py: error: ")


SHORT = {
    "dp": "run_data_parallel", "pp": "run_pipeline", "FLOW": FLOW,
    "ONE": "--model_parallel_mode model_parallel",
}  # fmt: skip
# The line, and a part of what is said after the values: of the rule, or of what works.
TABLE = """
# mistyped
pp FLOW --schedule 1fb1 => must be one of gpipe, 1f1b, zb, interleaved, zbv, vhalf, vmin, dualpipev,
# ranks and examples
dp --world_size 4 --dataset builtin --n_train 3 => needs 4 or more; more text, or a larger --n_train
train fsdp --num_workers 8 --model gpt2-mini --dataset pairs => a run of 8 ranks needs 8 or more
train 3d --dp 4 --batch_size 3 => 4 data-parallel ranks needs an example; --batch_size 4 or more
dp --cores_per_rank 99999 => can be used here; --cores_per_rank
# stages and layers
pp FLOW --num_devices 11 => the model has 10 layers (embedding, halves of blocks, head) and every
pp FLOW --pipeline blocks --num_devices 5 => has 4 blocks and every stage needs one; --num_devices 1
pp FLOW --balance 3,3 => or 2 positive numbers that add up to the 4 blocks (uniform is 2,2)
train pipeline --schedule deadlock.txt => deadlock: the next actions wait for ever: B0
train pipeline --schedule 1f1b --chunks 2 => fixes the number of stages per rank; leave --chunks
train pipeline -w 3 --schedule interleaved --chunks 9 => every stage needs one; --world_size 1 works
# what a mode or a strategy decides
train model --num_microbatches 2 => strategy pipeline takes several; leave it
pp --num_devices 999 => mode none uses one device; --model_parallel_mode pipeline_parallel works
pp --schedule zb => it is sequential; --model_parallel_mode pipeline_parallel
pp ONE --schedule zb => it is sequential; --model_parallel_mode pipeline_parallel
pp FLOW --pipeline blocks --schedule zb => it is gpipe; --model_parallel_mode pipeline_parallel
train 3d --dp 2 --pp 2 --world_size 2 => dp x cp x pp x tp is 4; start 4 ranks
train 3d --cp 2 --pp 2 --zero 3 --model gpt2-mini => keep their parameters and gradients; --zero 1,
train 3d --dp 2 --pp 2 --zero 2 => keep their parameters and gradients; --zero 1, or --pp 1, works
train fsdp -w 4 --shards 3 => it must divide the 4 data-parallel ranks; --shards 1 or 2
train 3d --dp 4 --shards 2 => without --zero every rank has a whole copy; --zero 1 works
train fsdp -w 4 --model gpt2-mini --experts 4 --ep 2 --shards 1 => share a copy; --shards 2 works
# what cannot be cut
train ddp --dataset mine.txt => only GPT-2 learns text, and only its matrices and positions are cut
train tensor => only its matrices and positions are cut; --model gpt2-mini works
train context => only its matrices and positions are cut; --model gpt2-mini works
train tensor --num_workers 3 --model gpt2-mini => divide the model's 4 heads; --world_size 2
train context --num_workers 3 --attention heads --model gpt2-mini => the 3 ranks must share 4
train 3d --cp 2 --tp 4 --attention heads --model gpt2-mini => the 2 ranks must share 1 head
# without effect
train ddp --momentum 0.5 => AdamW has --betas; leave it out
train ddp --optimizer sgd --betas 0.9,0.95 => sgd has only --momentum; leave it out
dp --adamw_lr 1e-3 => only --optimizer muon has a second rate; leave it out
train ddp --optimizer muon => matrices of GPT-2's blocks, and vgg16 has none; --optimizer adamw
dp --decay_steps 5 => only --lr_scheduler wsd has it; leave it out
dp --learning_rate 1e-3 --min_lr 2e-3 => a decay goes down; --min_lr 0.0001 works
dp --min_lr 1e-5 => a constant rate, the default, does not fall; --lr_scheduler cosine works
dp --keep 0 --save_every 5 => under --keep 0 no checkpoint is saved; --keep 1 works
dp --keep 0 --async_save => under --keep 0 no checkpoint is saved; --keep 1 works
dp --gradient_sync flat --bucket_mb 3 => only --gradient_sync overlap has buckets; leave it out
dp --gradient_sync flat --comm_dtype bf16 => only --gradient_sync overlap has buckets; leave it out
train ddp --model gpt2-mini --vgg_width 8 => only vgg16 has it; leave it out
dp --documents together => --dataset builtin has pairs, a row for each; it works without
train ddp --model gpt2-mini --src fr --tgt it => has plain text, with nothing in these
train ddp --model gpt2-mini --dataset a.txt --src en --tgt de => --dataset a.txt has plain
train ddp --n_layer 2 => the default model, learns pictures; --model gpt2-mini has it
train ddp --src fr => the default model, learns pictures; --model gpt2-mini has it
train ddp --model vgg16 --n_test 9 => the default model, learns pictures; --model gpt2-mini has it
train ddp --model empty --n_layer 2 => pretrained weights have a fixed size; only the pres
train single --benchmark_only --eval_every 5 => --benchmark_only validates nothing; leave it out
train single --benchmark_only --keep_best => --benchmark_only validates nothing; leave it out
train single --keep 0 --keep_best => no checkpoint is saved; --keep 1 works
# what would end late, or wrong
dp --dataset a.txt => plain text, and the program translates; project/train.py ddp --model gpt2-mini
dp --dataset empty.jsonl => it is empty, or its rows have no columns; --src and --tgt name
train ddp --model gpt2-mini --dropout 0.1 --precision bf16 --check_weights => in bf16, the
# experts
train ddp --model gpt2-mini --experts 6 --ep 2 --num_workers 3 => parallel ranks; --ep 1 or 3
train ddp --model gpt2-mini --experts 6 --ep 4 --num_workers 4 => ep must divide the
train ddp --model gpt2-mini --ep 2 => ep must divide the number of experts and that of
train fsdp --model gpt2-mini --experts 2 --top_k 3 => number of experts; --top_k 1 to 2 works
train ddp --experts 4 => for a GPT-2 from scratch (gpt2-mini, gpt2, gpt2-medium, gpt2-large,
train ddp --model gpt2-mini --top_k 1 => there are no experts; --experts 4 works
train ddp --model gpt2-mini --experts 4 --balance_rate 1 => kept busy by a loss; leave it out
train ddp --model gpt2-mini --experts 4 --balance_by bias --optimizer sgd => --optimizer adamw works
train tensor --model gpt2-mini --experts 4 => context and 3d alone can have it; leave it out
train 3d --tp 2 --dp 2 --ep 2 --model gpt2-mini --experts 4 => cannot cut experts; --ep, w
train ddp --model gpt2-mini --experts 4 --compile => each number is compiled anew; leave it out
# languages
dp --src fr => it has test.en, and no test.fr, in which line i translates its
dp --tgt de => two languages are needed: --src de --tgt en
dp --dataset builtin --n_test 1 => test has 1 pair with text on both sides, and a run of 2 ranks
# models
dp --n_layer 1000000 => it needs more than 6,045 GiB, and there are
pp --n_embd 16 --n_head 2 --n_layer 100000000 => --model gpt2-mini in its own size works
train ddp --model gpt2-mini --vocab_size 4000000000 => it needs more than 7,629 GiB, and there
train ddp --model gpt2-mini --model_max_length 4000000000 => it needs more than 7,629 GiB, and there
dp --n_head 3 => the heads must divide the width; --n_head 2 works
train ddp --model VGG16 => there is no such model; is it vgg16?
train ddp --model gpt2-min => there is no such model; is it gpt2-mini?
pp --model gpt2-min => or gpt2-xl; is it gpt2-mini?; project/train.py ddp also takes pretrained
train ddp --model ./nowhere/model => with a GPT-2 and its tokenizer (OSError: Repo id must
train ddp --model empty => with a GPT-2 and its tokenizer (ValueError: Unrecognized
# folders
dp --workdir taken => another run is writing there; --workdir taken_2 works
pp --workdir a.txt => it is no folder to write into (File exists); name one of your own
pp --workdir a.txt/here => it is no folder to write into (Not a directory);
"""


def test_a_machine_on_which_no_run_can_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few files, or two tasks of srun in one folder, whose lock on several hosts none may see."""
    with monkeypatch.context() as patch:
        patch.setattr("resource.getrlimit", lambda _: (20, 1024))
        with pytest.raises(UserError, match=r"may open 20 files here; .*; ulimit -n 1024 works"):
            parse(DP)
        patch.setattr("resource.getrlimit", lambda _: (-1, -1))  # unlimited
        parse(DP)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    with pytest.raises(
        UserError, match=r"^--workdir work: srun has started 2 of .*SLURM_PROCID, works$"
    ):
        parse(DP + "--workdir work")
    parse(DP + "--workdir work_1")
    with under_torchrun():
        parse(DP + "--workdir work")


def test_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    write_pairs(Path("pairs"))
    Path("empty").mkdir()
    Path("taken").mkdir()
    Path("taken/file").touch()
    Path("empty.jsonl").touch()
    Path("deadlock.txt").write_text("rank 0: F0 B0\nrank 1: B0 F0\n")
    Path("a.txt").write_text("A line.\nAnd one.\n")
    wrong = []
    with alone_in_workdir(Options(workdir=Path("taken"))):
        for row in TABLE.strip().splitlines():
            line, arrow, words = row.partition(" => ")
            if not arrow:
                continue
            given = " ".join(SHORT.get(word, word) for word in line.split())
            status, said = ended(given, capfd)
            values, _, rule = said.partition(": ")
            fits = status == 2 and said.count("\n") == 1 and words in rule
            if not fits or not {*given.split()[1:]} & {*values.split()}:
                wrong.append((line, status, said))
    assert wrong == [], wrong
    # Nothing is left behind, but what a later start need not read again.
    assert all("tokens" in path.parts for path in Path("workdir").rglob("*.*"))
    shutil.rmtree("workdir")
    assert names_in(".") == [
        "a.txt", "deadlock.txt", "empty", "empty.jsonl", "pairs", "taken",
    ]  # fmt: skip


def test_torch_compile_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of Python alone have none."""
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"^--compile: torch.compile needs a C"):
        parse("train single --compile")
    monkeypatch.setenv("CC", sys.executable)  # wherever it is
    parse("train single --compile")


NAME = "000002-epoch1-step4"
MADE = TINY + "--dropout 0 --n_epochs 2 "
# What is typed now, and how the run was saved.
CHANGED = {
    "--model gpt2": "--model gpt2-mini",
    "--dataset 'my pairs'": "--dataset builtin",
    "--n_train all": "--n_train 20",
    "--src en --tgt de": "--src de, --tgt en",
    "--batch_size 5 --max_grad_norm 1": "--batch_size 6, no --max_grad_norm",
}


# All other options decide what is computed.
MAY_CHANGE = """
    async_save attention balance benchmark_only bucket_mb check_output check_weights chunks compile
    cores_per_rank cp device dp ep eval_every gradient_sync keep keep_best model_parallel_mode
    n_epochs num_batches num_devices num_microbatches on_nan pipeline pp print_steps profile
    pytest recompute resume save_every schedule sequence_parallel shards step_timeout strategy
    tensorboard timeline timeout tp typed wandb workdir world_size zero
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a run of two epochs of four steps."""
    folder = tmp_path_factory.mktemp("made")
    run(f"train single {MADE} --workdir {folder}")
    return folder


def test_a_resume_with_other_options(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What decides what is computed must stay, whatever program resumes it."""
    write_pairs(Path("my pairs"))
    programs = [DP + "--world_size 1 ", PP, "train single "]
    for k, (now, saved) in enumerate(CHANGED.items()):
        said = f"{now} with --resume: {NAME} was saved with {saved}; keep that, in a program that "
        said += "has it, or use another --workdir to start a new run\n"
        line = f"{programs[k % 3]} {MADE} --workdir {made} --resume {now}"
        assert ended(line, capfd) == (2, said)


def test_what_a_resume_may_change(made: Path) -> None:
    """Where to write, how long, on which devices (see test_resume.py); not the data."""
    every = {field.name for kind in KINDS for field in fields(kind)}
    assert every > DECIDE | OF_RATES
    assert sorted(every - DECIDE - OF_RATES) == MAY_CHANGE.split()
    line = f"{MADE} --workdir {made} --resume "
    args = parse(DP + line)
    resume = find_resume(args)
    assert resume.checkpoint is not None
    texts, files = load_texts(args, World()), resume.files(TOKENIZER_FILES)
    task = TranslationTask(args, World(), texts, files)
    data, config = task.fingerprints(), task.files["config.json"]
    check = resume.check_data_and_model
    assert [*data] == ["train", "validation", "test"]
    check(data, config)
    for split in data:
        other = f"--resume: {NAME} had different {split} data of the same name; use "
        with pytest.raises(UserError, match=f"^{other}"):
            check(data | {split: "other"}, config)
    resume.checkpoint.state["examples"] = data["train"]  # of the version before
    check(data | {"test": "other"}, config)
    with pytest.raises(UserError, match="had different train data"):
        check(data | {"train": "other"}, config)

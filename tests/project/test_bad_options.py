"""Options that do not fit together: one line, with the values, the rule and what works, before
anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from project.utils import read_texts, run_program
from tests.project.conftest import write_pairs
from tests.project.programs import FLOW, PROGRAMS, TINY, parse, run
from training.checkpoint import newest
from training.data import train_tokenizer
from training.errors import UserError
from training.model import build_model, gpt2_config
from training.saving import NO_RESUME, find_resume
from training.workdir import alone_in_workdir

pytestmark = pytest.mark.usefixtures("elsewhere", "no_run_begins")

DP, PP, TRAIN = "run_data_parallel ", "run_pipeline ", "train "
ALL = (DP, PP, TRAIN + "ddp --model gpt2-mini ")
PRESETS = "gpt2-mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl"


@pytest.fixture
def no_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: object) -> None:
        raise AssertionError("it has begun")

    for program in ("run_data_parallel", "train"):
        monkeypatch.setattr(f"project.{program}.launch", begin)
    monkeypatch.setattr("project.run_pipeline.text_task", begin)


def ended(line: str, capfd: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """The status with which a command line ends, and what it says."""
    program, *options = line.split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [f"project/{program}.py", *options])
        with pytest.raises(SystemExit) as end:
            run_program(PROGRAMS[program][0].main)
    printed = capfd.readouterr()
    assert printed.out == ""
    return end.value.code, printed.err.removeprefix(f"{program}.py: error: ")


MODE, ONE = (f"--model_parallel_mode {mode}" for mode in ("none", "model_parallel"))

NOTHING = (
    "every micro-batch is the last one held, so nothing would be computed again; always, or a "
    "pipeline with more micro-batches, works"
)

CORES = len(os.sched_getaffinity(0))
ALL_CORES = f"1 to {CORES}" if CORES > 1 else "1"

# The line, and what is said; what is proposed is tried in test_options.py.
TABLE = [
    # what is computed again
    (DP + "--recompute except_last", f"--recompute except_last ddp: {NOTHING}"),
    (PP + f"{ONE} --recompute except_last", f"--recompute except_last {ONE}: {NOTHING}"),
    (TRAIN + "tensor --model gpt2-mini --recompute except_last",
     f"--recompute except_last tensor: {NOTHING}"),
    (TRAIN + "pipeline --recompute except_last --num_microbatches 1",
     f"--recompute except_last pipeline: {NOTHING}"),
    (TRAIN + "fsdp --recompute sqrt", "--recompute sqrt fsdp: shards are gathered for one layer at "
     "a time, and segments of several would be gathered once more; --recompute always works"),
    (TRAIN + "3d --dp 2 --zero 3 --model gpt2-mini --recompute sqrt", "--recompute sqrt 3d: shards "
     "are gathered for one layer at a time, and segments of several would be gathered once more; "
     "--recompute always works"),
    # ranks and examples
    (DP + "--cores_per_rank 999",
     f"--cores_per_rank 999: {CORES} cores may be used here; --cores_per_rank {ALL_CORES} works"),
    (DP + "--world_size 4 --n_train 3",
     "--n_train 3 --world_size 4: each rank needs an example; --world_size 1 to 3 works"),
    (TRAIN + "ddp --num_workers 4 --batch_size 3",
     "--batch_size 3 --num_workers 4: each rank needs an example; --num_workers 1 to 3 works"),
    (TRAIN + "fsdp --num_workers 3 --n_validation 2",
     "--n_validation 2 --num_workers 3: each rank needs an example; --num_workers 1 to 2 works"),
    (TRAIN + "fsdp --num_workers 8 --model gpt2-mini --dataset pairs",
     "--dataset pairs: test has 7 pairs for 8 ranks, and each rank needs one; --num_workers 1 to 7 "
     "works, or more pairs"),
    (TRAIN + "single --num_workers 2",
     "single --num_workers 2: single is one process; ddp takes several"),
    # stages and layers
    (PP + FLOW + "--num_devices 11",
     "--num_devices 11 --balance auto: the model has 10 layers (embedding, halves of blocks, head) "
     "and every stage needs one; --num_devices 1 to 10 works, or a larger --n_layer"),
    (PP + FLOW + "--num_devices 5 --pipeline blocks",
     "--num_devices 5 --balance auto: the model has 4 blocks and every stage needs one; "
     "--num_devices 1 to 4 works, or a larger --n_layer"),
    (PP + FLOW + "--balance 3,3",
     "--num_devices 2 --balance 3,3: auto, uniform, or 2 positive numbers that add up to the 4 "
     "blocks, as 2,2"),
    (TRAIN + "pipeline --num_workers 17",
     "pipeline --num_workers 17: vgg16 has 16 layers and every rank needs one; --num_workers 1 to "
     "16 works"),
    (TRAIN + "model --num_workers 7 --model gpt2-mini --n_layer 2",
     "model --num_workers 7: gpt2-mini has 6 layers and every rank needs one; --num_workers 1 to 6 "
     "works"),
    (TRAIN + "pipeline --balance 9,8",
     "--world_size 2 --balance 9,8: auto, uniform, or 2 positive numbers that add up to the 16 "
     "layers, as 8,8"),
    # micro-batches
    (DP + "--accumulation_steps 33",
     "--accumulation_steps 33 --batch_size 64 --world_size 2: a micro-batch needs an example; "
     "--accumulation_steps 1 to 32 works"),
    (PP + FLOW + "--n_chunk 65",
     "--n_chunk 65 --batch_size 64: a micro-batch needs an example; --n_chunk 1 to 64 works"),
    (TRAIN + "model --num_microbatches 2", "model --num_microbatches 2: with more than one it is "
     "pipeline"),
    # without effect
    (DP + "--gradient_sync flat --bucket_mb 8",
     "--bucket_mb 8.0 --gradient_sync flat: only the buckets of --gradient_sync overlap have it"),
    (PP + "--num_devices 999",
     f"--num_devices 999 {MODE}: it is 1 there; leave it out, or use {FLOW.split(' --num')[0]}"),
    (PP + f"{ONE} --schedule gpipe",
     f"--schedule gpipe {ONE}: it is sequential there; leave it out, or use "
     f"{FLOW.split(' --num')[0]}"),
    (PP + FLOW + "--pipeline blocks --schedule zb",
     f"--schedule zb {FLOW.split(' --num')[0]} --pipeline blocks: it is gpipe there; leave it out, "
     "or use --pipeline whole"),
    (PP + f"{ONE} --pipeline blocks --n_chunk 3",
     f"--n_chunk 3 {ONE} --pipeline blocks: it is 1 there; leave it out, or use "
     "--pipeline whole"),
    (TRAIN + "pipeline --schedule 1f1b --chunks 2",
     "--schedule 1f1b, chunks 2: a rank has 1 stage there; schedule interleaved, chunks 2 works"),
    (PP + FLOW + "--schedule vmin --chunks 3",
     "--schedule vmin, chunks 3: a rank has 2 stages there; schedule interleaved, chunks 3 works"),
    (PP + f"{ONE} --chunks 2", f"--chunks 2 {ONE}: it is 1 there; leave it out, or use "
     "--model_parallel_mode pipeline_parallel"),
    (TRAIN + "pipeline --schedule interleaved --chunks 9",
     "pipeline --world_size 2 --chunks 9: vgg16 has 16 layers and every chunk needs one; "
     "--chunks 2 to 8 works"),
    (TRAIN + "fsdp --chunks 2", "fsdp --chunks 2: it is an option of pipeline and 3d"),
    (TRAIN + "ddp --schedule zb", "ddp --schedule zb: it is an option of pipeline and 3d"),
    (TRAIN + "ddp --trace --model gpt2-mini", "ddp --trace: it is an option of pipeline and model"),
    (TRAIN + "pipeline --trace", "--trace --model vgg16: it is only for models of sentences, "
     "as gpt2-mini"),
    (TRAIN + "pipeline --trace --model gpt2-mini --dropout 0.1",
     "--trace --dropout 0.1: transformers' dropout draws, so that its masks would depend on the "
     "cut, and a run without --trace has others; --dropout 0 works"),
    (TRAIN + "ddp --balance uniform", "ddp --balance uniform: it is an option of pipeline, "
     "model and 3d"),
    (TRAIN + "pipeline --zero 2", "pipeline --zero 2: it is an option of fsdp"),
    (TRAIN + "ddp --tp 2", "ddp --tp 2: it is an option of 3d; --world_size is the number of ranks "
     "of ddp"),
    (TRAIN + "3d --dp 2 --pp 2 --world_size 2",
     "--world_size 2 --dp 2 --pp 2 --tp 1: their product is 4; leave --world_size out, or start 4 "
     "ranks"),
    (TRAIN + "ddp --dataset mine.txt",
     "--dataset mine.txt --model vgg16: this is text, and vgg16 learns pictures; --model gpt2-mini "
     "works"),
    (TRAIN + "tensor",
     "tensor --model vgg16: only GPT-2's matrices are cut; --model gpt2-mini works"),
    (TRAIN + "tensor --num_workers 3 --model gpt2-mini",
     "--num_workers 3 --model gpt2-mini: its 4 heads are dealt out evenly; --num_workers 2, 4 "
     "works"),
    (TRAIN + "3d --tp 4 --model gpt2-mini --sequence_parallel --model_max_length 127",
     "--sequence_parallel --model_max_length 127: 4 ranks cannot have equal parts; "
     "--model_max_length 128 works"),
    (TRAIN + "3d --pp 2 --sequence_parallel", "3d --sequence_parallel: positions are shared by the "
     "ranks that share a matrix; tensor, or 3d --tp 2, works"),
    (TRAIN + "3d --dp 2 --zero 2",
     "3d --zero 2 --dp 2 --pp 1: 3d has --zero 1 and, without stages, --zero 3"),
    (TRAIN + "3d --dp 2 --pp 2 --zero 3",
     "3d --zero 3 --dp 2 --pp 2: stages keep their parameters; --zero 1, or --pp 1, works"),
    (TRAIN + "3d --pp 2 --zero 1", "3d --zero 1 --dp 1 --pp 2: it shards over replicas; --dp 2 "
     "works"),
    (TRAIN + "3d --dp 4 --batch_size 3",
     "--batch_size 3 --dp 4: each rank needs an example; --dp 1 to 3 works"),
    (TRAIN + "3d --pp 9 --model gpt2-mini --n_layer 2",
     "3d --pp 9: gpt2-mini has 6 layers and every rank needs one; --pp 1 to 6 works"),
    (TRAIN + "ddp --momentum 0.5",
     "--momentum 0.5 --optimizer adamw: it is only for --optimizer sgd"),
    (TRAIN + "ddp --model gpt2-mini --vgg_width 8",
     "--vgg_width 8 --model gpt2-mini: it is only for --model vgg16"),
    *((TRAIN + f"ddp --{name} {value}",
       f"--{name} {value} --model vgg16: it is only for models of sentences, as gpt2-mini")
      for name, value in (("n_test", "all"), ("n_layer", "2"))),
    (TRAIN + "ddp --model gpt2-mini --dropout 0.1 --precision bf16 --check_weights",
     "--dropout 0.1 with --check_weights or --check_output: on a GPU, and in bf16, the plain run "
     "drops other activations; --dropout 0, or --device cpu and --precision fp32, works"),
    (TRAIN + "3d --dp 2 --balance 2,2 --model gpt2-mini",
     "3d --balance 2,2 --pp 1: there are no stages; --pp 2 works"),
    (TRAIN + "3d --dp 2 --zero 3 --schedule gpipe",
     "3d --schedule gpipe --pp 1: there are no stages; --pp 2 works"),
    (DP + "--save_every 9 --keep 0",
     "--save_every 9 --keep 0: no checkpoint would stay; --keep 1 works"),
    (TRAIN + "ddp --num_batches 5 --warmup_steps 5",
     "--warmup_steps 5: the run has 5 steps, and the warm-up must end before the last; "
     "--warmup_steps 0 to 4 works"),
    (DP + "--n_train 33 --batch_size 8 --n_epochs 2 --warmup_steps 10",
     "--warmup_steps 10: the run has 10 steps, and the warm-up must end before the last; "
     "--warmup_steps 0 to 9 works"),
    (DP + "--n_train 33 --batch_size 40 --n_epochs 1 --warmup_steps 100",
     "--warmup_steps 100: the run has 1 steps, and the warm-up must end before the last; "
     "--warmup_steps 0 works"),
    (TRAIN + "ddp --profile 3 --num_batches 1",
     "--profile 3 --num_batches 1: the first step is not profiled; --num_batches 4 works"),
    # models
    (DP + "--n_head 3",
     "--n_layer 4 --n_embd 256 --n_head 3: all must be positive and n_head must divide "
     "n_embd, as --n_layer 4 --n_embd 256 --n_head 4"),
    (DP + "--vocab_size 258", "--vocab_size 258: a byte-level vocabulary has at least 259 tokens; "
     "--vocab_size 2048 works"),
    (TRAIN + "ddp --model gpt3", "--model gpt3: neither a preset, nor a folder, nor could a GPT-2 "
     f"of this name be had from the hub (is it gpt2?); presets need none: {PRESETS}"),
    (TRAIN + "ddp --model auto", f"--model auto: train.py needs one of vgg16, {PRESETS}"),
    (DP + "--model empty --n_layer 2", "--n_layer with --model empty: pretrained weights have a "
     f"fixed size; only the presets can be changed ({PRESETS})"),
    *((program + "--model empty",
       "--model empty: no GPT-2 weights come from this folder (Unrecognized model in empty. Should "
       f"have a `model_type` key in its config.json.); presets need none: {PRESETS}")
      for program in ALL),
    (PP + "--model misfit --model_max_length 32",
     "--model misfit: no tokenizer that fits comes with it (it has 340 tokens, and the embedding "
     "300 rows); save the one of these weights there, as --export does"),
    # folders
    *((program + "--workdir taken",
       "--workdir taken: another run is writing there; --workdir taken_2 works")
      for program in ALL),
    (PP + "--export taken/file", "--export taken/file: something else is there; name a new folder, "
     "as --export taken/file_gpt2"),
]  # fmt: skip


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


def test_one_line(misfit: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_pairs(Path("pairs"))
    Path("misfit").symlink_to(misfit)
    Path("empty").mkdir()
    Path("taken").mkdir()
    Path("taken/file").touch()
    with alone_in_workdir(SimpleNamespace(workdir=Path("taken"), export=None)):  # type: ignore
        found = [(line, *ended(line, capfd)) for line, _ in TABLE]
    wrong = [
        (line, status, said, expected)
        for (line, status, said), (_, expected) in zip(found, TABLE, strict=True)
        if (status, said) != (2, f"{expected}\n")
    ]
    assert wrong == []


# ---------------------------------------------------------------------------- resume

NAME = "000002-epoch0-step4"
MADE = TINY + "--dropout 0 --n_epochs 1 "
CHANGED = [
    ("--batch_size 5", "--batch_size 5", "--batch_size 6"),
    ("--model gpt2", "--model gpt2", "--model gpt2-mini"),
    ("--dropout 0.1", "--dropout 0.1", "--dropout 0.0"),
    ("--learning_rate 0.02", "--learning_rate 0.02", "--learning_rate 0.01"),
    ("--dataset pairs", "--dataset pairs", "--dataset builtin"),
    ("--n_train all", "--n_train all", "--n_train 20"),
    ("--src en --tgt de", "--src en", "--src de"),
    ("--max_grad_norm 1", "--max_grad_norm 1.0", "no --max_grad_norm"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a run of one epoch, with two checkpoints."""
    folder = tmp_path_factory.mktemp("made")
    run(f"train single {MADE} --workdir {folder} --save_every 3")
    return folder


def test_a_resume_with_other_options(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What decides what is computed must stay, whatever program resumes it."""
    write_pairs(Path("pairs"))
    programs = [DP + "--world_size 1 ", PP, "train single "]
    for k, (change, now, then) in enumerate(CHANGED):
        line = f"{programs[k % 3]} {MADE} --workdir {made} --resume {change}"
        assert ended(line, capfd) == (
            2,
            f"{now} with --resume: {NAME} was saved with {then}; use {then}, or another --workdir "
            "to start a new run\n",
        )
    line = f"train single {MADE} --workdir {made} --resume ".replace("n_epochs 1", "num_batches 3")
    assert ended(line, capfd)[1] == (
        f"--num_batches 3 with --resume: {NAME} has done 4 steps; --num_batches 4 or more works\n"
    )


def test_what_a_resume_may_change(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where to write, how long, on which devices; among it what was chosen and is now given."""
    line = f"{MADE} --workdir {made} --resume "
    fingerprint = read_texts(parse(DP + line)).fingerprints()["train"]
    for change in (
        "--n_epochs 50", "--save_every 7", "--keep 5", "--timeout 5", "--gradient_sync flat",
        "--num_microbatches 2", "--export out", "--on_nan skip", "--world_size 4",
    ):  # fmt: skip
        assert find_resume(parse(DP + line + change), fingerprint).checkpoint is not None
    resume = find_resume(parse(DP + line + "--n_epochs 1"), fingerprint)
    assert resume.notes == (f"Resumed from {made}/checkpoints/{NAME}: 4 steps done.",)
    other = f"--resume: {NAME} was trained on other data of the same name; use "
    with pytest.raises(UserError, match=f"^{other}"):
        find_resume(parse(DP + line), "other")
    checkpoint, _ = newest(made / "checkpoints")
    assert checkpoint is not None
    checkpoint.state["steps_per_epoch"] = 2  # it was 4: an epoch
    monkeypatch.setattr("training.saving.newest", lambda _: (checkpoint, []))
    few = "--n_epochs 1 with --resume: .* --n_epochs 2 or more "
    with pytest.raises(UserError, match=f"^{few}"):
        find_resume(parse(DP + line + "--n_epochs 1"), fingerprint)


def test_a_schedule_ends_where_it_was_to_end(tmp_path: Path) -> None:
    line = f"{MADE} --workdir {tmp_path} --lr_scheduler cosine "
    run(f"train single {line} --save_every 2", stop_at=3)
    with pytest.raises(UserError) as error:
        find_resume(parse(PP + line + "--resume --n_epochs 2"), "")
    assert str(error.value) == (
        "--n_epochs 2 with --resume: 000001-epoch0-step2 has a learning rate that decays over "
        "--n_epochs 1; use that"
    )


def test_without_a_checkpoint_it_begins() -> None:
    """torchrun repeats the command line: the first time there is none."""
    assert find_resume(parse(DP + "--resume"), "").notes == (
        "--resume: workdir/checkpoints has no checkpoint; starting from scratch.",
    )
    assert find_resume(parse(DP), "") is NO_RESUME

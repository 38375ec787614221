"""A run that is interrupted and resumed is the run that was not: bit for bit with the same layout,
and with the same losses, up to the order of sums, with another one and in another program."""

from __future__ import annotations

import shutil
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from project import train
from project.figures.epochs import within_epochs
from tests.project.conftest import Learn, WorldOf, write_pairs
from tests.project.programs import (
    FLOW,
    TINY,
    VGG,
    assert_same_run,
    finish,
    names_in,
    parse,
    read_json,
    run,
    summary,
    weights,
)
from tests.ranks import Ranks, under_torchrun
from training.checkpoint import Checkpoint, Saver
from training.launch.errors import UserError, counted
from training.loop import seed_step
from training.optimization import Recipe
from training.results import read_metrics
from training.resume import find_resume
from training.tasks.tokens import TOKENIZER_FILES

pytestmark = pytest.mark.usefixtures("elsewhere")

# Four steps an epoch. Dropout is on, and the schedule and the clipping must go on where they were.
LINE = TINY + (
    "--n_epochs 2 --max_grad_norm 0.5 --lr_scheduler cosine --warmup_steps 2 --n_test 2 "
    "--dropout 0.1 "
)
# How many ranks; the step after which they are interrupted; all steps. (Where a rank is killed, and
# torchrun starts all again: tests/test_faults.py.)
SAME_LAYOUT = [
    ("train fsdp {text} --dropout 0.1", 2, 3, 8),
    # Ranks take turns to have the fifth picture.
    (f"train ddp {VGG} --batch_size 5 --n_train 25 --num_batches 7 --momentum 0.5", 2, 6, 7),
    (f"run_pipeline {FLOW} {LINE} --schedule 1f1b --n_chunk 3 --balance 1,1 --async_save", 1, 3, 8),
]


def outcome(workdir: Path) -> tuple[Any, ...]:
    """What a run has computed, less the times: losses, results, weights."""
    results = {path.name: read_json(path) for path in workdir.glob("*_epoch?.json")}
    for content in results.values():
        for timed in ("training_time", "tokens_per_sec", "real_tokens_per_sec"):
            if isinstance(content, dict):
                content.pop(timed, None)
    bits = {n: (t.dtype, t.numpy().tobytes()) for n, t in weights(workdir).items()}
    return summary(workdir)["loss"], results, bits


def taken(typed: str, names: str) -> list[Any]:
    """These options of a resume of the run in work/."""
    args = parse(f"{typed} --resume --workdir work")
    return [getattr(args, name) for name in names.split()]


def counts(workdir: Path) -> dict[str, float]:
    """The positions and the tokens of each epoch, of all ranks together."""
    of_epochs: dict[str, float] = defaultdict(float)
    for path in workdir.glob("*results_epoch?.json"):
        one = read_json(path)
        for kind in ("tokens_per_sec", "real_tokens_per_sec"):
            of_epochs[f"{path.stem[-6:]} {kind}"] += one[kind] * one["training_time"]
    return of_epochs


@pytest.mark.parametrize(
    ("line", "n", "stop_at", "steps"), SAME_LAYOUT, ids=[line for line, *_ in SAME_LAYOUT]
)
def test_with_the_same_layout_bit_for_bit(
    learned: Learn, world_of: WorldOf, line: str, n: int, stop_at: int, steps: int
) -> None:
    """Interrupted in the first epoch, a step after a checkpoint; or in the last, right after it."""
    line = line.format(text=learned("text").line)
    whole, parts = Path("whole").resolve(), Path("parts").resolve()
    for workdir, last in ((whole, None), (parts, stop_at), (parts, None)):
        where = f"--workdir {workdir} --save_every 2 --resume"
        printed = finish(f"{line} {where}", world_of(n), stop_at=last)
        begins = workdir == whole or last is not None
        assert ("has no checkpoint; starting afresh, as typed." in printed) == begins
    assert f": {stop_at // 2 * 2} steps done." in printed
    assert len(summary(parts)["loss"]) == len(summary(parts)["step_seconds"]) == steps
    assert outcome(parts) == outcome(whole)
    assert counts(parts) == pytest.approx(counts(whole))


def test_a_run_that_is_validated_within_epochs_is_the_one_that_is_not(learned: Learn) -> None:
    """Bit for bit; and a resume validates what was not validated yet, once: as a run's end does."""
    one, where = learned("dropout"), "--num_microbatches 1 --save_every 3 --eval_every 1"
    for last in (3, 7, None):  # saved, and not validated; a step after
        printed = finish(f"train single {one.line} {where} --resume", stop_at=last)
    work = Path("work").resolve()
    assert outcome(work) == outcome(one.workdir)
    lines = [numbers for numbers in read_metrics(work) if "loss" not in numbers]
    assert [(x["epoch"], x["step"], "training_loss" in x) for x in lines] == [
        (k // 5, k, k % 4 == 0) for k in range(1, 9)
    ]
    assert "  1.5                 " in printed  # its row of the table, in epochs
    losses = {x["step"] / 4: x["validation_loss"] for x in lines}
    within = {k: loss for k, loss in losses.items() if k % 1}
    assert within_epochs(work) == within
    text = (work / "metrics.jsonl").read_text()
    (work / "metrics.jsonl").write_text(text[: text.index('"step": 8')].rpartition("{")[0])
    assert within_epochs(work) == within  # the second has not ended
    run(f"train single {one.line} --workdir short --num_batches 3")
    assert summary("short")["validation_loss"] == losses[0.75]


def test_the_checkpoint_with_the_lowest_validation_loss_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also through a resume; of those that are saved, and that have a loss."""
    losses = iter([0.1, 3.0, 2.5, 5.0, 2.0, 5.0, 4.0])  # after each step
    monkeypatch.setattr("training.loop.evaluate_loss", lambda *_: (next(losses), 0.0))
    line = f"train single {TINY} --n_test 1 --keep 1 --keep_best --save_every 1 --eval_every 1 "
    run(line + "--num_batches 7", stop_at=2)
    shutil.rmtree("work/checkpoints/000001-epoch0-step1")  # which was the best
    for last in (4, 6, None):
        finish("train single --resume", stop_at=last)
    kept = {path.name.partition("-")[2] for path in Path("work/checkpoints").iterdir()}
    assert kept == {"epoch1-step1", "epoch1-step3"}


# Each of which drops what one process does, a step or so; the last goes on to the end.
STEPS = {
    "dropout": [
        (2, "run_data_parallel"),
        (4, "train 3d --dp 2 --tp 2 --zero 3"),
        (4, "train 3d --dp 2 --cp 2 --zero 3 --shards 1"),
        (4, "train 3d --pp 2 --tp 2"),
        (1, f"run_pipeline {FLOW} --n_chunk 3 --schedule zbv"),
    ],
    "experts": [(2, "train ddp --ep 2"), (2, "train fsdp --ep 2"), (1, "train single")],
}


@pytest.mark.parametrize("what", STEPS)
def test_any_program_resumes_what_any_other_has_saved(
    learned: Learn, world_of: WorldOf, what: str
) -> None:
    """Layouts in turn, dropout on, are one process; so is what they translate."""
    one, layouts = learned(what), STEPS[what]
    for stop_at, (n, layout) in enumerate(layouts, 1):
        line, last = f"{layout} {one.line} --save_every 1 --resume", stop_at
        printed = finish(line, world_of(n), stop_at=last if last < len(layouts) else None)
        assert stop_at == 1 or f": {counted(stop_at - 1, 'step')} done." in printed
    assert_same_run("work", one.workdir)


def test_what_is_not_typed_is_as_it_was(ranks: Ranks) -> None:
    """Model, data, batch, dropout and length of the run, though programs have other defaults; the
    layout, for the same strategy."""
    line = f"run_data_parallel {TINY} --n_epochs 2 --dropout 0.1 --save_every 4 --world_size 1 "
    run(line + "--gradient_sync flat --timeout 9 --n_test all --cores_per_rank 1", stop_at=5)
    # The warm-up is half of the eight steps of that run.
    assert taken("train ddp --n_epochs 99", "n_test warmup_steps") == [None, 4]
    of_run = "cores_per_rank save_every timeout world_size"
    of_program = f"{of_run} gradient_sync"
    assert taken("run_data_parallel", of_program) == [1, 4, 9.0, 1, "flat"]
    assert taken("run_data_parallel --num_workers 3", of_program) == [1, 4, 9.0, 3, "overlap"]
    assert taken("train ddp --save_every 5", of_run) == [1, 5, 9.0, 1]
    assert taken("train ddp --keep 0", of_run) == [1, 4, 9.0, 1]  # saves none
    assert taken("train fsdp", of_run) == [1, 4, 9.0, 2]
    with under_torchrun():
        assert taken("run_data_parallel", of_program) == [1, 4, 9.0, 2, "overlap"]
    printed = finish("train fsdp --resume", ranks)
    assert ": 4 steps done." in printed and "fsdp: 2 ranks" in printed
    assert len(summary()["loss"]) == 8


def test_data_and_a_tokenizer_may_have_moved() -> None:
    """As on a disk of each job. What is in the files is compared, and the tokenizer is the
    checkpoint's."""
    write_pairs(Path("own"))
    run(f"train single {TINY} --num_batches 1")
    Path("bpe").mkdir()
    for name in TOKENIZER_FILES:
        Path("work", name).rename(Path("bpe", name))
    finish(f"train single {TINY} --dataset own --tokenizer bpe --num_batches 2")
    shutil.rmtree("bpe")
    Path("job_2").mkdir()
    Path("own").rename("job_2/own")
    for n, dataset in enumerate(("job_2/own", Path("job_2/own").absolute(), "job_2/own/"), 3):
        printed = finish(f"train single --resume --num_batches {n} --dataset {dataset}")
        assert f": {n - 1} steps done." in printed
    Path("job_2/own").rename("other")
    with pytest.raises(UserError, match=r"^--dataset other with --resume: 000004-"):
        run("train single --resume --dataset other")


class Killed(BaseException):
    pass


def end_while_it_reads(line: str, error: BaseException) -> None:
    """A run that this ends while it reads its data."""
    with patch.object(train, "load_texts", side_effect=error), pytest.raises(type(error)) as end:
        run(line)
    assert end.value is error


def test_before_the_first_checkpoint_a_resume_is_the_run_that_was_started() -> None:
    end_while_it_reads(f"train single {TINY} --num_batches 2 --seed 7 --warmup_steps 0", Killed())
    started = Path("work/options.json").read_bytes()
    for line in ("train single --resume", f"train single {TINY} --seed 8"):
        end_while_it_reads(line, UserError("the data are away now"))
        assert Path("work/options.json").read_bytes() == started
    printed = finish("train single --resume")
    assert "has no checkpoint; starting afresh, with the options in options.json." in printed
    assert (summary()["model"], summary()["seed"], len(summary()["loss"])) == ("gpt2-mini", 7, 2)
    assert summary()["warmup_steps"] == 0  # by default it is 1
    before = Path("work/options.json").read_bytes()
    # Its folder is still the earlier run's.
    end_while_it_reads("train single --model gpt2", Killed())
    assert Path("work/options.json").read_bytes() == before
    shutil.rmtree("work/checkpoints")
    for typed in ("--seed 8", "--model gpt2", "--n_train 19"):
        with pytest.raises(UserError, match=f"^{typed} with --resume: options.json was saved with"):
            find_resume(parse(f"train ddp --resume --workdir work {typed}"))
    for name in ("train.ids", "tokenizer.json"):  # deleted by hand
        (file,) = Path("work/tokens").glob(f"*/{name}")
        file.unlink()
        with pytest.raises(UserError, match=f"/{name} was deleted; delete all of .*/tokens/"):
            run("train single --resume")
    for damage in ("{", "[1]", '{"mine": 1}'):  # the last is a user's own
        shutil.rmtree("work")
        Path("work").mkdir()
        Path("work/options.json").write_text(damage)
        if "mine" not in damage:
            with pytest.raises(UserError, match=r"options\.json: .*without --resume a new"):
                parse("train ddp --resume --workdir work")
        printed, error = run(f"train single {TINY} --num_batches 1")
        kept = Path("work/options.json_1")
        assert (error, kept.read_text()) == (None, damage)
        assert f"/options.json is not of a run; it is now {kept.absolute()}." in printed


def without_a_checkpoint(rank: int, patches: pytest.MonkeyPatch) -> None:
    """As a host with a folder of its own."""
    if rank == 1:
        patches.setattr("training.resume.newest", lambda _: (None, []))
        patches.setattr("training.resume.options_in", lambda *_: {})


def test_a_host_without_the_checkpoint_has_the_options_of_rank_0(ranks: Ranks) -> None:
    run(f"train ddp {TINY} --n_epochs 1 --dropout 0.2 --save_every 1", ranks, stop_at=2)
    printed = finish("train ddp --resume", ranks, without_a_checkpoint)
    assert ": 2 steps done." in printed
    assert (summary()["dropout"], len(summary()["loss"])) == (0.2, 4)


def test_a_pipeline_is_resumed_as_it_was_cut() -> None:
    """By the program of threads alone, which has a device for each stage."""
    run(f"run_pipeline {FLOW} {TINY} --schedule interleaved --n_chunk 3 --save_every 1", stop_at=1)
    names, mode = "strategy schedule chunks num_microbatches", "run_pipeline --model_parallel_mode"
    for typed in ("run_pipeline", f"{mode} pipeline_parallel"):
        as_it_was = ["pipeline_parallel", "interleaved", 2, 3, 2]
        assert taken(typed, f"{names} num_devices") == as_it_was
    assert taken("run_pipeline --n_chunk 2", names) == ["pipeline_parallel", "1f1b", 1, 2]
    assert taken(f"{mode} model_parallel", names) == ["model_parallel", "sequential", 1, 4]
    assert taken("train pipeline", names) == ["pipeline", "1f1b", 1, None]


def test_a_run_that_was_done_is_resumed_for_longer_or_with_nothing_to_do() -> None:
    """What was recorded stays, where nothing new is."""
    line = f"run_pipeline {TINY} "
    run(line + "--n_epochs 1 --timeline 2")
    before, recorded = summary(), read_json("work/timeline_rank0.json")
    printed, _ = run(line + "--n_epochs 1 --resume --timeline 2")
    assert ": 4 steps done.\nNothing is left to train.\n" in printed
    assert [summary()[k] == before[k] for k in ("loss", "bleu", "validation_loss")] == [True] * 3
    assert names_in("work/checkpoints") == ["000001-epoch0-step4"]
    printed = finish(line + "--n_epochs 2 --resume --timeline 0")
    assert "Nothing is left" not in printed
    assert len(summary()["loss"]) == 8
    evaluations = [x["step"] for x in read_metrics(Path("work")) if "loss" not in x]
    assert evaluations == [4, 8]  # the first was repeated
    assert read_json("work/timeline_rank0.json") == recorded
    decaying = line + "--num_batches 1 --lr_scheduler linear "
    run(decaying)  # without --resume it begins
    assert Path("work/earlier_1/summary.json").exists()
    printed, _ = run(decaying + "--resume")
    assert ": 1 step done.\nNothing is left to train.\n" in printed


def test_how_long_a_resumed_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the unit that is typed; 6 steps of 4 an epoch are two epochs at least."""
    options = {"strategy": "ddp", "num_batches": 7, "n_epochs": 5, "vgg_width": 32}
    state = {"steps": 6, "steps_per_epoch": 4, "options": options}
    found = Checkpoint(Path("c"), state, None)
    monkeypatch.setattr("training.resume.newest", lambda _: (found, []))

    def resumed(typed: str) -> Any:
        args = parse(f"train ddp --resume --workdir work {typed}")
        find_resume(args)
        return args

    assert resumed("").num_batches == 7
    # What cannot be typed here is not taken.
    with pytest.raises(UserError, match="saved with --vgg_width 32; keep that, in a program that"):
        find_resume(parse("run_data_parallel --resume --workdir work"))
    assert resumed("--n_epochs 2").num_batches is None
    for short in ("n_epochs 1", "num_batches 5"):
        said = rf"^--{short} .* has done 6 steps \(1\.5 epochs\); as many or more work"
        with pytest.raises(UserError, match=said):
            resumed(f"--{short}")


def test_a_stable_run_goes_on_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """While no rate of a step that was done would be another: of 12 steps the last two decay, and
    the first of them has the full rate."""
    options = {
        "strategy": "ddp", "num_batches": 12, "learning_rate": 1e-3, "lr_scheduler": "wsd",
        "warmup_steps": 4, "decay_steps": 2, "min_lr": 0.0, "model": "vgg16",
    }  # fmt: skip
    state = {"steps": 11, "steps_per_epoch": 4, "options": options}
    monkeypatch.setattr(
        "training.resume.newest", lambda _: (Checkpoint(Path("c"), state, None), [])
    )
    line = "train ddp --resume --workdir work --num_batches 20 "

    def refused(typed: str) -> str:
        with pytest.raises(UserError) as error:
            find_resume(parse(line + typed))
        return str(error.value).partition(" with --resume")[0]

    for typed in ("", "--decay_steps 9 --min_lr 1e-4", "--lr_scheduler constant"):
        find_resume(parse(line + typed))
    assert refused("--decay_steps 11") == "--decay_steps 11 --num_batches 20"
    assert refused("--learning_rate 2e-3") == "--learning_rate 0.002 --num_batches 20"
    state["steps"] = 12  # one has decayed
    assert refused("") == "--num_batches 20"
    state["steps"] = 1
    assert refused("--warmup_steps 5") == "--warmup_steps 5 --num_batches 20"


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it() -> None:
    """It is named, and set aside; half of one, from a killed run, is removed."""
    line = f"run_pipeline {TINY} --n_epochs 1 --save_every 1 "
    run(line, stop_at=3)
    folder = Path("work/checkpoints").resolve()
    _, second, third = names_in(folder)
    (folder / third / "state.json").write_text("{")
    (folder / ".000007-epoch5-step1.part").mkdir()
    printed = finish(line + "--resume --keep 1", stop_at=3)
    said = [row for row in printed.splitlines() if "checkpoint" in row]
    assert said[0].startswith(f"Set aside a damaged checkpoint, as damaged-...: {folder / third}: ")
    assert said[1] == f"Resumed from {folder / second}: 2 steps done."
    # The damaged one does not count as the one that is kept.
    assert names_in(folder) == [second, "000003-epoch0-step3", f"damaged-{third}_1"]
    assert (folder / f"damaged-{third}_1" / "state.json").read_text() == "{"


def test_every_part_shard_and_step_draws_masks_of_its_own() -> None:
    """By the number of the step in the whole run: a resume draws what the first run would have."""

    def drawn(part: int, shard: int, number: int) -> float:
        model: Any = SimpleNamespace(dp_rank=part, mask_rank=shard)
        seed_step(model, 0, number)
        return torch.rand(()).item()

    places = [(part, shard, number) for part in (0, 1) for shard in (0, 1) for number in (0, 1)]
    assert len({drawn(*place) for place in places}) == 8
    assert drawn(1, 0, 1) == drawn(1, 0, 1)


def test_steps_that_are_left_out_are_null_and_counted_through_a_resume(ranks: Ranks) -> None:
    """The first step moves every weight by 1e30. After 20 in a row the run ends, though some of
    them were before the resume."""
    line = f"train ddp {VGG} --learning_rate 1e30 --on_nan skip --keep 1 "
    printed = finish(line + "--num_batches 12", ranks)
    assert "after epoch 3: the validation loss is nan; the run goes on" in printed
    found = summary()
    assert found["loss"][0] is not None and found["loss"][1:] == [None] * 11
    assert found["validation_loss"] is None
    skipped = [read_json(f"work/rank0_results_epoch{e}.json")["skipped_steps"] for e in range(3)]
    assert skipped == [3, 4, 4]
    # Weights that may be ruined are saved, and take the place of no others.
    steps = ["000001-epoch0-step4", "000002-epoch1-step4", "000003-epoch2-step4"]
    assert names_in("work/checkpoints") == steps
    _, error = run(line + "--num_batches 25 --resume", ranks)
    assert error is not None and "step 1 of 4" in error and "as were 19 before it" in error
    assert error.endswith("--max_grad_norm 1")  # not --on_nan skip, which it has


@pytest.mark.parametrize(
    ("ruinous", "said", "good", "how"),
    [
        (2, "epoch 1, step 4 of 4: the loss is nan; try ", "000002-epoch0-step2", ""),
        (3, "after epoch 1: the validation loss is nan; try ", "000003-epoch0-step3", ""),
        (2, "epoch 1, step 4 of 4: the loss is nan; try ", "000002-epoch0-step2", "--async_save"),
    ],
)
def test_ruined_weights_end_a_run_and_leave_the_last_good_ones(
    ruinous: int, said: str, good: str, how: str
) -> None:
    """A step is finite, and what it has made of the weights is saved; what comes after it is not:
    the next step or, after the last one, the evaluation. What is being written is written."""
    asked, complete, wait = threading.Event(), Saver._complete, Saver.wait

    def when_asked(*args: Any) -> None:
        assert asked.wait(30)
        complete(*args)

    def ask(self: Saver) -> None:
        asked.set()
        wait(self)
        asked.clear()

    def ruin(_: int, patches: pytest.MonkeyPatch) -> None:
        patches.setattr(
            Recipe, "learning_rate_at", lambda _, step: 1e30 if step == ruinous else 1e-2
        )
        patches.setattr(Saver, "_complete", when_asked if how else complete)
        patches.setattr(Saver, "wait", ask)

    line = f"run_pipeline {FLOW} {TINY} --n_epochs 1 --save_every 1 --keep 1 {how}"
    _, error = run(line, None, ruin)
    assert error is not None
    assert error.startswith(said)
    ruined = f"{ruinous + 1:06}-epoch0-step{ruinous + 1}"
    assert names_in("work/checkpoints") == [good, ruined]
    assert list(Path("work").glob("*results*")) == []

"""A run that is interrupted and goes on is the run that was not: bit for bit at the same layout,
and with the same losses, up to the order of sums, at another."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from project import run_data_parallel, run_pipeline
from project.progress import NO_RESUME, Progress, check_texts, find_resume, share_out
from project.session import Session, read_texts
from project.utils import EpochTotals
from tests.ranks import Ranks
from training.launch import RunError, UserError, World
from training.optimization import Recipe
from training.seeds import stream

# 20 pairs are 4 steps, the last of 2 pairs: of three ranks one has none.
TINY = [
    "--n_layer=2", "--n_embd=16", "--n_head=2", "--vocab_size=300", "--model_max_length=64",
    "--batch_size=6", "--n_train=20", "--n_validation=6", "--n_test=3", "--n_epochs=2",
    "--learning_rate=1e-2", "--max_grad_norm=0.5", "--lr_scheduler=cosine", "--warmup_steps=2",
    "--device=cpu", "--keep=9",
]  # fmt: skip


class _Stop(BaseException):
    """In the middle of an epoch."""


def with_sizes(options: list[str]) -> list[str]:
    """The options after those of the tiny model; weights that exist have sizes of their own."""
    sizes = ("--n_layer", "--n_embd", "--n_head", "--vocab_size")
    ready = any(option.startswith("--model=") for option in options)
    return [option for option in TINY if not (ready and option.startswith(sizes))] + options


def run(work: Callable[[], None], stop_at: int | None) -> None:
    """Does the work of a program, less the pictures; until step `stop_at` of all, if given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "close", Session.export_model)
        after_step = Progress.after_step

        def stop(self: Progress, totals: EpochTotals) -> None:
            after_step(self, totals)
            if self.optimizer.steps == stop_at:
                raise _Stop

        patch.setattr(Progress, "after_step", stop)
        with suppress(_Stop):
            work()


def data_parallel(
    rank: int, world_size: int, folder: Path, options: list[str], stop_at: int | None = None
) -> None:
    """A rank of the program."""
    args = run_data_parallel.parse(
        [*with_sizes(options), f"--world_size={world_size}", f"--workdir={folder}"]
    )
    texts = read_texts(args, world_size)
    resume = find_resume(args)
    check_texts(texts, resume)
    run(lambda: run_data_parallel.run_dp(World(rank, world_size), args, texts, resume), stop_at)


def pipeline(folder: Path, options: list[str], stop_at: int | None = None) -> None:
    """The program."""
    args = run_pipeline.parse([*with_sizes(options), f"--workdir={folder}"])
    run(lambda: run_pipeline.run_pp(args, run_pipeline.choose_devices(args)), stop_at)


def last(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last checkpoint: its tensors' bytes and position, and its numbers less the times."""
    newest = max((folder / "checkpoints").iterdir())
    tensors: dict[str, Any] = {}
    for file in newest.glob("*.safetensors"):
        tensors |= {k: (v.dtype, v.numpy().tobytes()) for k, v in load_file(file).items()}
    state = json.loads((newest / "state.json").read_text())
    totals = [{**t, "seconds": None} for t in state["totals"]]
    return tensors, {"totals": totals, **{k: state[k] for k in ("position", "steps", "left_out")}}


def results(folder: Path) -> dict[str, Any]:
    """What the result files say, less the times."""
    found = {path.name: json.loads(path.read_text()) for path in folder.glob("*_epoch?.json")}
    timed = {"training_time", "tokens_per_sec", "real_tokens_per_sec"}
    return {
        name: {k: v for k, v in content.items() if k not in timed}
        if isinstance(content, dict)
        else content
        for name, content in found.items()
    }


def assert_same(folder: Path, reference: Path) -> None:
    (tensors, numbers), (expected, expected_numbers) = last(folder), last(reference)
    assert tensors.keys() == expected.keys()
    assert [name for name in expected if tensors[name] != expected[name]] == []
    assert numbers == expected_numbers
    assert numbers["left_out"] == 0  # or little would have been learnt, and compared
    assert results(folder) == results(reference)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name.split("-", 1)[1] for path in (folder / "checkpoints").iterdir())


# The same layout


@pytest.mark.parametrize("sync", ["per_parameter", "flat", "overlap"])
def test_data_parallel_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, sync: str) -> None:
    """Dropout is on; interrupted twice, the second time a step after a checkpoint."""
    options = [f"--gradient_sync={sync}", "--save_every=2"]
    ranks.run(data_parallel, tmp_path / "whole", options[:1])
    folder = tmp_path / "parts"
    ranks.run(data_parallel, folder, options, 2)
    ranks.run(data_parallel, folder, [*options, "--resume"], 7)
    assert checkpoints(folder) == ["epoch0-step2", "epoch0-step4", "epoch1-step2"]
    ranks.run(data_parallel, folder, [*options, "--resume"])
    assert_same(folder, tmp_path / "whole")
    assert checkpoints(tmp_path / "whole") == ["epoch0-step4", "epoch1-step4"]
    names = {key for key in last(folder)[0] if key.startswith("random")}
    assert names == {"random.0.cpu", "random.1.cpu"}


def _diverge(rank: int, world_size: int, folder: Path) -> str:
    try:
        data_parallel(rank, world_size, folder, ["--learning_rate=1e30", "--keep=1"])
    except RunError as error:
        return str(error)
    return "it did not"


def test_a_loss_that_is_not_a_number_ends_the_run(ranks: Ranks, tmp_path: Path) -> None:
    """The first step is finite, and moves every weight by 1e30."""
    said = (
        "epoch 0, step 2 of 4: the loss of rank 0 and 1 more is nan; try --learning_rate 5e+29 "
        "or --on_nan skip, which leaves such steps out"
    )
    assert ranks.run(_diverge, tmp_path) == [said] * 2
    assert list(tmp_path.glob("*epoch*")) == []


def _ruin(rank: int, world_size: int, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recipe, "learning_rate_at", lambda _, step: 1e30 if step == 2 else 1e-2)
        try:
            data_parallel(rank, world_size, folder, ["--save_every=1", "--keep=1"])
        except RunError as error:
            return str(error)
    return "it did not end"


def test_ruined_weights_leave_the_last_good_ones(ranks: Ranks, tmp_path: Path) -> None:
    """The third step is finite, and what it has made of the weights is saved; the fourth is not."""
    for said in ranks.run(_ruin, tmp_path):
        assert said.startswith("epoch 0, step 4 of 4: the loss of rank 0 and 1 more is nan")
    assert checkpoints(tmp_path) == ["epoch0-step2", "epoch0-step3"]


WHOLE = "--model_parallel_mode=pipeline_parallel"


@pytest.mark.parametrize(
    "options",
    [
        (WHOLE, "--schedule=1f1b", "--n_chunk=3"),
        (WHOLE, "--schedule=zb", "--n_chunk=3"),
        (WHOLE, "--pipeline=blocks", "--n_chunk=3"),
        ("--model_parallel_mode=model_parallel", "--n_chunk=2"),
    ],
    ids=" ".join,
)
def test_a_pipeline_goes_on_bit_for_bit(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The cut, which --balance auto measures, is that of before: the norm is a sum over stages."""
    pipeline(tmp_path / "parts", [*options, "--save_every=3"], 3)
    state = json.loads((tmp_path / "parts/checkpoints/000001-epoch0-step3/state.json").read_text())
    pipeline(tmp_path / "parts", [*options, "--resume"])
    # The reference is cut alike, which its own measurement need not do.
    cut = [] if state["cut"] is None else state["cut"]
    with pytest.MonkeyPatch.context() as patch:
        init = run_pipeline.WholeModel.__init__
        patch.setattr(
            run_pipeline.WholeModel,
            "__init__",
            lambda self, session, devices, step, *_: init(self, session, devices, step, cut),
        )
        pipeline(tmp_path / "whole", list(options))
    assert_same(tmp_path / "parts", tmp_path / "whole")


def test_a_run_that_was_done_goes_on_for_longer(tmp_path: Path) -> None:
    """Its last epoch is evaluated again, and nothing else changes."""
    constant = ["--lr_scheduler=constant"]
    pipeline(tmp_path / "a", [*constant, "--n_epochs=1"])
    before = last(tmp_path / "a")
    pipeline(tmp_path / "a", [*constant, "--n_epochs=1", "--resume"])
    assert (last(tmp_path / "a"), checkpoints(tmp_path / "a")) == (before, ["epoch0-step4"])
    (tmp_path / "a" / "eval_results_epoch7.json").write_text("{}")
    pipeline(tmp_path / "a", [*constant, "--n_epochs=2", "--resume"])
    pipeline(tmp_path / "b", [*constant, "--n_epochs=2"])
    assert_same(tmp_path / "a", tmp_path / "b")


# Another layout. In float32 a sum taken in another order is off by 2^-24 of its terms or so each
# time, a gradient by 1e-6 of its size after the few hundred terms here. AdamW divides an element by
# its own size: 8 steps of at most 1e-2 make 8e-8 of weights of 1e-2 to 1, and more only where a
# gradient is nearly 0. A wrong batch, weight or position is off in the second digit.
SAME = 1e-5


def losses(folder: Path) -> list[float]:
    prefix = "eval" if list(folder.glob("eval_results_epoch1.json")) else "rank0"
    found = json.loads((folder / f"{prefix}_results_epoch1.json").read_text())
    first = next(folder.glob("*_results_epoch0.json"))
    return [
        json.loads(first.read_text())["training_loss"],
        found["training_loss"],
        found["validation_loss"],
    ]


@pytest.fixture(scope="module")
def interrupted(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Path], list[float]]]:
    """Makes a workdir of one process without dropout that stopped in the middle of the second
    epoch; returns the losses of one that did not."""
    folder = tmp_path_factory.mktemp("layouts")
    plain = ["--dropout=0", "--model_parallel_mode=none", "--n_chunk=2"]
    pipeline(folder / "whole", plain)
    pipeline(folder / "parts", [*plain, "--save_every=1"], 5)

    def copy(to: Path) -> list[float]:
        shutil.copytree(folder / "parts", to)
        return losses(folder / "whole")

    yield copy


def test_as_a_pipeline_of_blocks(
    interrupted: Callable[[Path], list[float]], tmp_path: Path
) -> None:
    expected = interrupted(tmp_path / "a")
    pipeline(tmp_path / "a", ["--dropout=0", "--resume", WHOLE, "--pipeline=blocks"])
    assert losses(tmp_path / "a") == pytest.approx(expected, rel=SAME)


def test_on_three_ranks_then_as_a_pipeline_then_on_two_ranks(
    interrupted: Callable[[Path], list[float]], ranks: Ranks, three_ranks: Ranks, tmp_path: Path
) -> None:
    """Another layout at each step; the batches are those of one process throughout."""
    expected = interrupted(tmp_path / "a")
    more = ["--dropout=0", "--resume", "--save_every=1"]
    three_ranks.run(data_parallel, tmp_path / "a", more, 6)
    pipeline(tmp_path / "a", [*more, WHOLE, "--num_devices=3", "--n_chunk=2"], 7)
    ranks.run(data_parallel, tmp_path / "a", more)
    assert losses(tmp_path / "a") == pytest.approx(expected, rel=SAME)


def test_ranks_that_were_not_there_draw_masks_of_their_own(
    interrupted: Callable[[Path], list[float]], ranks: Ranks, tmp_path: Path
) -> None:
    interrupted(tmp_path / "a")
    first, second = ranks.run(_states_after_resume, tmp_path / "a")
    assert first != second
    seeds = [stream(0, "dropout", rank, 0) for rank in range(2)]
    fresh = [torch.Generator().manual_seed(seed).get_state().tolist() for seed in seeds]
    assert second not in fresh


def _states_after_resume(rank: int, world_size: int, folder: Path) -> list[int]:
    found = []
    with pytest.MonkeyPatch.context() as patch:

        def note(self: Progress) -> Iterator[int]:
            del self
            found.append(torch.get_rng_state().tolist())
            yield from ()

        patch.setattr(Progress, "epochs", note)
        data_parallel(rank, world_size, folder, ["--dropout=0", "--resume"])
    return found[0]


def test_totals_are_shared_out() -> None:
    two = [
        {"loss_sum": 3.0, "target_tokens": 5, "positions": 9, "tokens": 7, "seconds": 2.0,
         "skipped": 1, "steps": 4},
        {"loss_sum": 6.0, "target_tokens": 6, "positions": 8, "tokens": 7, "seconds": 2.5,
         "skipped": 1, "steps": 4},
    ]  # fmt: skip
    assert share_out(two, 1, 2) == EpochTotals(6.0, 6, 8, 7, 2.5, 1, 4)
    assert [share_out(two, rank, 3) for rank in range(3)] == [
        EpochTotals(3.0, 4, 6, 5, 2.0, 1, 4),
        EpochTotals(3.0, 4, 6, 5, 2.0, 1, 4),
        EpochTotals(3.0, 3, 5, 4, 2.0, 1, 4),
    ]


# What --resume finds


def args_of(folder: Path, *options: str) -> argparse.Namespace:
    return run_pipeline.parse([*TINY, "--dropout=0", "--resume", f"--workdir={folder}", *options])


def test_without_a_checkpoint_it_begins(tmp_path: Path) -> None:
    """torchrun repeats the command line: the first time there is none."""
    found = find_resume(args_of(tmp_path))
    assert found.checkpoint is None
    assert found.notes == (
        f"--resume: {tmp_path}/checkpoints has no checkpoint; from the beginning.",
    )
    args = args_of(tmp_path)
    args.resume = False
    assert find_resume(args) is NO_RESUME


def test_damaged_ones_are_named(interrupted: Callable[[Path], list[float]], tmp_path: Path) -> None:
    """And neither removed nor counted by the run that goes on from an older one."""
    interrupted(tmp_path / "a")
    folder = tmp_path / "a" / "checkpoints"
    names = sorted(path.name for path in folder.iterdir())
    (folder / names[-1] / "state.json").write_text("{}")
    found = find_resume(args_of(tmp_path / "a"))
    assert found.checkpoint is not None
    assert (found.checkpoint.folder.name, found.refused) == (names[-2], (names[-1],))
    assert found.notes[0].startswith(f"Not used, {folder / names[-1]}: state.json has 2 bytes of ")
    assert found.notes[1] == f"From {folder / names[-2]}: epoch 0, 4 steps done."
    pipeline(tmp_path / "a", ["--dropout=0", "--resume", "--keep=1"])
    left = sorted(path.name for path in folder.iterdir())
    assert left == [names[-1], f"{len(names) + 1:06d}-epoch1-step4"]
    for path in folder.iterdir():
        (path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole \(.*it has no manifest"):
        find_resume(args_of(tmp_path / "a"))

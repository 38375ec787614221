"""The three programs, run on the ranks of a test, which import their libraries once, or here."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import resource
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from project import generate, run_data_parallel, run_pipeline, train
from project.command_line import helps_of
from tests.ranks import Ranks
from training.checkpoint import newest, weights_of
from training.launch.errors import RunError
from training.launch.world import World, choose_device
from training.results import Totals
from training.resume import Saving
from training.tasks import text_files
from training.tasks.generation import continue_all
from training.tasks.text_files import END

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS: dict[str, tuple[ModuleType, Callable[..., Any]]] = {
    "run_data_parallel": (run_data_parallel, run_data_parallel.parse_data_parallel),
    "run_pipeline": (run_pipeline, run_pipeline.parse_pipeline),
    "train": (train, train.parse_train),
}
KINDS = (run_data_parallel.DataParallelOptions, run_pipeline.PipelineOptions, train.TrainOptions)
for kind in KINDS:
    helps_of(kind)  # kept: else each rank and program that is forked reads them from the source
# Batches of 6, 6, 6 and 2: of three ranks the last has no example of the fourth.
SIZES = "--batch_size 6 --n_train 20 --n_validation 9 --device cpu --keep 9 "
TINY = SIZES + (
    "--model gpt2-mini --n_layer 2 --n_embd 16 --n_head 2 --vocab_size 300 --model_max_length 64 "
    "--n_test 3 --learning_rate 1e-2 "
)
VGG = SIZES + "--vgg_width 4 --optimizer sgd --learning_rate 0.02 "
# Batches that three ranks, or four micro-batches, do not divide; sentences that leave no target
# within 24 tokens; warm-up, decay, and a norm that clips some steps.
PAIRS = TINY + (
    "--precision fp64 --n_epochs 2 --warmup_steps 2 --lr_scheduler cosine --max_grad_norm 1.2 "
    "--model_max_length 24 "
)
# 20 sequences of 16 tokens and one more, in batches of 6: of the last, two ranks have 2 and 1.
TEXT = END.join(f"Line {i} of {i * 7 % 31} is here.\nIt is not {i % 3}!\n" for i in range(21))
PLAIN = TINY.replace("--n_test 3", "").replace("--n_train 20 --n_validation 9", "--n_train 21 ") + (
    "--n_validation 5 --model_max_length 16 --precision fp64 --n_epochs 2 "
)
# In float64 a sum of a thousand terms is off by 1e-13. AdamW, which divides a gradient by its size,
# makes little more of it in eight steps. A micro-batch counted twice is off in the second digit.
SAME = 1e-9
FLOW = "--model_parallel_mode pipeline_parallel --num_devices 2 "

Tamper = Callable[[int, pytest.MonkeyPatch], None]


def in_folder(folder: Path, _: int, patch: pytest.MonkeyPatch) -> None:
    """Gradients go to the current folder."""
    patch.chdir(folder)


def course_commands(page: str, containing: str = "") -> list[str]:
    """The lines for `parse` and `run` of the commands on a page in docs/ that have these words."""
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    found = re.findall(r"^python project/(\w+)\.py (.*)$", text, re.MULTILINE)
    return [f"{program} {options}" for program, options in found if containing in options]


def _begin(
    decoder: Any, tokenizer: Any, prompts: Any, most: Sequence[int], *args: Any, **options: Any
) -> list[str]:
    """`continue_all`, but ten tokens at most: what a tiny model writes does not end, and would take
    half of a run. (test_translations.py translates to the end.)"""
    few = [min(n, 10) for n in most]
    return continue_all(decoder, tokenizer, prompts, few, *args, **options)


read_lines = text_files._lines


def _first_lines(path: Path) -> Iterator[str]:
    """The first of 10,000 lines that each rank would read: no run here takes more than 300."""
    return islice(read_lines(path), 400)


class _Stop(BaseException):
    """In the middle of a run."""


def parse(line: str) -> Any:
    """The settled options of a command line, which begins with a program's name."""
    program, *options = shlex.split(line)
    return PROGRAMS[program][1](options)


def on_rank(
    rank: int,
    world_size: int,
    line: str,
    tamper: Tamper | None = None,
    stop_at: int | None = None,
    local_rank: int | None = None,
) -> tuple[str, str | None]:
    """What a rank prints, less pictures, and how it ends: the text of a RunError, or None. With
    `stop_at` it ends after that step. A translation has ten tokens. The ranks are of one host,
    unless `local_rank` is 0 on each."""
    program, printed = line.split()[0], io.StringIO()
    after_step = Saving.after_step

    def stop(self: Saving, epoch: int, totals: Totals, now: bool) -> None:
        after_step(self, epoch, totals, now)
        if self.optimizer.steps == stop_at:
            self.saver.wait()  # else one that is written in the background might be there, or not
            raise _Stop

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr("project.figures.epochs.plot_training", lambda path, *_: path)
        patch.setattr(Saving, "after_step", stop)
        patch.setattr("training.tasks.sequences.continue_all", _begin)
        patch.setattr(text_files, "_lines", _first_lines)
        if tamper is not None:
            tamper(rank, patch)
        args = parse(line)
        args.workdir.mkdir(parents=True, exist_ok=True)  # as `alone_in_workdir` does
        device = choose_device(args.device, rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        place = rank if local_rank is None else local_rank
        world = World(rank, world_size, place, device)
        try:
            if program == "run_pipeline":
                run_pipeline.run_pp(args)
            elif program == "train":
                train.train_rank(world, args)
            else:
                run_data_parallel.run_dp(world, args)
        except RunError as error:
            return printed.getvalue(), str(error)
        except _Stop:
            pass
    return printed.getvalue(), None


def run(
    line: str, ranks: Ranks | None = None, tamper: Tamper | None = None, stop_at: int | None = None
) -> tuple[str, str | None]:
    """What the program prints, on rank 0 alone, and how it ends. Its workdir is work/, unless the
    line says otherwise."""
    if "--workdir" not in line:
        line += f" --workdir {Path('work').resolve()}"
    if ranks is None:
        return on_rank(0, 1, line, tamper, stop_at)
    line += f" --world_size {ranks.world_size}"
    (printed, error), *others = ranks.run(on_rank, line, tamper, stop_at)
    assert [said for said, _ in others] == [""] * len(others)
    return printed, error


def finish(
    line: str, ranks: Ranks | None = None, tamper: Tamper | None = None, stop_at: int | None = None
) -> str:
    """What a program prints that must end without an error."""
    printed, error = run(line, ranks, tamper, stop_at)
    assert error is None, f"{printed}{error}"
    return printed


def printed_by_generate(*words: str) -> str:
    """What generate.py prints."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr("sys.argv", ["generate.py", *words])
        generate.main()
    return printed.getvalue()


def read_json(path: str | Path) -> Any:
    """JSON as it is defined: without NaN."""
    return json.loads(
        Path(path).read_text(encoding="utf-8"),
        parse_constant=lambda word: pytest.fail(f"{word} in {path}"),
    )


def summary(workdir: str | Path = "work") -> Any:
    """The summary of a run."""
    return read_json(Path(workdir) / "summary.json")


def losses(workdir: str | Path = "work") -> list[float]:
    """The loss of every step, NaN where it had no target, and last that of validation data."""
    found = summary(workdir)
    every = [*found["loss"], found["validation_loss"]]
    return [math.nan if loss is None else loss for loss in every]


def written(workdir: str | Path) -> list[Any]:
    """What the trained model makes of the test split, or how it continues the validation split."""
    return read_json(sorted(Path(workdir).glob("*gen_epoch1.json"))[0])


def weights(workdir: str | Path = "work") -> dict[str, Tensor]:
    """The weights of the newest checkpoint, by name."""
    checkpoint, _ = newest(Path(workdir) / "checkpoints")
    assert checkpoint is not None
    return weights_of(checkpoint)


def assert_same_run(workdir: str | Path, other: str | Path) -> None:
    """Both have the same losses, weights by name, and texts, up to the order of sums."""
    assert losses(workdir) == pytest.approx(losses(other), rel=SAME, nan_ok=True)
    assert written(workdir) == written(other)
    found, expected = weights(workdir), weights(other)
    assert found.keys() == expected.keys()
    for name, p in expected.items():
        torch.testing.assert_close(found[name], p, msg=name)


@torch.no_grad()
def large_weights(name: str, p: Tensor) -> None:
    """So large that what the model writes varies."""
    if ".ln_" in name:
        p.fill_(name.endswith("weight"))
        return
    p.normal_(0, 0.5, generator=torch.Generator().manual_seed(sum(name.encode())))
    if "wte" in name:
        p[2] *= 5  # the end of a sentence: it comes soon in some, and late in others


@torch.no_grad()
def recomputed(model: Any, prompt: list[int], num_tokens: int, stop: int, length: int) -> list[int]:
    """The likeliest continuation of one prompt, up to `length` tokens in all, without a cache."""
    ids = list(prompt)
    while len(ids) < length:
        logits = model(input_ids=torch.tensor([ids])).logits
        token = int(logits[0, -1, :num_tokens].argmax())
        if token == stop:
            break
        ids.append(token)
    return ids[len(prompt) :]


def names_in(folder: str | Path) -> list[str]:
    """In their order."""
    return sorted(path.name for path in Path(folder).iterdir())


@contextlib.contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may become larger: who writes more, Python or Rust, is told so by the system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

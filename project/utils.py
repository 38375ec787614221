"""The course's functions under the names of its handout, and functions that the programs share.

The training loop is training/loop.py, tokenizer and batches are training/tasks/tokens.py,
translation is training/tasks/generation.py.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from project import rules
from project.command_line import as_typed, underscored
from project.parser import ALIASES
from training.files import PICTURE, show, writing
from training.launch.clocks import clock_offset
from training.launch.errors import (
    RunError,
    UserError,
    counted,
    leave,
    refuse,
    signals_end,
    torchrun,
)
from training.launch.notice import Ended
from training.launch.world import World, quiet_libraries
from training.layouts.layout import LaidOutModel
from training.layouts.setup import Setup
from training.loop import evaluate_loss, train
from training.options import Options
from training.results import Results
from training.tasks.generation import evaluate_bleu
from training.tasks.texts import SPLITS, Texts, load_pairs
from training.tasks.tokens import collate_batch, get_tokenizer
from training.timeline import Timeline

# The course's functions that are defined elsewhere.
__all__ = ["collate_batch", "evaluate_bleu", "evaluate_loss", "get_tokenizer", "train"]


def save_grad_weights(model: nn.Module, rank: int) -> Path:
    """Writes the gradients, by parameter name, to tests/model{rank}_gradients.pth."""
    path = Path("tests") / f"model{rank}_gradients.pth"
    path.parent.mkdir(exist_ok=True)
    gradients = {n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None}
    with writing(path):
        torch.save(gradients, path)
    return path


def read_pairs(args: Options) -> Texts:
    """The pairs of a run. Raises UserError if they cannot be read or are too few."""
    sizes = {split: getattr(args, f"n_{split}") for split in SPLITS}
    texts = load_pairs(args.dataset, args.src, args.tgt, sizes, args.dp)
    rules.require(args, [rules.warmup(args, len(texts.splits["train"]))])
    return texts


def setup_of(
    args: Options, world: World, cut: Sequence[int] | None = None, workers: str = "rank"
) -> Setup:
    """What a layout is made by, see `Setup`. All ranks call it: they compare their clocks. It sets
    how this process' GPU multiplies. `workers` is what the `Timeline` calls them."""
    if world.device.type == "cuda":  # torch's own default has tf32 in convolutions alone
        exact = "tf32" if args.precision == "tf32" else "ieee"
        torch.backends.cuda.matmul.fp32_precision = exact
        torch.backends.cudnn.conv.fp32_precision = exact  # type: ignore[attr-defined]
    steps = args.timeline + 1 if args.timeline else 0  # pictures leave out the first step
    offset = clock_offset(world) if steps else 0.0
    timeline = Timeline(
        world, num_steps=steps, workers=workers, about={"strategy": args.strategy}, offset=offset
    )
    # Each rank makes its optimizer, of the parameters or shards that it holds.
    return Setup(args, partial(make_optimizer, args), timeline, cut)


def announce(
    world: World, args: Options, model: LaidOutModel, timeline: Timeline, layout: str
) -> None:
    """Prints, on rank 0, the layout, in words, and the length of the run; and tells them to the
    timeline."""
    m = args.num_microbatches or model.num_microbatches
    timeline.about |= {"schedule": model.schedule, "num_microbatches": m, "ranks": model.ranks}
    n, unit = (args.num_batches, "step") if args.num_batches else (args.n_epochs, "epoch")
    if world.is_main:
        show(f"{layout}, micro-batches: {m or 'automatic'}, {counted(n, unit)}")


def make_optimizer(args: Options, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, or the optimizer that --optimizer names."""
    ps = list(parameters)  # an iterator would be used up
    if args.optimizer == "sgd":
        return torch.optim.SGD(ps, args.learning_rate, momentum=args.momentum)
    return torch.optim.AdamW(ps, args.learning_rate, fused=ps[0].device.type != "mps")


def finish(world: World, results: Results, args: Options) -> None:
    """Prints outputs, draws the curves, and names the files, on rank 0."""
    world.on_main(lambda: _show(results, args))  # the others wait, however long drawing takes


def _show(results: Results, args: Options) -> None:
    from project.figures.style import plot_training  # here: matplotlib takes a second to import

    results.close()
    foot = "; ".join(results.task.describe().splitlines()[:2])
    picture = plot_training(args.workdir / PICTURE, [args.workdir], foot)
    if any(args.workdir.glob("timeline_rank*.json")):
        results.say(
            f"The recorded steps: python project/plot.py timeline {shlex.quote(str(args.workdir))} "
            "draws them and writes them for https://ui.perfetto.dev."
        )
    results.say(f"Results are in {args.workdir}/; the curves are drawn in {picture}.")


def run_program(main: Callable[[], None]) -> None:
    """Runs a program. A user's mistake ends it with one line and status 2, a RunError with one line
    and status 1, a signal such as Ctrl-C with status 128 + signal; none prints a traceback."""
    quiet_libraries()
    with signals_end():
        try:
            main()
            sys.stdout.flush()
        except BrokenPipeError:  # its reader has ended, such as `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush
            raise SystemExit(1) from None
        except Ended as notice:
            if torchrun("LOCAL_RANK", 0):  # all ranks are here; the first of each host says it
                leave("", notice.status)
            refuse(f"{notice}\n", notice.status)
        except (UserError, RunError) as error:
            message = as_typed(str(error), underscored(sys.argv[1:]), ALIASES)
            refuse(f"{Path(sys.argv[0]).name}: error: {message}\n", error.status)

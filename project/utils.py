"""The course's functions under the names of its handout, and functions that the programs share.

The training loop is training/loop.py, tokenizer and batches are training/tasks/tokens.py,
translation is training/tasks/generation.py.
"""

from __future__ import annotations

import errno
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from training.files import PICTURE, writing
from training.launch.errors import RunError, UserError, leave, refuse, torchrun
from training.launch.signals import ENDING_SIGNALS, Ended, end_process, handlers
from training.launch.world import World, quiet_libraries
from training.layouts.layout import LaidOutModel
from training.loop import evaluate_loss, train
from training.options import Options
from training.rank import trained
from training.results import Results
from training.resume import Resume
from training.tasks.generation import evaluate_bleu
from training.tasks.texts import load_texts
from training.tasks.tokens import TOKENIZER_FILES, collate_batch, get_tokenizer
from training.tasks.translation import TranslationTask

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


def translation(args: Options, world: World, resume: Resume) -> TranslationTask:
    """The task of the course's two programs."""
    files = resume.files(TOKENIZER_FILES) if world.is_main else None
    return TranslationTask(args, world, load_texts(args, world, translates=True), files)


def finish(results: Results) -> None:
    """Prints outputs, draws the curves, and names the files, on rank 0."""
    results.world.on_main(lambda: _show(results))  # the others wait, however long drawing takes


def train_and_finish(model: LaidOutModel, resume: Resume) -> None:
    """The work of a rank whose program only trains."""
    finish(trained(model, resume))


def _show(results: Results) -> None:
    from project.figures.epochs import plot_training  # here: matplotlib takes a second to import

    args = results.args
    results.close()
    foot = "; ".join(results.task.describe().splitlines()[:2])
    picture = plot_training(args.workdir / PICTURE, [args.workdir], foot)
    if any(args.workdir.glob("timeline_rank*.json")):
        # A command that can be pasted even where the environment is not active.
        python = "python" if shutil.which("python") == sys.executable else sys.executable
        words = [python, Path(sys.argv[0]).with_name("plot.py"), "timeline", args.workdir]
        results.say(f"To draw the recorded steps: {shlex.join(map(str, words))}")
    if any(args.workdir.glob("profile_rank*.json")):
        results.say(f"{args.workdir}/profile_rank*.json: open them in https://ui.perfetto.dev.")
    results.say(f"Results are in {args.workdir}/; the curves are drawn in {picture}.")


def run_program(main: Callable[[], None]) -> None:
    """Runs a program. A user's mistake ends it with one line and status 2, a RunError with one line
    and status 1, a signal such as Ctrl-C with status 128 + signal; none prints a traceback."""
    quiet_libraries()
    with handlers(ENDING_SIGNALS, end_process):
        try:
            main()
            sys.stdout.flush()
        except BrokenPipeError:  # its reader has ended, such as `| head`
            leave("", 1)  # before Python itself flushes
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            leave(f"{error}; make room there, or write elsewhere\n", 1)
        except Ended as notice:
            if torchrun("LOCAL_RANK", 0):  # all ranks get here; the first of each host says it
                leave("", notice.status)
            refuse(f"{notice}\n", notice.status)
        except (UserError, RunError) as error:
            refuse(f"{Path(sys.argv[0]).name}: error: {error}\n", error.status)

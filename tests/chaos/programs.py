"""The programs that are struck. A new one needs one entry in PROGRAMS."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from project.strategies import STRATEGIES

OWN, TORCHRUN, ALONE = "own", "torchrun", "alone"  # who starts the ranks; ALONE: there are none

TORCHRUN_COMMAND = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TINY = (
    "--n_layer", "1", "--n_embd", "32", "--n_head", "2", "--vocab_size", "320",
    "--model_max_length", "32", "--batch_size", "8", "--n_train", "64", "--n_validation", "8",
    "--n_test", "4", "--device", "cpu",
)  # fmt: skip
# Of project/train.py, on two processes.
ON_PROCESSES = [
    name for name, row in STRATEGIES.items() if row.axis and "world_size" not in row.usual
]


@dataclass(frozen=True)
class Program:
    """A command line, given to Python in the root of the repository.

    The program must take --workdir and --n_epochs, and with ranks --timeout, and write a checkpoint
    into its workdir at the end of each epoch. Where it has ranks, they are children of the process
    that the command starts.
    """

    name: str
    launcher: str
    arguments: tuple[str, ...]

    def command(self, workdir: str, epochs: int, timeout: float) -> list[str]:
        """The whole command line."""
        given = ["--workdir", workdir, "--n_epochs", str(epochs)]
        if self.launcher != ALONE:
            given += ["--timeout", str(timeout)]
        return [sys.executable, *self.arguments, *given]


def trained(strategy: str) -> tuple[str, ...]:
    """project/train.py, with at least a block for each of two stages."""
    return ("project/train.py", strategy, "--model", "gpt2-mini", *TINY, "--n_layer", "2")


PROGRAMS = (
    Program("data parallel", OWN, ("project/run_data_parallel.py", *TINY)),
    Program("torchrun", TORCHRUN, (*TORCHRUN_COMMAND, "project/run_data_parallel.py", *TINY)),
    Program(
        "pipeline", ALONE,
        ("project/run_pipeline.py", "--model_parallel_mode=pipeline_parallel", *TINY),
    ),
    *(Program(f"train {name}", OWN, trained(name)) for name in ON_PROCESSES),
    Program("train 3d", OWN, (*trained("3d"), "--pp", "2", "--tp", "2")),
    Program("train recompute", OWN, (*trained("pipeline"), "--recompute", "always")),
    Program("train chunks", OWN, (*trained("pipeline"), "--schedule", "zbv")),
    *(
        Program(f"torchrun {name}", TORCHRUN, (*TORCHRUN_COMMAND, *trained(name)))
        for name in ON_PROCESSES
    ),
)  # fmt: skip

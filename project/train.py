"""Trains VGG16 or GPT-2 under any strategy, on processes that exchange tensors.

    single     one process
    ddp        the whole model on every worker, a part of each batch on each

    python project/train.py ddp --num_workers 2 --num_batches 2 --learning_rate 1e-3 \\
        --batch_size 32 --check_weights --check_output
    torchrun --nproc-per-node 2 project/train.py ddp --model gpt2-mini

Dropout is off unless --dropout says otherwise: with it no two strategies draw the same, and there
is nothing to compare.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: the packages are beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from project.options import (
    PRECISIONS,
    check_batch,
    check_model,
    claim_workdir,
    count,
    launch_settings,
    parser_for,
    positive,
    run_program,
)
from project.session import read_texts
from project.strategies import STRATEGIES
from project.tasks import VGG, Data
from project.worker import run_worker
from training.launch import UserError, launch, torchrun_world_size
from training.model import PRESETS
from training.pictures import load_pictures

OPTIMIZERS = ("sgd", "adamw")


def read_data(args: argparse.Namespace) -> Data:
    """Pictures or sentence pairs, whichever the model wants."""
    if args.model == VGG:
        return load_pictures(args.dataset, args.n_train, args.n_validation)
    return read_texts(args, args.num_workers)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options, with what is wrong with them said before anything is started."""
    parser = parser_for(__doc__, model=VGG, n_epochs=1, batch_size=32, dropout=0.0, workdir=None)
    parser.add_argument("strategy", choices=list(STRATEGIES), help="how the model is trained")

"""The rules between options that all programs share, checked before anything starts. A program's
own rules are in its file, in `parse_*`.

Each rule raises UserError with the values, the rule, and a setting that works. A `settle_*` also
fills in options that were not given, so that options.json has them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any

from runtime.cores import core_slice

from .launch.errors import UserError, torchrun_world_size, works
from .launch.world import choose_device
from .tasks.gpt2 import PRESETS, gpt2_size
from .tasks.pretrained import check_pretrained
from .tasks.task import steps_of_epoch

RATES = {"vgg16": 3e-4, "gpt2-mini": 1e-3}  # learning rates of AdamW
STEPS_RECORDED = 20
SGD_FACTOR = 30  # SGD's steps are scaled by small gradients; AdamW's have the size of the rate


def settle_ranks(args: Any) -> None:
    """Settles the number of processes, and checks that they can be started."""
    started = torchrun_world_size()
    for name, decided in (("world_size", started), ("master_port", None)):
        given = getattr(args, name)
        if started is not None and given not in (None, decided):
            raise UserError(
                f"--{name} {given}: torchrun started {started} ranks and decides it; leave it out"
            )
    args.world_size = args.world_size or started or (1 if args.strategy == "single" else 2)
    cores = len(core_slice(0, 1))
    if (args.cores_per_rank or 0) > cores > 0:
        raise UserError(
            f"--cores_per_rank {args.cores_per_rank}: {cores} cores may be used here; "
            + works("--cores_per_rank", cores)
        )


def settle_training(args: Any) -> None:
    """Settles the model, the learning rate, and how many steps are recorded."""
    kind = choose_device(args.device, 0, args.world_size).type
    if args.model == "auto":
        args.model = "gpt2" if kind == "cuda" else "gpt2-mini"
    if args.timeline is None:  # 0.3 microseconds per action; a GPU would be waited for
        args.timeline = STEPS_RECORDED if kind == "cpu" else 0
    if args.learning_rate is None:
        narrow = args.n_embd is not None and args.n_embd <= 512 and args.model in PRESETS
        rate = RATES.get(args.model) or (1e-3 if narrow else 1e-4)
        sgd = getattr(args, "optimizer", "adamw") == "sgd"
        args.learning_rate = rate * (SGD_FACTOR if sgd else 1)
    if args.num_batches is not None:
        check_warmup(args, 0)
    if getattr(args, "compile", False):
        _check_compiler(choose_device(args.device, 0, 1).type)
    device = choose_device(args.device, 0, args.world_size).type
    if args.precision == "tf32" and device != "cuda":
        raise UserError(
            f"--precision tf32 --device {device}: it is how CUDA devices multiply; "
            "--precision fp32 works"
        )


def _check_compiler(device: str) -> None:
    """Raises UserError if torch.compile lacks what it makes code with."""
    compiler = os.environ.get("CXX", "g++")
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError("--compile: torch.compile needs the package triton here; leave it out")
    if device != "cuda" and shutil.which(compiler) is None:
        raise UserError(f"--compile: there is no C++ compiler {compiler} here; leave it out")


def check_batch(args: Any, parts: int, option: str = "world_size") -> None:
    """Raises UserError if a batch or a split has fewer examples than the `parts` it is dealt out
    in; `option` sets their number."""
    for name in ("batch_size", "n_train", "n_validation"):
        have = getattr(args, name)
        if have is not None and have < parts:
            raise UserError(
                f"--{name} {have} --{option} {parts}: each rank needs an example; "
                + works(f"--{option}", have)
            )


def check_microbatches(args: Any, parts: int) -> None:
    """Raises UserError if a rank's part of a batch has fewer examples than micro-batches."""
    share, given = -(-args.batch_size // parts), args.num_microbatches
    if given is not None and given > share:
        ranks = f" --world_size {parts}" if parts > 1 else ""
        raise UserError(
            f"--num_microbatches {given} --batch_size {args.batch_size}{ranks}: a micro-batch "
            f"needs an example; {works('--num_microbatches', share)}"
        )


def check_recompute(args: Any, one_at_a_time: bool) -> None:
    """Raises UserError if this --recompute does not suit the layout. `one_at_a_time`: the backward
    of each micro-batch comes before the forward of the next."""
    unfit = {}
    if one_at_a_time or args.num_microbatches == 1:
        unfit["except_last"] = "every micro-batch is the last one held: nothing would be recomputed"
    if args.strategy == "fsdp" or getattr(args, "zero", None) == 3:
        unfit["sqrt"] = "shards of segments of several layers would be gathered once more"
    if args.recompute in unfit:
        raise UserError(
            f"--recompute {args.recompute}: {unfit[args.recompute]}; --recompute always works"
        )


def check_warmup(args: Any, num_examples: int) -> None:
    """Raises UserError if the warm-up does not end before the run does."""
    steps = args.num_batches or args.n_epochs * steps_of_epoch(args, num_examples)
    if args.warmup_steps and args.warmup_steps >= steps:
        raise UserError(
            f"--warmup_steps {args.warmup_steps}: the run has {steps} steps, and the warm-up must "
            f"end before the last; {works('--warmup_steps', steps - 1, least=0)}"
        )


def check_plain_text(args: Any) -> None:
    """Raises UserError for options of pairs of sentences, or a length that leaves no task."""
    if args.model_max_length < 2:
        raise UserError(
            f"--model_max_length {args.model_max_length}: the model would know no token before "
            "the one it predicts; 2 or more works"
        )
    for name, default in (("src", "de"), ("tgt", "en"), ("n_test", None)):
        if (given := getattr(args, name)) != default:
            raise UserError(
                f"--{name} {given} --dataset {args.dataset}: it is for pairs of sentences, and "
                "this is plain text; leave it out"
            )


def check_model(args: Any) -> None:
    """Raises UserError for a model that cannot be built."""
    least = 256 + 3
    if args.vocab_size is not None and args.vocab_size < least:
        raise UserError(
            f"--vocab_size {args.vocab_size}: a byte-level vocabulary has at least {least} tokens; "
            "--vocab_size 2048 works"
        )
    if args.model in PRESETS:
        gpt2_size(args.model, n_layer=args.n_layer, n_embd=args.n_embd, n_head=args.n_head)
        return
    given = [n for n in ("n_layer", "n_embd", "n_head", "vocab_size") if getattr(args, n)]
    if given:
        raise UserError(
            f"--{given[0]} with --model {args.model}: pretrained weights have a fixed size; only "
            f"the presets can be changed ({', '.join(PRESETS)})"
        )
    check_pretrained(args.model, args.model_max_length)

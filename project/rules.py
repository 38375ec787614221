"""What the options of a run must fulfil, and the values of those that were not given.

A rule is a row: the options that it is about, whether they fulfil it, the rule in words, and what
works instead. `require` reads rows lazily: later ones may rely on earlier ones. A function
`settled_*` returns the options with values for some that are UNSET; nothing is changed in place.
Each program puts its own together in its `parse_*`:

    parse -> as_it_was (--resume) -> settled -> require(rules) -> folders
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from runtime.cores import core_slice
from training.launch.errors import UserError, counted, torchrun, torchrun_world_size, works
from training.launch.world import choose_device
from training.optimization import check_warmup
from training.options import VGG, O, Options, spelt
from training.tasks.gpt2 import PRESETS, gpt2_size

from .command_line import is_it

SPLIT_SIZES = {"n_train": 5000, "n_validation": 1000, "n_test": 100}  # used of the built-in data
RATES = {VGG: 3e-4, "gpt2-mini": 1e-3}  # learning rates of AdamW
SGD_FACTOR = 30  # SGD's steps are scaled by small gradients; AdamW's have the size of the rate
STEPS_RECORDED = 20
LEAST_VOCABULARY = 256 + 3  # bytes and special tokens
OF_SENTENCES = "n_layer n_embd n_head vocab_size dropout padding src tgt model_max_length n_test"
LEAVE = "leave it out"

Rule = tuple[str, bool, str, str]
"""The options' names, whether they fulfil the rule, the rule, what works instead."""


def require(args: Options, rows: Iterable[Rule]) -> None:
    """Raises UserError for the first row that is not fulfilled. Under torchrun the first rank of
    each host checks, since a rule may load from the hub; of a resume rank 0, which has the
    checkpoint."""
    if torchrun("LOCAL_RANK", 0) or (args.resume and torchrun("RANK", 0)):
        return
    for names, fulfilled, rule, instead in rows:
        if not fulfilled:
            words = " ".join(spelt(name, getattr(args, name)) for name in names.split())
            raise UserError(f"{words}: {rule}; {instead}")


def typed(args: Options, rows: Iterable[Rule]) -> Iterator[Rule]:
    """A rule for each option of a row that was typed, and not as its default: it has no effect."""
    defaults = {field.name: field.default for field in fields(args)}
    for names, fits, rule, instead in rows:
        for name in args.typed & {*names.split()}:
            yield name, fits or getattr(args, name) == defaults[name], rule, instead


def of_use(args: Options) -> Iterator[Rule]:
    """What has no effect in this run must not be typed."""
    which = f"--model {VGG}" if "model" in args.typed else f"the default model, {VGG},"
    started = torchrun_world_size()
    return typed(args, [
        ("world_size", started in (None, args.world_size),
         f"torchrun started {started} ranks and decides it", LEAVE),
        ("schedule chunks balance", args.strategy != "3d" or args.pp > 1,
         "only a run with stages has it", "--pp 2 works"),
        ("sequence_parallel", args.tp > 1,
         "only a run whose matrices are cut has it", "--tp 2 works"),
        ("bucket_mb comm_dtype", args.gradient_sync == "overlap",
         "only --gradient_sync overlap has it", LEAVE),
        ("momentum", args.optimizer == "sgd", "only --optimizer sgd has it", LEAVE),
        ("vgg_width", args.model == VGG, f"only --model {VGG} has it", LEAVE),
        (OF_SENTENCES, args.model != VGG, f"{which} learns images", "--model gpt2-mini has it"),
    ])  # fmt: skip


def settled_ranks(args: O, usual: int = 2) -> O:
    """With the number of processes: as typed, as torchrun started, or as usual."""
    given = args.world_size if "world_size" in args.typed else torchrun_world_size()
    return replace(args, world_size=given or args.world_size or usual)


def settled(args: O) -> O:
    """With the model, the learning rate, the sizes of splits, and how many steps are recorded."""
    kind = choose_device(args.device).type
    new: dict[str, Any] = {"model": args.model}
    if args.model == "auto":
        new["model"] = "gpt2" if kind == "cuda" else "gpt2-mini"
    if args.timeline is None:  # 0.3 microseconds per action; a GPU would be waited for
        new["timeline"] = STEPS_RECORDED if kind == "cpu" else 0
    if args.learning_rate is None:
        narrow = args.n_embd is not None and args.n_embd <= 512 and new["model"] in PRESETS
        rate = RATES.get(new["model"]) or (1e-3 if narrow else 1e-4)
        new["learning_rate"] = rate * (SGD_FACTOR if args.optimizer == "sgd" else 1)
    for name, size in SPLIT_SIZES.items():
        limit = getattr(args, name) or (size if args.dataset == "builtin" else "all")
        new[name] = None if limit == "all" else limit
    return replace(args, **new)


def rules(
    args: Options, parts: int, dealt: str = "world_size", one_at_a_time: bool = True
) -> Iterator[Rule]:
    """The rules of every program. The batch is dealt out in `parts`, whose number the option
    `dealt` sets. `one_at_a_time`: the backward of each micro-batch comes before the forward of the
    next."""
    cores, share = len(core_slice(0, 1)), -(-args.batch_size // parts)
    kind = choose_device(args.device).type
    alone = one_at_a_time or args.num_microbatches == 1
    yield from of_use(args)
    for name in ("batch_size", "n_train", "n_validation"):
        n = getattr(args, name)
        enough = parts == 1 or n is None or n >= parts
        yield f"{name} {dealt}", enough, "each rank needs an example", works(f"--{dealt}", n or 1)
    yield from [
        ("cores_per_rank", not cores or (args.cores_per_rank or 0) <= cores,
         f"{counted(cores, 'core')} may be used here", works("--cores_per_rank", cores)),
        ("num_microbatches batch_size" + f" {dealt}" * (parts > 1),
         args.num_microbatches is None or args.num_microbatches <= share,
         "a micro-batch needs an example", works("--num_microbatches", share)),
        ("precision device", args.precision != "tf32" or kind == "cuda",
         "it is how CUDA devices multiply", "--precision fp32 works"),
        # A resume has the former of its checkpoint.
        ("save_every keep", args.save_every is None or args.keep > 0 or args.resume,
         "no checkpoint would stay", "--keep 1 works"),
        ("recompute", args.recompute != "except_last" or not alone,
         "every micro-batch is the last one held: nothing would be recomputed",
         "--recompute always works"),
    ]  # fmt: skip
    if args.compile:
        yield of_compile(kind == "cuda")
    if args.num_batches is not None:
        check_warmup(args, 0)


def of_compile(on_gpu: bool) -> Rule:
    """What torch.compile needs on this machine. On a GPU triton has a C compiler build what
    launches its kernels, which a container for running programs may lack."""
    needs, there = "a C++ compiler", shutil.which(os.environ.get("CXX", "g++"))
    if on_gpu:
        needs = "the package triton, and a C compiler,"
        there = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        there = there if importlib.util.find_spec("triton") else None
    return "compile", there is not None, f"torch.compile needs {needs} here", "leave it out"


def of_model(args: Options) -> Iterator[Rule]:
    """A GPT-2 that can be built from scratch."""
    yield from [
        ("vocab_size", args.vocab_size is None or args.vocab_size >= LEAST_VOCABULARY,
         f"a byte-level vocabulary has at least {LEAST_VOCABULARY} tokens",
         "--vocab_size 2048 works"),
        ("model", args.model in PRESETS,
         f"it must be {' or '.join(PRESETS)}{is_it(args.model, PRESETS)}",
         "project/train.py ddp also takes pretrained weights"),
    ]  # fmt: skip
    gpt2_size(args.model, n_layer=args.n_layer, n_embd=args.n_embd, n_head=args.n_head)

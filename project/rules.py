"""The rules that a run's options must fulfil, and the values of options that were not given.

A rule is a row: the options that it is about, whether they fulfil it, the rule in words, and what
works instead. `require` reads rows lazily: later ones may rely on earlier ones. There is a rule for
a mistake that would otherwise go unnoticed, end in a traceback, or show only after minutes. There
is none for a mistake that is refused in a sentence before the training anyway, or that does no
harm. Each program collects its rules in its function `settled_*`, which changes nothing in place:

    what was typed -> as_it_was (--resume) -> what follows from the layout -> settled -> require
"""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from runtime.cores import core_slice
from training.checkpoint import names as checkpoints_in
from training.files import CHECKPOINTS
from training.launch.errors import UserError, counted, first_sentence, torchrun, torchrun_world_size
from training.launch.world import choose_device, memory_here
from training.options import VGG, O, Options, spelt
from training.tasks.gpt2 import PRESETS, gpt2_size, round_vocab
from training.tasks.tokens import read_tokenizer

from .command_line import is_it

SPLIT_SIZES = {"n_train": 5000, "n_validation": 1000, "n_test": 100}  # of the built-in data
RATES = {VGG: 3e-4, "gpt2-mini": 1e-3}  # learning rates of AdamW
SGD_FACTOR = 30  # an SGD step is the rate times a small gradient; an AdamW step is about the rate
STEPS_RECORDED = 20
OBJECTS = 200_000  # bytes of a block without its weights: Python's objects
OF_SENTENCES = (
    "n_layer n_embd n_head vocab_size dropout padding src tgt tokenizer model_max_length n_test "
    "documents"
)
LEAVE = "leave it out"

Rule = tuple[str, bool, str, str]
"""The options' names, whether they fulfil the rule, the rule, what works instead."""


def require(args: Options, rows: Iterable[Rule]) -> None:
    """Raises UserError for the first rule that is not fulfilled. Under torchrun only the first rank
    of each host checks, since a rule may load from the hub. If the run is resumed, only rank 0
    checks, which has the checkpoint."""
    if torchrun("LOCAL_RANK", 0) or (args.resume and torchrun("RANK", 0)):
        return
    for names, fulfilled, rule, instead in rows:
        if not fulfilled:
            words = " ".join(spelt(name, getattr(args, name)) for name in names.split())
            raise UserError(f"{words}: {rule}; {instead}")


def without_effect(args: Options, names: str, rule: str, instead: str) -> list[Rule]:
    """A rule for each of these options that was typed: this run has no use for it."""
    return [(name, False, rule, instead) for name in names.split() if name in args.typed]


def settled(args: O) -> O:
    """The options with values for the model, the learning rate, the momentum, the sizes of splits,
    and the numbers of steps to record and of checkpoints to keep."""
    kind = choose_device(args.device).type
    model, rate = args.model, args.learning_rate
    if model == "auto":
        model = "gpt2" if kind == "cuda" else "gpt2-mini"
    if rate is None:
        narrow = args.n_embd is not None and args.n_embd <= 512 and model in PRESETS
        rate = RATES.get(model) or (1e-3 if narrow else 1e-4)
        rate *= SGD_FACTOR if args.optimizer == "sgd" else 1
    momentum = args.momentum
    if momentum is None:
        momentum = 0.95 if args.optimizer == "muon" else 0.9
    sizes: dict[str, Any] = {}
    for name, size in SPLIT_SIZES.items():
        # n_validation is capped for any text: these examples are evaluated after every epoch.
        capped = args.dataset == "builtin" or (name == "n_validation" and model != VGG)
        limit = getattr(args, name) or (size if capped else "all")
        sizes[name] = None if limit == "all" else limit
    timeline = args.timeline
    if timeline is None:  # recording takes 0.3 microseconds per action, but would wait for a GPU
        timeline = STEPS_RECORDED if kind == "cpu" else 0
    return replace(
        args, model=model, learning_rate=rate, momentum=momentum, **sizes, timeline=timeline,
        keep=args.keep or int(args.check_weights),  # the check compares what is saved
    )  # fmt: skip


def ranks_of_run(args: Options) -> int | None:
    """As many as torchrun has started, or else as were asked for. Raises UserError if the two
    differ."""
    started = torchrun_world_size()
    if started and "world_size" in args.typed and args.world_size != started:
        raise UserError(f"--world_size {args.world_size}: torchrun started {started}; {LEAVE}")
    return started or args.world_size


def rules(args: Options) -> Iterator[Rule]:
    """The rules of every program."""
    cores = len(core_slice(0, 1)) or os.cpu_count() or 1
    files, unlimited = resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.RLIM_INFINITY
    tasks, task = os.environ.get("SLURM_STEP_NUM_TASKS", "1"), os.environ.get("SLURM_PROCID", "")
    compilers = (os.environ.get("CXX", "g++"), os.environ.get("CC", "gcc"))
    yield from [
        ("batch_size", args.batch_size >= args.dp,
         f"each of {args.dp} data-parallel ranks needs an example",
         f"--batch_size {args.dp} or more works"),
        ("cores_per_rank", (args.cores_per_rank or 1) <= cores,
         f"{counted(cores, 'core')} can be used here", f"--cores_per_rank {cores} works"),
        ("keep_best keep", bool(args.keep) or not args.keep_best, "no checkpoint is saved",
         "--keep 1 works"),
        # Ranks would wait for one that cannot open its connections. macOS allows 256, Linux 1,024.
        ("workdir", files >= 128 or files == unlimited,
         f"a process may open {files} files here; a rank may need 128", "ulimit -n 1024 works"),
        # One host may not see the lock that another has set on a folder.
        ("workdir", bool(torchrun_world_size()) or tasks == "1" or task in args.workdir.name,
         f"srun has started {tasks} of this program, and each would be a run", "srun --ntasks 1, "
         "torchrun as in examples/slurm, or a --workdir for each with $SLURM_PROCID, works"),
        # A container image made only to run programs may have none.
        ("compile", not args.compile or any(map(shutil.which, compilers)),
         "torch.compile needs a C++ compiler here", LEAVE),
        ("min_lr learning_rate", args.min_lr <= args.learning_rate, "a decay goes down",
         f"--min_lr {args.learning_rate / 10:g} works"),
        ("optimizer", args.model != VGG or args.optimizer != "muon",
         f"it is for matrices of GPT-2's blocks, and {VGG} has none", "--optimizer adamw works"),
    ]  # fmt: skip
    for here, names, rule, instead in (
        (args.optimizer == "adamw", "momentum", "AdamW has --betas", LEAVE),
        (args.optimizer == "sgd", "weight_decay betas eps", "sgd has only --momentum", LEAVE),
        (args.optimizer != "muon", "adamw_lr", "only --optimizer muon has a second rate", LEAVE),
        (args.lr_scheduler != "wsd", "decay_steps", "only --lr_scheduler wsd has it", LEAVE),
        (args.lr_scheduler == "constant", "min_lr", "a constant rate, the default, does not fall",
         "--lr_scheduler cosine works"),
        (args.benchmark_only, "eval_every keep_best", "--benchmark_only validates nothing", LEAVE),
        (not args.keep, "save_every async_save", "under --keep 0 no checkpoint is saved",
         "--keep 1 works"),
        (args.gradient_sync != "overlap", "bucket_mb comm_dtype",
         "only --gradient_sync overlap has buckets", LEAVE),
        (args.model != VGG, "vgg_width", f"only {VGG} has it", LEAVE),
        (args.model == VGG, OF_SENTENCES, f"{VGG}, the default model, learns pictures",
         "--model gpt2-mini has it"),
    ):  # fmt: skip
        if here:
            yield from without_effect(args, names, rule, instead)
    # A resumed run takes the checkpoint's tokenizer: the folder may be gone.
    in_checkpoint = args.resume and checkpoints_in(args.workdir / CHECKPOINTS)
    if args.tokenizer and args.model in PRESETS and not in_checkpoint:
        n = size_of_tokenizer(args.tokenizer)
        yield ("vocab_size tokenizer", n <= (args.vocab_size or n),
               f"it has {counted(n, 'token')}", f"--vocab_size {round_vocab(n)} works")  # fmt: skip


def size_of_tokenizer(name: str) -> int:
    """The number of tokens of a tokenizer. Raises UserError if it is not a byte-level BPE: other
    kinds lack letters, and may join the parts that a text is cut into."""
    try:
        tokenizer = read_tokenizer(name)
        decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
        if (decoder or {}).get("type") != "ByteLevel" or len(tokenizer) < 256:
            raise ValueError("its tokens are not made of bytes")
        return len(tokenizer)
    except Exception as error:  # its readers raise many kinds
        raise UserError(
            f"--tokenizer {name}: neither a folder nor a name on the hub with a byte-level BPE "
            f"({first_sentence(error)}); a folder with GPT-2's vocab.json and merges.txt works"
        ) from error


def of_model(args: Options) -> Iterator[Rule]:
    """A GPT-2 that can be built from scratch, and of which one copy has room on all hosts."""
    yield (
        "model", args.model in PRESETS,
        f"it must be {' or '.join(PRESETS)}{is_it(args.model, PRESETS)}",
        "project/train.py ddp also takes pretrained weights",
    )  # fmt: skip
    size = gpt2_size(args.model, n_layer=args.n_layer, n_embd=args.n_embd, n_head=args.n_head)
    layers, width = size["n_layer"], size["n_embd"]
    weights = (12 * layers * width + (args.vocab_size or 0) + args.model_max_length) * width
    needed = 8 * weights + OBJECTS * layers  # weights and gradients alone
    hosts = (torchrun_world_size() or 1) // torchrun("LOCAL_WORLD_SIZE", 1)
    there = hosts * memory_here(choose_device(args.device))
    names = ("n_layer", "n_embd", "vocab_size", "model_max_length")
    yield (
        " ".join(["model", *(name for name in names if name in args.typed)]), needed <= there,
        f"it needs more than {needed >> 30:,} GiB, and there are {there >> 30:,}",
        "--model gpt2-mini in its own size works",
    )  # fmt: skip

"""What must hold between the options of a run, checked before anything starts.

Each rule raises UserError with the values, the rule, and a setting that works. `parse_*` are the
options of each program with every default settled: what is left to the program to choose, it
chooses here, so that options.json says it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from project.options import (
    DataParallelOptions,
    PipelineOptions,
    TrainOptions,
    parse,
)
from runtime.cores import core_slice
from training.errors import torchrun
from training.launch import (
    UserError,
    choose_backend,
    choose_device,
    torchrun_world_size,
)
from training.model import PRESETS, gpt2_size, sizes_of_blocks, split_by
from training.pretrained import check_pretrained
from training.workdir import claim_folders

VGG = "vgg16"
SGD_FACTOR = 30  # its steps are gradients, which are small; AdamW's are of the size of the rate
BUCKET_MB = 4.0
SENTENCES_ONLY = (
    "n_layer", "n_embd", "n_head", "vocab_size", "dropout", "n_test", "padding", "src", "tgt",
    "model_max_length",
)  # fmt: skip


def parse_data_parallel(description: str | None, argv: Sequence[str] | None = None) -> Any:
    """Of run_data_parallel.py."""
    args: Any = parse(DataParallelOptions, description, argv)
    args.strategy = "ddp"
    _settle_ranks(args)
    if args.gradient_sync != "overlap":
        for name, given in (("bucket_mb", args.bucket_mb), ("comm_dtype", args.comm_dtype)):
            if given not in (None, "fp32"):
                raise UserError(
                    f"--{name} {given} --gradient_sync {args.gradient_sync}: only the buckets of "
                    "--gradient_sync overlap have it"
                )
    args.bucket_mb = args.bucket_mb or BUCKET_MB
    check_batch(args)
    check_microbatches(args, args.world_size)
    _settle_training(args)
    check_model(args)
    claim_folders(args)
    return args


def parse_pipeline(description: str | None, argv: Sequence[str] | None = None) -> Any:
    """Of run_pipeline.py."""
    args: Any = parse(PipelineOptions, description, argv)
    if (started := torchrun_world_size() or 1) > 1:
        raise UserError(
            f"torchrun started {started} ranks: run_pipeline.py is one process; start it without "
            "torchrun, or take project/train.py pipeline, whose stages are ranks"
        )
    args.strategy, args.world_size = args.model_parallel_mode, 1
    _settle_stages(args)
    check_microbatches(args, 1)
    _settle_training(args)
    check_model(args)
    _check_stages(args)
    claim_folders(args)
    return args


def parse_train(description: str | None, argv: Sequence[str] | None = None) -> Any:
    """Of train.py."""
    args: Any = parse(TrainOptions, description, argv)
    if args.model == "auto":
        raise UserError(f"--model auto: train.py needs one of {VGG}, {', '.join(PRESETS)}")
    _check_uses(args)
    _settle_ranks(args)
    if args.strategy == "single" and args.world_size > 1:
        raise UserError(
            f"single --world_size {args.world_size}: single is one process; ddp takes several"
        )
    parts = args.world_size if args.strategy in ("ddp", "fsdp") else 1
    if parts > 1:
        check_batch(args)
    check_microbatches(args, parts)
    _settle_training(args)
    if args.model != VGG:
        check_model(args)
    _settle_strategy(args)
    if args.dropout and (args.check_weights or args.check_output):
        raise UserError(
            f"--dropout {args.dropout:g} with --check_weights or --check_output: dropout draws "
            "other masks under every strategy, so nothing can be compared; --dropout 0 works"
        )
    if args.strategy not in ("single", "ddp"):
        check_gpus(args)
    args.workdir = args.workdir or Path("workdir") / f"{args.strategy}{args.world_size}"
    claim_folders(args)
    return args


def _settle_ranks(args: Any) -> None:
    """How many processes there are, and whether they can be started."""
    started, given = torchrun_world_size(), args.world_size
    args.world_size = given or started or (1 if args.strategy == "single" else 2)
    if started is not None and started != args.world_size:
        raise UserError(f"--world_size {given}: torchrun started {started} ranks; leave it out")
    if started is not None and args.master_port is not None:
        raise UserError(
            f"--master_port {args.master_port}: torchrun decides where its ranks meet; leave it "
            f"out, or start torchrun with --master-port {args.master_port}"
        )
    cores = len(core_slice(0, 1))
    if cores and (args.cores_per_rank or 0) > cores:
        raise UserError(
            f"--cores_per_rank {args.cores_per_rank}: {cores} cores may be used here; "
            f"--cores_per_rank {cores} or less works"
        )


def _settle_training(args: Any) -> None:
    """The model, the learning rate, and options that only some programs have."""
    if args.model == "auto":
        gpu = choose_device(args.device, 0, args.world_size).type == "cuda"
        args.model = "gpt2" if gpu else "gpt2-mini"
    optimizer = getattr(args, "optimizer", "adamw")
    if args.learning_rate is None:
        small = {VGG: 3e-4, "gpt2-mini": 1e-3}.get(args.model)
        narrow = args.n_embd is not None and args.n_embd <= 512 and args.model in PRESETS
        rate = small or (1e-3 if narrow else 1e-4)
        args.learning_rate = rate * (SGD_FACTOR if optimizer == "sgd" else 1)
    if args.num_batches is not None and args.warmup_steps >= args.num_batches > 1:
        raise UserError(
            f"--warmup_steps {args.warmup_steps} --num_batches {args.num_batches}: the warm-up "
            f"must end before the last step; --warmup_steps {args.num_batches // 10} works"
        )
    if args.save_every is not None and not args.keep:
        raise UserError(
            f"--save_every {args.save_every} --keep 0: no checkpoint would stay; --keep 1 works"
        )


def check_batch(args: Any) -> None:
    """Raises UserError where a batch or a split has fewer examples than there are ranks."""
    for name in ("batch_size", "n_train", "n_validation"):
        have = getattr(args, name)
        if have is not None and have < args.world_size:
            raise UserError(
                f"--{name} {have} --world_size {args.world_size}: each rank needs an example; "
                f"--world_size {have} or less works"
            )


def check_microbatches(args: Any, parts: int) -> None:
    """Raises UserError where a rank's part of a batch has fewer examples than micro-batches."""
    share, given = -(-args.batch_size // parts), args.num_microbatches
    if given is not None and given > share:
        ranks = f" --world_size {parts}" if parts > 1 else ""
        raise UserError(
            f"--num_microbatches {given} --batch_size {args.batch_size}{ranks}: a micro-batch "
            f"needs an example; --num_microbatches {share} or less works"
        )


def check_warmup(args: Any, num_examples: int) -> None:
    """Raises UserError where the warm-up does not end before the run does."""
    steps = args.num_batches or args.n_epochs * -(-num_examples // args.batch_size)
    if args.warmup_steps and args.warmup_steps >= steps:
        raise UserError(
            f"--warmup_steps {args.warmup_steps}: the run has {steps} steps, and the warm-up must "
            f"end before the last; --warmup_steps {steps // 10} works"
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
        gpt2_size(args.model, args.n_layer, args.n_embd, args.n_head)
        return
    given = [n for n in ("n_layer", "n_embd", "n_head", "vocab_size") if getattr(args, n)]
    if given:
        raise UserError(
            f"--{given[0]} with --model {args.model}: pretrained weights have a fixed size; only "
            f"the presets can be changed ({', '.join(PRESETS)})"
        )
    folder = Path(args.model)
    try:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else None
    except OSError as error:
        raise UserError(
            f"--model {args.model}: cannot be read ({error.strerror}); presets need no files: "
            f"{', '.join(PRESETS)}"
        ) from error
    if names is not None and not any(name.endswith((".safetensors", ".bin")) for name in names):
        raise UserError(
            f"--model {args.model}: the folder holds no weights (*.safetensors); "
            f"presets need none: {', '.join(PRESETS)}"
        )
    check_pretrained(args.model, args.model_max_length)


def check_gpus(args: Any) -> None:
    """Raises UserError where ranks that send each other tensors would share a GPU. NCCL wants one
    for each rank, and gloo can sum what is on a GPU, but neither send nor gather it."""
    here = torchrun("LOCAL_WORLD_SIZE", args.world_size)
    device = choose_device(args.device, 0, here)
    if device.type != "cuda" or choose_backend(args.device, here) == "nccl":
        return
    gpus = torch.cuda.device_count()
    fewer = f"--world_size {gpus}" if here == args.world_size else f"--nproc-per-node {gpus}"
    raise UserError(
        f"{args.strategy} --world_size {args.world_size} --device {args.device}: "
        f"{gpus} GPU{'s are' if gpus > 1 else ' is'} visible, and every rank needs one; "
        f"{fewer}, or --device cpu, works"
    )


def _settle_stages(args: Any) -> None:
    """The options of run_pipeline.py's stages. Raises UserError for one that the mode ignores."""
    mode, blocks = args.model_parallel_mode, args.pipeline == "blocks"
    where, whole = f"--model_parallel_mode {mode}", "--pipeline whole"
    flow = "--model_parallel_mode pipeline_parallel"
    fixed: dict[str, tuple[Any, str]] = {}  # option: its only value, and how to be free to choose
    if mode == "none":
        fixed |= {"num_devices": (1, flow), "balance": ("uniform", flow)}
    if mode != "pipeline_parallel":
        fixed["schedule"] = "sequential", f"{flow} {whole}" if blocks else flow
    elif blocks:
        fixed["schedule"] = "gpipe", whole
    if blocks and mode != "pipeline_parallel":
        fixed["num_microbatches"] = 1, whole
    on_gpu = choose_device(args.device, 0, 1).type == "cuda"
    defaults = {
        "num_devices": torch.cuda.device_count() if on_gpu else 2,
        "balance": "auto", "schedule": "1f1b", "num_microbatches": 4,
    }  # fmt: skip
    for name, default in defaults.items():
        given = getattr(args, name)
        value, instead = fixed.get(name, (given or default, ""))
        if given not in (None, value):
            form = f"{where} --pipeline blocks" if blocks else where
            raise UserError(
                f"--{name} {given} {form}: it is {value} there; leave it out, or use {instead}"
            )
        setattr(args, name, value)


def _check_stages(args: Any) -> None:
    """Raises UserError where the model cannot be cut into the stages of run_pipeline.py."""
    n, blocks = args.num_devices, number_of_blocks(args)
    halves = args.pipeline == "whole" and args.balance == "auto"
    cuts = 2 * blocks + 2 if halves else blocks
    if n > cuts:
        what = f"{cuts} layers (embedding, halves of blocks, head)" if halves else f"{cuts} blocks"
        raise UserError(
            f"--num_devices {n} --balance {args.balance}: the model has {what} and every stage "
            f"needs one; --num_devices {cuts} or less works, or a larger --n_layer"
        )
    try:
        sizes_of_blocks(args.balance, blocks, n)
    except ValueError as error:
        raise UserError(f"--num_devices {n} --{error}") from None


def choose_devices(args: Any) -> list[torch.device]:
    """The devices of run_pipeline.py's stages: GPUs, or slices of the CPU's cores. Raises UserError
    where there are not so many GPUs."""
    kind, n = choose_device(args.device, 0, 1).type, args.num_devices
    gpus = torch.cuda.device_count() if kind == "cuda" else 1
    if kind != "cpu" and n > gpus:
        raise UserError(
            f"--num_devices {n} --device {kind}: {gpus} GPU{'s are' if gpus > 1 else ' is'} "
            f"visible; --num_devices {gpus}, or --device cpu, works"
        )
    return [torch.device(kind, index) for index in range(n)]


def _settle_strategy(args: Any) -> None:
    """The options of one strategy. Raises UserError for one of another, or a cut that fails."""
    staged = ("pipeline", "model")
    for name, default, users in (
        ("schedule", "1f1b", ("pipeline",)), ("balance", "auto", staged), ("zero", 3, ("fsdp",)),
    ):  # fmt: skip
        given = getattr(args, name)
        if given is not None and args.strategy not in users:
            raise UserError(
                f"{args.strategy} --{name} {given}: it is an option of {' and '.join(users)}"
            )
        setattr(args, name, given or default)
    if args.strategy == "model" and (args.num_microbatches or 1) > 1:
        raise UserError(
            f"model --num_microbatches {args.num_microbatches}: with more than one it is pipeline"
        )
    if args.strategy not in staged:
        return
    n, vgg = args.world_size, args.model == VGG
    blocks = 0 if vgg else number_of_blocks(args)
    layers = 16 if vgg else 2 * blocks + 2
    if n > layers:
        raise UserError(
            f"{args.strategy} --world_size {n}: {args.model} has {layers} layers and every rank "
            f"needs one; --world_size {layers} or less works"
        )
    try:
        if vgg and args.balance != "auto":
            split_by(args.balance, layers, n, "layers")
        elif not vgg:
            sizes_of_blocks(args.balance, blocks, n)
    except ValueError as error:
        raise UserError(f"--world_size {n} --{error}") from None


def _check_uses(args: Any) -> None:
    """Raises UserError for an option that the model or the optimizer ignores."""
    defaults = TrainOptions()
    if args.model == VGG:
        users = f"models of sentences, as {next(iter(PRESETS))}"
        unused = [(name, "model", users) for name in SENTENCES_ONLY]
    else:
        unused = [("vgg_width", "model", f"--model {VGG}")]
    if args.optimizer != "sgd":
        unused.append(("momentum", "optimizer", "--optimizer sgd"))
    for name, chosen, users in unused:
        given = getattr(args, name)
        if given != getattr(defaults, name):
            what = f"--{name} {'all' if given is None else given}"
            raise UserError(f"{what} --{chosen} {getattr(args, chosen)}: it is only for {users}")


def number_of_blocks(args: Any) -> int:
    """The blocks of the model that the options name, which `check_model` found to be good."""
    if args.model in PRESETS:
        return args.n_layer or PRESETS[args.model]["n_layer"]
    from transformers import AutoConfig  # here: it takes seconds to import

    return AutoConfig.from_pretrained(args.model).n_layer

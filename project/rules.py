"""What must hold of the options of a run before anything starts.

Each rule raises UserError with the values, the rule, and a setting that works.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from pipeline.partition import parse_balance
from training.ending import ranks_here
from training.launch import (
    UserError,
    choose_backend,
    choose_device,
    core_slice,
    torchrun_world_size,
)
from training.model import PRESETS, gpt2_size
from training.pretrained import check_pretrained


def check_batch(args: argparse.Namespace) -> None:
    """Raises UserError where the global batch or the data has no example for each rank. The ranks
    need not divide the batch: their parts then differ by one example."""
    for option in ("batch_size", "n_train"):
        have = getattr(args, option)
        if have is not None and have < args.world_size:
            raise UserError(
                f"--world_size {args.world_size} --{option} {have}: each rank needs an example; "
                f"--world_size {have} or less works"
            )


def check_parts(args: argparse.Namespace, option: str, ranks: str | None = None) -> None:
    """Raises UserError where a rank's share of the global batch has fewer examples than it is to be
    cut into micro-batches. (The last batch of an epoch may: then there are fewer of them.)

    Args:
        option: the name of the option that says how many.
        ranks: that of the number of ranks among which a batch is dealt; None: there is one share.
    """
    parts, among = getattr(args, option), getattr(args, ranks) if ranks else 1
    share = -(-args.batch_size // among)
    if parts is not None and parts > share:
        given = f"--{option} {parts} --batch_size {args.batch_size}"
        given += f" --{ranks} {among}" if ranks else ""
        raise UserError(
            f"{given}: a micro-batch needs an example; --{option} {share} or less works"
        )


def check_alone(program: str, instead: str = "") -> None:
    """Raises UserError where torchrun started several processes of a program that is one."""
    started = torchrun_world_size() or 1
    if started > 1:
        raise UserError(
            f"torchrun started {started} ranks: {program} is one process; start it without "
            f"torchrun{instead}"
        )


def check_ranks(args: argparse.Namespace, ranks: str, cores_each: str) -> None:
    """Raises UserError where the ranks cannot be started as the options say; `ranks` and
    `cores_each` name those for their number and for the cores of each."""
    started, given = torchrun_world_size(), getattr(args, ranks)
    if started is not None and started != given:
        raise UserError(f"--{ranks} {given}: torchrun started {started} ranks; leave it out")
    if started is not None and args.master_port is not None:
        raise UserError(
            f"--master_port {args.master_port}: torchrun decides where its ranks meet; leave it "
            f"out, or start torchrun with --master-port {args.master_port}"
        )
    there, wanted = len(core_slice(0, 1)), getattr(args, cores_each)
    if there and (wanted or 0) > there:
        raise UserError(
            f"--{cores_each} {wanted}: {there} cores may be used here; "
            f"--{cores_each} {there} or less works"
        )


def check_gpus(args: argparse.Namespace) -> None:
    """Raises UserError where workers that hand each other tensors would share a GPU. NCCL wants one
    for each rank, and gloo can sum what is on a GPU, but neither send nor gather it."""
    here = ranks_here(args.num_workers)
    device = choose_device(args.device, 0, here)
    if device.type != "cuda" or choose_backend(args.device, here) == "nccl":
        return
    gpus = torch.cuda.device_count()
    fewer = f"--num_workers {gpus}" if here == args.num_workers else f"--nproc-per-node {gpus}"
    raise UserError(
        f"{args.strategy} --num_workers {args.num_workers} --device {args.device}: "
        f"{gpus} GPU{'s are' if gpus > 1 else ' is'} visible, and every worker needs one; "
        f"{fewer}, or --device cpu, works"
    )


def check_warmup(args: argparse.Namespace, num_examples: int) -> None:
    """Raises UserError where the warm-up does not end before the run does."""
    steps = args.n_epochs * -(-num_examples // args.batch_size)
    if args.warmup_steps and args.warmup_steps >= steps:
        raise UserError(
            f"--warmup_steps {args.warmup_steps}: the run has {steps} steps, and the warm-up must "
            f"end before the last; --warmup_steps {steps // 10} works"
        )


def model_name(args: argparse.Namespace, device: torch.device) -> str:
    """The model that --model means here."""
    if args.model != "auto":
        return args.model
    return "gpt2" if device.type == "cuda" else "gpt2-mini"


def check_model(args: argparse.Namespace) -> None:
    """Raises UserError for model options that cannot work, before any process starts."""
    least = 256 + 3
    if args.vocab_size is not None and args.vocab_size < least:
        raise UserError(
            f"--vocab_size {args.vocab_size}: a byte-level vocabulary has at least {least} tokens; "
            "--vocab_size 2048 works"
        )
    if args.model in PRESETS or args.model == "auto":
        name = model_name(args, choose_device(args.device, 0, args.world_size))
        gpt2_size(name, args.n_layer, args.n_embd, args.n_head)
        return
    given = [n for n in ("n_layer", "n_embd", "n_head", "vocab_size") if getattr(args, n)]
    if given:
        raise UserError(
            f"--{given[0]} with --model {args.model}: weights come with their sizes; only the "
            f"presets can be changed ({', '.join(PRESETS)})"
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


def settle_stages(args: argparse.Namespace) -> None:
    """Gives the options of run_pipeline.py's stages their values. Raises UserError for one that was
    given and that mode or form decides otherwise."""
    mode, blocks = args.model_parallel_mode, args.pipeline == "blocks"
    flowing, where = mode == "pipeline_parallel", f"--model_parallel_mode {mode}"
    flow, whole = "--model_parallel_mode pipeline_parallel", "--pipeline whole"
    decided: dict[str, tuple[Any, str, str]] = {}  # option: its value, why, and how to choose it
    if mode == "none":
        decided["num_devices"] = 1, f"{where}: there is one device", flow
        decided["balance"] = "uniform", f"{where}: nothing is cut", flow
    if not flowing:
        both = f"{flow} {whole}" if blocks else flow
        decided["schedule"] = "sequential", f"{where}: one device computes at a time", both
    elif blocks:
        decided["schedule"] = "gpipe", "--pipeline blocks: its order is GPipe's", whole
    if blocks and not flowing:
        decided["n_chunk"] = 1, f"{where} --pipeline blocks: the batch is not cut", whole
    defaults = {"num_devices": None, "balance": "auto", "schedule": "1f1b", "n_chunk": 4}
    for name, default in defaults.items():
        given = getattr(args, name)
        value, why, instead = decided.get(name, (given or default, "", ""))
        if given not in (None, value):
            raise UserError(f"--{name} {given} {why}; leave it out, or take {instead}")
        setattr(args, name, value)
    if args.num_devices is None:
        on_gpu = choose_device(args.device, 0, 1).type == "cuda"
        args.num_devices = torch.cuda.device_count() if on_gpu else 2


def check_stages(args: argparse.Namespace) -> None:
    """Raises UserError for pipeline options that cannot work."""
    check_parts(args, "n_chunk")
    blocks = number_of_blocks(args)
    cuts, what = blocks, f"{blocks} blocks"
    if args.pipeline == "whole" and args.balance == "auto":
        cuts, what = 2 * blocks + 2, f"{2 * blocks + 2} layers (embedding, halves of blocks, head)"
    if args.num_devices > cuts:
        raise UserError(
            f"--num_devices {args.num_devices} --balance {args.balance}: the model has {what} and "
            f"every stage needs one; --num_devices {cuts} or less works, or a larger --n_layer"
        )
    try:
        parse_balance(args.balance, blocks, args.num_devices, lambda: [1.0] * cuts)
    except ValueError as error:
        raise UserError(f"--num_devices {args.num_devices} --{error}") from None


def number_of_blocks(args: argparse.Namespace) -> int:
    """The blocks of the model that the options name, which `check_model` found to be good."""
    if args.model not in (*PRESETS, "auto"):
        from transformers import AutoConfig  # here: it takes seconds to import

        return AutoConfig.from_pretrained(args.model).n_layer
    kind = choose_device(args.device, 0, 1)
    return args.n_layer or PRESETS[model_name(args, kind)]["n_layer"]

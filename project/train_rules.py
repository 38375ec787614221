"""The rules of train.py alone; those of all programs are in project/rules.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from runtime.axes import FACTORS
from tensor_parallel.gpt2 import degrees
from training.launch.errors import UserError, counted, first_sentence, torchrun, works
from training.launch.world import choose_device
from training.options import VGG, Options
from training.results import check_trackers
from training.tasks.gpt2 import PRESETS
from training.tasks.pretrained import check_pretrained

from . import rules, stage_rules
from .command_line import is_it
from .rules import Rule
from .strategies import STRATEGIES

VGG_LAYERS = 16


def option_of(args: Options, axis: str) -> str:
    """The option that sets the length of an axis on which there are several ranks."""
    return "world_size" if STRATEGIES[args.strategy].axis else axis


def of_strategy(args: Options) -> Iterator[Rule]:
    """The rules between a strategy and its options, and those of the parts that it uses."""
    strategy, row, vgg = args.strategy, STRATEGIES[args.strategy], args.model == VGG
    ranks = math.prod(getattr(args, axis) for axis in FACTORS)
    started = "--world_size" if torchrun("RANK", None) is None else "torchrun --nproc-per-node"
    of_text = args.tp * args.cp > 1 or Path(args.dataset).suffix.lower() == ".txt"
    drawn = args.precision == "bf16" or choose_device(args.device).type != "cpu"
    yield from [
        ("strategy world_size", args.world_size == ranks,
         f"{' x '.join(FACTORS)} is {ranks}", f"start {ranks} ranks: {started} {ranks} works"),
        ("strategy world_size", args.world_size == 1 or row.usual.get("world_size") != 1,
         f"{strategy} is one process", "ddp takes several"),
        ("strategy num_microbatches", strategy != "model" or args.num_microbatches in (None, 1),
         "strategy pipeline takes several", rules.LEAVE),
        ("strategy model dataset", not (vgg and of_text),
         "only GPT-2 learns text, and only its matrices and positions are cut",
         "--model gpt2-mini works"),
        ("strategy zero pp", args.pp == 1 or args.zero in (None, 1),
         "stages keep their parameters and gradients", "--zero 1, or --pp 1, works"),
        ("shards", args.shards is None or bool(args.zero),
         "without --zero every rank has a whole copy", "--zero 1 works"),
        (f"shards {option_of(args, 'dp')}", not args.dp % (args.shards or 1),
         f"it must divide the {counted(args.dp, 'data-parallel rank')}",
         f"--shards {' or '.join(str(n) for n in range(1, args.dp + 1) if not args.dp % n)} works"),
        ("shards ep", not (args.shards or args.ep) % args.ep,
         "ranks that share experts must share a copy", f"--shards {args.ep} works"),
        ("dropout", not (args.dropout and (args.check_weights or args.check_output) and drawn),
         "on a GPU, and in bf16, the plain run of a check drops different activations",
         "--dropout 0, or --device cpu and --precision fp32, works"),
    ]  # fmt: skip
    check_trackers(args)
    yield from rules.rules(args)
    if not vgg:
        yield from of_gpt2(args)
    blocks = None if vgg else size_of_model(args, "n_layer")
    yield from stage_rules.of_stages(args, option_of(args, "pp"), args.pp, blocks, VGG_LAYERS)
    if args.tp * args.cp > 1:
        yield from of_cuts(args)
    yield from of_experts(args)
    if not row.whole or args.ep > 1:
        yield of_gpus(args)


def of_gpt2(args: Options) -> Iterator[Rule]:
    """A GPT-2 from scratch, or pretrained. Raises UserError if its weights cannot be read."""
    if args.model in PRESETS:
        yield from rules.of_model(args)
        return
    yield from rules.without_effect(
        args, "tokenizer", "pretrained weights come with their own tokenizer", rules.LEAVE
    )
    presets = ", ".join(PRESETS)
    yield from rules.without_effect(
        args, "n_layer n_embd n_head vocab_size", "pretrained weights have a fixed size",
        f"only the presets can be changed ({presets})",
    )  # fmt: skip
    near = is_it(args.model, [*PRESETS, VGG])
    elsewhere = "/" in args.model or Path(args.model).is_dir()  # else the hub is not asked
    yield "model", elsewhere or not near, "there is no such model", near.removeprefix("; ")
    try:
        positions = check_pretrained(args.model)
    except Exception as error:  # its readers raise many kinds
        raise UserError(
            f"--model {args.model}: neither a preset ({presets}), nor a folder or a name on the "
            f"hub with a GPT-2 and its tokenizer ({first_sentence(error)})"
        ) from error
    yield (
        "model_max_length model", args.model_max_length <= positions,
        f"the model has {positions} positions", f"--model_max_length {positions} works",
    )  # fmt: skip


def of_cuts(args: Options) -> Iterator[Rule]:
    """GPT-2's matrices are cut evenly. Ranks that exchange positions for heads must share those of
    a part evenly, too."""
    tp, cp, heads = option_of(args, "tp"), option_of(args, "cp"), size_of_model(args, "n_head")
    fit = degrees(heads, args.vocab_size or 256)
    yield (
        f"{tp} model", args.tp in fit, f"it must divide the model's {heads} heads",
        f"--{tp} {' or '.join(map(str, fit[1:])) or '1'} works",
    )  # fmt: skip
    yield (
        f"attention {cp} model", args.attention == "ring" or heads // args.tp % args.cp == 0,
        f"the {args.cp} ranks must share {counted(heads // args.tp, 'head')} evenly",
        "--attention ring works",
    )  # fmt: skip


def of_experts(args: Options) -> Iterator[Rule]:
    """Experts replace the MLPs of a GPT-2 from scratch, and are dealt out evenly."""
    experts = args.experts or 1
    fits = [ep for ep in range(1, experts + 1) if not experts % ep and not args.dp % ep]
    yield (
        f"ep experts {option_of(args, 'dp')}", args.ep in fits,
        "ep must divide the number of experts and that of data-parallel ranks",
        f"--ep {' or '.join(map(str, fits))} works",
    )  # fmt: skip
    other = "balance_coefficient" if args.balance_by == "bias" else "balance_rate"
    rule = f"experts are kept busy by a {args.balance_by}"
    yield from rules.without_effect(args, other, rule, rules.LEAVE)
    yield ("optimizer balance_by", args.balance_by == "loss" or args.optimizer != "sgd",
           "only AdamW moves biases by steps of one size", "--optimizer adamw works")  # fmt: skip
    if args.experts is None:
        names = "top_k shared_experts balance_by balance_coefficient balance_rate router_z"
        yield from rules.without_effect(args, names, "there are no experts", "--experts 4 works")
    else:
        yield from [
            ("model experts", args.model in PRESETS,
             f"experts are made for a GPT-2 from scratch ({', '.join(PRESETS)})",
             "--model gpt2-mini works"),
            ("top_k experts", args.top_k <= args.experts,
             "it cannot exceed the number of experts", works("--top_k", args.experts)),
            ("strategy tp experts", args.tp == 1,
             "tensor parallelism cannot cut experts", "--ep, with --tp 1, works"),
            ("compile experts", not args.compile,
             "an expert's number of rows differs in every step, and each number is compiled anew",
             rules.LEAVE),
        ]  # fmt: skip


def of_gpus(args: Options) -> Rule:
    """Ranks that send each other tensors need a GPU each: NCCL needs it; gloo can sum tensors on a
    GPU, but neither send nor gather them."""
    ranks, gpus = torchrun("LOCAL_WORLD_SIZE", args.world_size), torch.cuda.device_count()
    on_gpu = choose_device(args.device).type == "cuda"
    rule = f"{counted(gpus, 'GPU')} for {ranks} ranks of this machine, and each needs one"
    instead = f"{gpus} ranks on a machine, or --device cpu, work"
    return "strategy world_size device", not on_gpu or ranks <= gpus, rule, instead


def size_of_model(args: Options, name: str) -> int:
    """n_layer or n_head of the GPT-2 that the options name, which fulfils `of_gpt2`."""
    if args.model in PRESETS:
        return getattr(args, name) or PRESETS[args.model][name]
    from transformers import AutoConfig  # here: it takes seconds to import

    return getattr(AutoConfig.from_pretrained(args.model), name)

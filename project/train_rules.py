"""The rules of train.py alone; those of all programs are in project/rules.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from runtime.axes import FACTORS
from tensor_parallel.gpt2 import degrees
from training.launch.errors import UserError, counted, torchrun, torchrun_world_size, works
from training.launch.world import choose_device
from training.options import VGG, Options
from training.results import check_trackers
from training.tasks.gpt2 import PRESETS
from training.tasks.pretrained import check_pretrained, first_sentence

from . import rules, stage_rules
from .command_line import is_it
from .rules import Rule
from .strategies import STRATEGIES

VGG_LAYERS = 16


def option_of(args: Options, axis: str) -> str:
    """The option that sets the length of an axis on which there are several ranks."""
    return "world_size" if STRATEGIES[args.strategy].axis else axis


def of_strategy(args: Options) -> Iterator[Rule]:
    """What a strategy and its options ask of each other, and the rules of its parts."""
    strategy, row, vgg = args.strategy, STRATEGIES[args.strategy], args.model == VGG
    ranks = math.prod(getattr(args, axis) for axis in FACTORS)
    zero = args.zero if strategy == "3d" else None
    elastic = torchrun_world_size() is not None  # another host may join later
    checked = args.check_weights or args.check_output
    drawn = args.precision == "bf16" or choose_device(args.device).type != "cpu"
    mesh = "strategy zero dp cp pp" if args.cp > 1 else "strategy zero dp pp"
    yield from [
        ("strategy world_size", args.world_size == ranks,
         f"{' x '.join(FACTORS)} is {ranks}", f"start {ranks} ranks: --world_size {ranks} works"),
        ("strategy world_size", args.world_size == 1 or row.usual.get("world_size") != 1,
         f"{strategy} is one process", "ddp takes several"),
        ("strategy num_microbatches", strategy != "model" or args.num_microbatches in (None, 1),
         "with more than one it is pipeline", "leave it out"),
        ("dataset model", not vgg or Path(args.dataset).suffix.lower() != ".txt",
         f"this is text, and {VGG} learns pictures", "--model gpt2-mini works"),
        ("strategy model", not vgg or args.tp == 1,
         "only GPT-2's matrices are cut", "--model gpt2-mini works"),
        ("strategy model", not vgg or args.cp == 1,
         "pictures have no positions to cut", "--model gpt2-mini works"),
        (mesh, zero != 2,
         "3d has no stage 2", "--zero 1 --dp 2 or, without stages, --zero 3 --dp 2 works"),
        (mesh, zero != 3 or args.pp == 1,
         "stages keep their parameters", "--zero 1, or --pp 1, works"),
        (mesh, zero is None or args.dp * args.cp > 1 or elastic,
         "it shards over replicas", "--dp 2 works"),
        ("keep check_weights", args.keep > 0 or not args.check_weights,
         "it compares the weights that are saved", "--keep 1 works"),
        ("dropout check_weights", not (args.dropout and checked and drawn),
         "on a GPU, and in bf16, the plain run drops other activations",
         "--dropout 0, or --device cpu and --precision fp32, works"),
    ]  # fmt: skip
    yield from rules.typed(args, [
        ("attention", args.cp > 1,
         "only a run whose sequences are cut has it", f"--{option_of(args, 'cp')} 2 works"),
    ])  # fmt: skip
    check_trackers(args)
    one_at_a_time = args.pp == 1 or strategy == "model"
    yield from rules.rules(args, args.dp, option_of(args, "dp"), one_at_a_time)
    sharded = args.strategy == "fsdp" or args.zero == 3
    yield (
        "recompute", args.recompute != "sqrt" or not sharded,
        "shards of segments of several layers would be gathered once more",
        "--recompute always works",
    )  # fmt: skip
    if not vgg:
        yield from of_gpt2(args)
    if args.pp > 1 or row.axis == "pp":
        blocks = None if vgg else size_of_model(args, "n_layer")
        yield from stage_rules.of_stages(args, option_of(args, "pp"), args.pp, blocks, VGG_LAYERS)
    if args.tp > 1:
        yield from of_tensor(args)
    if args.cp > 1 and args.attention == "heads":
        yield of_heads(args)
    yield from of_experts(args)
    if not row.whole or args.ep > 1:
        yield from of_gpus(args)


def of_tensor(args: Options) -> Iterator[Rule]:
    """GPT-2's matrices are cut evenly."""
    option, heads = option_of(args, "tp"), size_of_model(args, "n_head")
    divisors = degrees(heads, args.vocab_size or 256)
    numbers = " or ".join(map(str, divisors[1:])) or "1"
    # more: the positions that a full sequence lacks for equal parts.
    length, more = args.model_max_length, -args.model_max_length % args.tp
    yield from [
        (f"{option} model", args.tp in divisors,
         f"its {heads} heads are dealt out evenly", f"--{option} {numbers} works"),
        ("sequence_parallel model_max_length", not (args.sequence_parallel and more),
         f"{args.tp} ranks cannot have equal parts", f"--model_max_length {length + more} works"),
    ]  # fmt: skip


def of_experts(args: Options) -> Iterator[Rule]:
    """Experts in the place of the MLPs of a GPT-2 from scratch, dealt out evenly."""
    if args.experts is None:
        yield from rules.typed(args, [
            ("top_k ep balance_coefficient", False,
             "only a model with experts has it", "--experts 8 works"),
        ])  # fmt: skip
        return
    fits = [ep for ep in range(1, args.experts + 1) if not args.experts % ep and not args.dp % ep]
    works_for_ep = f"--ep {' or '.join(map(str, fits))} works"
    yield from [
        ("model experts", args.model in PRESETS,
         f"experts are made for a GPT-2 from scratch ({', '.join(PRESETS)})",
         "--model gpt2-mini works"),
        ("top_k experts", args.top_k <= args.experts,
         "each position is seen by so many different ones", works("--top_k", args.experts)),
        (f"ep {option_of(args, 'dp')}", args.dp % args.ep == 0,
         "the ranks that share experts are a part of the data-parallel ones", works_for_ep),
        ("ep experts", args.experts % args.ep == 0,
         "each rank has as many experts as another", works_for_ep),
        ("tp experts", args.tp == 1,
         "the matrices of experts are not cut, but dealt out whole", "--ep, with --tp 1, works"),
        ("compile experts", not args.compile,
         "an expert gets another number of rows in each step, and would be compiled again",
         "leave --compile out"),
    ]  # fmt: skip


def of_heads(args: Options) -> Rule:
    """Heads that are exchanged for positions are dealt out evenly, too."""
    option, heads = option_of(args, "cp"), size_of_model(args, "n_head") // args.tp
    divisors = [n for n in range(2, heads + 1) if heads % n == 0]
    numbers = f"--{option} {' or '.join(map(str, divisors))}, or " if divisors else ""
    on_each = " on each rank" if args.tp > 1 else ""
    rule = f"{counted(heads, 'head')}{on_each} must be dealt out evenly"
    works_too = f"{numbers}--attention ring works"
    return f"attention {option} model", heads % args.cp == 0, rule, works_too


def of_pictures(args: Options, number: int) -> Rule:
    """`number`: of the pictures of the smaller split."""
    option = option_of(args, "dp")
    rule = f"it has {counted(number, 'picture')}, and each rank needs one"
    return f"{option} dataset", number >= args.dp, rule, works(f"--{option}", number)


def of_plain_text(args: Options) -> Iterator[Rule]:
    """Plain text has no pairs, and needs a length that leaves a task."""
    yield (
        "model_max_length", args.model_max_length >= 2,
        "it needs a token of context and one to predict", "2 or more works",
    )  # fmt: skip
    pairs = f"it is for pairs of sentences, and --dataset {args.dataset} is plain text"
    yield from rules.typed(args, [("src tgt n_test", False, pairs, rules.LEAVE)])


def of_gpt2(args: Options) -> Iterator[Rule]:
    """A GPT-2 from scratch, or pretrained. Also raises what its weights say."""
    if args.model in PRESETS:
        yield from rules.of_model(args)
        return
    near = is_it(args.model, [*PRESETS, VGG])
    elsewhere = "/" in args.model or Path(args.model).is_dir()
    yield "model", elsewhere or not near, "there is no such model", near.removeprefix("; ")
    yield from rules.typed(args, [
        ("n_layer n_embd n_head vocab_size", False, "pretrained weights have a fixed size",
         f"only the presets can be changed ({', '.join(PRESETS)})"),
    ])  # fmt: skip
    try:
        positions = check_pretrained(args.model)
    except Exception as error:  # its readers raise many kinds
        raise UserError(
            f"--model {args.model}: neither a preset ({', '.join(PRESETS)}), nor a folder or a "
            f"name on the hub with a GPT-2 and its tokenizer ({first_sentence(error)})"
        ) from error
    yield (
        "model_max_length model", args.model_max_length <= positions,
        f"the model has {positions} positions", f"--model_max_length {positions} works",
    )  # fmt: skip


def of_gpus(args: Options) -> list[Rule]:
    """Ranks that send each other tensors need a GPU each: NCCL needs it; gloo can sum tensors on a
    GPU, but neither send nor gather them."""
    here = torchrun("LOCAL_WORLD_SIZE", args.world_size)  # ranks of this machine
    on_gpu = choose_device(args.device).type == "cuda"
    gpus = torch.cuda.device_count()
    fewer = f"--world_size {gpus}" if here == args.world_size else f"--nproc-per-node {gpus}"
    return [
        ("strategy world_size device", not on_gpu or here <= gpus,
         f"{stage_rules.visible(gpus)}, and every rank needs one",
         f"{fewer}, or --device cpu, works"),
    ]  # fmt: skip


def size_of_model(args: Options, name: str) -> int:
    """n_layer or n_head of the GPT-2 that the options name, which fulfils `of_gpt2`."""
    if args.model in PRESETS:
        return getattr(args, name) or PRESETS[args.model][name]
    from transformers import AutoConfig  # here: it takes seconds to import

    return getattr(AutoConfig.from_pretrained(args.model), name)

"""The options of a run: name, type, default and help, each once.

An option that is UNSET gets its value before anything starts (project/rules.py). A program has some
of the groups of options below, and may give an option a different default; an option that it lacks
keeps the default that is here.

This module does not import torch, so --help and a mistyped option are answered at once.
"""

from __future__ import annotations

import math
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

UNSET: Any = None
VGG = "vgg16"  # the --model that learns pictures
PIPELINE_MICROBATCHES = 4  # per step of a pipeline, by default


def number_type(
    read: Callable[[str], Any], fits: Callable[[Any], bool], rule: str
) -> Callable[[str], Any]:
    """Returns a function that turns a word into a value that fits; argparse reports its error."""

    def checked(word: str) -> Any:
        with suppress(ValueError):
            if fits(value := read(word)):
                return value
        raise ArgumentTypeError(f"{word}: it must be {rule}")

    return checked


def flag(word: str) -> bool:
    """True or false."""
    if word.lower() not in ("true", "false"):
        raise ArgumentTypeError(f"{word}: it must be true or false")
    return word.lower() == "true"


def spelt(name: str, value: Any) -> str:
    """An option as it is typed. The strategy of train.py has no dashes."""
    if value is None and name not in ("n_train", "n_validation", "n_test"):
        return f"no --{name}"
    if isinstance(value, float):
        value = f"{value:.15g}"  # 8, and not 8.0
    if name == "schedule":  # a schedule given as text is called by its first line
        value = str(value).partition("\n")[0].removeprefix("# ")
    text = "all" if value is None else shlex.quote(str(value))
    return text if name == "strategy" else f"--{name}" + f" {text}" * (value is not True)


MAX_COUNT = 2**32 - 1
WEEKS = 3 * 7 * 24 * 3600  # seconds; the system counts milliseconds in 31 bits
count = number_type(int, lambda n: 1 <= n <= MAX_COUNT, f"a whole number from 1 to {MAX_COUNT}")
whole = number_type(int, lambda n: 0 <= n <= MAX_COUNT, f"a whole number from 0 to {MAX_COUNT}")

size = number_type(
    lambda word: word if word == "all" else int(word),
    lambda n: n == "all" or 1 <= n <= MAX_COUNT, f"a whole number from 1 to {MAX_COUNT}, or all",
)  # fmt: skip

Count = Annotated[int, count]
Size = Annotated[int | None, size]  # None: all
Whole = Annotated[int, whole]
Positive = Annotated[float, number_type(float, lambda x: 0 < x < math.inf, "positive and finite")]
Coefficient = Annotated[float, number_type(float, lambda x: 0 <= x < math.inf, "0 or positive")]
Fraction = Annotated[float, number_type(float, lambda x: 0 <= x < 1, "from 0 to below 1, e.g. 0.1")]
Seconds = Annotated[  # in less than one the store in which ranks meet may not even open
    float, number_type(float, lambda x: 1 <= x <= WEEKS, f"from 1 to {WEEKS} seconds, e.g. 300")
]
# run_pipeline.py has one more, sequential: one device at a time.
SCHEDULE_NAMES = ("gpipe", "1f1b", "zb", "interleaved", "zbv", "vhalf", "vmin", "dualpipev")
ScheduleName = Annotated[  # a file, or a function in it, is read when the ranks are known
    str, number_type(str, lambda word: word in SCHEDULE_NAMES or "." in word,
                    f"one of {', '.join(SCHEDULE_NAMES)}, or a file, e.g. my_schedule.txt"),
]  # fmt: skip


def betas(word: str) -> str:
    """Two fractions."""
    parts = word.split(",")
    with suppress(ValueError):
        if len(parts) == 2 and all(0 <= float(part) < 1 for part in parts):
            return word
    raise ArgumentTypeError(f"{word}: it must be two numbers, at least 0, below 1, e.g. 0.9,0.95")


@dataclass
class Training:
    """training"""

    n_epochs: Count = 8
    """passes over the training data"""
    batch_size: Count = 64
    """examples per step: the global batch"""
    learning_rate: Positive = UNSET
    """peak rate; default: 1e-3 for gpt2-mini, else 1e-4"""
    lr_scheduler: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """after warm-up: constant; linear or cosine decay to --min_lr; or wsd (warm-up, stable, decay):
    constant, then a decay by a square root in the last --decay_steps. Before the decay, a run can
    be resumed with more epochs: its length need not be known at the start"""
    decay_steps: Count | None = None
    """the last steps of wsd, in which the rate falls; default: a fifth of the run"""
    min_lr: Coefficient = 0.0
    """the lowest rate of a decay; often a tenth of --learning_rate"""
    warmup_steps: Whole = UNSET
    """steps of linear warm-up, which allow a higher learning rate; default: 20, or half of a
    shorter run"""
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    """muon (GPT-2): moves each matrix of a block by the orthogonal matrix nearest to its momentum,
    so all its directions move equally; AdamW updates the rest. With --check_weights prefer sgd:
    AdamW hides gradients that are scaled by a constant"""
    momentum: Fraction = UNSET
    """the part of the sum (sgd) or mean (muon) of gradients that each step keeps; default: 0.9
    for sgd, 0.95 for muon"""
    adamw_lr: Positive | None = None
    """under muon, the peak rate of what AdamW updates: embedding, head, router, biases, norms;
    default: --learning_rate"""
    weight_decay: Coefficient = 0.01
    """each step shrinks every matrix by this times the learning rate; biases and norms never
    shrink. GPT-2's recipes have 0.1"""
    betas: Annotated[str, betas] = "0.9,0.999"
    """the parts that each step keeps of AdamW's two means, that of gradients and that of their
    squares; GPT-2's recipes have 0.9,0.95, which forgets large gradients sooner"""
    eps: Positive = 1e-8
    """AdamW divides by the root of the mean square, plus this"""
    max_grad_norm: Positive | None = None
    """clip the global gradient norm to this, e.g. 1.0; default: off"""
    on_nan: Literal["stop", "skip"] = "stop"
    """if a loss or gradient is not finite: stop the run, or skip the step"""
    precision: Literal["fp32", "tf32", "bf16", "fp64"] = "fp32"
    """bf16: matrix products in bfloat16, weights and optimizer in fp32; tf32: CUDA multiplies with
    10-bit mantissas"""
    seed: Whole = 0
    """seed of the weights, the data order and dropout"""
    num_batches: Count | None = None
    """stop after this many steps, instead of --n_epochs"""
    max_batches: Whole = 0
    """at most this many steps per epoch; 0: no limit"""
    eval_every: Count | None = None
    """measure the validation loss every N steps, not only after each epoch"""
    benchmark_only: bool = False
    """train and measure only: no validation, no generation"""
    num_microbatches: Count | None = None
    """micro-batches per step; default: 4 in a pipeline; otherwise 1 on a GPU, and on a CPU the
    number that needs the least padding"""
    recompute: Literal["never", "always", "except_last", "sqrt"] = "never"
    """which micro-batches compute their activations again in backward, to save memory;
    except_last: all but the last of a step (none if each ends before the next begins; under ZeRO
    all); sqrt: all, while about sqrt(L) of a stage's L layers keep their inputs (under ZeRO-3 all
    L)"""


@dataclass
class Data:
    """data"""

    dataset: str = "builtin"
    """builtin; a folder with train.de, train.en, ...; a JSONL, CSV, TSV or Parquet file, or a
    folder of them; or a dataset on the hub"""
    n_train: Size = None
    """use at most this many training examples, or all; default: 5000 of the built-in text, all of
    your own data"""
    n_validation: Size = None
    """the same for validation examples; default: 1000, or all of your own pictures"""
    n_test: Size = None
    """the same for test pairs; default: 100, or all of your own; plain text has no test split"""
    src: str = "de"
    """language to translate from"""
    tgt: str = "en"
    """language to translate to"""
    tokenizer: str | None = None
    """byte-level BPE: a folder (tokenizer.json, or vocab.json and merges.txt) or a name on the hub,
    e.g. gpt2; default: one is trained"""
    model_max_length: Count = 128
    """longest sequence, in tokens; longer pairs are cut"""
    documents: Literal["apart", "together"] = "apart"
    """documents of plain text that share a row: apart: none sees another; together: each sees those
    before it, as in GPT-2"""
    padding: Literal["longest", "max_length"] = "longest"
    """pad each micro-batch to its longest sentence, or every one to --model_max_length"""


@dataclass
class Architecture:
    """model"""

    model: str = "auto"
    """gpt2-mini, gpt2, gpt2-medium, gpt2-large or gpt2-xl, from scratch; auto: gpt2 on a GPU,
    gpt2-mini without"""
    n_layer: Count | None = None
    """number of blocks; default: the preset's"""
    n_embd: Count | None = None
    """width of the model; default: the preset's"""
    n_head: Count | None = None
    """attention heads; default: the preset's"""
    vocab_size: Count | None = None
    """rows of the embedding; default: what the tokenizer needs (trained: at most 4096), rounded
    up to a multiple of 64"""
    dropout: Fraction = 0.1
    """dropout probability"""


@dataclass
class Files:
    """files"""

    workdir: Path = Path("workdir")
    """folder for tokenizer, results, checkpoints and figures; results of an earlier run there are
    moved to its earlier_1, earlier_2, ..."""
    resume: bool = False
    """continue from the newest intact checkpoint in the workdir, if there is one; options that you
    do not type are those of the saved run"""
    save_every: Count | None = None
    """save a checkpoint every N steps, in addition to that at the end of each epoch and that on
    SIGTERM, SIGUSR1 or SIGUSR2, which end the run with status 75 (Ctrl-C saves nothing)"""
    keep: Whole = 2
    """how many of the newest checkpoints to keep (one more while training); 0: save none"""
    keep_best: bool = False
    """also keep the checkpoint with the lowest validation loss; set --save_every to the value
    of --eval_every"""
    async_save: bool = False
    """write checkpoints in the background while training goes on, from a copy in memory"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one"""
    timeline: Whole = UNSET
    """record the actions of N steps after the first, for plot.py timeline; default: 20 on a CPU; 0
    on a GPU, where recording synchronizes after every action"""


@dataclass
class Processes:
    """processes"""

    world_size: Count = UNSET
    """number of processes; default: 2, or as many as torchrun starts"""
    cores_per_rank: Count | None = None
    """CPU cores per process; default: all cores, evenly divided"""
    compile: bool = False
    """torch.compile each layer and the loss: faster on a GPU, once half a minute of compiling is
    over"""
    timeout: Seconds = 300.0
    """seconds after which a process that does not answer ends the run"""
    step_timeout: Seconds | None = None
    """the same within a step, except the first of an epoch; default: on a CPU 60, or ten times the
    previous step if that is longer; on a GPU, and with --compile, the value of --timeout"""


@dataclass
class Stages:
    """stages of a pipeline"""

    schedule: ScheduleName = "1f1b"
    """order of work: gpipe, 1f1b or zb; interleaved, zbv, vhalf, vmin and dualpipev have several
    stages per device; or a file of your own, or my_module.py:function (docs/schedules.md);
    default: 1f1b"""
    chunks: Count = UNSET
    """stages per device, for --schedule interleaved; default: 2"""
    balance: str = "auto"
    """how blocks are split into stages: auto balances measured time and may cut inside a block;
    uniform; or blocks per stage, e.g. 3,5"""


@dataclass
class Tools:
    """other tools"""

    print_steps: bool = False
    """print the loss and the seconds of every step"""
    profile: Whole = 0
    """profile every operator for N steps after the first, on each rank, for ui.perfetto.dev"""
    tensorboard: bool = False
    """write the numbers of metrics.jsonl for TensorBoard, too"""
    wandb: bool = False
    """send the numbers of metrics.jsonl to Weights & Biases, too"""


@dataclass
class Axes:
    """layout, optimizer, checks"""

    dp: Count = UNSET
    """data-parallel replicas, each with a part of the batch; default: as many as the ranks allow"""
    cp: Count = UNSET
    """parts that every sequence is cut into; default: 1"""
    pp: Count = UNSET
    """pipeline stages; default: 1"""
    tp: Count = UNSET
    """parts that every matrix is cut into; default: 1"""
    sequence_parallel: bool = False
    """between the matrices, each rank holds a part of the positions"""
    attention: Literal["ring", "heads"] = "ring"
    """ring: keys and values go from rank to rank; heads: positions are exchanged for heads"""
    experts: Count | None = None
    """number of experts that replace the MLP of each block (GPT-2); default: no experts, one MLP"""
    top_k: Count = 2
    """number of experts for each position: the most probable ones"""
    ep: Count = UNSET
    """data-parallel ranks that share the experts, each having a part; default: 1"""
    shared_experts: Whole = 0
    """number of experts that see every position, in addition to the chosen ones"""
    balance_by: Literal["loss", "bias"] = "loss"
    """what keeps experts equally busy: loss: an additional loss; bias: a bias of each expert, which
    counts only where experts are chosen, and moves after each step: down if the expert was chosen
    more often than the mean, else up"""
    balance_coefficient: Coefficient = 0.01
    """weight of the balance loss, which is smallest if all experts are used equally; 0: none"""
    balance_rate: Positive = 0.001
    """how far a bias moves in a step; it is added to a probability, so 1 is the whole range"""
    router_z: Coefficient = 0.0
    """weight of a loss that keeps the router's logits small, e.g. 0.001; 0: none"""
    zero: Literal[1, 2, 3] | None = None
    """ZeRO stage: 1 shards the optimizer state, 2 the gradients, too, 3 the parameters, too; 3d
    takes 1 or 3; default: 3 in fsdp, elsewhere none"""
    shards: Count | None = None
    """data-parallel ranks that share one copy under --zero; only gradients of shards travel between
    copies, so on hosts with a slow network take the number of ranks of a host; default: all"""
    vgg_width: Count = 64
    """channels of the first layers of vgg16; later layers have up to 8 times as many"""
    check_weights: bool = False
    """train again on one process and compare every weight of the last checkpoint by name; exit with
    status 1 if they differ"""
    check_output: bool = False
    """the same for the outputs on a batch of test data"""


@dataclass
class Threads:
    """devices"""

    model_parallel_mode: Literal["none", "model_parallel", "pipeline_parallel"] = "none"
    """none: one device; model_parallel: stages that compute one at a time, a micro-batch through
    all of them before the next (train.py model: the whole batch at once); pipeline_parallel: stages
    that compute at the same time, on different micro-batches"""
    num_devices: Count = UNSET
    """number of stages, on GPUs or on slices of the CPU cores; default: all GPUs, or 2 slices"""
    pipeline: Literal["whole", "blocks"] = "whole"
    """whole: embedding and head belong to the first and last stage; blocks: the course's form, with
    both on the first device"""


@dataclass
class DataParallel:
    """data parallelism"""

    gradient_sync: Literal["per_parameter", "flat", "overlap"] = "overlap"
    """how gradients are averaged: per_parameter: an all-reduce for each parameter, after backward;
    flat: one for all; overlap: one for each bucket, while backward runs (CPU ranks of one host read
    each other's buckets after it)"""
    bucket_mb: Positive | None = None
    """size of a bucket in MiB, for --gradient_sync overlap; default: 25 on a GPU, 4 on a CPU"""
    comm_dtype: Literal["fp32", "bf16"] = "fp32"
    """type in which buckets are sent"""
    pytest: Annotated[bool, flag] = False
    """train one epoch without evaluation; each rank writes tests/model{rank}_gradients.pth"""


@dataclass
class Options(
    Training, Data, Architecture, Files, Processes, Axes, Threads, Stages, DataParallel, Tools
):
    """All options. A program's own class has its groups of options, and its defaults."""

    GROUPS: ClassVar[tuple[type, ...]]
    strategy: str = "single"
    """how the model is laid out on the processes"""
    typed: Set[str] = frozenset()
    """the names of the options that a person has typed"""


def option_names(*groups: type) -> list[str]:
    """The names of the options of these groups."""
    return [field.name for group in groups for field in fields(group)]


O = TypeVar("O", bound=Options)  # noqa: E741

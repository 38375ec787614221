"""The options of a run: name, type, default and help, each once; and which runs have an option.

An option that is UNSET gets its value before anything starts (project/rules.py). A program shows
some of the groups of options below, and may give an option another default; what it does not show
keeps the default that is here.

This module does not import torch, so --help and a mistyped option are answered at once.
"""

from __future__ import annotations

import math
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from runtime.axes import AXES

UNSET: Any = None
VGG = "vgg16"  # of --model: the one that learns pictures


@dataclass(frozen=True)
class Number:
    """A kind of number. Called with a word, it returns the number; argparse reports the error."""

    kind: type[int] | type[float]
    fits: Callable[[Any], bool]
    rule: str

    def __call__(self, word: str) -> Any:
        try:
            fine = self.fits(self.kind(word))
        except ValueError:
            fine = False
        if not fine:
            raise ArgumentTypeError(f"{word}: it must be {self.rule}")
        return self.kind(word)


def size(word: str) -> int | str:
    """A count, or all."""
    return word if word == "all" else int(count(word))


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
    text = "all" if value is None else shlex.quote(str(value))
    return text if name == "strategy" else f"--{name}" + f" {text}" * (value is not True)


MAX_COUNT = 2**32 - 1
WEEKS = 3 * 7 * 24 * 3600  # seconds; the system counts milliseconds in 31 bits
count = Number(int, lambda n: 1 <= n <= MAX_COUNT, f"a whole number from 1 to {MAX_COUNT}")
whole = Number(int, lambda n: 0 <= n <= MAX_COUNT, f"a whole number from 0 to {MAX_COUNT}")

Count = Annotated[int, count]
Size = Annotated[int | None, size]  # None: all
Whole = Annotated[int, whole]
Positive = Annotated[float, Number(float, lambda x: 0 < x < math.inf, "positive and finite")]
Fraction = Annotated[float, Number(float, lambda x: 0 <= x < 1, "at least 0, below 1, as 0.1")]
Seconds = Annotated[float, Number(float, lambda x: 0 < x <= WEEKS, f"positive, at most {WEEKS}")]
ZeroStage = Annotated[int, Number(int, lambda n: 1 <= n <= 3, "1, 2 or 3")]
if TYPE_CHECKING:
    ScheduleName = str  # run_pipeline.py has one more, for a device at a time
else:
    ScheduleName = Literal["gpipe", "1f1b", "zb", "interleaved", "zbv", "vhalf", "vmin"]


@dataclass
class Training:
    """training"""

    n_epochs: Count = 8
    """passes over the training data"""
    batch_size: Count = 64
    """examples per step, before they are split into parts and micro-batches"""
    learning_rate: Positive = UNSET
    """peak rate; default: 1e-3 for gpt2-mini, else 1e-4"""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """after warm-up: constant, or linear or cosine decay to 0"""
    warmup_steps: Whole = 0
    """linear warm-up steps; they allow a higher learning rate"""
    max_grad_norm: Positive | None = None
    """clip the global gradient norm to this, e.g. 1.0; off by default"""
    on_nan: Literal["stop", "skip"] = "stop"
    """if a loss or gradient is not finite: stop the run, or skip the step"""
    precision: Literal["fp32", "tf32", "bf16", "fp64"] = "fp32"
    """bf16: matrix products in bfloat16, weights and optimizer in fp32; tf32: products of CUDA
    devices with 10 bits of their factors' fractions"""
    seed: Whole = 0
    """of weights, data order and dropout"""
    num_batches: Count | None = None
    """stop after so many steps, instead of n_epochs"""
    max_batches: Whole = 0
    """steps per epoch at most; 0: all"""
    benchmark_only: bool = False
    """train and measure: no validation, no generation"""
    num_microbatches: Count | None = None
    """micro-batches per step; default: 4 in a pipeline, else 1, and on a CPU what pads least"""
    recompute: Literal["never", "always", "except_last", "sqrt"] = "never"
    """compute activations again in backward; sqrt: keep about sqrt(L) inputs of L layers"""


@dataclass
class Data:
    """data"""

    dataset: str = "builtin"
    """builtin, a folder (train.de ...), a JSONL, CSV or Parquet file, a hub name"""
    n_train: Size = None
    """training examples at most, or all; default: 5000 of builtin, else all"""
    n_validation: Size = None
    """validation examples, likewise; default: 1000 of builtin, else all"""
    n_test: Size = None
    """test examples, likewise; default: 100 of builtin, else all; plain text has none"""
    src: str = "de"
    """language to translate from"""
    tgt: str = "en"
    """language to translate to"""
    model_max_length: Count = 128
    """longest sequence; longer pairs are cut"""
    padding: Literal["longest", "max_length"] = "longest"
    """pad each micro-batch to its longest sentence, or all to model_max_length"""


@dataclass
class Architecture:
    """model"""

    model: str = "auto"
    """gpt2-mini, gpt2, gpt2-medium, gpt2-large or gpt2-xl, from scratch; auto: gpt2 on a GPU,
    gpt2-mini without"""
    n_layer: Count | None = None
    """blocks, instead of the preset's"""
    n_embd: Count | None = None
    """width, instead of the preset's"""
    n_head: Count | None = None
    """attention heads, instead of the preset's"""
    vocab_size: Count | None = None
    """rows of the embedding; default: the trained tokenizer's, at most 4096, a multiple of 64"""
    dropout: Fraction = 0.1
    """dropout probability"""


@dataclass
class Files:
    """files"""

    workdir: Path = Path("workdir")
    """folder for tokenizer, results, checkpoints and figures; earlier results are set aside"""
    resume: bool = False
    """go on from the newest intact checkpoint in the workdir, if there is one; what you do not type
    is as it was"""
    save_every: Count | None = None
    """steps between checkpoints; there is always one at the end of an epoch"""
    keep: Whole = 2
    """checkpoints to keep, the newest, and one more while it trains; 0 saves none"""
    on_signal: Literal["save", "end"] = "save"
    """on SIGTERM or SIGUSR1: finish the step, save and end with status 75, or end at once; a second
    SIGTERM always ends at once"""
    async_save: bool = False
    """write checkpoints in the background while training goes on, from a copy in memory"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: a GPU if there is one"""
    timeline: Whole = UNSET
    """record N steps after the first, for plot.py timeline and ui.perfetto.dev; default: 20, and 0
    on a GPU, which would wait for every action"""


@dataclass
class Processes:
    """processes"""

    world_size: Count = UNSET
    """processes; default 2, or as many as torchrun starts"""
    cores_per_rank: Count | None = None
    """CPU cores per process; by default all cores are shared out"""
    master_port: Whole | None = None
    """port on 127.0.0.1 where the processes meet; default: a free one"""
    compile: bool = False
    """torch.compile each layer and the loss; faster on a GPU, after half a minute"""
    timeout: Seconds = 300.0
    """seconds after which a process that does not answer ends the run"""
    step_timeout: Seconds | None = None
    """the same within steps, after the first of an epoch; default: on a CPU 60, or ten times the
    step before if that is longer; on a GPU, and with --compile, --timeout"""


@dataclass
class Stages:
    """stages of a pipeline"""

    schedule: ScheduleName = UNSET
    """gpipe, 1f1b (default), zb; several stages per device: interleaved, zbv, vhalf, vmin"""
    chunks: Count = UNSET
    """stages per device, of interleaved; default: 2"""
    balance: str = UNSET
    """auto (default): by measured time, halves of blocks too; uniform; or 3,5: blocks of each"""


@dataclass
class Tools:
    """other tools"""

    profile: Whole = 0
    """profile every operator for N steps, skipping the first; per rank, for ui.perfetto.dev"""
    tensorboard: bool = False
    """write metrics.jsonl for TensorBoard, too"""
    wandb: bool = False
    """write metrics.jsonl for Weights & Biases, too"""


@dataclass
class Axes:
    """layout, optimizer, checks"""

    dp: Count = UNSET
    """of 3d: replicas, each with a part of the batch; default: as many as the ranks make"""
    pp: Count = UNSET
    """of 3d: stages of layers; default: 1"""
    tp: Count = UNSET
    """of 3d: parts of every matrix; default: 1"""
    sequence_parallel: bool = False
    """of tensor and 3d: between matrices, each rank has a part of the positions"""
    zero: ZeroStage | None = None
    """ZeRO: 1 optimizer state, 2 + gradients, 3 (of fsdp the default) + parameters; of 3d 1 or 3"""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """with check_weights prefer sgd: AdamW cannot reveal gradients scaled by a constant"""
    momentum: Fraction = 0.9
    """of sgd"""
    vgg_width: Count = 64
    """of vgg16: channels of the first layers; later ones have up to 8 times as many"""
    check_weights: bool = False
    """train again on one process and compare every weight by name; exit status 1 if they differ"""
    check_output: bool = False
    """the same for the outputs on a batch of test data"""


@dataclass
class Threads:
    """devices"""

    model_parallel_mode: Literal["none", "model_parallel", "pipeline_parallel"] = "none"
    """none: one device; model_parallel: stages that compute one at a time; pipeline_parallel:
    stages that compute at the same time, on different micro-batches"""
    num_devices: Count = UNSET
    """stages: GPUs, by default all; or slices of the CPU cores, by default 2"""
    pipeline: Literal["whole", "blocks"] = "whole"
    """whole: embedding and head belong to the first and last stage; blocks: the course's form, with
    both on the first device"""


@dataclass
class DataParallel:
    """data parallelism"""

    gradient_sync: Literal["per_parameter", "flat", "overlap"] = "overlap"
    """one all-reduce per parameter after backward, one for all, or buckets while backward runs"""
    bucket_mb: Positive | None = None
    """size of a bucket of gradient_sync overlap in MiB; default: 4, and 25 over NCCL"""
    comm_dtype: Literal["fp32", "bf16"] = "fp32"
    """type in which buckets are sent"""
    pytest: bool = False
    """True: an epoch without evaluation; each rank writes tests/model{rank}_gradients.pth"""


@dataclass
class Options(
    Training, Data, Architecture, Files, Processes, Axes, Stages, Threads, DataParallel, Tools
):
    """All options. A program's own class says which groups it shows, and its defaults."""

    GROUPS: ClassVar[tuple[type, ...]] = ()
    PAGES: ClassVar[Mapping[str, tuple[str, Set[str]]]] = {}
    """of a program that has several strategies: what --help says of each, and which options it does
    not show"""
    strategy: str = "single"
    """how the model is laid out on the processes"""
    typed: Set[str] = frozenset()
    """the names of the options that a person has typed"""


O = TypeVar("O", bound=Options)  # noqa: E741


class Only(NamedTuple):
    """Options that only some runs have.

    Attributes:
        names: of the options.
        who: the runs, in words. Without `has` it names strategies, as "pipeline or 3d".
        has: whether a run of these options, which may be UNSET, is one of them.
        instead: what works.
    """

    names: str
    who: str
    has: Callable[[Options], bool] | None = None
    instead: str = "leave it out"

    def fits(self, args: Options) -> bool:
        """Whether a run has them."""
        return self.has(args) if self.has else args.strategy in self.who.split(" or ")


SENTENCES = "n_layer n_embd n_head vocab_size dropout padding src tgt model_max_length n_test"

ONLY = (
    Only(" ".join(AXES), "3d"),
    Only("schedule chunks", "pipeline or 3d"),
    Only("balance", "pipeline or model or 3d"),
    Only("sequence_parallel", "tensor or 3d"),
    Only("zero", "fsdp or 3d"),
    Only("compile", "single or ddp"),  # nothing watches the operators of a layer
    Only("schedule chunks balance", "a run with stages",
         lambda o: o.strategy != "3d" or o.pp > 1, "--pp 2 works"),
    Only("sequence_parallel", "a run whose matrices are cut", lambda o: o.tp > 1, "--tp 2 works"),
    Only("bucket_mb comm_dtype", "--gradient_sync overlap",
         lambda o: o.gradient_sync == "overlap"),
    Only("momentum", "--optimizer sgd", lambda o: o.optimizer == "sgd"),
    Only("vgg_width", f"--model {VGG}", lambda o: o.model == VGG),
    Only(SENTENCES, "a model of sentences, as gpt2-mini,", lambda o: o.model != VGG),
)  # fmt: skip

"""The options that programs share: name, type, default and help. A program's own options are in its
file. `--config run.yaml` reads options from a file, `--print_config` prints them.

This module does not import torch, so --help and a mistyped option are answered at once. Rules
between options are in training/rules.py and in the programs. The courses' own names, such as
--n_chunk, are in ALIASES.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, get_type_hints

from docstring_parser import parse_from_object
from jsonargparse import ArgumentParser, DefaultHelpFormatter
from jsonargparse.typing import restricted_number_type

from training.command_line import is_it, underscored

if TYPE_CHECKING:
    Count = int
    Whole = int
    Positive = float
    Fraction = float
    Seconds = float
else:
    Count = restricted_number_type("Count", int, [(">=", 1)])
    Whole = restricted_number_type("Whole", int, [(">=", 0), ("<", 2**32)])
    Positive = restricted_number_type("Positive", float, [(">", 0), ("<", float("inf"))])
    Fraction = restricted_number_type("Fraction", float, [(">=", 0), ("<", 1)])
    # At most a month: libraries count in milliseconds, which must not overflow.
    Seconds = restricted_number_type("Seconds", float, [(">", 0), ("<=", 30 * 24 * 3600)])
WORDS = {  # what a value of the type must be
    "Count": "a whole number, 1 or more",
    "Whole": f"a whole number from 0 to {2**32 - 1}",
    "Positive": "a positive, finite number, as 0.5",
    "Fraction": "at least 0 and less than 1, as 0.1",
    "Seconds": "a positive number of seconds, at most 2592000 (a month)",
    "bool": "true or false",
}

SIZES = {"n_train": 5000, "n_validation": 1000, "n_test": 100}  # used of the built-in data

# Values of options that take others, too: a name much like one of them is a misspelt one.
NAMES = {
    "model": ("auto", "vgg16", "gpt2-mini", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    "dataset": ("builtin",),
    "balance": ("auto", "uniform"),
}

# What an option is called in another program, and by the courses.
TWINS = {"num_devices": "world_size", "world_size": "num_devices", "num_workers": "num_devices"}
ALIASES = {
    "num_workers": "world_size",
    "cores_per_worker": "cores_per_rank",
    "accumulation_steps": "num_microbatches",
    "n_chunk": "num_microbatches",
}


@dataclass
class Training:
    """training"""

    n_epochs: Count = 8
    """passes over the training data"""
    batch_size: Count = 64
    """examples per step, over all ranks and micro-batches"""
    learning_rate: Positive | None = None
    """peak rate; default: 1e-3 for gpt2-mini, 3e-4 for vgg16, else 1e-4; with sgd 30 times that"""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """after warm-up: constant, or linear or cosine decay to 0"""
    warmup_steps: Whole = 0
    """linear warm-up steps; they allow a higher learning rate"""
    max_grad_norm: Positive | None = None
    """clip the global gradient norm to this, e.g. 1.0; off by default"""
    on_nan: Literal["stop", "skip"] = "stop"
    """if a loss or gradient is not finite: stop the run, or skip the step on all ranks"""
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
    """builtin, a folder (train.de ...), a JSONL, CSV, Parquet or .txt file, a hub name"""
    n_train: Count | Literal["all"] | None = None
    """training examples at most, or all; default: 5000 of builtin, else all"""
    n_validation: Count | Literal["all"] | None = None
    """validation examples, likewise; default: 1000 of builtin, else all"""
    n_test: Count | Literal["all"] | None = None
    """test examples, likewise; default: 100 of builtin, else all"""
    src: str = "de"
    """language to translate from"""
    tgt: str = "en"
    """language to translate to"""
    model_max_length: Count = 128
    """longest sequence; longer pairs are cut"""
    padding: Literal["longest", "max_length"] = "longest"
    """pad each micro-batch to its longest sentence, or all to model_max_length"""


@dataclass
class Model:
    """model"""

    model: str = "auto"
    """gpt2-mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl from scratch, or a folder or hub id with
    weights; auto: gpt2 on a GPU, gpt2-mini without"""
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
    """resume from the newest intact checkpoint in the workdir, if there is one"""
    save_every: Count | None = None
    """steps between checkpoints; there is always one at the end of an epoch"""
    keep: Whole = 2
    """checkpoints to keep, the newest, and one more while it trains; 0 saves none"""
    async_save: bool = False
    """write checkpoints in the background while training goes on, from a copy in memory"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: a GPU if there is one"""
    timeline: Whole | None = None
    """record N steps after the first, for plot.py timeline and ui.perfetto.dev; default: 20, and 0
    on a GPU, which would wait for every action"""


@dataclass
class Processes:
    """processes"""

    world_size: Count | None = None
    """processes; default 2, or as many as torchrun starts"""
    cores_per_rank: Count | None = None
    """CPU cores per process; by default all cores are shared out"""
    master_port: Whole | None = None
    """port on 127.0.0.1 where the processes meet; default: a free one"""
    compile: bool = False
    """of whole models (single, ddp): torch.compile each layer and the loss; faster on a GPU, after
    half a minute"""
    timeout: Seconds = 300.0
    """seconds after which a process that does not answer ends the run"""


@dataclass
class Stages:
    """stages of a pipeline"""

    schedule: Literal["gpipe", "1f1b", "zb", "interleaved", "zbv", "vhalf", "vmin"] | None = None
    """gpipe, 1f1b (default), zb; several stages per rank: interleaved, zbv, vhalf, vmin"""
    chunks: Count | None = None
    """stages per rank, of interleaved; default: 2"""
    balance: str | None = None
    """auto (default): by measured time, halves of blocks too; uniform; or 3,5: blocks of each"""


@dataclass
class Tools:
    """other tools"""

    profile: Whole = 0
    """what every operator took in N steps after the first, per rank, for ui.perfetto.dev"""
    tensorboard: bool = False
    """write metrics.jsonl for TensorBoard, too"""
    wandb: bool = False
    """write metrics.jsonl for Weights & Biases, too"""


T = TypeVar("T")


def _plain(value: Any) -> Any:
    """A number as Python's own type: torch.compile does not know jsonargparse's restricted ones."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if isinstance(value, int) else float(value)
    return value


def parse(kind: type[T], description: str | None, argv: Sequence[str] | None = None) -> T:
    """The options on the command line, as an object of the dataclass `kind`.

    Prints help and ends with status 0, or prints one line on a mistake and ends with status 2.
    """
    given = underscored(sys.argv[1:] if argv is None else argv)
    parser = _parser(kind, description, given)
    for name in sorted(
        _names(given)
    ):  # first: what follows an unknown option looks like a strategy
        if name.startswith("--") and name not in ("--", *parser._option_string_actions):
            parser.error(f"unrecognized arguments: {name}")
    if not {"--n_epochs", "--num_batches"} - _names(given):
        parser.error("--n_epochs and --num_batches both say when the run ends: leave one out")
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument("--config", action="append", default=[])
    first, others = files.parse_known_args(given)  # files first: the command line wins
    found = parser.parse_args([f"--config={path}" for path in first.config] + others)
    options = {field.name: _plain(getattr(found, field.name)) for field in fields(kind)}  # type: ignore[arg-type]
    for name, known in NAMES.items():
        value = options.get(name) or known[0]
        if "/" in value or Path(value).exists() or value in known:
            continue  # a name on the hub, or a folder
        if near := is_it(value, known):
            parser.error(f"--{name} {value}: there is no such {name}{near}")
    return settle_sizes(kind(**options))


def settle_sizes(options: T) -> T:
    """The options, with the number of examples of each split: a limit, or None for all."""
    builtin = options.dataset == "builtin"  # type: ignore[attr-defined]
    for name, size in SIZES.items():
        given = getattr(options, name) or (size if builtin else "all")
        setattr(options, name, None if given == "all" else given)
    return options


def begin(kind: type, description: str | None) -> None:
    """Answers --help, refuses a mistyped option, and lets Ctrl-C end the process at once, before
    torch is imported, which takes seconds. (A library may swallow a KeyboardInterrupt during its
    import; `training.launch.errors.signals_end` takes over later.)"""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    parse(kind, description)


def as_typed(message: str, given: Sequence[str]) -> str:
    """The message, with the alias that was typed in place of the option's name."""
    for alias, name in ALIASES.items():
        if f"--{alias}" in _names(given):
            message = re.sub(rf"--{name}\b", f"--{alias}", message)
    return message


def _names(given: Sequence[str]) -> set[str]:
    return {word.partition("=")[0] for word in underscored(given)}


def _parser(kind: type, description: str | None, given: Sequence[str]) -> _Parser:
    parser = _Parser(
        description=description, formatter_class=_Help, usage=argparse.SUPPRESS, allow_abbrev=False
    )
    parser.hints, parser.given = get_type_hints(kind), given
    defaults = {field.name: field.default for field in fields(kind)}
    helps = {  # an option that a program declares again may leave its help out
        entry.args[1]: " ".join(entry.description.split())
        for base in reversed(kind.__mro__[:-1])
        for entry in parse_from_object(base).params
        if entry.description
    }
    if "strategy" in defaults:
        parser.add_argument("strategy", type=parser.hints["strategy"], help=helps["strategy"])
    for base in kind.__mro__[1:-1]:
        group = parser.add_argument_group(base.__doc__)
        for name in [field.name for field in fields(base)]:
            hint, default, text = parser.hints[name], defaults[name], helps[name]
            names = [name, *(alias for alias, option in ALIASES.items() if option == name)]
            more: dict[str, Any] = {}
            if hint is bool:  # --resume is --resume true
                more = {"nargs": "?", "const": True, "metavar": "BOOL"}
            elif any(word in str(hint) for word in WORDS):
                more = {"metavar": "N"}
            if not (default is None or isinstance(default, bool) or "default" in text):
                text += f" [{default}]"
            flags = [f"--{n}" for n in names]
            group.add_argument(*flags, type=hint, default=default, help=text, **more)
    parser.add_argument("--config", action="config", help="YAML file with options")
    return parser


class _Help(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Help texts as they are written above, without types."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=118)

    def _get_help_string(self, action: Any) -> str:
        printing = action.dest == "print_config"
        return "print the options as a YAML file for --config" if printing else str(action.help)


class _Parser(ArgumentParser):
    """Reports a mistake in one line, once for all ranks of torchrun."""

    hints: dict[str, Any]
    given: Sequence[str]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # noqa: ARG002
        """The option, the value, the rule."""
        from training.launch.errors import refuse

        text = as_typed(_in_one_line(self.hints, message), self.given)
        refuse(f"{self.prog}: error: {text}; --help explains all\n")


def _in_one_line(hints: dict[str, Any], message: str) -> str:
    """jsonargparse's message, which names Python types in several lines, as a sentence."""
    if unknown := re.search(r"unrecognized arguments: --(\w+)|Option '(\w+)' is not", message):
        name = unknown[1] or unknown[2]
        if (other := TWINS.get(name)) in hints:
            return f"--{name}: there is no such option; is it --{other}?"
        for group in (Processes, Stages, Tools):
            if name in {field.name for field in fields(group)}:
                return f"--{name}: an option for {group.__doc__}, which this program does not have"
        known = [*hints, *(alias for alias, option in ALIASES.items() if option in hints)]
        return f"--{name}: there is no such option" + is_it(name, known).replace("it ", "it --")
    key = re.search(r'[Kk]ey "(\w+)"', message)
    if message.endswith("required: strategy"):
        return f"name a strategy first: {', '.join(get_args(hints['strategy']))}"
    if key is None or key[1] not in hints:  # no value, or a file that cannot be read
        return " ".join(message.replace('Parser key "config"', "--config").split())
    hint = str(hints[key[1]])
    rules = [rule for word, rule in WORDS.items() if re.search(rf"\b{word}\b", hint)]
    words = re.search(r"Literal\[(.*?)\]", hint)
    choices = words[1].replace("'", "").split(", ") if words else []
    rules += [" or ".join(choices)] if choices else []
    found = re.search(r"value: (.+)|: '(.+)'|: (\S+) does not conform", message)
    value = found[found.lastindex or 0] if found else ""
    option = "strategy" if key[1] == "strategy" else f"--{key[1]}"  # it has no dashes
    return f"{option} {value}: it must be {', or '.join(rules)}{is_it(value, choices)}"

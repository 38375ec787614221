"""The command line of the programs that train. What options there are is in training/options.py,
the rules between them in project/rules.py.

`@run.txt` reads options from a file, as they are typed. The courses' own names, such as --n_chunk,
are in ALIASES. Neither torch nor a model is imported to answer --help.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object

from project.command_line import Parser, underscored
from project.strategies import STRATEGIES, absent_from, page_of
from training.launch.errors import exit_on_signals, refuse
from training.options import Axes, DataParallel, O, Options, Processes, Stages, Threads, Tools, flag

# What options are called by the courses.
ALIASES = {
    "world_size": ["--num_workers", "-w"],
    "cores_per_rank": ["--cores_per_worker", "-c"],
    "num_microbatches": ["--accumulation_steps", "--n_chunk", "-m"],
    "num_batches": ["-n"],
    "batch_size": ["-b"],
    "learning_rate": ["-l"],
}
# Who has the options that a program lacks.
HAVE = {
    Processes: "run_data_parallel.py and train.py have",
    DataParallel: "run_data_parallel.py has",
    Stages: "run_pipeline.py and train.py pipeline have",
    Threads: "run_pipeline.py has",
    Axes: "train.py has",
    Tools: "train.py has",
}
INSTEAD = {"world_size": "--num_devices sets the stages", "num_devices": "--world_size works"}

documented = cache(parse_from_object)  # reads the source of a class, for a tenth of a second


def parse_options(kind: type[O], description: str | None, argv: Sequence[str] | None = None) -> O:
    """The options on the command line, as an object of the program's class; others have their
    defaults. `typed` are the names of those that were typed, also in a file.

    Prints help and ends with status 0, or prints one line on a mistake and ends with status 2.
    """
    parser = make_parser(kind, description)
    words = [*(sys.argv[1:] if argv is None else argv)]
    try:
        words = underscored(parser._read_args_from_files(words))
    except ValueError as error:  # not UTF-8, or quotes that do not end
        files = " ".join(word for word in words if word.startswith("@"))
        parser.error(f"{files}: it holds no options as they are typed ({error})")
    if kind.HAS_STRATEGIES:
        words = strategy_first(words)
        if words and words[0].startswith("-") and not {"-h", "--help"} & {*words}:
            given, names = shlex.join(words), " or ".join(STRATEGIES)
            parser.error(f"{given}: no strategy is named; it must be {names}, as in: train.py ddp")
    typed = vars(parser.parse_args(words))
    if {"n_epochs", "num_batches"} <= typed.keys():
        parser.error("--n_epochs and --num_batches both say when the run ends: leave one out")
    path = typed.get("dataset", "")
    if path.startswith(("/", ".", "~")) and not Path(path).exists():
        parser.error(f"--dataset {path}: there is no such file or folder")
    return kind(**typed, typed=frozenset(typed))


def strategy_first(words: list[str]) -> list[str]:
    """The command line with the strategy's word in front, wherever it is typed."""
    names = [field.name for field in fields(Options) if field.type != "bool"]
    with_value = {word for name in names for word in spellings(name)}
    for i, word in enumerate(words):
        if word in STRATEGIES and not (i and words[i - 1] in with_value):
            return [word, *words[:i], *words[i + 1 :]]
    return words


def shown(kind: type[Options]) -> list[str]:
    """The names of the options that a program has."""
    return [field.name for group in kind.GROUPS for field in fields(group)]


def begin(kind: type[O], description: str | None) -> O:
    """The options that were typed. Answers --help, refuses a mistyped option, and lets signals end
    the process at once, before torch is imported, which takes seconds."""
    exit_on_signals()
    options = parse_options(kind, description)
    if sys.flags.optimize > 1:
        refuse("python -OO removes docstrings, which transformers reads; python -O works\n")
    return options


def make_parser(kind: type[Options], description: str | None) -> Parser:
    """A parser of the options of a program, which finds those that were typed alone."""
    parser = Parser(
        description=description, fromfile_prefix_chars="@", argument_default=argparse.SUPPRESS
    )
    if not kind.HAS_STRATEGIES:
        add_options(parser, kind)
        return parser
    commands = parser.add_subparsers(
        dest="strategy", required=True, metavar="STRATEGY", title="strategies"
    )
    for name, row in STRATEGIES.items():
        command = commands.add_parser(
            name, help=row.summary, description=page_of(name), argument_default=argparse.SUPPRESS
        )
        add_options(command, kind, name)
    return parser


def add_options(parser: Parser, kind: type[Options], strategy: str = "") -> None:
    """Adds the options of a program, or of one of its strategies."""
    hints, helps = get_type_hints(kind, include_extras=True), helps_of(kind)
    defaults = {field.name: field.default for field in fields(kind)}
    absent = absent_from(strategy) if strategy else {}
    hidden = STRATEGIES[strategy].hidden.split() if strategy else []
    for group in kind.GROUPS:
        section = parser.add_argument_group(group.__doc__)
        for name in (field.name for field in fields(group) if field.name not in absent):
            text, default = helps[name], defaults[name]
            if not (default is None or isinstance(default, bool) or "default" in text):
                text += f" [{default}]"
            section.add_argument(
                *spellings(name), **values_of(hints[name]),
                help=argparse.SUPPRESS if name in hidden else text,
            )  # fmt: skip
    for group in HAVE.keys() - {*kind.GROUPS}:
        for name in (field.name for field in fields(group)):
            absent[name] = f"only {HAVE[group]} it; {INSTEAD.get(name, 'leave it out')}"
    parser.epilog = "@FILE reads options from a file, as they are typed here."
    if strategy:
        parser.epilog += (
            "\nWithout --model it trains VGG16 on images; --model gpt2-mini learns text."
        )
    parser.hints = {word: said for name, said in absent.items() for word in spellings(name)}


def spellings(name: str) -> list[str]:
    """An option's names on the command line."""
    return [f"--{name}", *ALIASES.get(name, [])]


def helps_of(kind: type[Options]) -> dict[str, str]:
    """The docstring of each option. One that a program declares again may leave it out."""
    return {
        entry.arg_name: " ".join(entry.description.split())
        for base in reversed(kind.__mro__[:-1])
        for entry in documented(base).params
        if entry.description
    }


def values_of(hint: Any) -> dict[str, Any]:
    """How argparse reads values of a type."""
    if NoneType in get_args(hint):
        hint = get_args(hint)[0]  # X | None
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is Annotated:
        return {"type": hint.__metadata__[0], "metavar": "N"}
    if hint is bool:  # --resume is --resume true
        return {"type": flag, "nargs": "?", "const": True, "metavar": "BOOL"}
    return {"type": hint}

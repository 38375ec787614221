"""The command line of the programs that train. What options there are is in training/options.py,
the rules between them in project/rules.py.

`--config run.yaml` reads options from a file, `--print_config` prints them. The courses' own names,
such as --n_chunk, are in ALIASES. Neither torch nor a model is imported to answer --help.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import yaml
from docstring_parser import parse_from_object

from project.command_line import Parser, is_it, underscored
from training.launch.errors import exit_on_signals, open_streams, refuse
from training.options import O, Options, flag

# What options are called by the courses.
ALIASES = {
    "--world_size": ["--num_workers"],
    "--cores_per_rank": ["--cores_per_worker"],
    "--num_microbatches": ["--accumulation_steps", "--n_chunk"],
}

documented = cache(parse_from_object)  # reads the source of a class, for a tenth of a second


def parse_options(
    kind: type[O], description: str | None, argv: Sequence[str] | None = None
) -> tuple[O, set[str]]:
    """The options on the command line, as an object of the program's class, and which of them were
    typed, also in a file.

    Prints help and ends with status 0, or prints one line on a mistake and ends with status 2.
    """
    line = underscored(sys.argv[1:] if argv is None else argv)
    strategy = next((word for word in line if word in kind.PAGES), "")
    parser = make_parser(kind, description, strategy)
    pairs = [word.partition("=") for word in line]
    after = [*line[1:], ""]  # where a word has no value of its own
    typed = {name: value or later for (name, _, value), later in zip(pairs, after, strict=False)}
    if {"--n_epochs", "--num_batches"} <= typed.keys():
        parser.error("--n_epochs and --num_batches both say when the run ends: leave one out")
    for name, others in ALIASES.items():
        both = {word: value for word, value in typed.items() if word in (name, *others)}
        if len(set(both.values())) > 1:
            said = " ".join(f"{word} {value}" for word, value in both.items())
            parser.error(f"{said}: two names of one option; leave one out")
    files = getattr(parser.parse_args(line), "config", [])
    words = [word for path in files for word in words_of_file(parser, path)]
    found = vars(parser.parse_args([*words, *line]))  # what comes later wins
    found.pop("config", None)
    printing = found.pop("print_config", False)
    options = kind(**found, typed=frozenset(found))
    if printing:
        values = {name: getattr(options, name) for name in shown(kind)}
        values["workdir"] = values["workdir"] and str(values["workdir"])
        print(yaml.safe_dump(values, sort_keys=False), end="")
        parser.exit()
    return options, set(found)


def shown(kind: type[Options]) -> list[str]:
    """The names of the options that a program has."""
    return [field.name for group in kind.GROUPS for field in fields(group)]


def begin(kind: type[Options], description: str | None) -> None:
    """Answers --help, refuses a mistyped option, and lets signals end the process at once, before
    torch is imported, which takes seconds."""
    exit_on_signals()
    open_streams()
    if sys.flags.optimize > 1:
        refuse("python -OO removes docstrings, which transformers reads; python -O works\n")
    parse_options(kind, description)


def words_of_file(parser: Parser, path: str) -> list[str]:
    """The options in a YAML file, as they are typed. null is the default."""
    try:
        found = dict(yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {})
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or "it is no YAML file of options"
        parser.error(f"--config {path}: {reason}; --print_config writes one")
    for name, value in found.items():
        option = underscored([f"--{name}"])[0]
        action = parser._option_string_actions.get(option)
        if action is None or action.dest in ("help", "config", "print_config"):
            near = is_it(option, parser._option_string_actions)
            parser.error(f"--config {path}: {name}: no file has such an option{near}")
        if isinstance(value, bool) and action.type is not flag:
            parser.error(f"--config {path}: {name}: YAML reads a word as {value}; put it in quotes")
    return [f"--{name}={value}" for name, value in found.items() if value is not None]


def make_parser(kind: type[O], description: str | None, strategy: str = "") -> Parser:
    """A parser of the options of a program, which finds those that were typed alone. --help is on
    the given strategy; without one it shows no options if the program has strategies."""
    text, hidden = kind.PAGES.get(strategy, (description, shown(kind) if kind.PAGES else ()))
    which = f" {strategy or 'STRATEGY'}" if kind.PAGES else ""
    parser = Parser(
        usage=f"python project/%(prog)s{which} [--OPTION VALUE ...]", description=text,
        argument_default=argparse.SUPPRESS, formatter_class=partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=28, width=118
        ),
    )  # fmt: skip
    if kind.PAGES:
        parser.add_argument(
            "strategy", choices=list(kind.PAGES), metavar="STRATEGY", help=argparse.SUPPRESS
        )
    hints, helps = get_type_hints(kind, include_extras=True), helps_of(kind)
    defaults = {field.name: field.default for field in fields(kind)}
    for group in kind.GROUPS:
        section = parser.add_argument_group(group.__doc__)
        for name in [field.name for field in fields(group)]:
            text, default = helps[name], defaults[name]
            if not (default is None or isinstance(default, bool) or "default" in text):
                text += f" [{default}]"
            text, option = argparse.SUPPRESS if name in hidden else text, f"--{name}"
            names = [option, *ALIASES.get(option, [])]
            section.add_argument(*names, help=text, **values_of(hints[name]))
    parser.add_argument("--config", action="append", help="YAML file with options")
    parser.add_argument(
        "--print_config", action="store_true", help="print the options as a file for --config"
    )
    return parser


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

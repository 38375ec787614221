"""The command line of every program: argparse whose errors are one line without the usage, and
options that are declared as dataclasses (training/options.py).

`@run.txt` reads options from a file, as they are typed. The courses' own names, such as --n_chunk,
are in ALIASES. Neither torch nor a model is imported to answer --help.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object

from project.strategies import ONLY_SOME, STRATEGIES, page_of
from training.launch.errors import exit_on_signals, listed, open_streams, refuse
from training.options import PROGRAMS, O, Options, flag, option_names

# What options are called by the courses, and by many.
ALIASES = {
    "world_size": ["--num_workers", "-w"],
    "cores_per_rank": ["--cores_per_worker", "-c"],
    "num_microbatches": ["--accumulation_steps", "--n_chunk", "-m"],
    "num_batches": ["-n"],
    "batch_size": ["-b"],
    "learning_rate": ["--lr", "-l"],
}
# What a program has in the place of another one's option.
INSTEAD = {"world_size": "--num_devices sets the stages", "num_devices": "--world_size works"}
Words = Sequence[str] | None  # a command line; None: that of this process
OPTION = re.compile(r"^--?[A-Za-z][\w-]*(?=\Z|=)")
LONG = re.compile(r"^--[A-Za-z][\w-]*(?=\Z|=)")

documented = cache(parse_from_object)  # reads the source of a class, for a tenth of a second


def underscored(words: Words) -> list[str]:
    """A command line in which hyphens in the names of options are underscores: --n-epochs=3. A
    short option has none, and -l1e-3 is one with its value."""
    given = [*(sys.argv[1:] if words is None else words)]
    options = before_text(given)
    names = [LONG.sub(lambda name: f"--{name[0][2:].replace('-', '_')}", w) for w in options]
    return names + given[len(options) :]


def before_text(words: list[str]) -> list[str]:
    """The words before --, after which there is text, however it looks."""
    return words[: words.index("--")] if "--" in words else words


def is_it(word: str, known: Iterable[str]) -> str:
    """The end of a message on a misspelt word: the known ones that begin with it; or those that are
    most like it, if any are."""
    names = list(known)
    begun = [name for name in names if name.startswith(word.lower())][:2]
    near = begun or get_close_matches(word.lower(), names, 2, cutoff=0.75)
    return f"; is it {' or '.join(near)}?" if near else ""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help whose first line has the options that must be given: the others are listed below it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=118)

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: Any = None) -> None:
        """As in argparse, which also names the commands of a program by it."""
        words = [action for action in actions if action.required or not action.option_strings]
        if prefix is None:
            words.append(argparse.Action([], "options", metavar="[options]"))
        super().add_usage(usage, words, groups, prefix)


class Parser(argparse.ArgumentParser):
    """Prints the description unwrapped; answers a mistake with one line and status 2."""

    def __init__(self, **settings: Any) -> None:
        open_streams()  # every program begins with a parser
        super().__init__(**{"formatter_class": Formatter, "allow_abbrev": False, **settings})
        # A value, not an option. (Python 3.10 to 3.13 take -1e-3 for an option.)
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)")

    def parse_known_args(  # type: ignore[override]
        self, args: Words = None, namespace: Any = None
    ) -> Any:
        """As in argparse, which parses everything through it, also the options of a command. Ends
        the program at an option that there is not."""
        return self._without_options(*super().parse_known_args(underscored(args), namespace))

    def parse_known_intermixed_args(  # type: ignore[override]
        self, args: Words = None, namespace: Any = None
    ) -> Any:
        """The same. (Since Python 3.12.8 it does not parse through the one above.)"""
        parse = super().parse_known_intermixed_args
        return self._without_options(*parse(underscored(args), namespace))

    def _without_options(self, parsed: Any, left: list[str]) -> Any:
        for word in before_text(left):
            if name := OPTION.match(word):
                near = is_it(name[0], self._option_string_actions)
                self.error(f"{name[0]}: there is no such option{near}")
        return parsed, left

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """A line of an @FILE: words as in a shell; # begins a comment."""
        return shlex.split(arg_line, comments=True)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """An option's value is not empty, as an unset variable of the shell would make it."""
        if not arg_string and action.option_strings:
            raise argparse.ArgumentError(action, "is empty; leave it out, or give it a value")
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        """Ends the program. An option has its first name, and stands before what is said of it."""
        message = re.sub(r"^argument ([^/:]*)[^:]*: ", r"\1 ", message)
        wrong_file = r"@\2: this file of options cannot be read (\1)"  # of @FILE alone
        message = re.sub(r"^\[Errno \d+\] (.*): '(.*)'$", wrong_file, message)
        refuse(f"{self.prog.partition(' ')[0]}: error: {message}; --help explains all\n")


def begin(kind: type[O], description: str | None) -> O:
    """The options that were typed. Answers --help, refuses a mistyped option, and lets signals end
    the process at once, before torch is imported, which takes seconds."""
    exit_on_signals()
    options = parse_options(kind, description)
    if sys.flags.optimize > 1:
        refuse("python -OO removes docstrings, which transformers reads; python -O works\n")
    return options


def parse_options(kind: type[O], description: str | None, argv: Words = None) -> O:
    """The options on the command line, as an object of the program's class; others have their
    defaults. `typed` are the names of those that were typed, also in a file.

    Prints help and ends with status 0, or prints one line on a mistake and ends with status 2.
    """
    parser = make_parser(kind, description)
    words = underscored(argv)
    try:
        words = underscored(parser._read_args_from_files(words))
    except ValueError as error:  # not UTF-8, or quotes that do not end
        files = " ".join(word for word in words if word.startswith("@"))
        parser.error(f"{files}: it holds no options as they are typed ({error})")
    if kind.PROGRAM == "train.py":
        words = strategy_first(parser, words)
    typed = vars(parser.parse_args(words))
    strategy = typed.get("strategy")
    own = ["strategy", *shown(kind, strategy)]
    for name in [name for name in typed if name not in own]:
        instead = INSTEAD.get(name, "leave it out")
        having = owners(kind, name)
        have = "has" if len(having) == 1 else "have"
        parser.error(f"--{name}: only {listed(having, 'and')} {have} it; {instead}")
    if {"n_epochs", "num_batches"} <= typed.keys():
        parser.error("--n_epochs and --num_batches both say when the run ends: leave one out")
    path = typed.get("dataset", "")
    if path.startswith(("/", ".", "~")) and not Path(path).exists():
        parser.error(f"--dataset {path}: there is no such file or folder")
    usual = STRATEGIES[strategy].usual if strategy else {}
    return kind(**{**usual, **typed}, typed=frozenset(typed))


def strategy_first(parser: Parser, words: list[str]) -> list[str]:
    """The command line with the strategy's word in front, wherever it is typed."""
    names = [field.name for field in fields(Options) if field.type != "bool"]
    with_value = {word for name in names for word in spellings(name)}
    for i, word in enumerate(words):
        if word in STRATEGIES and not (i and words[i - 1] in with_value):
            return [word, *words[:i], *words[i + 1 :]]
    if words and not {"-h", "--help"} & {*words}:
        given, choices = shlex.join(words), listed(STRATEGIES, "or")
        others = [word for word in words if word not in STRATEGIES and word[:1] != "-"]
        near = next(filter(None, (is_it(word, STRATEGIES) for word in others)), "")
        parser.error(
            f"{given}: no strategy is named{near}; it must be {choices}, as in: train.py ddp"
        )
    return words


def shown(kind: type[Options], strategy: str | None = None) -> list[str]:
    """The names of the options that a program, or one of its strategies, has."""
    names = option_names(*PROGRAMS[kind.PROGRAM])
    lacking = ONLY_SOME - {*STRATEGIES[strategy].options.split()} if strategy else ()
    return [name for name in names if name not in lacking]


def owners(kind: type[Options], name: str) -> list[str]:
    """The programs that have an option; or, if this one does, its strategies that have it."""
    if name in shown(kind):
        return [strategy for strategy in STRATEGIES if name in shown(kind, strategy)]
    return [program for program, groups in PROGRAMS.items() if name in option_names(*groups)]


def make_parser(kind: type[Options], description: str | None) -> Parser:
    """A parser of the options of a program, which finds those that were typed alone."""
    parser = Parser(
        description=description, fromfile_prefix_chars="@", argument_default=argparse.SUPPRESS
    )
    if kind.PROGRAM != "train.py":
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


def add_options(parser: Parser, kind: type[Options], strategy: str | None = None) -> None:
    """Adds all options; the help is of those alone that a program, or one of its strategies, has
    and leaves a choice of."""
    hints, helps = get_type_hints(kind, include_extras=True), helps_of(kind)
    defaults = {field.name: field.default for field in fields(kind)}
    hidden = STRATEGIES[strategy].hidden.split() if strategy else []
    explained = {*shown(kind, strategy)} - {*hidden}
    for group in Options.__bases__:
        section = parser.add_argument_group(group.__doc__)
        for name in option_names(group):
            text, default = helps[name], defaults[name]
            if not (default is None or isinstance(default, bool) or "default" in text):
                text += f" [{default}]"
            section.add_argument(
                *spellings(name), **values_of(hints[name]),
                help=text if name in explained else argparse.SUPPRESS,
            )  # fmt: skip
    parser.epilog = "@FILE reads options from a file, as they are typed here."


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
        rule = hint.__metadata__[0]  # the words that may be typed, or what reads one
        return {"choices": rule} if isinstance(rule, tuple) else {"type": rule, "metavar": "N"}
    if hint is bool:  # --resume is --resume true
        return {"type": flag, "nargs": "?", "const": True, "metavar": "BOOL"}
    return {"type": hint}

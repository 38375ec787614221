"""The command line of every program: argparse, with options that are declared as dataclasses
(training/options.py), and errors that are one line.

`@run.txt` reads options from a file, written as on the command line. The courses' own names, such
as --n_chunk, are in ALIASES. Neither torch nor a model is imported to answer --help.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object

from project.strategies import ONLY, STRATEGIES, owners, page_of
from training.launch.errors import listed, open_streams, refuse, say, torchrun
from training.launch.signals import ENDING_SIGNALS, die_with_parent, end_process, set_handlers
from training.options import (
    Axes,
    DataParallel,
    O,
    Options,
    Processes,
    Stages,
    Threads,
    Tools,
    option_names,
)

# Further names of options: those of the courses, and common ones.
ALIASES = {
    "world_size": ["--num_workers", "-w"],
    "cores_per_rank": ["--cores_per_worker", "-c"],
    "num_microbatches": ["--accumulation_steps", "--n_chunk", "-m"],
    "num_batches": ["-n"],
    "batch_size": ["-b"],
    "learning_rate": ["--lr", "-l"],
}
# The groups of options that not every program has, and the program that has each.
PROGRAMS: dict[type, str] = {
    DataParallel: "run_data_parallel.py", Threads: "run_pipeline.py",
    **dict.fromkeys((Processes, Axes, Stages, Tools), "train.py"),
}  # fmt: skip
Words = Sequence[str] | None  # a command line; None: that of this process

documented = cache(parse_from_object)  # it parses the source of a class: a tenth of a second


def is_it(word: str, known: Iterable[str]) -> str:
    """The end of a message on a misspelt word: a suggestion, or nothing. It is a known word with
    all parts of the misspelt one, as --n_epochs for --epochs, or else the most similar one."""
    word, known = underscored(word).lower(), [*known]
    parts = {*word.strip("-").split("_")}
    whole = [name for name in known if parts <= {*name.strip("-").split("_")}]
    near = whole or get_close_matches(word, known, 1, cutoff=0.75)
    return f"; is it {near[0]}?" if near else ""


def underscored(word: str) -> str:
    """An option as it is declared: without a value, hyphens in its name as underscores."""
    return re.sub(r"(?<=\w)-", "_", word.partition("=")[0])


def whose(word: str) -> str:
    """The end of a message on an unknown option: the program that has it, if one has."""
    for group, program in PROGRAMS.items():
        for name in option_names(group):
            if underscored(word) in spellings(name):
                strategy = f" {ONLY.get(name, 'ddp').split()[0]}" if program == "train.py" else ""
                return f"; {program}{strategy} has it"
    return ""


class Parser(argparse.ArgumentParser):
    """Prints the description unwrapped; answers a mistake with one line and status 2."""

    def __init__(self, **settings: Any) -> None:
        open_streams()  # every program begins with a parser
        unwrapped = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=unwrapped, allow_abbrev=False, **settings)

    def _parse_optional(self, arg_string: str) -> Any:
        """Hyphens in the name of a long option are underscores: --n-epochs=3."""
        name = re.sub(r"^--[\w-]+", lambda name: f"--{name[0][2:].replace('-', '_')}", arg_string)
        return super()._parse_optional(name)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Refuses an empty value, which an unset variable of the shell would leave."""
        if not arg_string and action.option_strings:
            raise argparse.ArgumentError(action, "is empty; leave it out, or give it a value")
        return super()._get_value(action, arg_string)

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """A line of an @FILE: words as in a shell; # begins a comment. The first line may begin
        with a byte-order mark, which editors on Windows write."""
        return shlex.split(arg_line.removeprefix("\ufeff"), comments=True)

    def error(self, message: str) -> NoReturn:
        """Ends the program. A message about an option begins with the option's first name."""
        message = re.sub(r"^argument ([^/:]*)[^:]*: ", r"\1 ", message)
        unread = r"@\2: \1; a file with options, as they are typed here, works"
        message = re.sub(r"^\[Errno \d+\] (.*): '(.*)'$", unread, message)  # of an @FILE
        if message.startswith("unrecognized arguments: "):
            word = message.split()[2]
            message = f"{word}: there is no such option{is_it(word, self._option_string_actions)}"
        refuse(f"{self.prog.partition(' ')[0]}: error: {message}; --help explains all\n")


def begin(kind: type[O], description: str | None) -> O:
    """Returns the options that were typed. Before torch is imported, which takes seconds, it
    answers --help, refuses mistyped options, begins a log, and lets signals end the process."""
    set_handlers(ENDING_SIGNALS, end_process)
    if torchrun("RANK", None) is not None:
        die_with_parent()  # already while it imports torch
    if sys.flags.optimize > 1:
        refuse("python -OO removes docstrings, of which the help is made; python -O works\n")
    typed = parse_options(kind, description)
    if not sys.stderr.isatty() and torchrun("RANK", 0) == 0:
        say(f"{Path(sys.argv[0]).name} begins; it imports torch, then it reads its data.\n")
    return typed


def parse_options(kind: type[O], description: str | None, argv: Words = None) -> O:
    """The options on the command line, as an object of the program's class; options that were not
    typed have their defaults. The field `typed` has the names of those that were, also in a file.
    The strategy of train.py may stand anywhere.

    Prints help and ends with status 0, or prints one line on a mistake and ends with status 2.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    strategies = strategies_of(kind)
    parser = make_parser(kind, description, next(filter(strategies.count, words), None))
    try:
        values, left = parser.parse_known_args(words)
    except RecursionError:
        parser.error("@FILE: it includes itself; options alone work")
    except ValueError as error:  # an unclosed quote; not UTF-8
        files = " ".join(word for word in words if word.startswith("@"))
        parser.error(f"{files}: it holds no options as they are typed ({error})")
    names = option_names(*kind.GROUPS)
    known = [*strategies, *chain.from_iterable(map(spellings, names))]
    for word in left:
        if word not in strategies:
            what = "strategy" if strategies and word[:1] != "-" else "option"
            near = whose(word) or is_it(word, strategies if what == "strategy" else known)
            all_of_them = f"; there are {listed(strategies, 'and')}" if what == "strategy" else ""
            parser.error(f"{word}: there is no such {what}{near or all_of_them}")
    typed = vars(values)
    if strategies:
        if len(left) != 1:
            parser.error(f"one strategy must be named: {listed(strategies, 'or')}")
        typed["strategy"] = left[0]
    for name in typed:
        if strategies and left[0] not in owners(name):
            parser.error(f"--{name}: {listed(owners(name), 'and')} alone can have it; leave it out")
    path = typed.get("dataset", "")
    if path.startswith(("/", ".", "~")) and not Path(path).exists():
        parser.error(f"--dataset {path}: there is no such file or folder")
    usual = STRATEGIES[left[0]].usual if strategies else {}
    return kind(**{**usual, **typed}, typed=frozenset(typed))


def strategies_of(kind: type[Options]) -> list[str]:
    """The strategies of train.py; other programs have none to choose from."""
    return [*STRATEGIES] if Axes in kind.GROUPS else []


def make_parser(kind: type[Options], description: str | None, strategy: str | None) -> Parser:
    """A parser of a program's options. It returns only those that were typed, without defaults. Its
    help explains one strategy of train.py, or lists all."""
    strategies = strategies_of(kind)
    usage = "%(prog)s [options]"
    if strategies:
        usage = f"%(prog)s {strategy or 'STRATEGY'} [options]"
        rows = [f"    {name:10}{row.summary}" for name, row in STRATEGIES.items()]
        listing = "\n".join([f"{description}\nstrategies:", *rows])
        description = page_of(strategy) if strategy else listing
    parser = Parser(
        usage=usage, description=description, fromfile_prefix_chars="@",
        epilog="@FILE reads options from a file, as they are typed here.",
        argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    hints, helps = get_type_hints(kind, include_extras=True), helps_of(kind)
    for group in kind.GROUPS:
        section = parser.add_argument_group(group.__doc__)
        for name in option_names(group):
            text, default = helps[name], getattr(kind, name)
            if not (default is None or isinstance(default, bool) or "default" in text):
                text += f"; default: {default}"
            if strategies and strategy not in owners(name):
                text = argparse.SUPPRESS
            section.add_argument(*spellings(name), **values_of(hints[name]), help=text)
    return parser


def spellings(name: str) -> list[str]:
    """An option's names on the command line."""
    return [f"--{name}", *ALIASES.get(name, [])]


def helps_of(kind: type[Options]) -> dict[str, str]:
    """The docstring of each option. A program that declares an option again may leave it out."""
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
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), "type": type(get_args(hint)[0])}
    if get_origin(hint) is Annotated:
        rule = hint.__metadata__[0]  # the allowed words, or a function that parses a word
        name = "TRUE|FALSE" if get_args(hint)[0] is bool else "N"
        return {"choices": rule} if isinstance(rule, tuple) else {"type": rule, "metavar": name}
    return {"type": hint}

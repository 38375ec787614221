"""argparse whose errors are one line without the usage: the command line of every program. The
programs that train declare their options as dataclasses; see project/parser.py."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, NoReturn

from training.launch.errors import open_streams, refuse

FORMATTER = partial(argparse.RawDescriptionHelpFormatter, max_help_position=28, width=118)
OPTION = re.compile(r"--?[A-Za-z][\w-]*")


def underscored(words: Iterable[str]) -> list[str]:
    """A command line in which hyphens in the names of options are underscores: --n-epochs=3."""
    line = []
    for word in words:
        name, equals, value = word.partition("=")
        if OPTION.fullmatch(name):
            name = name[:2] + name[2:].replace("-", "_")
        line.append(name + equals + value)
    return line


def is_it(word: str, known: Iterable[str]) -> str:
    """The end of a message on a misspelt word: the known ones that are most like it, if any are."""
    near = get_close_matches(word.lower(), list(known), 2, cutoff=0.75)
    return f"; is it {' or '.join(near)}?" if near else ""


class Parser(argparse.ArgumentParser):
    """Prints the description unwrapped; answers a mistake with one line and status 2.

    Attributes:
        hints: what is said of options that only other programs or commands have.
    """

    def __init__(self, **settings: Any) -> None:
        open_streams()  # every program begins with a parser
        super().__init__(**{"formatter_class": FORMATTER, "allow_abbrev": False, **settings})
        self.hints: Mapping[str, str] = {}
        # A value, not an option. (Python 3.10 to 3.13 take -1e-3 for an option.)
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As in argparse, which parses everything through it, also the options of a command. Ends
        the program at an option that there is not."""
        self._settle_usage()
        words = underscored(sys.argv[1:] if args is None else args)
        return self._without_options(*super().parse_known_args(words, namespace))

    def parse_known_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """The same. (Since Python 3.12.8 it does not parse through the one above.)"""
        self._settle_usage()
        words = underscored(sys.argv[1:] if args is None else args)
        return self._without_options(*super().parse_known_intermixed_args(words, namespace))

    def _without_options(
        self, parsed: argparse.Namespace, left: list[str]
    ) -> tuple[argparse.Namespace, list[str]]:
        """What was parsed. Ends the program if an option is left of the command line."""
        for word in left[: left.index("--")] if "--" in left else left:  # after it there is text
            name = word.partition("=")[0]
            if OPTION.fullmatch(name):
                none = f"there is no such option{is_it(name, self._option_string_actions)}"
                self.error(f"{name}: {self.hints.get(name, none)}")
        return parsed, left

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """A line of an @FILE: words as in a shell; # begins a comment."""
        return shlex.split(arg_line, comments=True)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """An option's value is not empty, as an unset variable of the shell would make it."""
        if not arg_string and action.option_strings:
            raise argparse.ArgumentError(action, "is empty; leave it out, or give it a value")
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """In argparse's place, since a word of a list may be misspelt."""
        choices = [str(choice) for choice in action.choices or ()]
        if choices and str(value) not in choices:
            rule = f"it must be {' or '.join(choices)}{is_it(str(value), choices)}"
            raise argparse.ArgumentError(action, f"{value}: {rule}")

    def _settle_usage(self) -> None:
        """The usage line of --help: of one form for every program and command."""
        given = [action for action in self._actions if not action.option_strings]
        words = [self._get_formatter()._format_args(action, action.dest) for action in given]
        names = " ".join(words).removesuffix(" ...").upper()  # after COMMAND argparse adds dots
        line = ["python project/%(prog)s", *names.split(), "[--OPTION VALUE ...]"]
        self.usage = self.usage or " ".join(line)

    def error(self, message: str) -> NoReturn:
        """Ends the program. An option has its first name, and stands before what is said of it."""
        message = re.sub(r"^argument ([^/:]*)[^:]*: ", r"\1 ", message)
        refuse(f"{self.prog.partition(' ')[0]}: error: {message}; --help explains all\n")

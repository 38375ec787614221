"""argparse whose errors are one line without the usage: the command line of every program. The
programs that train declare their options as dataclasses; see project/parser.py."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from training.launch.errors import refuse


def underscored(words: Sequence[str]) -> list[str]:
    """A command line in which hyphens in the names of options are underscores: --n-epochs=3."""
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        option = re.fullmatch(r"--[A-Za-z][\w-]*", name)
        found.append((name[:2] + name[2:].replace("-", "_") if option else name) + equals + value)
    return found


def is_it(word: str, known: Iterable[str]) -> str:
    """The end of a message on a misspelt word: the known one that is most like it, if any is."""
    near = get_close_matches(word.lower(), list(known), 1, cutoff=0.7)
    return "".join(f"; is it {found}?" for found in near)


def as_typed(message: str, line: Iterable[str], aliases: Mapping[str, Sequence[str]]) -> str:
    """A message in which an option has the name that is on the command line: of `aliases`, by the
    name that messages use."""
    typed = {word.partition("=")[0] for word in line}
    for name, others in aliases.items():
        for other in () if name in typed else typed.intersection(others):
            message = re.sub(rf"{name}\b", other, message)
    return message


# What argparse says, and what a user is told.
REWORDED = {
    r"(.*) expected (one|at least one) argument": r"\1: it needs a value",
    r"(.*) ignored explicit argument '(.*)'": r"\1 \2: it takes no value",
    r"the following arguments are required: (.*)": r"\1: it is missing",
    r"(.*) invalid (int|float) value: '(.*)'": r"\1 \3: it must be a number",
    r"unrecognized arguments: (?!--\w)(.*)": r"\1: no option takes this value; quote any spaces",
}


class Parser(argparse.ArgumentParser):
    """Prints the description unwrapped; answers a mistake with one line and status 2."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings, allow_abbrev=False)  # type: ignore[arg-type]
        self.words: list[str] = []  # that were parsed
        # A value, not an option. (Python 3.10 to 3.13 take -1e-3 for an option.)
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, which parses everything through it."""
        return super().parse_known_args(self._checked(args), namespace)

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The same: since Python 3.12.8 it does not call the one above."""
        return super().parse_known_intermixed_args(self._checked(args), namespace)

    def _checked(self, args: Sequence[str] | None) -> list[str]:
        """The words of a command line. Ends the program at an empty one, as of an unset variable of
        the shell. (Only a text to translate may be empty: see project/generate.py.)"""
        self._settle_usage()
        self.words = words = underscored(sys.argv[1:] if args is None else args)
        if words[:1] == [""]:
            self.error("the first argument is empty")
        for word, value in zip(words, [*words[1:], None], strict=False):
            if (re.fullmatch("--\\w+", word) and value == "") or re.fullmatch("--\\w+=", word):
                self.error(f"{word.rstrip('=')}: its value is empty; leave it out, or give one")
        return words

    def _settle_usage(self) -> None:
        """The usage line of --help: of one form for every program and command."""
        given = [action for action in self._actions if not action.option_strings]
        words = [self._get_formatter()._format_args(action, action.dest) for action in given]
        names = " ".join(words).removesuffix(" ...").upper()  # after COMMAND argparse adds dots
        line = ["python project/%(prog)s", *names.split(), "[--OPTION VALUE ...]"]
        self.usage = self.usage or " ".join(line)

    def error(self, message: str) -> NoReturn:
        """Ends the program. An option is named as it was typed."""
        message = re.sub(r"^argument ([^/:]+)[^:]*: ", r"\1 ", message)
        for pattern, words in REWORDED.items():
            message = re.sub(pattern, words, message)
        if wrong := re.fullmatch(r"(.*) invalid choice: (.*) \(choose from (.*)\)", message):
            option, value, listed = wrong.groups()
            value, choices = value.strip("'\""), listed.replace("'", "").split(", ")
            message = f"{option} {value}: it must be {' or '.join(choices)}{is_it(value, choices)}"
        elif unknown := re.match(r"unrecognized arguments: (--\w+)", message):
            message = f"{unknown[1]}: there is no such option{is_it(unknown[1], self._known())}"
        options = [action.option_strings for action in self._actions if action.option_strings]
        message = as_typed(message, self.words, {name: others for name, *others in options})
        refuse(f"{self.prog}: error: {message}; --help explains all\n")

    def _known(self) -> list[str]:
        """All options, also of commands."""
        commands = (action.choices for action in self._actions if isinstance(action.choices, dict))
        inner = [
            option for each in commands for parser in each.values() for option in parser._known()
        ]
        return [*self._option_string_actions, *inner]

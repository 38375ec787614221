"""argparse whose errors are one line without the usage: the command line of every program. The
programs that train declare their options as dataclasses; see project/parser.py."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NoReturn

from training.launch.errors import refuse


def underscored(words: Iterable[str]) -> list[str]:
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


class Parser(argparse.ArgumentParser):
    """Prints the description unwrapped; answers a mistake with one line and status 2."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        settings |= {"allow_abbrev": False, "exit_on_error": False}  # `parse_known_args` reports it
        super().__init__(**settings)  # type: ignore[arg-type]
        self.words: list[str] = []  # that were parsed
        # A value, not an option. (Python 3.10 to 3.13 take -1e-3 for an option.)
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)")

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """As in argparse. Ends the program at a value that no option takes."""
        with self._one_line():
            return super().parse_args(args, namespace)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """As in argparse, which parses everything through it, also the options of a command."""
        with self._one_line():
            return super().parse_known_args(self._checked(args), namespace)

    def parse_intermixed_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        """The same. (Since Python 3.12.8 it does not parse through the one above.)"""
        with self._one_line():
            return super().parse_intermixed_args(self._checked(args), namespace)

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        """Ends the program at a mistake, with the option's first name before what argparse says."""
        try:
            yield
        except argparse.ArgumentError as wrong:
            option = (wrong.argument_name or "").partition("/")[0]
            self.error(f"{option} {wrong.message}".strip())

    def _checked(self, args: Iterable[str] | None) -> list[str]:
        """The words of a command line. Ends the program at an unknown option and at an empty value,
        as of an unset variable of the shell. (Only a text to translate may be empty: see
        project/generate.py.)"""
        self._settle_usage()
        self.words = words = underscored(sys.argv[1:] if args is None else args)
        if words[:1] == [""]:
            self.error("the first argument is empty")
        known = self._known()
        for word, value in zip(words, [*words[1:], None], strict=False):
            name, equals, rest = word.partition("=")
            if word == "--":
                break  # no options after it
            if re.fullmatch(r"--\w+", name) and name not in known:
                self.error(f"{name}: there is no such option{is_it(name, known)}")
            if name.startswith("--") and (rest if equals else value) == "":
                self.error(f"{name}: its value is empty; leave it out, or give one")
        return words

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
        """Ends the program. An option is named as it was typed."""
        options = [action.option_strings for action in self._actions if action.option_strings]
        message = as_typed(message, self.words, {name: others for name, *others in options})
        refuse(f"{self.prog}: error: {message}; --help explains all\n")

    def _known(self) -> list[str]:
        """All options, also of commands."""
        every = [*self._option_string_actions]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    every += parser._known()
        return every

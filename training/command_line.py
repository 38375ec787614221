"""argparse with errors that are sentences, for programs with few options.

argparse prints its usage and then `argument --step: invalid int value: 'y'`. Here a mistake is one
line, as in all programs: the option, the value, the rule. The programs that train declare their
options as dataclasses in project/options.py.
"""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from training.errors import refuse

RULES = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """Prints the description unwrapped; answers a mistake with one line and status 2."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings, allow_abbrev=False)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        refuse(f"{self.prog}: error: {in_words(message)}; --help explains all\n")


def in_words(message: str) -> str:
    """argparse's error message as a sentence."""
    found = re.fullmatch(r"argument (?P<name>[^:/]+)[^:]*: (?P<problem>.*)", message)
    if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
        return f"missing: {missing[1]}"
    if unknown := re.fullmatch(r"unrecognized arguments: (.*)", message):
        return f"{unknown[1]}: there is no such option"
    if found is None:
        return message
    name, problem = found["name"], found["problem"]
    if choice := re.fullmatch(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", problem):
        option = "" if name.isupper() else f"{name} "  # COMMAND is no option
        return f"{option}{choice[1]}: it must be one of {choice[2]}".replace("'", "")
    if value := re.fullmatch(r"invalid (\w+) value: '(.*)'", problem):
        return f"{name} {value[2]}: it must be {RULES.get(value[1], value[1])}"
    if problem.startswith("expected"):
        return f"{name} needs a value"
    return f"{name} {problem}"


def count(text: str) -> int:
    """The type of an option: a whole number, 1 or more."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: it must be a whole number, 1 or more")
    return int(text)

"""argparse whose errors are one line without the usage, for programs with few options. The programs
that train declare their options as dataclasses in project/options.py."""

from __future__ import annotations

import argparse
from typing import NoReturn

from training.errors import refuse


class Parser(argparse.ArgumentParser):
    """Prints the description unwrapped; answers a mistake with one line and status 2."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings, allow_abbrev=False)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        refuse(f"{self.prog}: error: {message}; --help explains all\n")


def count(text: str) -> int:
    """The type of an option: a whole number, 1 or more."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: it must be a whole number, 1 or more")
    return int(text)

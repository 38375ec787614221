"""The command line of the programs that train. What options there are is in training/options.py,
the rules between them in project/rules.py.

`--config run.yaml` reads options from a file, `--print_config` prints them. The courses' own names,
such as --n_chunk, are in ALIASES. Neither torch nor a model is imported to answer --help.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import yaml
from docstring_parser import parse_from_object
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from project.command_line import is_it, underscored
from training.options import WORDS, Options

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

O = TypeVar("O", bound=Options)  # noqa: E741

documented = cache(parse_from_object)  # reads the source of a class, for a tenth of a second


def parse_options(
    kind: type[O], description: str | None, argv: Sequence[str] | None = None
) -> tuple[O, set[str]]:
    """The options on the command line, as an object of the program's class, and which of them were
    typed, also in a file.

    Prints help and ends with status 0, or prints one line on a mistake and ends with status 2.
    """
    given = underscored(sys.argv[1:] if argv is None else argv)
    parser = _Parser(kind, description, given)
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument("--config", action="append", default=[])
    first, others = files.parse_known_args(given)  # files first: the command line wins
    typed = {name for path in first.config for name in parser.check_file(path)}
    typed |= {name for name, value in _values(others) if parser.check(name, value)}
    if not {"n_epochs", "num_batches"} - {name for name, _ in _values(given)}:
        parser.error("--n_epochs and --num_batches both say when the run ends: leave one out")
    found = parser.parse_args([f"--config={path}" for path in first.config] + others)
    options = kind(**{name: _plain(getattr(found, name)) for name in shown(kind)})
    if "strategy" in parser.hints and not fits(parser.hints["strategy"], str(found.strategy)):
        choices = get_args(parser.hints["strategy"])
        if found.strategy is None:
            parser.error(f"name a strategy first: {', '.join(choices)}")
        near = is_it(found.strategy, choices)
        parser.error(f"strategy {found.strategy}: it must be {' or '.join(choices)}{near}")
    for name, known in NAMES.items():
        value = getattr(options, name) or known[0]
        if "/" in value or Path(value).exists() or value in known:
            continue  # a name on the hub, or a folder
        if near := is_it(value, known):
            parser.error(f"--{name} {value}: there is no such {name}{near}")
    return options, typed


def shown(kind: type[Options]) -> list[str]:
    """The names of the options that a program has."""
    names = [field.name for group in kind.GROUPS for field in fields(group)]
    own = "strategy" in vars(kind).get("__annotations__", {})
    return ["strategy", *names] if own else names


def begin(kind: type[Options], description: str | None) -> None:
    """Answers --help, refuses a mistyped option, and lets Ctrl-C end the process at once, before
    torch is imported, which takes seconds. (A library may swallow a KeyboardInterrupt during its
    import; `training.launch.errors.signals_end` takes over later.)"""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    parse_options(kind, description)


def as_typed(message: str, given: Sequence[str]) -> str:
    """The message, with the alias that was typed in place of the option's name."""
    for alias, name in ALIASES.items():
        if any(word.partition("=")[0] == f"--{alias}" for word in underscored(given)):
            message = re.sub(rf"--{name}\b", f"--{alias}", message)
    return message


def fits(hint: Any, value: str) -> bool:
    """Whether an option of this type can have the value."""
    if get_origin(hint) is Literal:
        return value in map(str, get_args(hint))
    if kinds := get_args(hint):  # of a union
        return any(fits(kind, value) for kind in kinds)
    if hint is bool:
        return value.lower() in ("true", "false")
    if hint is type(None):
        return value == "null"
    try:
        hint(value)
    except ValueError:
        return False
    return True


def _rule(hint: Any, value: str) -> str:
    """What the values of a type must be."""
    kinds = [hint] if get_origin(hint) is Literal else [*(get_args(hint) or [hint])]
    rules = [WORDS[kind.__name__] for kind in kinds if getattr(kind, "__name__", "") in WORDS]
    choices = [str(c) for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)]
    rules += [" or ".join(choices)] if choices else []
    return f"it must be {', or '.join(rules)}{is_it(value, choices)}"


def _values(given: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """The options of a command line under their own names, and their values, if they have one."""
    for word, following in zip(given, [*given[1:], "--"], strict=False):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            own = ALIASES.get(name[2:], name[2:])
            yield own, value if equals else None if following.startswith("--") else following


def _plain(value: Any) -> Any:
    """A number as Python's own type: torch.compile does not know jsonargparse's restricted ones."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if isinstance(value, int) else float(value)
    return value


class _Help(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Help texts as they are written in training/options.py, without types."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=118)

    def _get_help_string(self, action: Any) -> str:
        printing = action.dest == "print_config"
        return "print the options as a YAML file for --config" if printing else str(action.help)


class _Parser(ArgumentParser):
    """Reports a mistake in one line, once for all ranks of torchrun. Every value is checked before
    the library sees it, so that the line has our words."""

    def __init__(
        self, kind: type[Options] | None = None, description: str | None = None,
        given: Sequence[str] = (), **settings: Any,
    ) -> None:  # fmt: skip
        """The library makes parsers of this class, too, without a `kind`."""
        if kind is None:
            super().__init__(**settings)
            return
        super().__init__(
            description=description, formatter_class=_Help, usage=argparse.SUPPRESS,
            allow_abbrev=False,
        )  # fmt: skip
        hints = get_type_hints(kind)
        self.given = given
        self.hints = {name: hints[name] for name in shown(kind)}
        self.others = {f.name: g for g in Options.__mro__[1:-1] for f in fields(g)}  # by option
        defaults = {field.name: field.default for field in fields(kind)}
        helps = {  # an option that a program declares again may leave its help out
            entry.args[1]: " ".join(entry.description.split())
            for base in reversed(kind.__mro__[:-1])
            for entry in documented(base).params
            if entry.description
        }
        if "strategy" in self.hints:
            self.add_argument("strategy", nargs="?", help=helps["strategy"])
        for group in kind.GROUPS:
            section = self.add_argument_group(group.__doc__)
            for name in [field.name for field in fields(group)]:
                hint, default, text = hints[name], defaults[name], helps[name]
                names = [name, *(alias for alias, option in ALIASES.items() if option == name)]
                more: dict[str, Any] = {}
                if hint is bool:  # --resume is --resume true
                    more = {"nargs": "?", "const": True, "metavar": "BOOL"}
                elif any(word in str(hint) for word in WORDS):
                    more = {"metavar": "N"}
                if not (default is None or isinstance(default, bool) or "default" in text):
                    text += f" [{default}]"
                flags = [f"--{n}" for n in names]
                hint = hint | None if default is None else hint
                section.add_argument(*flags, type=hint, default=default, help=text, **more)
        self.add_argument("--config", action="config", help="YAML file with options")

    def check(self, name: str, value: str | None) -> str:
        """The option's name, if there is such an option and it can have the value; otherwise ends
        the program."""
        if name in ("help", "config", "print_config", ""):
            return ""
        if name not in self.hints:
            self.error(self._unknown(name))
        if value is not None and not fits(self.hints[name], value):
            self.error(f"--{name} {value}: {_rule(self.hints[name], value)}")
        return name

    def check_file(self, path: str) -> set[str]:
        """The options in a file, checked likewise."""
        try:
            found = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
            given = {str(k): None if v is None else str(v) for k, v in found.items()}
        except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
            reason = getattr(error, "strerror", None) or "it is no YAML file of options"
            self.error(f"--config {path}: {reason}; --print_config writes one")
        return {self.check(name, value) for name, value in given.items() if value is not None}

    def _unknown(self, name: str) -> str:
        """That there is no such option, and which one may have been meant."""
        if (twin := TWINS.get(name)) in self.hints:
            return f"--{name}: there is no such option; is it --{twin}?"
        if name in self.others:
            group = self.others[name].__doc__
            return f"--{name}: an option for {group}, which this program does not have"
        known = [*self.hints, *(alias for alias, own in ALIASES.items() if own in self.hints)]
        return f"--{name}: there is no such option" + is_it(name, known).replace("it ", "it --")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # noqa: ARG002
        """The option, the value, the rule."""
        from training.launch.errors import refuse

        text = as_typed(" ".join(message.split()), self.given)
        refuse(f"{self.prog}: error: {text}; --help explains all\n")

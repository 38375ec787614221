"""The programs that a person runs. If a library is missing, they say what to type."""

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

_BIN = Path(os.path.relpath(Path(__file__).parents[1] / ".venv" / "bin"))
for _library in ("torch", "docstring_parser", "tqdm"):
    if find_spec(_library) is None:
        _first = "" if _BIN.exists() else "`make train` makes one; then "
        _line = shlex.join([f"{_BIN}/python", *sys.orig_argv[1:]])
        raise SystemExit(
            f"{sys.executable} has no {_library}: the environment is not active; {_first}type "
            f"{_line}, or source {_BIN}/activate first"
        )

"""Programs that only some machines have."""

from __future__ import annotations

import shutil
import warnings

import pytest


def program(*names: str, tests: str) -> str:
    """The path of the first that is here. Where there is none, the test is skipped, and a warning,
    which stands at the end of the suite's output, says what was not tested."""
    for name in names:
        if path := shutil.which(name):
            return path
    missing = f"there is no {' or '.join(names)}: {tests} was not tested"
    warnings.warn(missing, stacklevel=2)
    pytest.skip(missing)

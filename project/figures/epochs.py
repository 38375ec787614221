"""The results of a run's epochs, read back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from training.launch.errors import UserError

Epochs = list[dict[str, float]]  # the results of one rank, per epoch


def read_json(path: Path) -> dict[str, Any]:
    """The content of a file that a run wrote. Raises UserError."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); make the run again") from None


def read_epochs(workdir: Path, *prefixes: str) -> Epochs:
    """The results of all epochs, in order, each with its number, from 1, as `epoch`. By default
    rank 0's, or the pipeline's. Raises UserError if there are none, or one cannot be read."""
    prefixes = prefixes or ("rank0_results", "eval_results")
    paths = [path for prefix in prefixes for path in workdir.glob(f"{prefix}_epoch*.json")]
    numbers = {int(path.stem.rpartition("epoch")[2]) + 1: path for path in paths}
    if not numbers:
        raise UserError(
            f"{workdir} has no {prefixes[0]}_epoch0.json; name the --workdir of a finished run"
        )
    results: Epochs = []
    for number, path in sorted(numbers.items()):
        values = {key: math.nan if x is None else x for key, x in read_json(path).items()}
        results.append({**values, "epoch": number})
    return results

"""The text of the benchmarks: Multi30k if it is there, else the built-in text."""

from __future__ import annotations

import tempfile
from pathlib import Path

from training.launch.world import World
from training.tasks.texts import Texts, load_pairs

REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "multi30k"


def benchmark_texts(n_train: int = 5000, n_validation: int = 1000, n_test: int = 100) -> Texts:
    """Pairs of Multi30k, if its folder is beside the project, else of the built-in text."""
    sizes: dict[str, int | None] = {
        "train": n_train, "validation": n_validation, "test": n_test
    }  # fmt: skip
    dataset = str(REAL) if REAL.is_dir() else "builtin"
    with tempfile.TemporaryDirectory() as folder:
        return load_pairs(dataset, "de", "en", sizes, 2, World(), Path(folder))


def text_name() -> str:
    """The name of this text in a table."""
    return "Multi30k" if REAL.is_dir() else "the built-in text"

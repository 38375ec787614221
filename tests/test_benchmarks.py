"""Every contestant of a benchmark takes one step, in a tiny model. Layers are called through
`nn.Module`, so mypy does not see when a benchmark and what it measures disagree."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks import recompute
from tests.ranks import Ranks
from training.launch.world import World
from training.tasks.gpt2 import gpt2_config

SMALL = partial(gpt2_config, n_layer=1, n_embd=16, n_head=2)  # instead of a benchmark's own size


def config() -> Any:
    return SMALL("gpt2-mini", 64, 8, dropout=0.0)


TOKENS = {"SEQUENCES": 4, "LENGTH": 8, "VOCAB": 64}
BLOCKS = {"WIDTH": 16, "LENGTH": 8, "BATCH": 8, "use_cores": list}  # the session keeps its cores
STAGES = BLOCKS | {"MICROBATCHES": (4,)}
CUT = {"WIDTH": 24, "VOCABULARY": 64, "T": 8, "PUBLISHED": 65}
CASES: dict[str, tuple[str, dict[str, Any], list[Any]]] = {
    "data_parallel": ("_rank", TOKENS | {"STEPS": 1, "gpt2_config": SMALL}, []),
    "fsdp": ("_speed", TOKENS | {"_config": config}, []),
    "pipeline": ("_rank", STAGES, [[0]]),
    "process_pipeline": ("_rank", STAGES | {"FEWER_ROUNDS": 0}, [[0]]),
    "chunks": ("_rank", STAGES | {"USUAL": (4,), "RECORDED": 1}, [[0]]),
    "tensor": ("_speed", CUT, []),
}


def one_round(rank: int, size: int, name: str, function: str, args: list[Any], out: Path) -> None:
    """What the benchmark has its ranks do, with the round alone that is not timed."""
    sizes = {"ROUNDS": 0} | CASES[name][1]
    with ExitStack() as patches:
        for key, value in BLOCKS.items() if sizes.keys() >= BLOCKS.keys() else ():
            patches.enter_context(patch(f"benchmarks.pipeline.{key}", value))
        for key, value in sizes.items():
            patches.enter_context(patch(f"benchmarks.{name}.{key}", value))
        benchmark = import_module(f"benchmarks.{name}")
        getattr(benchmark, function)(World(rank, size), *args, out)


@pytest.mark.parametrize("name", CASES)
def test_contestants_take_a_step(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """They compare their losses and gradients themselves."""
    function, _, args = CASES[name]
    ranks.run(one_round, name, function, args, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert len(found[0] if name == "chunks" else found) > 3


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bytes_of_a_tensor_rank(ranks: Ranks, tmp_path: Path, sequence_parallel: bool) -> None:
    ranks.run(one_round, "tensor", "_held", [sequence_parallel], tmp_path / "out.pt")
    assert min(torch.load(tmp_path / "out.pt", weights_only=True)) > 0


def test_meshes_take_a_step(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(one_round, "tensor", "_mesh_steps", [], tmp_path / "out.pt")
    assert len(torch.load(tmp_path / "out.pt", weights_only=True)) == 7


@pytest.mark.parametrize("rows", [recompute.memory, recompute.times])
def test_recomputation(monkeypatch: pytest.MonkeyPatch, rows: Callable[[], Any]) -> None:
    sizes = {"BLOCKS": 2, "LENGTH": 8, "COUNTED": 16, "TIMED": 16, "MICROBATCHES": (2,)}
    for name, value in (sizes | {"ROUNDS": 2}).items():
        monkeypatch.setattr(recompute, name, value)
    assert rows()

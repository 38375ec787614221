"""Every contestant of a benchmark takes one step, in a tiny model. Layers are called through
`nn.Module`, so mypy does not see when a benchmark and the code that it measures disagree. And what
the documentation says of the planner's errors is what benchmarks/planner.py finds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from benchmarks import calibrate, data_parallel, generation, planner, recompute
from planning.cost import blocks_of_stages
from planning.describe import Layout, Machine, machine
from planning.passes import group
from tests.plain_gpt2 import build_model
from tests.ranks import Ranks
from training.launch.world import World
from training.tasks.gpt2 import gpt2_config
from training.tasks.tokens import get_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SMALL = partial(gpt2_config, dropout=0.0, n_layer=1, n_embd=16, n_head=2)


TOKENS = {"SEQUENCES": 4, "LENGTH": 8, "VOCAB": 64, "CONFIG": partial(SMALL, "gpt2-mini", 64, 8)}
STAGES = {
    "WIDTH": 16,
    "LENGTH": 8,
    "BATCH": 8,
    "USUAL": (4,),
    "FURTHER": (),
    "use_cores": list,
}  # fmt: skip  (the session keeps its cores)
CUT = {"WIDTH": 24, "VOCABULARY": 64, "T": 8, "PUBLISHED": 65}
FEW = {"EXPERTS": 4, "WIDTH": 16, "POSITIONS": 32, "use_cores": list}
SMALLEST = {"EXPERTS": 4, "B": 4, "T": 8, "VOCABULARY": 64, "CONFIG": TOKENS["CONFIG"]}
CASES: dict[str, tuple[str, str, dict[str, Any], list[Any]]] = {
    "replicated": ("data_parallel", "_speed", TOKENS, [{}, data_parallel.REPLICATED]),
    "sharded": ("data_parallel", "_speed", TOKENS, [{"n_layer": 2}, data_parallel.SHARDED]),
    "pipeline": ("pipeline", "_rank", STAGES, [[0]]),
    "tensor": ("tensor", "_speed", CUT, []),
    "context": ("context", "_times", {"TIMED": 16, "VOCABULARY": 64}, []),
    "memory of positions": ("context", "_memory", {"VOCABULARY": 64}, ["heads", 16]),
    "products of experts": ("experts", "_products", FEW, [0.5]),
    "experts": ("experts", "_steps", SMALLEST, []),
    "host": ("host", "_rank", {"BLOCKS": 2}, []),
}


def one_round(rank: int, size: int, case: str, function: str, args: list[Any], out: Path) -> None:
    """What the benchmark has its ranks do, with the round alone that is not timed."""
    name, _, sizes, _ = CASES[case]
    with ExitStack() as patches:
        for key, value in ({"ROUNDS": 0} | sizes).items():
            patches.enter_context(patch(f"benchmarks.{name}.{key}", value))
        getattr(import_module(f"benchmarks.{name}"), function)(World(rank, size), *args, out)


@pytest.mark.parametrize("case", CASES)
def test_contestants_take_a_step(ranks: Ranks, case: str, tmp_path: Path) -> None:
    """They compare their losses and gradients themselves."""
    _, function, _, args = CASES[case]
    ranks.run(one_round, case, function, args, tmp_path / "out.pt")
    assert len(torch.load(tmp_path / "out.pt", weights_only=True)) > 1


def test_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    """All modes compute the same loss, which it compares."""
    for name, value in {"BLOCKS": 2, "LENGTH": 8, "WIDTH": 16, "M": 2, "ROUNDS": 2}.items():
        monkeypatch.setattr(recompute, name, value)
    monkeypatch.setattr(recompute, "write_rows", lambda *_: None)
    assert [row.name for row in recompute.run()][:2] == ["gpipe, never", "gpipe, always"]


def test_texts_of_any_length_are_translated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch of a short and a long one, the long one is asked for positions that the model has
    not; what is said there does not count."""
    monkeypatch.setattr(generation, "LENGTH", 16)
    sources = ["a", "a b c d e f", "a b"]
    pairs = [{"de": source, "en": "c"} for source in sources]
    tokenizer = get_tokenizer(pairs, 300, "de", "en", tmp_path)
    model = generation.with_more_positions(build_model(SMALL("gpt2-mini", 320, 16), 0))
    one_by_one, together = (generation.translated(model, sources, tokenizer, n) for n in (1, 3))
    assert one_by_one == together and len(together) == 3


def test_the_errors_on_runs_that_nothing_was_fitted_to_are_those_of_the_documentation() -> None:
    text = (ROOT / "docs" / "planning_details.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\w-]+) \|[^|]*\| (\d+) \| ([\d.]+) % \| ([\d.]+) % \|", text, re.M)
    assert [name for name, *_ in rows] == list(planner.UNSEEN)
    for name, number, mean, worst in rows:
        table = planner.read_table(planner.RUNS / f"{name}.csv")
        found = planner.summary(table, machine(*planner.UNSEEN[name]))
        assert found["rows"] == int(number)
        assert 100 * found["time_error"] == pytest.approx(float(mean), abs=0.5)
        assert 100 * found["time_worst"] == pytest.approx(float(worst), abs=0.5)


def test_what_is_left_out_of_a_fit_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every model and every number of nodes in turn, of both tables; a fit never sees its rows."""
    head = "layers,hidden,heads,seq,gpus,gpus_per_node,global_batch,seconds_per_step\n"
    rows = {
        "one": ("2,64,4,128,8,8,64,1.0", "2,32,4,128,8,8,64,1.1"),
        "more": ("2,32,4,128,16,8,64,1.2", "2,32,4,128,16,8,64,"),
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.csv").write_text(head + "\n".join(lines))
    monkeypatch.setattr(planner, "TABLES", {"h100": (("one", "more"), ())})
    seen = []

    def fitted(begin: Machine, tables: list[list[planner.Row]]) -> Machine:
        seen.append([(row["hidden"], row["gpus"]) for table in tables for row in table])
        return begin

    monkeypatch.setattr(planner, "fitted", fitted)
    planner.calibrations(tmp_path, "h100")
    said = capsys.readouterr().out.split("\n\n")
    runs = [("64", "8"), ("32", "8"), ("32", "16")]  # the last has no seconds
    assert dict(zip([part.strip().split("\n")[0] for part in said], seen, strict=True)) | {
        "h100, random fifth left out": None
    } == {
        "h100, nothing left out": runs, "h100, random fifth left out": None,
        "h100, hidden 32 left out": runs[:1], "h100, hidden 64 left out": runs[1:],
        "h100, nodes 1 left out": runs[2:], "h100, nodes 2 left out": runs[:2],
    }  # fmt: skip
    assert [part.count("  rows ") for part in said][2:] == [1, 1, 1, 1]
    assert "rows 2," in said[2]


def test_what_a_table_does_not_say_is_assumed(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "# a comment\nlayers,hidden,heads,seq,gpus,tp,pp,zero,global_batch,schedule,recompute\n"
        "24,1024,16,1024,8.0,2,,3,64,,full\n22,2304,24,1024,,,8,,64,interleaved,\n"
    )
    (sizes, sharded, fused), (model, staged, nodes) = (
        planner.row_of(row, machine("a100-80gb")) for row in planner.read_table(path)
    )
    assert (sizes.vocab, sizes.ffn, sizes.tied) == (51200, 4096, True)
    assert sharded == Layout(
        8, dp=4, tp=2, batch_size=64, zero=3, recompute="always", order="pp-dp-tp"
    )
    assert (fused.attention, fused.loss) == ("flash", "fused")
    # 22 blocks, embedding and head: 24 equal parts.
    assert (staged.schedule, staged.chunks, staged.gpus) == ("interleaved", 3, 8)
    assert blocks_of_stages(model, staged, nodes) == [0, *[1] * 22, 0]


def test_a_machine_has_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-reduce that is predicted takes as long as one that was measured."""
    measured = [100e-6 + size * 1024 / 2e9 for size in calibrate.MESSAGES]

    def spawn(_: Callable[..., None], args: tuple[Any, ...], nprocs: int, **_how: bool) -> Mock:
        assert nprocs == args[2] == 2
        figures = {
            "best": 80e9, "flops": 60e9, "added": 40e9, "moved": 10e9, "kernel": 2e-6,
            "skew": 0.1, "peak": 0.3,
        }  # fmt: skip
        sums = zip(calibrate.MESSAGES, measured, strict=True)
        figures |= {f"{kib} KiB": took for kib, took in sums}
        Path(args[1]).write_text(json.dumps(figures))
        return Mock()

    monkeypatch.setattr(calibrate, "spawn", spawn)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    path = tmp_path / "mine.yaml"
    monkeypatch.setattr("sys.argv", ["calibrate", str(path)])
    calibrate.main()
    mine = machine(str(path))
    assert mine.per_second("fp32") == pytest.approx(60e9)
    assert mine.memory_per_second == pytest.approx(10e9)
    assert (mine.gpus_per_node, mine.reserve_gb, mine.kernel_us, mine.skew) == (2, 0.3, 2.0, 0.1)
    predicted = [group(mine, 2, 1).reduce(1024 * size) for size in calibrate.MESSAGES]
    assert predicted == pytest.approx(measured, rel=0.01)
    # Four ranks on two cores compute and copy in turns, each half as fast.
    half, ring = mine.shared(4), group(replace(mine, gpus_per_node=4), 4, 1)
    assert half.per_second("fp32") == mine.per_second("fp32") / 2
    assert half.kernel_us == 2 * mine.kernel_us
    assert group(half, 4, 1).reduce(1e6) == pytest.approx(2 * ring.reduce(1e6))
    assert mine.shared(2) == mine

"""The search finds what trying everything finds, and its commands are train.py's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planning.cost import PricedStep
from planning.describe import Layout, machine, model_of
from planning.search import command, layouts, neighbours, search, what_if, why
from project.train import parse_train

A100 = machine("a100-80gb")
MODEL = model_of("gpt2-medium")


def test_the_search_finds_what_trying_everything_finds() -> None:
    best, near = search(MODEL, 8, A100, 64, top=3)
    everything = [
        found for layout in layouts(MODEL, 8, 64) if (found := PricedStep(MODEL, layout, A100)).fits
    ]
    fastest = sorted(found.seconds for found in everything)[:3]
    assert [found.seconds for found in best] == pytest.approx(fastest)
    assert best[0].layout in near
    reasons = {change: why(best[0], other) for change, other in neighbours(best[0])}
    assert any("slower: " in reason for reason in reasons.values())
    assert all("-" not in reason.split(" slower")[0] for reason in reasons.values())


def test_positions_are_whole_where_that_is_asked_for() -> None:
    """Also of a cut model, and with one choice changed."""
    cut = [layout.tp for layout in layouts(MODEL, 8, 64)]
    assert [x.tp for x in layouts(MODEL, 8, 64, sequence_parallel=False)] == cut
    best = PricedStep(MODEL, Layout(8, dp=4, tp=2, batch_size=64), A100)
    near = [step.layout for _, step in neighbours(best)]
    assert max(x.tp for x in near) == 4 and not any(x.sequence_parallel for x in near)


def test_a_better_machine_is_never_slower() -> None:
    """The chosen layout competes there, too; the closed form ranks four others before it here."""
    best, near = search(model_of("gpt2"), 8, machine("h100"), 8)
    gains = [float(text.split(", ")[-1].split("%")[0]) for text in what_if(best[0], near)]
    assert len(gains) == 4
    assert min(gains) >= 0


def test_nothing_fits_is_said() -> None:
    big = model_of(None, layers=96, hidden=12288, heads=96, vocab=51200, seq=2048)
    least = min(PricedStep(big, layout, A100).memory_gb for layout in layouts(big, 8, 8))
    with pytest.raises(ValueError, match=rf"no layout fits; .* needs {least:.0f} GiB of 75: more"):
        search(big, 8, A100, 8)


def test_nodes_share_the_ranks_equally() -> None:
    """12 GPUs of nodes with 8 are 2 x 6; of nodes with 5, 3 x 4."""
    (layout, *_), small = layouts(MODEL, 12, 48), replace(A100, gpus_per_node=5)
    for machine_, ranks in ((A100, "2 --nproc-per-node 6"), (small, "3 --nproc-per-node 4")):
        assert f"--nnodes {ranks} --rdzv" in command(MODEL, layout, machine_, None)


def test_train_accepts_the_commands_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kind: single, ddp, fsdp, 3d with stages, chunks, parts of matrices, ZeRO."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    model, kinds = replace(MODEL, layers=16, vocab=512, seq=128), dict[str, list[str]]()
    for gpus in (1, 8):
        for layout in layouts(model, gpus, 64, micro_batch=2):
            words = command(model, layout, A100, None).split()
            kind = (words[2], layout.schedule, layout.zero, layout.tp > 1, layout.recompute)
            kinds[str(kind)] = words[2:]
    assert {words[0] for words in kinds.values()} == {"single", "ddp", "fsdp", "3d"}
    for words in kinds.values():
        found: Any = parse_train(None, words)
        assert (found.batch_size, found.n_layer) == (64, 16)
        assert found.dp * found.pp * found.tp == found.world_size

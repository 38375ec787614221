"""The search finds what trying everything finds, and its commands are train.py's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planning.cost import GIB, Memory, PricedStep
from planning.describe import MODELS, Layout, machine, model_of
from planning.search import command, cut, doubts, kinds, layouts, options, preferred, search, why
from project.train import parse_train
from tests.which import see_gpus

ROOT = Path(__file__).resolve().parents[2]
A100 = machine("a100-80gb")
MODEL = model_of("gpt2-medium")


@pytest.mark.parametrize(("name", "gpus", "batch"), [("gpt2-medium", 8, 64), ("gpt2", 16, 48)])
def test_the_search_finds_what_trying_everything_finds(name: str, gpus: int, batch: int) -> None:
    """The layout to take, the fastest of each other cut, and why these are not taken."""
    model = model_of(name)
    best = search(model, gpus, A100, batch, top=5)
    steps = [PricedStep(model, layout, A100) for layout in layouts(model, gpus, batch)]
    fitting = sorted((step for step in steps if step.fits), key=lambda step: step.seconds)
    taken = preferred(fitting)
    fastest: dict[Any, PricedStep] = {cut(taken.layout): taken}
    for step in fitting:
        fastest.setdefault(cut(step.layout), step)
    wanted = [step.seconds for step in list(fastest.values())[:5]]
    assert [step.seconds for step in best] == pytest.approx(wanted)
    assert len({cut(step.layout) for step in best}) == 5
    for other in best[1:]:
        slower = other.seconds / best[0].seconds - 1
        assert why(best[0], other).startswith(
            (f"{slower:.1%} slower: ", f"equal ({slower:+.1%}): ")
        )


def test_the_fastest_is_preferred_and_of_equal_layouts_the_simplest() -> None:
    """Equal are those of which three digits are. Fewer kinds of parallelism come first, then less
    memory."""

    def step(seconds: float, where: str = "h100", **given: Any) -> PricedStep:
        layout = Layout(**({"gpus": 16, "batch_size": 256} | given))
        priced = PricedStep(MODEL, layout, machine(where))
        vars(priced)["_times"] = [seconds, seconds, seconds]
        return priced

    staged, plain = step(1.0, dp=8, pp=2), step(1.004, dp=16)
    assert (kinds(staged.layout), kinds(plain.layout)) == (2, 1)
    assert preferred([staged, plain]) is plain  # both are 1.00
    assert preferred([staged, step(1.006, dp=16)]) is staged
    sharded = step(1.0041, dp=16, zero=1)
    assert preferred([staged, plain, sharded]) is sharded
    assert why(sharded, staged).startswith("equal: it needs ")
    quick, small = step(1.0, dp=16), step(1.004, dp=16)
    for gib, taken, said in ((8.0, quick, "as much memory"), (8.2, quick, "0.2 GiB less"),
                             (9.2, small, "1.2 GiB less")):  # fmt: skip
        for each, size in ((quick, gib), (small, 8.0)):
            vars(each)["memory"] = [Memory(size * GIB, 0, 0, 0, 0, 0)]
        assert preferred([quick, small]) is taken  # the least memory in whole GiB, then the fastest
        assert why(quick, small) == f"equal: it needs {said}, and 1 kind of parallelism"
    gathered = step(1.0, "h100-megatron", gpus=256, dp=256, zero=3)
    known = step(1.0, "h100-megatron", gpus=256, dp=128, tp=2)
    assert "no run was on more than 16 nodes: nobody knows" in doubts(gathered)
    assert "within 6%" in doubts(known) and "nobody" not in doubts(known)
    for unmeasured in ("b200", "h200"):  # files that are like a measured machine
        said = doubts(step(1.0, unmeasured, dp=16))
        assert "No run was on this machine" in said and "within" not in said
    assert "counted, not measured" in doubts(step(1.0, dp=8, cp=2))
    assert "counted" not in doubts(staged)


def test_long_sequences_and_experts_are_cut() -> None:
    """Only where ranks keep 2,048 positions; experts over the replicas of a model that has some."""
    long = replace(MODEL, seq=8192)
    assert {layout.cp for layout in layouts(MODEL, 8, 64)} == {1}
    assert {(x.cp, x.attention) for x in layouts(long, 8, 64)} == {
        (1, "ring"), (2, "ring"), (2, "heads"), (4, "ring"), (4, "heads")
    }  # fmt: skip
    assert {x.cp for x in layouts(MODEL, 8, 64, cp=8)} == {8}
    some = {(x.tp, x.dp, x.ep) for x in layouts(replace(MODEL, experts=4), 8, 64, pp=1)}
    assert some == {(1, 8, 1), (1, 8, 2), (1, 8, 4)}


def test_replicas_of_shards_spare_a_slow_network() -> None:
    """Two nodes: over a fast network one copy in shards is faster, over a slow one a copy each."""
    model, chosen = MODELS["gpt2-xl"], []
    for network in (200, 1.25):
        where = replace(A100, network_gbs=network)
        best = search(model, 16, where, 64, pp=1, tp=1, cp=1, micro_batch=2)[0]
        chosen.append(best.layout.shards)
        assert ("--shards 8" in options(best.layout)) == (best.layout.shards == 8)
        assert ("replicas of shards" in doubts(best)) == (best.layout.shards == 8)
    assert chosen == [None, 8]
    assert {x.shards for x in layouts(model, 16, 64, 8, zero=3)} == {None, 8}
    assert {x.shards for x in layouts(model, 16, 64, 8, zero=3, shards=16)} == {16}
    whole = Layout(16, 16, micro_batch=1, batch_size=16, zero=1)
    assert replace(whole, shards=4).sharing == 4 and whole.sharing == 16
    copies = PricedStep(model, replace(whole, shards=4), A100).of_shards
    assert (copies.size, copies.inside) == (4, 2)  # 4 copies, two on each of two nodes
    for wrong, said in (
        ({"shards": 3}, "--shards 3 --dp 16"),
        ({"zero": 0}, "--shards 4: without"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(whole, **{"shards": 4, **wrong}).check(model)  # type: ignore[arg-type]


def test_the_documentation_has_the_planners_choice_of_ring_or_heads() -> None:
    """In a table of docs/planning.md, made by the search."""
    text = (ROOT / "docs" / "planning.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\d,]+) \| (\D+.*) \|$", text, re.M)
    assert len(rows) == 5
    for positions, cells in rows:
        model = model_of("llama-3-8b", seq=int(positions.replace(",", "")))
        said = []
        for link in (None, "pcie4", "pcie3"):
            where = machine("h100", None, link)
            step = search(model, 8, where, 8, 1, pp=1, tp=1, recompute="never")[0]
            cp, attention = step.layout.cp, step.layout.attention
            way = f"{attention}, cp {cp}" if cp > 1 else "neither"
            said.append(f"{way}: {step.seconds:.3g} s, {step.memory_gb:.0f} GiB")
        assert cells.split(" | ") == said


def test_why_a_layout_is_slower() -> None:
    best = PricedStep(MODEL, Layout(16, dp=16, micro_batch=4, batch_size=64), A100)
    for change, reason in (
        ({"recompute": "always"}, "% slower: it computes every forward twice"),
        ({"dp": 2, "pp": 8}, r"% slower: \d+% of the step is the filling and draining of its pipe"),
    ):
        other = PricedStep(MODEL, replace(best.layout, **change), A100)
        assert re.search(reason, why(best, other))
    big = model_of("gpt3-175b")
    inside, outside = (
        PricedStep(big, Layout(32, pp=32 // tp, tp=tp, micro_batch=4, batch_size=128), A100)
        for tp in (8, 16)
    )
    assert re.search(r"slower: tp 16 leaves the node: \d+% of the step waits", why(inside, outside))


def test_every_cut_divides_heads_and_the_mlp() -> None:
    """Also where positions are to be whole."""
    for model, cuts in (
        (replace(MODEL, ffn=4098), {1, 2}), (replace(MODEL, heads=4), {1, 2, 4}),
    ):  # fmt: skip
        for given in ({}, {"sequence_parallel": False}):
            assert {layout.tp for layout in layouts(model, 8, 64, **given)} == cuts


def test_a_preset_is_named_with_the_sizes_that_differ() -> None:
    """The length of sequences is an option of its own."""
    layout = Layout(8, dp=8, batch_size=64)
    for model, preset, words in (
        (replace(MODEL, seq=512), "gpt2-medium", "gpt2-medium --vocab_size 50257 "),
        (replace(MODEL, vocab=512, experts=2), "gpt2-medium", "gpt2-medium --vocab_size 512 "),
        (replace(MODEL, layers=5), "gpt2-medium", "gpt2-medium --n_layer 5 "),
        (model_of("gpt3-175b"), "gpt3-175b", "gpt2 --n_layer 96 "),
    ):
        assert f"train.py ddp --model {words}" in command(model, layout, A100, preset)


def test_options_that_differ_from_the_usual_are_shown_and_five_more() -> None:
    """And the schedule, if there are stages."""
    usual, more = "--dp 1 --pp 1 --tp 1 --micro_batch 1", "--zero 1 --precision bf16"
    assert options(Layout(1)) == f"{usual} --precision bf16"
    staged = usual.replace("--pp 1", "--pp 2")
    assert options(Layout(2, pp=2, zero=1)) == f"{staged} --schedule 1f1b {more}"


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
    """One of each kind: single, ddp, fsdp, 3d with stages, chunks, parts of matrices and positions,
    ZeRO, experts."""
    see_gpus(8, monkeypatch)
    model, kinds = replace(MODEL, layers=16, vocab=512, seq=128), dict[str, list[str]]()
    experts = replace(model, experts=4, top_k=2)
    for gpus, sizes, cp in ((1, model, 1), (8, model, 1), (8, model, 2), (8, experts, 1)):
        for layout in layouts(sizes, gpus, 64, micro_batch=2, cp=cp):
            words = command(sizes, layout, A100, None).split()
            kind = (words[2], layout.schedule, layout.zero, layout.tp > 1, layout.recompute)
            kinds[str((*kind, layout.cp > 1, layout.attention, layout.ep > 1))] = words[2:]
    assert {words[0] for words in kinds.values()} == {"single", "ddp", "fsdp", "3d"}
    for words in kinds.values():
        found: Any = parse_train(words)
        assert (found.batch_size, found.n_layer) == (64, 16)
        assert found.dp * found.cp * found.pp * found.tp == found.world_size

"""Tables of measured runs: what they may say, and how right the planner is on those at hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.planner import RUNS, UNSEEN
from planning.cost import PricedStep, blocks_of_stages
from planning.describe import machine, model_of
from planning.table import compared, read_table, row_of, summary

A100 = machine("a100-80gb")
ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT.parent / "shared" / "data" / "planner"


def test_a_table_may_be_short_and_speak_the_words_of_train() -> None:
    row = {
        "layers": "24", "hidden": "1024", "heads": "16", "vocab": "51200", "seq": "1024",
        "gpus": "8", "global_batch": "64", "tp": "2", "zero": "3", "sequence_parallel": "True",
        "recompute": "Full",
    }  # fmt: skip
    model, layout, _ = row_of(row, A100)
    assert (model.ffn, model.tied, layout.dp, layout.pp) == (4096, True, 4, 1)
    found = layout.recompute, layout.precision, layout.sequence_parallel
    assert found == ("always", "bf16", True)
    for change, attribute, value in (
        ({"zero": "FSDP"}, "zero", 3), ({"zero": "ZeRO-2"}, "zero", 2),
        ({"zero": "DDP"}, "zero", 0),
        ({"schedule": "ZB_H1"}, "schedule", "zb"),
        ({"schedule": "sequential"}, "schedule", "sequential"),
        ({"schedule": "none"}, "schedule", "1f1b"),
        ({"schedule": "Interleaved 1F1B", "chunks": "2", "pp": "2"}, "schedule", "interleaved"),
        ({"recompute": "True"}, "recompute", "always"), ({"recompute": "0"}, "recompute", "never"),
    ):  # fmt: skip
        assert getattr(row_of(row | change, A100)[1], attribute) == value
    for change, message in (
        ({"schedule": "dualpipe"}, "schedule is 'dualpipe', and must be one of"),
        ({"precision": "fp8"}, "precision is 'fp8', and must be one of fp32, fp16, bf16"),
        ({"layers": ""}, "layers missing: give them, or a preset, such as gpt2-xl"),
        ({"tp": "two"}, "tp is 'two', and must be a whole number"),
        ({"micro_batch": "0"}, "micro_batch is 0, and must be 1 or more"),
        ({"zero": "4"}, "zero is '4', and must be one of 0, 1, 2, 3"),
        ({"model": "gpt-5", "layers": ""}, "model gpt-5: one of gpt2-mini, gpt2,"),
    ):
        with pytest.raises(ValueError, match=message):
            row_of(row | change, A100)


def test_layouts_of_one_model_are_compared_and_whole_numbers_may_have_a_point() -> None:
    """As pandas writes them if a cell is empty. Sizes count, not what a row calls them."""
    runs = [("gpt2", 8, 2.0), ("gpt2", 4, 1.0), ("gpt2-xl", 8, 9.0), ("gpt2-xl", 16, 9.5)]
    table = [
        {"model": model, "dp": f"{dp}.0", "zero": "1.0", "fits": "1.0",
         "seconds_per_step": str(seconds), "global_batch": "64.0"}
        for model, dp, seconds in runs
    ]  # fmt: skip
    found = compared(table, A100)
    assert [(row["layers"], row["gpus"], row["fits"]) for row in found] == [
        (12, 8, True), (12, 4, True), (48, 8, True), (48, 16, True)
    ]  # fmt: skip
    assert "regret" not in summary(found)  # no two rows have the same model, GPUs and batch
    table[1] |= {"gpus": "8", "dp": "8.0", "gated_mlp": "1"}
    assert "regret" not in summary(compared(table, A100))


def test_the_columns_of_a_table_have_other_names(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "n_layer,n_embd,N_head, vocab_size,seq,gpus,batch_size,more\n2,8,2,9,4,1,3,x, \n,,,,,,\n"
        "4,2,2,9,4,1,3,x,2\n", "utf-8",
    )  # fmt: skip
    row, longer = read_table(path)  # a spreadsheet's last cells and lines are empty
    assert row_of(row, A100)[1].batch_size == 3
    assert "row 2: it has more cells" in compared([row, longer], A100)[1]["problem"]
    head = "layers,hidden,heads,vocab,seq,gpus,global_batch,micro_batc"
    path.write_text(f"{head}\n2,8,2,9,4,1,3,2\n", "utf-8")
    with pytest.raises(ValueError, match="micro_batc is unknown; did you mean micro_batch"):
        read_table(path)


def test_a_table_may_be_silent(tmp_path: Path) -> None:
    """A preset in the place of sizes; what is not known; a run that ended out of memory."""
    path = tmp_path / "runs.csv"
    path.write_text(
        "model,pp,tp,batch_size,gpus,chunks,precision,seconds_per_step,memory_gb,fits\n"
        "llama-3-8b,2,,8,,none,amp_bf16,1.5,None,none\nllama-3-8b,,2,8,8,-,,OOM,,\n",
        "utf-8",
    )
    table = read_table(path)
    (model, layout, _), (_, other, _) = (row_of(row, A100) for row in table)
    assert (model, layout.gpus, layout.pp) == (model_of("llama-3-8b"), 2, 2)
    assert (other.dp, other.tp, other.precision) == (4, 2, "bf16")
    assert row_of(table[1], machine("t4"))[1].precision == "fp16"
    found = compared(table, A100)
    assert [(row["seconds_per_step"], row["memory_gb"], row["fits"]) for row in found] == [
        (1.5, None, None),
        (None, None, False),
    ]


def test_a_table_may_say_whose_loss_it_is() -> None:
    """Where it is silent, ZeRO-2 and 3 have a fused loss, everything else the machine's. Chunks are
    Megatron-LM's on every machine."""
    row = {"model": "gpt2", "gpus": "8", "global_batch": "64"}
    for change, loss in (
        ({}, "plain"), ({"zero": "3"}, "fused"), ({"zero": "3", "loss": "plain"}, "plain"),
    ):  # fmt: skip
        assert row_of(row | change, A100)[2].loss == loss
    with pytest.raises(ValueError, match="loss is 'sharded', and must be one of plain, fused"):
        row_of(row | {"loss": "sharded"}, A100)
    nodes = row_of(row | {"pp": "2", "chunks": "2"}, machine("h100"))[2]
    assert (nodes.balance, nodes.gathered) == ("uniform", "again")


@pytest.mark.parametrize(("layers", "chunks"), [(22, 3), (30, 2), (62, 2)])
def test_embedding_and_head_may_count_as_a_block_each(layers: int, chunks: int) -> None:
    """24, 32 and 64 equal parts, of which the first and the last have a block less: the sizes of
    the Zero Bubble paper."""
    ranks = 32 if layers == 62 else 8
    row = {
        "layers": str(layers), "hidden": "2304", "heads": "24", "seq": "1024", "pp": str(ranks),
        "global_batch": "64", "schedule": "1F1B-I",
    }  # fmt: skip
    model, layout, nodes = row_of(row, A100)
    assert (layout.schedule, layout.chunks) == ("interleaved", chunks)
    blocks, each = blocks_of_stages(model, layout, nodes), (layers + 2) // (ranks * chunks)
    assert blocks == [each - 1, *[each] * (ranks * chunks - 2), each - 1]
    assert PricedStep(model, layout, nodes, legal=False).seconds > 0


@pytest.mark.skipif(not TABLES.is_dir(), reason=f"no tables of measured runs in {TABLES}")
@pytest.mark.parametrize(
    ("table", "name", "limits"),
    [
        ("playbook_one_node_h100", "h100", {"time_error": 0.05, "memory_error": 0.06}),
        ("narayanan2021_table1_a100", "a100-80gb", {"time_error": 0.04, "time_worst": 0.11}),
    ],
)  # fmt: skip
def test_errors_on_measured_runs(table: str, name: str, limits: dict[str, float]) -> None:
    found = summary(compared(read_table(TABLES / f"{table}.csv"), machine(name)))
    assert [what for what, limit in limits.items() if found[what] >= limit] == []
    assert found.get("pairs_in_order", 1) > 0.9


def test_the_errors_on_runs_that_nothing_was_fitted_to_are_those_of_the_documentation() -> None:
    text = (ROOT / "docs" / "planning_details.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\w-]+) \|[^|]*\| (\d+) \| ([\d.]+) % \| ([\d.]+) % \|", text, re.M)
    assert [name for name, *_ in rows] == list(UNSEEN)
    for name, number, mean, worst in rows:
        found = summary(compared(read_table(RUNS / f"{name}.csv"), machine(*UNSEEN[name])))
        assert found["rows"] == int(number)
        assert 100 * found["time_error"] == pytest.approx(float(mean), abs=0.5)
        assert 100 * found["time_worst"] == pytest.approx(float(worst), abs=0.5)

"""The cost model: what can be counted by hand, monotone where it must be, and right on tables of
measured runs where those are at hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import formulas
from benchmarks.planner import RUNS, UNSEEN
from planning.cost import Group, PricedStep, blocks_of_stages, group, predict, simulator
from planning.describe import MACHINES, Layout, machine, model_of
from planning.search import command, layouts, neighbours, search, what_if, why
from planning.table import compared, read_table, row_of, summary
from project.plan import main
from project.train import parse_train

A100 = machine("a100-80gb")
MODEL = model_of("gpt2-medium")
ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT.parent / "shared" / "data" / "planner"


def seconds(machine_name: str = "a100-80gb", **layout: object) -> float:
    given = {"gpus": 8, "dp": 8, "batch_size": 64, "micro_batch": 4} | layout
    return predict(MODEL, Layout(**given), machine(machine_name)).seconds  # type: ignore[arg-type]


def test_every_machine_can_be_read_and_predicts() -> None:
    names = {path.stem for path in MACHINES.glob("*.yaml")}
    assert names == {"a100-40gb", "a100-80gb", "b200", "h100", "h200", "t4", "v100"}
    slowest_first = sorted(names, key=lambda name: -seconds(name, precision="fp16"))
    assert slowest_first[:2] == ["t4", "v100"]
    assert slowest_first[-1] == "b200"


def test_a_ring_takes_what_the_formula_says() -> None:
    link = formulas.Link(1e9, 1e-5)
    for size in (2, 3, 8):
        ring = Group(size, size, 1e9, 1e-5, 1e-3)
        assert ring.reduce(1e6) == pytest.approx(formulas.all_reduce_seconds(1e6, size, link))
    assert Group(1, 1, 1e9, 1e-5, 1e-3).reduce(1e6) == 0


def test_groups_share_the_network_of_their_nodes() -> None:
    """8 GPUs in a node, whose network carries 200 GB/s, 85 % of it used: a group with all 8 GPUs of
    a node has it alone, a group with one has an eighth. In a node it is NVLink."""
    inside = 0.79 * 300e9
    assert group(A100, 8, 1)[:3] == (8, 8, inside)
    assert group(A100, 16, 1)[:3] == (16, 8, 0.85 * 200e9)
    assert group(A100, 16, 8)[:3] == (16, 1, 0.85 * 200e9 / 8)
    far, near = group(A100, 512, 8), group(A100, 8, 1)
    assert far.reduce(1e3) < 2 * far.scatter(1e3)  # small messages take the tree
    assert near.reduce(1e9) == 2 * near.scatter(1e9)


def test_memory_is_what_can_be_counted() -> None:
    """gpt2-medium without recomputation in bf16: 2 bytes a parameter, 4 its gradient, 12 of the
    optimizer, and what ZeRO shards of them. Under ZeRO-3 the parameters are in fp32, and the
    optimizer has no others."""
    for zero, bytes_each in (
        (0, (2, 4, 12)), (1, (2, 4, 12 / 8)), (2, (2, 4 / 8, 12 / 8)), (3, (4 / 8, 4 / 8, 8 / 8)),
    ):  # fmt: skip
        layout = Layout(8, dp=8, batch_size=64, micro_batch=4, zero=zero)
        (found,) = predict(MODEL, layout, A100).memory
        assert found[:3] == pytest.approx([MODEL.parameters * size for size in bytes_each])
    # 1F1B's stage s of 4 holds 4 - s micro-batches; the last one logits, too.
    staged = predict(MODEL, Layout(4, pp=4, batch_size=64, micro_batch=4), A100).memory
    one = staged[2].activations / 2
    assert [m.activations for m in staged[:3]] == pytest.approx([4 * one, 3 * one, 2 * one])
    assert staged[3].activations > one
    again = Layout(4, pp=4, batch_size=64, micro_batch=4, recompute="always")
    less = predict(MODEL, again, A100).memory[0].activations
    assert less == 4 * 6 * 4 * 1024 * 1024 * 2  # 4 held, 6 blocks' inputs of 4 x 1024 x 1024 x 2 B


def test_the_parts_of_a_step_add_up_to_it() -> None:
    for given in (
        {"dp": 8}, {"dp": 2, "pp": 2, "tp": 2, "zero": 1}, {"dp": 1, "pp": 8, "schedule": "zb"},
        {"dp": 2, "pp": 4, "schedule": "interleaved", "chunks": 2}, {"dp": 8, "zero": 3},
    ):  # fmt: skip
        layout = Layout(**({"gpus": 8, "batch_size": 64, "micro_batch": 1} | given))
        found = predict(MODEL, layout, A100)
        assert sum(found.parts.values()) == pytest.approx(found.seconds, rel=0.02)


def test_a_long_step_is_as_long_as_if_all_of_it_were_simulated() -> None:
    for schedule in ("gpipe", "1f1b", "zb", "interleaved", "zbv"):
        step = PricedStep(MODEL, Layout(4, pp=4, batch_size=96, schedule=schedule), A100)
        short = step.predict().seconds
        timeline = simulator(schedule, 4, 96, None).run(step.work())
        assert short == pytest.approx(timeline.seconds, rel=1e-3)
        assert step.estimate() == pytest.approx(timeline.seconds, rel=0.05)


def test_what_costs_more_takes_longer() -> None:
    assert seconds(recompute="always") > 1.2 * seconds()
    assert seconds(micro_batch=1) > seconds()  # small kernels wait for the host
    assert seconds(gpus=16, dp=1, tp=16) > 2 * seconds(gpus=16, dp=8, tp=2)  # tp leaves the node
    slow = replace(A100, gpus_per_node=1, network_gbs=1.25)
    apart = Layout(8, dp=8, batch_size=64, micro_batch=4)
    assert predict(MODEL, apart, slow).parts["exchange"] > 0.1
    assert sum(blocks_of_stages(MODEL, Layout(4, pp=4), machine("h100"))) == MODEL.layers


def test_the_search_finds_what_trying_everything_finds() -> None:
    best, near = search(MODEL, 8, A100, 64, top=3)
    everything = [
        found
        for layout in layouts(MODEL, 8, 64)
        if (found := PricedStep(MODEL, layout, A100).predict(explain=False)).fits
    ]
    fastest = sorted(found.seconds for found in everything)[:3]
    assert [found.seconds for found in best] == pytest.approx(fastest)
    assert best[0].layout in near
    reasons = {change: why(best[0], other) for change, other in neighbours(best[0])}
    assert any("slower: " in reason for reason in reasons.values())
    assert all("-" not in reason.split(" slower")[0] for reason in reasons.values())


def test_a_better_machine_is_never_slower() -> None:
    """The chosen layout competes there, too; the closed form ranks four others before it here."""
    best, near = search(model_of("gpt2"), 8, machine("h100"), 8)
    gains = [float(text.split(", ")[-1].split("%")[0]) for text in what_if(best[0], near)]
    assert len(gains) == 4
    assert min(gains) >= 0


def test_nothing_fits_is_said() -> None:
    big = model_of(None, layers=96, hidden=12288, heads=96, vocab=51200, seq=2048)
    with pytest.raises(ValueError, match=r"no layout fits; .* needs \d+ GiB of 75: more GPUs work"):
        search(big, 8, A100, 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("predict --model gpt2 --batch_size 8 --machine a10", "a YAML file, or one of a100-40gb"),
        ("predict --model gpt --batch_size 8", "--model gpt: one of gpt2-mini, gpt2"),
        ("predict --n_layer 2 --batch_size 8", "hidden, heads, vocab, seq missing"),
        ("predict --model gpt2 --batch_size 8 --gpus 6 --dp 4", "tp is 4; --gpus 4 works"),
        ("predict --model gpt2 --batch_size 9 --dp 4", "--batch_size 12 works"),
        ("predict --model gpt2 --batch_size 8 --pp 13", "13 stages need"),
        ("predict --model gpt2 --batch_size 8 --network fast", "GB/s, or one of ethernet-10"),
        ("simulate --stages 2 --num_microbatches 2 --forward 1,2,3", "one for each of --stages 2"),
        ("simulate --stages 2 --num_microbatches 2 --transfer -1", "finite number, 0 or more"),
        ("simulate --stages 2 --num_microbatches 2 --forward nan", "finite number, 0 or more"),
        ("search --model gpt2 --gpus 16 --batch_size 16 --tp 5", "--tp 5: no layout of --gpus 16"),
        ("search --model gpt2 --gpus 8 --batch_size 8 --pp 2 --zero 2", "no layout of --gpus 8"),
        ("check no.csv --machine h100", "no.csv: No such file"),
        ("search --model gpt2 --gpus 13 --batch_size 5", "--batch_size 13 has some"),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_sentence(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert message in error


def run(words: str, capsys: pytest.CaptureFixture[str]) -> object:
    main([*words.split(), "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_commands_of_the_documentation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    xl = "--model gpt2-xl --gpus 16 --machine a100-80gb --batch_size 512"
    found: dict[str, object] = run(  # type: ignore[assignment]
        f"predict {xl} --dp 2 --pp 2 --tp 4 --micro_batch 4 --seq 1024 --schedule 1f1b "
        "--recompute always --zero 1", capsys,
    )  # fmt: skip
    assert found["fits"] is True
    assert len(found["memory_of_stages"]) == 2  # type: ignore[arg-type]
    timed: dict[str, float] = run(  # type: ignore[assignment]
        "simulate --stages 8 --num_microbatches 24 --forward 10 --backward_input 9 "
        "--backward_weight 6 --transfer 0.3 --schedule zb", capsys,
    )  # fmt: skip
    assert timed["seconds"] == pytest.approx(24 * 25 + 7 * (10 + 9 - 6) + 4 * 7 * 0.3)
    assert timed["bubble"] == pytest.approx(1 - 600 / timed["seconds"])
    chosen: dict[str, object] = run(f"search {xl} --top 2", capsys)  # type: ignore[assignment]
    assert len(chosen["best"]) == 2  # type: ignore[arg-type]
    assert str(chosen["command"]).startswith("torchrun --nnodes 2 --nproc-per-node 8 project/train")
    own = tmp_path / "mine.yaml"
    own.write_text("like: a100-80gb\nmemory_gb: 10\n", "utf-8")
    again: dict[str, object] = run(f"predict {xl} --dp 16 --machine {own}", capsys)  # type: ignore[assignment]
    assert (again["memory_limit_gb"], again["fits"]) == (10, False)
    own.write_text("like: a100-80gb\nmemory_gbs: fast\n", "utf-8")
    with pytest.raises(SystemExit):
        run(f"predict {xl} --dp 16 --machine {own}", capsys)
    assert "memory_gbs is 'fast', and must be a number" in capsys.readouterr().err
    own.write_text(f"like: {own}\nmemory_gb: 10\n", "utf-8")
    with pytest.raises(SystemExit):
        run(f"predict {xl} --dp 16 --machine {own}", capsys)
    assert f"`like: {own}` leads back to it; `like: a100-80gb` works" in capsys.readouterr().err
    own.write_text("like: a100-80gb\nmemori_gb: 10\n", "utf-8")
    with pytest.raises(SystemExit):
        run(f"predict {xl} --dp 16 --machine {own}", capsys)
    assert "memori_gb is no figure of a machine; did you mean memory_gb?" in capsys.readouterr().err


def test_a_table_is_compared_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    head = (
        "layers,hidden,heads,ffn,gated_mlp,vocab,tied,seq,gpus,gpus_per_node,dp,tp,pp,chunks,"
        "micro_batch,global_batch,schedule,zero,sequence_parallel,recompute,precision,"
        "seconds_per_step,memory_gb,fits\n"
    )
    one = "24,1024,16,4096,0,51200,1,1024,8,8,{},{},1,1,1,64,1f1b,0,0,full,fp16,{},,{}\n"
    path.write_text(
        "# a comment\n" + head + one.format(8, 1, 0.5, 1) + one.format(1, 8, 9, 0), "utf-8"
    )
    rows: list[dict[str, object]] = run(f"check {path} --machine a100-80gb", capsys)  # type: ignore[assignment]
    assert [row["seconds_per_step"] for row in rows] == [0.5, 9]
    assert [row["fits"] for row in rows] == [True, False]
    assert [row["predicted_fits"] for row in rows] == [True, True]
    errors = summary(rows)
    assert (errors["rows"], errors["pairs_in_order"], errors["regret"]) == (2, 1, 0)
    assert errors["fits_right"] == 0.5
    path.write_text(head.replace("heads,", ""), "utf-8")
    for text, message in (
        (head.replace("heads,", "") + "1\n", "the column heads is missing"),
        (head + one.format(8, 1, "fast", 1), "row 1: seconds_per_step is 'fast', and must be"),
    ):
        path.write_text(text, "utf-8")
        with pytest.raises(SystemExit):
            run(f"check {path} --machine a100-80gb", capsys)
        assert message in capsys.readouterr().err


def test_a_table_may_be_short_and_speak_the_words_of_train() -> None:
    row = {
        "layers": "24", "hidden": "1024", "heads": "16", "vocab": "51200", "seq": "1024",
        "gpus": "8", "global_batch": "64", "tp": "2", "zero": "3", "sequence_parallel": "True",
        "recompute": "Full",
    }  # fmt: skip
    model, layout, _ = row_of(row, A100)
    assert (model.ffn, model.tied, layout.dp, layout.pp) == (4096, True, 4, 1)
    assert (layout.recompute, layout.precision, layout.sequence_parallel) == (
        "always",
        "bf16",
        True,
    )
    for change, message in (
        ({"dp": "3"}, "dp 3 x tp 2 x pp 1 is 6, and gpus is 8"),
        ({"schedule": "dualpipe"}, "schedule is 'dualpipe', and must be one of"),
        ({"precision": "fp8"}, "precision is 'fp8', and must be one of fp32, fp16, bf16"),
        ({"recompute": "nevr"}, "'nevr', and must be one of never, selective, always"),
        ({"layers": ""}, "layers is empty"),
        ({"tp": "two"}, "tp is 'two', and must be a whole number"),
        ({"tp": "inf"}, "tp is 'inf', and must be a whole number"),
        ({"micro_batch": "0"}, "micro_batch is 0, and must be 1 or more"),
        ({"zero": "4"}, "zero is '4', and must be one of 0, 1, 2, 3"),
    ):
        with pytest.raises(ValueError, match=message):
            row_of(row | change, A100)


def test_the_columns_of_a_table_have_other_names(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "n_layer,n_embd,n_head,vocab_size,seq,gpus,batch_size\n2,8,2,9,4,1,3\n", "utf-8"
    )
    assert row_of(read_table(path)[0], A100)[1].batch_size == 3
    path.write_text("layers,hidden,heads,vocab,seq,gpus,global_batch,micro_batc\n", "utf-8")
    path.write_text(path.read_text("utf-8") + "2,8,2,9,4,1,3,2\n", "utf-8")
    with pytest.raises(ValueError, match="micro_batc is unknown; did you mean micro_batch"):
        read_table(path)


def test_a_table_may_be_silent(tmp_path: Path) -> None:
    """A preset in the place of sizes; what is not known; a run that ended out of memory."""
    path = tmp_path / "runs.csv"
    path.write_text(
        "model,pp,tp,batch_size,gpus,chunks,precision,seconds_per_step,memory_gb,fits\n"
        "llama-3-8b,2,,8,,none,BFloat16,1.5,n/a,\nllama-3-8b,,2,8,8,-,,OOM,,\n",
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
    assert PricedStep(model, layout, nodes, legal=False).predict().seconds > 0


def test_queries_that_share_keys_and_values_cost_less() -> None:
    shared = model_of("llama-3-8b")
    own = replace(shared, kv_heads=None)
    assert own.block - shared.block == 2 * 3 / 4 * 4096 * 4096
    assert 8.0e9 < shared.parameters < 8.1e9
    layout = Layout(8, dp=8, batch_size=8, zero=3)
    less, more = (predict(model, layout, machine("h100")) for model in (shared, own))
    assert less.seconds < more.seconds
    assert less.memory_gb < more.memory_gb


def test_torch_computes_every_other_product_again() -> None:
    """Of FSDP, `selective` holds less than never, and takes less time than always."""
    model, layout = model_of("llama-3-8b"), Layout(8, dp=8, batch_size=16, micro_batch=2, zero=3)
    never, some, always = (
        predict(model, replace(layout, recompute=word), machine("h100"))
        for word in ("never", "selective", "always")
    )
    assert never.seconds < some.seconds < always.seconds
    assert never.memory_gb > some.memory_gb > always.memory_gb


def test_torch_does_not_compute_the_last_product_again() -> None:
    """Recomputation ends with what backward needs: the MLP's second product is a third of a
    block's, whose forward is then repeated but for that."""
    for zero, part in ((1, 1), (3, 2 / 3)):
        layout = Layout(8, dp=8, batch_size=64, micro_batch=8, zero=zero)
        again, never = (
            PricedStep(MODEL, replace(layout, recompute=word), A100).cost.block
            for word in ("always", "never")
        )
        repeated = again[1].products - never[1].products
        assert repeated == pytest.approx(part * never[0].products, rel=0.02)


def test_the_embedding_and_the_head_are_summed_over_the_parts_too() -> None:
    """Two of the all-reduces of a step, besides four per block."""
    cost = PricedStep(MODEL, Layout(8, tp=8, batch_size=8), A100).cost
    assert cost.head[0].tensor + cost.head[1].tensor == cost.block[0].tensor


def test_what_waits_for_the_weights_is_the_gradient_of_the_logits() -> None:
    """1F1B's last stage holds one micro-batch; ZB-H1's up to four, of 2 bytes a logit, not 6."""
    layouts = (Layout(4, pp=4, batch_size=64, schedule=name) for name in ("1f1b", "zb"))
    whole, halves = (PricedStep(MODEL, layout, A100) for layout in layouts)
    logits = 1024 * 50257
    assert whole.stages[-1].held - halves.stages[-1].held == pytest.approx(4 * logits)


def test_attention_is_that_of_the_software() -> None:
    """Of a table's rows, ZeRO-3 is torch's, whose attention is fused. Megatron-LM's softmax falls
    apart where heads x sequences of a GPU are no multiple of 4."""
    sizes = dict.fromkeys(
        ["layers", "hidden", "heads", "vocab", "seq", "gpus", "global_batch"], "8"
    )
    assert [row_of(sizes | {"zero": zero}, A100)[2].attention for zero in "13"] == [
        "unfused",
        "flash",
    ]
    hosts = [
        PricedStep(MODEL, Layout(8, tp=8, micro_batch=b, batch_size=8), A100).cost.block[0].host
        for b in (1, 2)
    ]
    assert hosts[0] - hosts[1] == pytest.approx(8 * A100.host_us * 1e-6)


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
    assert {what: found[what] < limit for what, limit in limits.items()} == dict.fromkeys(
        limits, True
    )
    assert found.get("pairs_in_order", 1) > 0.9


def test_the_errors_on_runs_that_nothing_was_fitted_to_are_those_of_the_documentation() -> None:
    text = (ROOT / "docs" / "planning.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\w-]+) \|[^|]*\| (\d+) \| ([\d.]+) % \| ([\d.]+) % \|", text, re.M)
    assert [name for name, *_ in rows] == list(UNSEEN)
    for name, number, mean, worst in rows:
        found = summary(compared(read_table(RUNS / f"{name}.csv"), machine(*UNSEEN[name])))
        assert found["rows"] == int(number)
        assert 100 * found["time_error"] == pytest.approx(float(mean), abs=0.5)
        assert 100 * found["time_worst"] == pytest.approx(float(worst), abs=0.5)


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

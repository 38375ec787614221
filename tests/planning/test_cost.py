"""The cost model: equal to what is counted by hand, and monotone where it must be. (Measured runs:
tests/test_benchmarks.py.)"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from pipeline.schedules.catalogue import SCHEDULES
from pipeline.schedules.printed import peak_alive
from planning.cost import PricedStep, blocks_of_stages
from planning.describe import MACHINES, Layout, machine, model_of
from planning.passes import Group, Pass, group

A100 = machine("a100-80gb")
MODEL = model_of("gpt2-medium")


def test_every_machine_can_be_read_and_predicts() -> None:
    names = {path.stem for path in MACHINES.glob("*.yaml")}
    assert names == {
        "a100-40gb", "a100-80gb", "a100-deepspeed", "b200", "h100", "h100-megatron", "h200", "t4",
        "v100",
    }  # fmt: skip
    layout = Layout(8, dp=8, batch_size=256, micro_batch=16, precision="fp16")
    fastest_first = sorted(names, key=lambda x: PricedStep(MODEL, layout, machine(x)).seconds)
    assert set(fastest_first[:2]) == {"b200", "h100-megatron"}  # of other software
    assert fastest_first[-2:] == ["v100", "t4"]


def test_a_ring_takes_what_the_formula_says() -> None:
    """Twice n - 1 hops, each with an n-th of the bytes."""
    for size, seconds in ((2, 1.02e-3), (3, 1.373333e-3), (8, 1.89e-3)):
        assert Group(size, size, 1e9, 1e-5, 1e-3).reduce(1e6) == pytest.approx(seconds)
    assert Group(1, 1, 1e9, 1e-5, 1e-3).reduce(1e6) == 0
    # 15 hops over two nodes: two of them leave a node.
    assert Group(16, 8, 1e9, 1e-5, 1e-3).scatter(1e6) == pytest.approx(3.0675e-3)


def test_groups_share_the_network_of_their_nodes() -> None:
    """8 GPUs in a node, whose network carries 200 GB/s, 85 % of it used: a group with all 8 GPUs of
    a node has it alone, a group with one has an eighth. In a node it is NVLink."""
    inside = 0.79 * 300e9
    assert group(A100, 8, 1)[:3] == (8, 8, inside)
    assert group(A100, 16, 1)[:3] == (16, 8, 0.85 * 200e9)
    assert group(A100, 16, 8)[:3] == (16, 1, 0.85 * 200e9 / 8)
    # The second 6 of 24 ranks are 2 of a node and 4 of the next. 12 are two nodes of 6.
    assert group(A100, 6, 1)[:3] == (6, 2, 0.85 * 200e9 / 4)
    node = PricedStep(MODEL, Layout(12, dp=2, tp=6, batch_size=2), A100).machine
    assert (node.gpus_per_node, node.network_gbs) == (6, 150)


def test_the_order_of_the_axes_says_who_are_neighbours() -> None:
    """8 replicas of 2 stages of 2 ranks: in a node are all ranks of 2 replicas, or of a stage those
    of 4, and then stages send over the network: 4 micro-batches of 1024 x 1024 numbers, 2 B each,
    of which a rank has half."""
    layout = Layout(32, dp=8, pp=2, tp=2, micro_batch=4, batch_size=64)
    inner, outer = (
        PricedStep(MODEL, replace(layout, order=order), A100) for order in ("dp-pp-tp", "pp-dp-tp")
    )
    assert [step.replicas[:2] for step in (inner, outer)] == [(8, 2), (8, 4)]
    sent, link, network = 4 * 1024 * 1024 * 2 / 2, A100.link_us * 1e-6, A100.network_us * 1e-6
    assert inner.message == pytest.approx(sent / (0.79 * 300e9) + link)
    assert outer.message == pytest.approx(sent / (0.85 * 200e9 / 8) + network)


def test_blocks_of_stages() -> None:
    """As many each; or embedding and head count as one each; or by work: the head is 4.1 blocks."""
    for layers, balance, stages, blocks in (
        (24, "uniform", 4, [6, 6, 6, 6]), (22, "uniform", 8, [2, 3, 3, 3, 3, 3, 3, 2]),
        (24, "auto", 4, [7, 7, 7, 3]),
    ):  # fmt: skip
        layout = Layout(stages, pp=stages, batch_size=8)
        where = replace(A100, balance=balance)
        assert blocks_of_stages(replace(MODEL, layers=layers), layout, where) == blocks


def test_what_backward_takes() -> None:
    """Twice the products, two and a half times the attention, as many all-reduces; and, if a block
    is computed again, all of a forward more."""
    layout = Layout(2, tp=2, micro_batch=2, batch_size=4)
    again = replace(layout, recompute="always")
    flash = replace(A100, attention="flash")
    block, more = (PricedStep(MODEL, x, flash).block for x in (layout, again))
    forward, backward = block[:2]
    assert backward.products == 2 * forward.products
    assert backward.attention == 2.5 * forward.attention
    assert backward.tensor == forward.tensor > 0
    assert more.backward == pytest.approx([a + b for a, b in zip(forward, backward, strict=True)])
    of_one = PricedStep(MODEL, Layout(1, micro_batch=2, batch_size=4), flash).block.forward
    wide = PricedStep(replace(MODEL, gated_mlp=True), layout, flash).block.forward
    gate = 2048 * 3 * 4096 * 2 / 2 / flash.memory_per_second  # tokens, numbers, bytes, ranks
    assert wide.elementwise - forward.elementwise == pytest.approx(gate)
    # torch's own stops at the last tensor that backward needs: the last product is not repeated.
    sharded = Layout(8, dp=8, micro_batch=2, batch_size=16, recompute="always")
    all_of_it, less = (
        PricedStep(MODEL, replace(sharded, zero=zero), flash).block.backward.products
        for zero in (0, 3)
    )
    assert (all_of_it - less) / of_one.products == pytest.approx(4 / 12, rel=0.1)
    assert forward.host - of_one.host == pytest.approx(2 * A100.collective_us * 1e-6)


def test_a_pass_is_longer_than_the_longer_of_gpu_and_host() -> None:
    assert [Pass(2.0).seconds, Pass(host=3.0, gathering=1.0).seconds] == [2, 4]
    assert Pass(1.0, host=1.0).seconds == pytest.approx(2 ** (1 / 4))


def test_what_is_held_of_cut_matrices() -> None:
    """2 x 1024 tokens on 2 ranks, width 1024, 16 heads: each rank has the scores of its own heads,
    with a byte of their mask, and under sequence parallelism half of what lies between matrices."""
    layout = Layout(2, tp=2, micro_batch=2, batch_size=4)
    flash, kept = replace(A100, attention="flash"), replace(A100, gathered="kept")
    for parallel, shared in ((False, 1), (True, 2)):
        cut = replace(layout, sequence_parallel=parallel)
        step = PricedStep(MODEL, cut, A100)
        masks, scores = 2 * 1024 / shared, 5 * 16 * 1024 / 2
        assert step.whole - PricedStep(MODEL, cut, flash).whole == 2048 * (masks + scores)
        assert step.entry == 2048 * 2 * 1024 / shared
        gathered = 2048 * 2 * 2 * 1024 * (1 - 1 / shared)
        assert PricedStep(MODEL, cut, kept).whole - step.whole == gathered


def test_sizes_in_the_place_of_a_presets() -> None:
    """The width of the MLP follows that of the model; a size may be switched off."""
    changed = model_of("llama-2-7b", hidden=64, heads=None, gated_mlp=False)
    assert (changed.ffn, changed.heads, changed.gated_mlp) == (256, 32, False)


def test_what_nanotron_exchanges_and_when() -> None:
    """Without ZeRO sums of 25 MiB of bf16 gradients, in fp32, beside the last backward, but for the
    embedding's, which comes last. Under ZeRO-1 one sum after it, and the copies of what was
    gathered: of every block from each of 16 replicas."""
    own = machine("h100")
    plain, sharded = (
        PricedStep(MODEL, Layout(16, dp=16, batch_size=64, micro_batch=4, zero=zero), own)
        for zero in (0, 1)
    )
    ranks, number = group(own, 16, 1), MODEL.parameters
    buckets = 2 * number / (25 * 2**20)
    in_buckets = buckets * ranks.reduce(4 * number / buckets)
    last = in_buckets * MODEL.table / number
    (first,), (other,) = plain.stages, sharded.stages
    assert first.exchange == pytest.approx(in_buckets - last)
    assert other.exchange == pytest.approx(ranks.reduce(4 * number))
    assert "exchange" not in plain.simulator(1).run(plain.work()).idle
    assert sharded.parts["exchange"] == pytest.approx(other.exchange)
    moved, copies = 48 * number / own.memory_per_second, 24 * 16 * own.slices_us * 1e-6
    assert first.update == pytest.approx(moved + last)
    gathered = 24 * ranks.scatter(2 * number / 24)
    assert other.update == pytest.approx(moved / 16 + gathered + copies)


def test_collectives_of_stages_on_several_nodes_cost_the_host_more() -> None:
    """For every rank of tensor parallelism; two in a pass over a block."""
    own = machine("h100")

    def host(gpus: int, pp: int, tp: int) -> float:
        layout = Layout(gpus, gpus // pp // tp, pp=pp, tp=tp, batch_size=64)
        return PricedStep(MODEL, layout, own).block.forward.host

    alone = host(16, 1, 1)
    assert host(16, 2, 1) == alone
    assert host(16, 1, 4) == host(8, 2, 4) == pytest.approx(alone + 2 * 183e-6)
    assert host(16, 2, 4) == pytest.approx(alone + 2 * (183 + 4 * 426) * 1e-6)


def test_a_part_of_the_positions_needs_a_part_of_the_memory_and_the_keys_of_the_others() -> None:
    """2 of 8 ranks share each sequence: of 2 x 1024 tokens each has half. It has all parameters,
    whose gradients all 8 ranks add. Keys and values of all tokens, 2 x 1024 numbers each of 2 B, go
    round a ring, and in backward their gradients, too; attention hides as much as it takes. Or half
    of queries, keys, values and results go to the other rank, and nothing hides that."""
    flash = replace(A100, attention="flash")
    whole = PricedStep(MODEL, Layout(8, dp=8, micro_batch=2, batch_size=16), flash)
    layout = Layout(8, dp=4, cp=2, micro_batch=2, batch_size=16)
    cut = PricedStep(MODEL, layout, flash)
    for kept in ("whole", "entry", "late", "logits"):
        assert getattr(cut, kept) == getattr(whole, kept) / 2
    assert cut.replicas == whole.replicas
    forward, backward = cut.block.forward, cut.block.backward
    full = whole.block.forward
    assert forward.attention == pytest.approx(full.attention / 2, rel=0.03)
    assert forward.products == pytest.approx(full.products / 2, rel=0.03)
    slow = replace(flash, link_gbs=1)
    ring = group(slow, 2, 1).scatter(2 * 2 * 1024 * 1024 * 2)
    step = PricedStep(MODEL, layout, slow).block
    assert step.forward.context == pytest.approx(ring - forward.attention)
    assert step.backward.context == pytest.approx(2 * ring - backward.attention)
    assert forward.context < 1e-7  # over NVLink
    alone = PricedStep(MODEL, layout, replace(slow, overlap="nothing")).block
    assert alone.forward.context == pytest.approx(ring)
    heads = PricedStep(MODEL, replace(layout, attention="heads"), slow).block
    exchange = group(slow, 2, 1).scatter(4 * 1024 * 1024 * 2)
    assert heads.forward.context == heads.backward.context == pytest.approx(exchange)
    staged = PricedStep(MODEL, Layout(8, cp=2, pp=4, micro_batch=2, batch_size=16), A100)
    assert staged.message == pytest.approx(group(A100, 2, 1).scatter(2 * 2 * 1024 * 1024), rel=1e-3)


def test_ranks_share_experts_and_send_tokens_to_them() -> None:
    """8 experts over 4 of 8 ranks: each holds 2, which another rank has, too. 4 x 1024 tokens go to
    2 experts each and come back, and as many gradients."""
    model = replace(MODEL, experts=8, top_k=2)
    assert model.parameters - MODEL.parameters == 7 * 24 * 8 * 1024 * 1024
    layout = Layout(8, dp=8, ep=4, micro_batch=4, batch_size=32)
    whole, shared = (
        PricedStep(model, replace(layout, ep=ranks), replace(A100, overlap="zero"))
        for ranks in (1, 4)
    )
    experts, others = 24 * 8 * model.mlp, 24 * model.attention + model.table
    assert whole.stages[0].parameters == experts + others
    assert shared.stages[0].parameters == experts / 4 + others
    assert shared.stages[0].shard == pytest.approx(experts / 8 + others / 8)
    assert shared.memory[0].gradients == 4 * (experts / 4 + others)
    sums = group(A100, 8, 1).reduce(4 * others) + group(A100, 2, 4).reduce(experts)
    assert shared.stages[0].exchange == pytest.approx(sums)
    sent = 2 * group(A100, 4, 1).scatter(4 * 1024 * 2 * 1024 * 2)
    assert shared.block.forward.experts == shared.block.backward.experts == pytest.approx(sent)
    assert whole.block.forward.experts == 0
    # The tokens of a rank times 2 experts, either way.
    dense = PricedStep(replace(MODEL, ffn=8192), replace(layout, ep=1), A100).block.forward
    for step in (whole, shared):
        assert step.block.forward.products == pytest.approx(dense.products, rel=0.1)
    assert model.flops(1) == replace(MODEL, ffn=8192).flops(1)


def test_memory_is_what_can_be_counted() -> None:
    """gpt2-medium without recomputation in bf16: 2 bytes a parameter, 4 its gradient, 12 of the
    optimizer, and what ZeRO shards of them. Under ZeRO-3 the parameters are in fp32, and the
    optimizer has no others; two blocks, with one's gradients, and the table are gathered."""
    working = []
    for zero, bytes_each in (
        (0, (2, 4, 12)), (1, (2, 4, 12 / 8)), (2, (2, 4 / 8, 12 / 8)), (3, (4 / 8, 4 / 8, 8 / 8)),
    ):  # fmt: skip
        layout = Layout(8, dp=8, batch_size=64, micro_batch=4, zero=zero)
        step = PricedStep(MODEL, layout, A100)
        (found,) = step.memory
        assert found[:3] == pytest.approx([MODEL.parameters * size for size in bytes_each])
        assert step.memory_gb == pytest.approx(sum(found) / 2**30)
        working.append(found.working)
    assert working[3] - working[2] == 2 * (3 * MODEL.block + MODEL.table)
    single = PricedStep(MODEL, Layout(1, batch_size=1, precision="fp32"), machine("v100"))
    assert single.memory[0][:3] == tuple(MODEL.parameters * size for size in (4, 4, 8))
    half = PricedStep(MODEL, Layout(1, batch_size=1, precision="fp16"), machine("v100"))
    assert half.memory[0][:3] == tuple(MODEL.parameters * size for size in (2, 2, 12))
    for precision, kept in (("bf16", 4 + 2), ("fp16", 2)):  # a trainer that keeps bf16's, too
        alone = Layout(1, batch_size=1, precision=precision)
        twice = PricedStep(MODEL, alone, machine("a100-deepspeed")).memory[0]
        assert twice.gradients == MODEL.parameters * kept
    # 5 % of a GPU's memory are fragments that no tensor can use.
    for size, fits in ((1.04, False), (1.06, True)):
        assert (
            PricedStep(MODEL, layout, replace(A100, memory_gb=size * step.memory_gb)).fits == fits
        )
    # 1F1B's stage s of 4 holds 4 - s micro-batches; the last one logits, too.
    staged = PricedStep(MODEL, Layout(4, pp=4, batch_size=64, micro_batch=4), A100).memory
    one = staged[2].activations / 2
    assert [m.activations for m in staged[:3]] == pytest.approx([4 * one, 3 * one, 2 * one])
    assert staged[3].activations > one
    again = Layout(4, pp=4, batch_size=64, micro_batch=4, recompute="always")
    less = PricedStep(MODEL, again, A100).memory[0].activations
    assert less == 4 * 6 * 4 * 1024 * 1024 * 2  # 4 held, 6 blocks' inputs of 4 x 1024 x 1024 x 2 B


def test_memory_of_cores_is_as_what_was_measured_on_them() -> None:
    """docs/planning.md has the peaks. The logits' gradient beside two of the table; or, of logits
    so small that malloc keeps them, three of a log-softmax. And what is exchanged: a bucket for
    each gradient that stages add up, or two of the table, and others' parts, which are read."""
    model = model_of(None, layers=4, hidden=256, heads=4, vocab=50257, seq=64)
    cores = replace(machine("h100"), overlap="nothing", gathered="again", reserve_gb=0)
    table, number, logits = 4 * model.table, 4 * model.parameters, 4 * 256 * model.vocab

    def working(**layout: Any) -> float:
        asked: dict[str, Any] = {"micro_batch": 4, "batch_size": 16, "precision": "fp32"} | layout
        return PricedStep(model, Layout(**asked), cores).memory[0].working

    alone = logits + 2 * table
    assert working(gpus=1) == alone
    assert working(gpus=1, micro_batch=16) == 2 * 4 * logits
    assert working(gpus=2, dp=2) == alone + number / 2
    assert working(gpus=2, dp=2, zero=1) == alone + number * 3 / 2
    gathered = table + 4 * 3 * model.block
    assert working(gpus=2, dp=2, zero=3) == alone + 3 * table + gathered
    assert working(gpus=2, cp=2) == 2 * logits / 2 + 2 * table + number * 3 / 2


def test_the_parts_of_a_step_add_up_to_it() -> None:
    for given in (
        {"dp": 8}, {"dp": 2, "pp": 2, "tp": 2, "zero": 1}, {"dp": 1, "pp": 8, "schedule": "zb"},
        {"dp": 2, "pp": 4, "schedule": "interleaved", "chunks": 2}, {"dp": 8, "zero": 3},
    ):  # fmt: skip
        layout = Layout(**({"gpus": 8, "batch_size": 64, "micro_batch": 1} | given))
        found = PricedStep(MODEL, layout, A100)
        assert sum(found.parts.values()) == pytest.approx(found.seconds, rel=0.02)
        # 6 operations per parameter and token, and per block 6 of width x positions: causal.
        operations = 64 * 1024 * (6 * MODEL.parameters + 24 * 6 * 1024 * 1024)
        assert 8e12 * found.tflops * found.seconds == pytest.approx(operations)
        assert found.tokens_per_second * found.seconds == pytest.approx(64 * 1024)


def test_a_long_step_is_as_long_as_if_all_of_it_were_simulated() -> None:
    """And holds as much: all micro-batches under GPipe."""
    for schedule, m in product(SCHEDULES, (25, 96)):
        step = PricedStep(MODEL, Layout(4, pp=4, batch_size=m, schedule=schedule), A100)
        simulator = step.simulator(m)
        assert step.seconds == pytest.approx(simulator.run(step.work()).seconds, rel=1e-3)
        held = peak_alive(simulator.schedule, [stage.held for stage in step.stages].__getitem__)
        assert [rank.activations for rank in step.memory] == pytest.approx(held, rel=0.1)


def test_two_ranks_over_a_slow_network_fall_into_step_late() -> None:
    layout = Layout(16, dp=8, pp=2, micro_batch=4, batch_size=1920, schedule="zbv")
    step = PricedStep(MODEL, replace(layout, order="pp-dp-tp"), machine("a100-80gb", "ethernet-10"))
    assert step.seconds == pytest.approx(step.simulator(60).run(step.work()).seconds, rel=1e-3)


def test_the_first_rank_of_a_v_has_both_ends_of_the_model() -> None:
    """So that tied weights are there once, and nobody sends gradients of them. Else two ranks do,
    here over NVLink: both are in a node."""
    for schedule, tables in (("1f1b", 2), ("zbv", 1)):
        step = PricedStep(MODEL, Layout(8, pp=8, batch_size=16, schedule=schedule), A100)
        number = 24 * MODEL.block + tables * MODEL.table
        assert sum(rank.parameters for rank in step.memory) == 2 * number
        sent = step.updates[7] - 2e-3 - sum(stage.update for stage in step.of_ranks[7])
        gradient = (tables - 1) * 4 * MODEL.table / (0.79 * 300e9)
        assert sent == pytest.approx(gradient, rel=0.1, abs=1e-9)


def test_queries_that_share_keys_and_values_cost_less() -> None:
    shared = model_of("llama-3-8b")
    own = replace(shared, kv_heads=None)
    assert own.block - shared.block == 2 * 3 / 4 * 4096 * 4096
    assert 8.0e9 < shared.parameters < 8.1e9
    layout = Layout(8, dp=8, batch_size=8, zero=3)
    less, more = (PricedStep(model, layout, machine("h100")) for model in (shared, own))
    assert less.seconds < more.seconds
    assert less.block.forward.products < 0.95 * more.block.forward.products
    assert less.memory_gb < more.memory_gb


def test_what_a_llama_holds_was_counted_and_nanotron_holds_more() -> None:
    """Numbers of a token and block: inputs and results of both norms, q k v and the heads' output,
    gate, up, SiLU and product. The same with what nanotron's runs held besides."""
    model, layout = model_of("llama-2-7b"), Layout(8, dp=8, batch_size=8)
    megatron, nanotron = (
        PricedStep(model, layout, machine(name)) for name in ("h100-megatron", "h100")
    )
    assert megatron.whole == 2 * 4096 * (4 * 4096 + 4 * 4096 + 4 * 11008)
    assert nanotron.whole - megatron.whole == 2 * 4096 * (2 * 4096 + 11008)


def test_torch_computes_every_other_product_again() -> None:
    """FSDP's `selective` holds less than never, and takes less time than always. It keeps the
    products q, v, up and down, the heads' output and the block's input: of 4096 numbers a token 1,
    1/4, 3.5, 1, 1 and 1."""
    model, layout = model_of("llama-3-8b"), Layout(8, dp=8, batch_size=16, micro_batch=2, zero=3)
    never, some, always = (
        PricedStep(model, replace(layout, recompute=word), machine("h100"))
        for word in ("never", "selective", "always")
    )
    assert never.seconds < some.seconds < always.seconds
    assert never.memory_gb > some.memory_gb > always.memory_gb
    step = PricedStep(model, replace(layout, recompute="selective"), machine("h100"))
    assert step.whole == 2 * 8192 * 2 * 7.75 * 4096


def test_logits_and_what_is_computed_again_are_not_there_together() -> None:
    """With large logits the peak is the beginning of backward, which has 12 bytes of each, or 4 if
    the loss is fused; with small ones, a block that is computed again when the logits are gone."""
    layout = Layout(8, dp=8, batch_size=64, micro_batch=8, recompute="always")
    for vocab, loss, each in ((50257, "plain", 12), (50257, "fused", 4), (1000, "plain", 12)):
        model = replace(MODEL, vocab=vocab)
        step = PricedStep(model, layout, replace(A100, loss=loss))
        (found,) = step.memory
        held = 24 * step.entry
        logits = 8 * 1024 * vocab
        tables = 2 * 2 * model.table
        moments = held + each * logits, held + step.whole
        assert found.activations + found.working == pytest.approx(max(moments) + tables)
        assert (moments[0] > moments[1]) == (vocab > 1000)


def test_what_fits_is_the_whole_run() -> None:
    """Where a step holds little, of many blocks that are computed again, texts that are continued
    hold more: keys and values of 4 x 1,024 positions, in 16 bits."""
    layout = Layout(1, micro_batch=4, batch_size=4, recompute="always")
    memory = PricedStep(replace(model_of("gpt2-xl"), layers=300, vocab=512), layout, A100).memory[0]
    assert memory.activations + memory.working == 300 * 2 * 4096 * 1600 * 2
    memory = PricedStep(model_of("gpt2-xl"), replace(layout, recompute="never"), A100).memory[0]
    assert memory.activations > 48 * 6 * 2 * 4096 * 1600 * 2


def test_what_splits_its_backward_holds_gradients_of_products() -> None:
    """Under zero bubble, of one micro-batch: of q, k, v, the heads' output, the MLP's two, 3, 1, 4
    and 1 times the width. 1F1B's first of 4 stages holds 4 micro-batches either way, and its last
    one; ZB-H1's last up to four, each with the gradient of its logits, of 2 bytes, not 6."""
    layout = Layout(4, pp=4, batch_size=64, micro_batch=4)
    whole, split = (PricedStep(MODEL, replace(layout, schedule=s), A100) for s in ("1f1b", "zb"))
    assert split.seconds < whole.seconds
    assert split.bubble < whole.bubble
    late = 6 * 4 * 1024 * 9 * 1024 * 2  # blocks, sequences, positions, width, bytes
    assert split.memory[0].working - whole.memory[0].working == late
    logits = 4 * 1024 * 50257
    assert whole.stages[-1].held - split.stages[-1].held == pytest.approx(4 * logits)


def test_nothing_runs_beside_the_computation_of_a_core() -> None:
    """There ZeRO-3's collectives take time of their own, and its ranks wait for the last of them;
    those of data parallelism meet once a step."""
    cores = replace(A100, overlap="nothing", skew=0.1)
    layout = Layout(8, dp=8, batch_size=64, micro_batch=4, zero=3)
    beside, alone = (PricedStep(MODEL, layout, where).parts for where in (A100, cores))
    gathered = 3 * 24 * group(A100, 8, 1).scatter(2 * MODEL.parameters / 24)
    work = sum(beside[name] for name in ("products", "attention", "elementwise", "host"))
    assert beside["gathering"] == 0
    assert alone["gathering"] == pytest.approx(2 * gathered + 0.1 * work)  # of 2 micro-batches
    split = Layout(8, tp=8, batch_size=64, micro_batch=4)
    even, skewed = (PricedStep(MODEL, split, where).parts for where in (A100, cores))
    work = sum(even[name] for name in ("products", "attention", "elementwise"))
    assert skewed["tensor"] - even["tensor"] == pytest.approx(0.1 * work)
    plain = replace(layout, zero=0)
    assert PricedStep(MODEL, plain, cores).seconds == PricedStep(MODEL, plain, A100).seconds


def test_parameters_may_be_gathered_during_the_next_forward() -> None:
    """Under ZeRO-1 and 2, block by block. The first one's are waited for; and under ZeRO-1 the sum
    of the embedding's gradient, which comes last."""
    ranks, number = group(A100, 8, 1), MODEL.parameters
    block, sums = ranks.scatter(2 * number / 24), ranks.scatter(4 * number)
    for zero in (1, 2):
        layout = Layout(8, dp=8, batch_size=64, micro_batch=4, zero=zero)
        after, beside = (
            PricedStep(MODEL, layout, replace(A100, overlap=word)).parts["update"]
            for word in ("gradients", "all")
        )
        last = sums * MODEL.table / number if zero == 1 else 0.0
        assert after - beside == pytest.approx(23 * block - last)
        moved = 48 * number / 8 / A100.memory_per_second
        assert beside == pytest.approx(2e-3 + moved + block + last)


def test_no_order_takes_less_than_the_bound_of_the_search() -> None:
    draw = random.Random(0)
    for schedule, overlap in product(SCHEDULES, ("nothing", "zero", "gradients", "all")):
        dp, pp, tp = draw.choice((1, 2, 5)), draw.choice((1, 2, 3, 6)), draw.choice((1, 2, 3, 16))
        m, b = draw.randrange(1, 60), draw.choice((1, 2, 8))
        zero = draw.randrange(2 if pp > 1 else 4)
        layout = Layout(
            dp * pp * tp, dp, pp=pp, tp=tp, micro_batch=b, batch_size=dp * b * m,
            schedule=schedule, zero=zero, recompute=draw.choice(("never", "always")),
            order=draw.choice(("dp-pp-tp", "pp-dp-tp")),
        )  # fmt: skip
        where = replace(
            machine(draw.choice(("a100-80gb", "h100"))), skew=draw.choice((0, 0.2)),
            overlap=overlap,
        )  # fmt: skip
        step = PricedStep(MODEL, layout, where)
        simulated = step.simulator(m).run(step.work()).seconds
        assert 0.2 * simulated < step.least_seconds <= simulated * (1 + 1e-9), layout


def test_a_rank_with_the_larger_part_of_what_is_uneven_is_priced() -> None:
    """25 heads over 2 ranks are 13 and 12, as 26 of the same width; so for a vocabulary and the
    width of an MLP. A batch of 10 is 3 micro-batches of 4 at most."""
    layout = Layout(2, tp=2, micro_batch=2, batch_size=4)
    sizes: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"heads": 25, "hidden": 1600}, {"heads": 26, "hidden": 1664}),
        ({"ffn": 5121}, {"ffn": 5122}),
        ({"vocab": 50257}, {"vocab": 50258}),
    )
    for odd, even in sizes:
        steps = [PricedStep(replace(MODEL, **size), layout, A100) for size in (odd, even)]
        block = [step.block.forward for step in steps]
        head = [step.head.forward for step in steps]
        assert block[0].attention == block[1].attention
        if "heads" not in odd:
            assert block[0].products == block[1].products and head[0][:3] == head[1][:3]
    assert Layout(1, micro_batch=4, batch_size=10).num_microbatches == 3
    assert Layout(2, dp=2, micro_batch=2, batch_size=10).num_microbatches == 3


def test_megatrons_softmax_takes_four_matrices_at_a_time() -> None:
    """It falls apart where heads x sequences of a GPU are no multiple of 4."""
    hosts = [
        PricedStep(MODEL, Layout(8, tp=8, micro_batch=b, batch_size=8), A100).block[0].host
        for b in (1, 2)
    ]
    assert hosts[0] - hosts[1] == pytest.approx(8 * A100.host_us * 1e-6)


MOES = [replace(MODEL, gated_mlp=gated, experts=4, top_k=2) for gated in (False, True)]
WAYS: list[dict[str, Any]] = [  # of 8 ranks to share a batch
    {"dp": 8}, {"dp": 4, "cp": 2}, {"dp": 4, "cp": 2, "attention": "heads"}, {"dp": 4, "tp": 2},
    {"dp": 4, "tp": 2, "sequence_parallel": True}, {"dp": 2, "pp": 4, "schedule": "zbv"},
    {"dp": 8, "ep": 4},
]  # fmt: skip


def test_every_option_is_priced_under_every_other() -> None:
    """Two of four experts hold and compute what an MLP of twice the width does, and hold what each
    was given and gave; to compute again holds less and takes longer; what has twice the bytes holds
    twice as much."""
    cases = product(MOES, WAYS, range(4), ("never", "selective", "always"), ("flash", "unfused"))
    for experts, way, zero, recompute, attention in cases:
        given: dict[str, Any] = {"micro_batch": 2, "batch_size": 64, "zero": zero} | way
        if zero > 1 and "pp" in way:
            continue
        layout = Layout(8, recompute=recompute, **given)
        where = replace(A100, attention=attention)
        sparse = PricedStep(experts, layout, where)
        wide = replace(experts, ffn=2 * experts.ffn, experts=1, top_k=1)
        whole = PricedStep(wide, replace(layout, ep=1), where)
        case = str((experts.gated_mlp, way, zero, recompute, attention))
        number = 2 * 1024 * 1024 // layout.cp * 2  # bytes of the hidden states of a micro-batch
        selective = recompute == "selective" and zero > 1
        split = 2 if layout.sequence_parallel else 1
        routed = number * (experts.gated_mlp / split if selective else 4)
        assert sparse.whole - whole.whole == pytest.approx(routed), case
        assert sparse.late - whole.late == number, case
        assert sparse.entry == whole.entry < sparse.whole, case
        there, back = sparse.block.forward, sparse.block.backward
        # All of it is sent again where the results of experts are not kept.
        again = recompute == "always" or selective
        assert back.experts == pytest.approx(there.experts * (1 + again)), case
        products = {"always": 3, "selective": 2.5 if selective else 2, "never": 2}[recompute]
        assert back.products == pytest.approx(products * there.products, rel=1e-3), case
        never = PricedStep(experts, replace(layout, recompute="never"), where)
        assert sparse.whole <= never.whole and back.seconds >= never.block.backward.seconds, case
        kept = attention == "flash" or recompute == "never"
        assert (back.attention == never.block.backward.attention) == kept or recompute == "always"
        single, double = (
            PricedStep(experts, replace(layout, precision=precision), replace(where, loss="plain"))
            for precision in ("fp32", "fp64")
        )
        for before, after in zip(single.stages, double.stages, strict=True):
            assert after.held == pytest.approx(2 * before.held, rel=0.1), case
            assert after.working == pytest.approx(2 * before.working, rel=0.1), case
        assert [each[:3] for each in double.memory] == [
            tuple(2 * size for size in each[:3]) for each in single.memory
        ], case


def test_tf32_is_fp32_where_a_machine_has_none() -> None:
    """In memory anywhere."""
    layout = Layout(8, dp=8, batch_size=64, precision="fp32")
    for name, faster in (("a100-80gb", True), ("v100", False)):
        single, tensor = (
            PricedStep(MODEL, replace(layout, precision=precision), machine(name))
            for precision in ("fp32", "tf32")
        )
        assert tensor.memory == single.memory
        assert (tensor.seconds < 0.6 * single.seconds) == faster
        assert (tensor.seconds == single.seconds) != faster

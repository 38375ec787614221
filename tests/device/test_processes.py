"""Layouts on devices compute what one process computes on the CPU, with one wait per step.

Two ranks have a device each, and NCCL, for which gloo stands; four ranks share two devices, and
have only gloo. The layouts are rows of tests/equivalence.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from threading import get_ident
from typing import Any
from unittest import mock
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from context_parallel.ring import ring_attention
from data_parallel.fsdp import FullyShardedDataParallel
from pipeline.processes.process import ProcessPipe
from runtime.communicator import Communicator
from runtime.dropout import mixed
from runtime.mesh import GROUPS, make_mesh
from tests.data_parallel.sharded_models import DTYPE, SGD, filled
from tests.data_parallel.test_fsdp import LAYERS, REFUSED
from tests.device.seen import Kernel, watch
from tests.device.session import NCCL, ranks
from tests.equivalence.compare import check, laid_out
from tests.equivalence.plain import of_arrays, plain, to_arrays
from tests.equivalence.table import Row, find
from tests.odd_layers import FEATURES, ODD, ON_DEVICES, linear
from tests.pipeline.pipeline_models import (
    Call,
    assert_close,
    in_one_process,
    square_error,
    take_gradients,
)
from tests.pipeline.test_plain_programs import sequences
from tests.remote import on_device
from training.checkpoint import Saver
from training.launch.world import World
from training.layouts.layout import Held, parameters_of
from training.loop import seed_step, train

STEPS = 2
IN_16_BITS = [
    "context2-ring", "context2-heads", "mesh2-ep2-zero3", "fsdp2-zero3-m2", "pipeline2-1f1b-m8",
    "mesh2-1x1x2-sequence",
]  # fmt: skip
MOVES = {"send", "recv_"}
NAMES = ["fsdp2-zero3-m2", "pipeline2-zbv-v2_m3", "mesh2-1x1x2-sequence"]


def row_of(rank: int, world_size: int, name: str, **changes: Any) -> tuple[World, Row]:
    """A rank with a device, and a row of the table, whose problem is changed."""
    world = World(rank, world_size, rank, torch.device("cuda", rank % 2))
    torch.cuda.set_device(world.device)
    row = find(name)
    problem: Any = row.problem
    return world, replace(row, problem=replace(problem, **changes))


def compared(
    rank: int, world_size: int, name: str, dtype: torch.dtype = torch.float64, **changes: Any
) -> str:
    """Trains a row of the table; what is wrong with it."""
    world, row = row_of(rank, world_size, name, dropout=0.0, **changes)  # masks: of the device
    arrays = to_arrays(plain(row.problem, STEPS, torch.float64)) if world.is_main else {}
    reference = of_arrays(world.gather(arrays)[0])
    return check(row, reference, world, STEPS, dtype).failure


@pytest.mark.parametrize("name", ["module2-documents", "threads2-1f1b-clipped", "threads2-zb-m3"])
@on_device
def test_two_stages_of_one_process_with_a_device_each(name: str) -> None:
    """The head's copy of the embedding follows it through both updates."""
    assert compared(0, 1, name) == ""


@pytest.mark.parametrize("name", [*NAMES, "context2-ring-documents"])
@on_device
def test_two_ranks_with_a_device_each(name: str) -> None:
    assert ranks(2, NCCL).run(compared, name) == ["", ""]


def in_16_bits(rank: int, world_size: int, name: str) -> tuple[str, int]:
    """What is wrong with a row under autocast, with heads that FlashAttention takes; and how often
    that ran."""
    with watch() as seen:
        failure = compared(rank, world_size, name, torch.bfloat16, n_head=2)
    return failure, sum(n for name, n in seen.operators.items() if "flash" in name)


@pytest.mark.parametrize("name", IN_16_BITS)
@on_device
def test_two_ranks_in_16_bits(name: str) -> None:
    """Kernels and collectives read memory by address, and refuse what they would misread."""
    for failure, flash in ranks(2, NCCL).run(in_16_bits, name):
        assert failure == "" and (flash > 0) == (name == "context2-ring")


def dropped(rank: int, _: int) -> tuple[list[bool], int]:
    """What the ring drops in 16 bits: whether another call with the same number, and one with
    another, drop the same; whether backward does; and the fused kernels of a call."""
    torch.cuda.set_device(rank)
    q, k, v, d = torch.randn(4, 2, 2, 16, 8, dtype=torch.bfloat16).cuda()
    v.requires_grad_()
    ring = partial(ring_attention, Communicator(dist.group.WORLD))
    with watch() as seen:
        out = ring(q, k, v, None, 0.3, 5, 7)
        out.backward(d)
    others = [ring(q, k, v, None, 0.3, key, 7).equal(out) for key in (5, 6)]
    # The results are linear in all ranks' values: d * out = d_v * v, only with equal masks.
    assert v.grad is not None
    sums = torch.stack([(d * out).float().sum(), (v.grad * v).float().sum()]).detach().cpu()
    dist.all_reduce(sums)
    backward = bool((sums[0] - sums[1]).abs() < 2**-4 * sums[0].abs())
    return [*others, backward], sum(n for name, n in seen.operators.items() if "flash" in name)


@on_device
def test_a_ring_with_dropout_runs_fused_and_backward_drops_the_same() -> None:
    """Two blocks on each rank, forward and backward."""
    assert ranks(2, NCCL).run(dropped) == [([True, False, True], 4)] * 2


@pytest.mark.parametrize("name", ["mesh4-2x1x2-sequence-zero3", "hybrid4-shards2-zero3"])
@on_device
def test_four_ranks_that_share_devices(name: str) -> None:
    assert ranks(4).run(compared, name) == [""] * 4


def odd_layers(rank: int, _: int, narrow: bool) -> dict[str, str]:
    """Shards of layers that do what few do, beside one process on the CPU; what is wrong, by kind.
    In 16 bits only rounding may differ. (This device has neither sparse tensors nor the bits of
    conjugates: tests/data_parallel has such layers.)"""
    torch.cuda.set_device(rank)
    wrong = {}
    for kind in (*ODD, "expanded", "windows", "copy"):
        if kind in REFUSED or "sparse" in kind or (narrow and kind == "complex weights"):
            continue
        models = [filled(nn.Sequential(linear(), *LAYERS[kind]())) for _ in range(2)]
        inputs = [torch.full((2 + r, 2, FEATURES), 0.5 + r, dtype=DTYPE) for r in range(2)]
        try:
            fsdp = FullyShardedDataParallel(
                models[0].float() if narrow else models[0], SGD, device="cuda",
                compute_dtype=torch.bfloat16 if narrow else None,
            )  # fmt: skip
            x = inputs[rank].cuda()
            output = fsdp.forward(x.bfloat16() if narrow else x)
            fsdp.backward(output.to(torch.float32 if narrow else DTYPE).sum())
            for x in inputs:
                models[1](x).sum().backward()
            for name, shape, start, part, _shard in (
                piece for k in range(len(fsdp.layers)) for piece in fsdp.get_local_grad_shard(k)
            ):
                want = dict(models[1].named_parameters())[name].grad
                if want is not None:
                    whole = want.to_dense().flatten()
                    off = part.cpu().to(whole.dtype) - whole[start : start + len(part)]
                    if off.abs().max() > (0.1 if narrow else 1e-9) * (1 + whole.abs().max()):
                        wrong[kind] = f"{name} {tuple(shape)}: off by {off.abs().max()}"
        except Exception as error:
            wrong[kind] = repr(error)
    return wrong


@pytest.mark.parametrize("narrow", [False, True])
@on_device
def test_shards_of_odd_layers_on_devices(narrow: bool) -> None:
    """Memory that is gathered is freed between the passes, and views of it are notes."""
    wrong = ranks(2, NCCL).run(odd_layers, narrow)
    assert wrong == [{}, {}], wrong


def odd_stages(rank: int, _: int) -> dict[str, str]:
    """The same layers in a pipeline of two processes, with a device each, by whole backwards and by
    halves. What they compute again, they do inside of backward."""
    torch.cuda.set_device(rank)
    wrong, (x, y) = {}, sequences()
    for kind in ON_DEVICES:
        torch.manual_seed(0)
        model = nn.Sequential(*ODD[kind]()).double()
        expected = in_one_process(deepcopy(model), x.clone(), y)
        half = len(model) // 2
        try:
            with ProcessPipe(model, (half, len(model) - half), f"cuda:{rank}") as pipe:
                for schedule in ("1f1b", "zb"):
                    loss = pipe.train_step(x, y, square_error, schedule, 3)
                    own = take_gradients(pipe) | ({"loss": loss} if rank else {})
                    assert_close(own, {name: expected[name] for name in own})
        except BaseException as error:
            wrong[kind] = repr(error)
    return wrong


@on_device
def test_stages_of_odd_layers_on_devices() -> None:
    wrong = ranks(2, NCCL).run(odd_stages)
    assert wrong == [{}, {}], wrong


def thread_of_backward(rank: int, _: int) -> bool:
    torch.cuda.set_device(rank)
    threads: list[int] = []

    def noted(h: Tensor) -> Tensor:
        h.register_hook(lambda _: threads.append(get_ident()))
        return h

    layers = nn.Sequential(nn.Linear(4, 4), Call(noted), nn.Linear(4, 4), Call(noted)).double()
    with ProcessPipe(layers, (2, 2), f"cuda:{rank}") as pipe:
        pipe.train_step(*sequences(), square_error)
    return threads == [get_ident()]


@on_device
def test_the_backward_of_a_stage_runs_on_the_thread_that_calls_it() -> None:
    """What it computes again finds that thread's state, as the forward did."""
    assert ranks(2, NCCL).run(thread_of_backward) == [True, True]


def ended_groups(rank: int, world_size: int, name: str) -> tuple[list[str], int]:
    """What is wrong with a row that is trained twice; and groups that are left."""
    found = [compared(rank, world_size, name) for _ in range(2)]
    return found, len(dist.distributed_c10d._world.pg_map) - 1  # beside that of all ranks


@on_device
def test_rows_that_follow_each_other_make_groups_of_their_own() -> None:
    """Messages of devices close theirs, and others of NCCL's would keep memory of the GPU."""
    assert ranks(4).run(ended_groups, "mesh4-2x2x1-zero1") == [(["", ""], 0)] * 4


def connected(rank: int, _: int) -> tuple[int, int]:
    """In how many groups a rank meets others, and in how many it has met them."""
    met, all_reduce = set(), dist.all_reduce
    torch.cuda.set_device(rank % 2)

    def noted(x: Tensor, group: Any) -> None:
        met.add(group)
        assert x.device.type == "cuda"
        all_reduce(x, group=group)

    with patch("torch.distributed.all_reduce", noted):
        mesh = make_mesh({"dp": 2}, 30.0)
    return len({mesh[axes].group for axes in GROUPS if mesh[axes].size > 1}), len(met)


@on_device
def test_groups_are_connected_before_the_first_step() -> None:
    """Else NCCL does it inside backward, while a message between stages waits on the same GPU."""
    assert ranks(2, NCCL).run(connected) == [(1, 1)] * 2


def second_step(rank: int, world_size: int, name: str) -> tuple[list[str], set[str], set[str]]:
    """Where a rank waited for its device in its second step, the collectives of devices, and the
    operators that were launched before it waited."""
    wanted = {"num_examples": 16, "batch_size": 8, "dropout": 0.1}
    world, row = row_of(rank, world_size, name, **wanted)
    with laid_out(row, world, torch.float32) as training:
        steps = training._steps()
        for number in range(STEPS):
            seed_step(training.model, 0, number)
            with watch() as seen:
                train(training.model, training.optimizer, islice(steps, 1), "", rank=1)
    before = seen.order[: seen.order.index(seen.waits[0])]
    launched = {what.operator for what in before if isinstance(what, Kernel)}
    return [wait.where for wait in seen.waits], set(seen.collectives), launched


@pytest.mark.parametrize("name", NAMES)
@on_device
def test_a_step_waits_once(name: str) -> None:
    """For the norm, the losses and the counts of all ranks, which it reads together; meanwhile the
    device can update, also shards."""
    for waits, collectives, launched in ranks(2, NCCL).run(second_step, name):
        assert [where.rpartition("/")[2].partition(":")[0] for where in waits] == [
            "optimization.py"
        ]
        assert "_fused_adamw_" in launched
        assert MOVES & collectives == (MOVES if "pipeline" in name else set())


@on_device
def test_gloo_gets_no_message_of_a_device() -> None:
    """It sends from the CPU's memory alone. NCCL sends messages: see above."""
    found = ranks(2).run(second_step, "pipeline2-1f1b-m3")
    assert [MOVES & collectives for _, collectives, _ in found] == [set()] * 2


def received(rank: int, world_size: int) -> list[tuple[bool, bool]]:
    """Of each body that a rank receives in two steps of a pipeline: whether that was launched on
    the compute stream; and whether its memory was left to the compute stream afterwards."""
    world, row = row_of(rank, world_size, "pipeline2-1f1b-m3")
    bodies, owned, irecv = list[tuple[int, bool]](), set[int](), dist.irecv
    compute = torch.cuda.current_stream()

    def launched(x: Tensor, *where: Any) -> Any:
        if x.device.type == "cuda":
            bodies.append((id(x), torch.cuda.current_stream() == compute))
            kept.append(x)
        return irecv(x, *where)

    def recorded(x: Tensor, stream: Any) -> None:
        if stream == compute:
            owned.add(id(x))

    kept = list[Tensor]()  # so that ids are unique
    with (
        patch.object(dist, "irecv", launched),
        patch.object(Tensor, "record_stream", recorded),
        laid_out(row, world, torch.float32) as training,
    ):
        train(training.model, training.optimizer, islice(training._steps(), STEPS), "", rank=1)
    return [(of_compute, key in owned) for key, of_compute in bodies]


@on_device
def test_a_body_is_received_beside_computing() -> None:
    """NCCL would wait for all that is launched on the stream that is current."""
    for bodies in ranks(2, NCCL).run(received):
        assert len(bodies) >= 3 * STEPS and {*bodies} == {(False, True)}


def seeds_and_gradients(rank: int, world_size: int, name: str) -> tuple[list[int], list[Tensor]]:
    """What seeds each dropout of a tensor rank in a step; gradients of what it has whole."""
    world, row = row_of(rank, world_size, name, n_layer=2, dropout=0.1)
    row = replace(row, num_microbatches=1)
    seeds: list[int] = []

    def noted(*place: int) -> int:
        seeds.append(mixed(*place))
        return seeds[-1]

    with (
        laid_out(row, world, torch.float32) as training,
        mock.patch("runtime.dropout.mixed", noted),
    ):
        model: Any = training.model
        model.backward(next(training._steps()))
        return seeds, [p.grad.cpu() for p in parameters_of(model.held, "tp") if p.grad is not None]


@pytest.mark.parametrize("sequence", ["", "-sequence"])
@on_device
def test_tensor_ranks_drop_the_same_where_they_hold_the_same(sequence: str) -> None:
    """There are masks of the embedding, and of each block's attention weights, attention and MLP.
    Ranks hold other heads, and all positions or, with sequence parallelism, other ones."""
    (first, mine), (second, theirs) = ranks(2, NCCL).run(
        seeds_and_gradients, f"mesh2-1x1x2{sequence}"
    )
    same = [a == b for a, b in zip(first, second, strict=True)]
    assert same == [False] * 7 if sequence else same == [True, *[False, True, True] * 2]
    assert len({*first, *second}) == (14 if sequence else 9)
    assert all(a.equal(b) for a, b in zip(mine, theirs, strict=True)) and len(mine) > 9


@on_device
def test_a_checkpoint_in_the_background_is_written_on_the_ranks_device(tmp_path: Path) -> None:
    """There the library asks for its stream. On the first device each rank would hold memory."""
    saver = Saver(tmp_path, World(device=torch.device("cuda", 1)), background=True)
    saver.save("a", [Held.whole("x", torch.ones(2))], {}, {})
    assert saver._thread.submit(torch.cuda.current_device).result() == 1
    assert torch.cuda.current_device() == 0

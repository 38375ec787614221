"""A step on the device: how often the host waits, how many kernels it launches, which activations
it drops."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data_parallel import buckets
from project.train import parse_train, train_rank
from runtime import communicator
from runtime.randomness import OfThread
from tests.device.seen import Seen, watch
from tests.device.session import ranks
from tests.equivalence.problems import Sentences
from tests.remote import on_device
from training.launch.world import World
from training.layouts.layout import LaidOutModel, Setup, setup_of
from training.layouts.replicated import Replicated
from training.layouts.threads import StagesInThreads
from training.loop import train
from training.optimization import GlobalOptimizer, Recipe
from training.options import Options
from training.tasks.task import Step, to_device, whole_model
from training.timeline import Timeline

PROBLEM = Sentences(16, 8, max_grad_norm=1e-3, dropout=0.1)
CUDA = World(device=torch.device("cuda:0"))
BUCKETS = (buckets.__file__, communicator.__file__)
ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)


def steps(task: Any, model: LaidOutModel) -> Iterator[Step]:
    for epoch in count():
        yield from task.steps(epoch, model.dp_rank, model.dp_size, model.num_microbatches)


def third_step(model: LaidOutModel, average: Any = None) -> Seen:
    """What the loop does in its third step, from the examples to the update."""
    recipe = Recipe(PROBLEM.options, model.task.steps_per_epoch)
    optimizers = model.global_optimizer(recipe)
    batches = steps(model.task, model)
    train(model, optimizers, islice(batches, 2), "", average_gradients_fn=average)
    with watch() as seen:
        train(model, optimizers, islice(batches, 1), "", average_gradients_fn=average)
    assert optimizers.steps == 3 and optimizers.norm > 1e-3  # it was clipped
    return seen


def waits(seen: Seen) -> Counter[str]:
    return Counter(
        f"{wait.why}, {wait.where.rpartition('/')[2].partition(':')[0]}" for wait in seen.waits
    )


ONE_WAIT = {"copy to the CPU, optimization.py": 1}  # losses, norm and counts, read together


def plain_step(num_microbatches: int) -> Seen:
    """The same by hand: transformers' model, all logits, clipping, fused AdamW."""
    model: Any = whole_model(PROBLEM.task(CUDA, torch.float32), CUDA.device).train()
    optimizer = ADAMW(model.parameters())
    for _ in range(3):
        with watch() as seen:
            optimizer.zero_grad()
            total = torch.zeros((), device="cuda")
            for ids in torch.randint(64, (8, 17)).pin_memory().chunk(num_microbatches):
                ids = ids.to("cuda", non_blocking=True)
                logits = model(input_ids=ids[:, :-1], use_cache=False).logits
                loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                (loss / num_microbatches).backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            total.item()
    return seen


@pytest.mark.parametrize("num_microbatches", [1, 4])
@on_device
def test_a_step_waits_once_and_launches_what_a_plain_loop_does(num_microbatches: int) -> None:
    """With dropout. Clipping by hand scales by a number of the device, without a wait; by a
    number of the host it takes a kernel less."""
    setup = Setup(Options(num_microbatches=num_microbatches), ADAMW)
    seen = third_step(Replicated(PROBLEM.task(CUDA, torch.float32), CUDA, setup))
    assert waits(seen) == ONE_WAIT
    plain = plain_step(num_microbatches)
    assert plain.operators["native_dropout"] == seen.operators["native_dropout"] > 0
    assert len(seen.kernels) <= 1.15 * len(plain.kernels)


@on_device
def test_a_copy_that_cannot_be_pinned_is_waited_for() -> None:
    with patch.object(Tensor, "pin_memory", side_effect=RuntimeError), watch() as seen:
        moved = to_device(torch.arange(3), "cuda")
    assert sum(waits(seen).values()) == 1 and moved.tolist() == [0, 1, 2]


@pytest.mark.parametrize("recompute", ["never", "always"])
@on_device
def test_a_step_of_stages_in_threads_waits_once(recompute: Any) -> None:
    setup = Setup(Options(recompute=recompute), ADAMW, cut=(3, 3))
    task, devices = PROBLEM.task(CUDA, torch.float32), [torch.device("cuda", k) for k in (0, 1)]
    model = StagesInThreads(task, CUDA, setup, devices)
    assert waits(third_step(model)) == ONE_WAIT
    model.close()


def gradients_of(build: Any, num_microbatches: int, **options: Any) -> dict[str, Tensor]:
    """The first step's gradients by name, on the CPU."""
    task = PROBLEM.task(CUDA, torch.float32)
    setup = Setup(Options(num_microbatches=num_microbatches, **options), ADAMW, cut=(3, 3))
    model = build(task, CUDA, setup)
    model.backward(next(steps(task, model)))
    found = {name: p.grad.cpu() for name, p in model.module.named_parameters()}
    model.close()
    return found


def largest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference, as a part of the largest gradient."""
    assert a.keys() == b.keys()
    size = max(float(g.abs().max()) for g in a.values())
    return max(float((a[name] - b[name]).abs().max()) for name in a) / size


@on_device
def test_what_is_dropped_depends_on_the_micro_batch_alone() -> None:
    """One process, recomputation and stages drop the same; of another cut another's. The stages
    add in another order: rounding is far below the share of a dropped activation."""
    devices = [torch.device("cuda", k) for k in (0, 1)]
    alone = gradients_of(Replicated, 2)
    again = gradients_of(Replicated, 2, recompute="always")
    assert all(alone[name].equal(again[name]) for name in alone)
    for recompute in ("never", "always", "sqrt"):
        found = gradients_of(partial(StagesInThreads, devices=devices), 2, recompute=recompute)
        assert largest(alone, found) < 1e-5
    assert largest(alone, gradients_of(Replicated, 4)) > 1e-2


@on_device
def test_masks_differ_by_examples_place_first_position_and_epoch() -> None:
    from runtime.dropout import attention, dropout, site_of

    x = torch.ones(8, 16, 32, device="cuda:1")  # which is not the current device

    def mask(key: int, where: str, first: int = 0) -> Tensor:
        return dropout(x, 0.25, key, site_of(where), first).cpu()

    task = PROBLEM.task(CUDA, torch.float32)
    model = Replicated(task, CUDA, Setup(Options(num_microbatches=2), ADAMW))
    keys = [x[2] for step in islice(steps(task, model), 4) for x in step.inputs]  # of two epochs
    assert len(set(keys)) == 8 and all(type(key) is int and 0 <= key < 2**63 for key in keys)
    torch.manual_seed(0)
    masks = [
        *(mask(key, "drop") for key in keys),
        mask(keys[0], "h.0.attn"),
        mask(keys[0], "drop", 16),
    ]
    for i, one in enumerate(masks):
        assert abs(float((one == 0).double().mean()) - 0.25) < 0.04  # 5 deviations of 4,096 draws
        assert one.unique().tolist() == pytest.approx([0, 4 / 3])
        for other in masks[:i]:  # both keep an element with probability 9/16
            assert abs(float(((one > 0) & (other > 0)).double().mean()) - 9 / 16) < 0.04
    torch.manual_seed(1)
    before = torch.cuda.get_rng_state("cuda:1")
    assert mask(keys[0], "drop").equal(masks[0])
    with OfThread(x.device, 0).in_backward():  # other draws raise there
        assert mask(keys[0], "drop").equal(masks[0])
    assert torch.cuda.get_rng_state("cuda:1").equal(before)  # its own draws go on as they were
    q = torch.zeros(8, 2, 16, 32, device="cuda:1")
    draws = [attention(q, q, x[:, None], None, 0.25, key, 3).cpu() for key in (5, 6, 5)]
    assert draws[0].equal(draws[2]) and not draws[0].equal(draws[1])


def ddp(rank: int, world_size: int, how: Any) -> tuple[Counter[str], int, Counter[str]]:
    """The waits of a step of four micro-batches, its kernels, and those of the buckets by name."""
    world = World(rank, world_size, rank, torch.device("cuda", rank))
    torch.cuda.set_device(rank)
    setup = Setup(Options(num_microbatches=4, gradient_sync=how, bucket_mb=2**-7), ADAMW)
    model = Replicated(PROBLEM.task(world, torch.float32), world, setup)
    seen = third_step(model, model.average_gradients)
    model.close()
    of_buckets = [kernel for kernel in seen.kernels if kernel.where.startswith(BUCKETS)]
    return waits(seen), len(seen.kernels), Counter(kernel.operator for kernel in of_buckets)


@pytest.mark.parametrize("how", ["per_parameter", "flat", "overlap"])
@on_device
def test_a_step_of_two_replicas_waits_once_and_copies_bucket_by_bucket(how: str) -> None:
    for found, kernels, of_buckets in ranks(2).run(ddp, how):
        assert found == ONE_WAIT
        if how == "overlap":
            assert kernels <= 1.15 * len(plain_step(4).kernels)
            n = of_buckets["_foreach_copy_"]
            assert n > 2 and of_buckets == {"_foreach_copy_": n, "fill_": n, "div_": n}


@on_device
def test_a_recorded_action_waits_for_its_own_stream() -> None:
    """Not for NCCL's, on which a message stays until another rank receives it: with several stages
    per rank that one may be waiting for this one."""
    with watch() as seen, Timeline(CUDA).span("F"):
        torch.ones(3, device="cuda")
    assert [wait.why for wait in seen.waits] == ["event.synchronize"]


@on_device
def test_an_update_is_recorded_on_the_device_of_its_stage() -> None:
    timeline = Timeline(CUDA)
    for k in (0, 1):
        weight = nn.Parameter(torch.ones(2, device=f"cuda:{k}"))
        weight.grad = torch.ones_like(weight)
        optimizer = Setup(Options(), ADAMW, timeline).optimizer([("weight", weight)], stage=k)
        stream_of = torch.accelerator.current_stream
        with patch("torch.accelerator.current_stream", wraps=stream_of) as asked:
            optimizer.step()
        asked.assert_any_call(torch.device("cuda", k))  # torch itself asks for that of no device


@on_device
def test_lent_memory_goes_back_to_a_device_without_a_number() -> None:
    mine = communicator.Communicator()
    whole = mine.take(8, torch.float32, torch.device("cuda"))
    mine.start_reduce_scatter(whole, 0)()
    assert [pool._lent for pool in mine._pools.values()] == [{}]


@on_device
def test_products_are_exact_unless_tf32_is_asked_for(tmp_path: Path) -> None:
    """Torch's own default is tf32 in convolutions."""
    backends: Any = torch.backends
    line = f"single --model gpt2-mini --device cuda --workdir {tmp_path} --precision"
    for precision, wanted in (("tf32", "tf32"), ("fp32", "ieee")):
        setup = setup_of(parse_train(f"{line} {precision}".split()), CUDA)
        assert setup.dtype == torch.float32
        assert backends.cuda.matmul.fp32_precision == backends.cudnn.conv.fp32_precision == wanted


@on_device
def test_a_step_of_a_program_waits_once(tmp_path: Path) -> None:
    """With metrics.jsonl, the line that moves, and its share of a validation, which both runs do
    once: a run of one step more waits once more."""
    counts = []
    for steps_of_run in (3, 4):
        line = (
            "single --model gpt2-mini --n_layer 1 --n_embd 16 --n_head 2 --vocab_size 300 "
            "--n_train 64 --n_validation 8 --n_test 2 --batch_size 8 --num_microbatches 2 --keep 0 "
            f"--device cuda --timeline 0 --num_batches {steps_of_run} --workdir {tmp_path}"
        )
        args = parse_train(line.split())
        with watch() as seen, patch("project.figures.epochs.plot_training"):
            train_rank(CUDA, args)
        counts.append(waits(seen))
    assert counts[1] - counts[0] == ONE_WAIT
    assert counts[0] - counts[1] == {}


@on_device
def test_an_update_launched_ahead_is_the_one_that_the_host_decides_on() -> None:
    """Clipped, left out and taken as on the CPU, where the host decides before it updates."""

    def updated(device: str) -> tuple[list[Tensor], list[Any]]:
        torch.manual_seed(0)
        weights = nn.Linear(3, 2).to(device)
        optimizer = ADAMW(weights.parameters())
        options = Options(learning_rate=0.1, num_batches=9, max_grad_norm=1.0, on_nan="skip")
        optimizers = GlobalOptimizer(
            [optimizer], Recipe(options, 9), World(device=torch.device(device))
        )
        said: list[Any] = []
        for size, loss in ((1e-2, 1.0), (9.0, 1.0), (1.0, math.nan), (math.inf, 1.0), (1e-2, 2.0)):
            for p in weights.parameters():
                p.grad = torch.full_like(p, size)
            before = [p.detach().cpu().clone() for p in weights.parameters()]
            remark = optimizers.step(torch.tensor(loss, device=device), 1)
            same = all(map(torch.equal, before, (p.detach().cpu() for p in weights.parameters())))
            said.append(
                (remark, same, optimizers.norm, optimizer.state[weights.bias]["step"].item())
            )
        return [p.detach().cpu() for p in weights.parameters()], said

    (cpu, of_cpu), (device, of_device) = updated("cpu"), updated("cuda:0")
    assert [same for _, same, _, _ in of_device] == [False, False, True, True, False]
    assert [number for *_, number in of_device] == [1, 2, 2, 2, 3]
    assert repr(of_device) == repr(of_cpu)
    torch.testing.assert_close(device, cpu)

"""A rank that fails, or dies, ends the waiting of all others; mistakes are named; and what a rank
keeps right beside its gradients."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from data_parallel.gradients import GradientBuckets
from pipeline.messages import Message, PeerError, read
from pipeline.pipe import Pipe
from pipeline.process import ProcessPipe
from pipeline.shared_messages import SharedLink
from runtime.mesh import make_mesh
from tests.pipeline.pipeline_models import (
    Fuse,
    assert_close,
    assert_same_bits,
    batch,
    cut,
    in_one_process,
    one_f_one_b,
    square_error,
    take_gradients,
    tower,
)
from tests.ranks import Ranks

SOON = 10.0  # seconds; the time-out of the pipes is 30


def caught(function: Callable[..., Any], *args: Any) -> tuple[str, list[str]]:
    """What it raises, and soon, with its notes."""
    start = time.monotonic()
    try:
        function(*args)
    except Exception as error:
        assert time.monotonic() - start < SOON
        return f"{type(error).__name__}: {error}", list(getattr(error, "__notes__", []))
    return "nothing", []


def _blown(_: int, __: int, share: bool, where: str, culprit: int) -> list[Any]:
    layers, sizes = list(tower()), [2, 2, 2]
    fuse = Fuse()
    layers.insert(2 * culprit + 1, fuse)
    sizes[culprit] += 1
    with ProcessPipe(nn.Sequential(*layers), sizes, share_memory=share, timeout=30) as pipe:
        one_f_one_b(pipe, *batch(8))
        pipe.module.zero_grad()
        fuse.armed = (where, ZeroDivisionError)
        # A rank that could do all of its part before has no error in this step, but in the next.
        found = [caught(one_f_one_b, pipe, *batch(8)) for _ in range(2)]
        if pipe.rank == culprit:
            assert {p.grad for p in pipe.parameters()} == {None}
        dist.barrier()
    return found


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    ("culprit", "where"), [(0, "forward"), (0, "backward"), (1, "backward"), (2, "forward")]
)
def test_an_error_on_one_stage_ends_all_and_says_where(
    three_ranks: Ranks, share: bool, where: str, culprit: int
) -> None:
    for rank, (first, second) in enumerate(three_ranks.run(_blown, share, where, culprit)):
        text, notes = first if first[0] != "nothing" else second
        place = f"of micro-batch 0 on stage {culprit}"
        if rank == culprit:
            assert text == "ZeroDivisionError: on purpose"
            assert notes[0].startswith(f"in the {where}")
            assert notes[0].endswith(f"{place} (cpu)")
        else:
            said = (f"PeerError: stage {rank} waited for ", "PeerError: handing ")
            assert text.startswith(said), text
            assert place in text or not share
        if first[0] != "nothing":
            assert second[0].startswith("RuntimeError: the pipe cannot be used any more: ")


def _survivor(rank: int, _: int) -> list[str]:
    pipes = [ProcessPipe(tower(), [2, 4], share_memory=way, timeout=30) for way in (True, False)]
    for pipe in pipes:
        one_f_one_b(pipe, *batch(8))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [caught(one_f_one_b, pipe, *batch(8))[0] for pipe in pipes]


def test_a_rank_that_is_killed_ends_the_wait_of_its_neighbour() -> None:
    """Ranks of its own: these are not whole afterwards."""
    world = Ranks(2)
    try:
        with pytest.raises((EOFError, AssertionError, ConnectionError)):
            world.run(_survivor)
        assert world.pipes[0].poll(60)
        fine, answers = world.pipes[0].recv()
        assert fine, answers
    finally:
        world.close()
    for answer in answers:
        assert answer.startswith("PeerError: ") and " stage 1" in answer, answer
        assert "it has ended" in answer


def _failing_evaluation(_: int, __: int) -> str:
    layers, fuse = tower(), Fuse()
    layers[3].train(False)
    with ProcessPipe(nn.Sequential(*layers, fuse), [2, 5], timeout=30) as pipe:
        fuse.armed = ("forward", ZeroDivisionError)
        text, _notes = caught(pipe.eval, batch(8)[0])
        dist.barrier()
    assert [layer.training for layer in layers] == [True, True, True, False, True, True]
    return text


def test_a_rank_that_cannot_evaluate_tells_the_others_and_its_layers_are_as_before(
    ranks: Ranks,
) -> None:
    first, second = ranks.run(_failing_evaluation)
    assert second == "ZeroDivisionError: on purpose"
    assert first.startswith("PeerError: ")
    assert "it has failed: ZeroDivisionError: on purpose" in first


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return tower()


def closed() -> None:
    pipe = ProcessPipe(tower(), [6])
    pipe.close()
    one_f_one_b(pipe, *batch(4))


FIT = r"for 6 layers: one number per stage"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ProcessPipe(tower(), [2, 4]), r"2 stages on the ranks \[0, 1\] of 1: every"),
        (lambda: ProcessPipe(tower(), [5]), FIT),
        (lambda: ProcessPipe(tower(), [6, 0], ranks=[0, 0]), FIT),
        (lambda: ProcessPipe(on_meta(), [6]), r"0\.weight is on the meta device, .* initialize"),
        (
            lambda: ProcessPipe(tower(), [6]).train_step(*batch(4), square_error, "zbv"),
            "zbv",
        ),
        (closed, "cannot be used any more: it is closed; make a new"),
    ],
)
def test_what_does_not_fit(call: Callable[[], Any], said: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=said):
        call()


# Messages


@pytest.fixture
def linked() -> Any:
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]  # to a, to b
    memory = [FileIO(os.memfd_create("ends"), "r+b") for _ in range(2)]  # a's, b's
    theirs = [FileIO(os.dup(file.fileno()), "r+b") for file in memory]  # for the other end
    links = [
        SharedLink(pipes[k][0], pipes[1 - k][1], memory[k], theirs[1 - k], 0.05) for k in (0, 1)
    ]
    yield links
    for link in links:
        link.close()


def test_what_a_neighbour_sends_just_before_it_ends_is_received(linked: Any) -> None:
    ours, theirs = linked
    for i in range(3):
        theirs.send(Message(torch.full((2,), float(i))))
    ours.send(Message("nobody reads this"))
    theirs.close()
    found = [read(*ours.receive()) for _ in range(3)]
    assert [t.tolist() for t in found] == [[float(i)] * 2 for i in range(3)]
    for wait in (ours.receive, lambda: ours.send(Message(None))):
        with pytest.raises(PeerError, match=r"^it has ended$"):
            wait()


def _last_words(rank: int, _: int) -> Any:
    with ProcessPipe(tower(), [2, 4], share_memory=False, timeout=20) as pipe:
        link: Any = pipe._neighbours._links[1 - rank]
        dist.barrier()
        if rank == 1:
            link.send(Message("the last"))
            link.flush()
            return None
        time.sleep(0.5)  # it has hung up
        said = read(*link.receive())
        with pytest.raises(PeerError, match="it has ended, or is silent"):
            link.receive()
        return said


def test_so_it_is_between_groups(ranks: Ranks) -> None:
    assert ranks.run(_last_words) == ["the last", None]


def test_a_neighbour_that_is_silent_and_one_that_does_not_read(linked: Any) -> None:
    ours, _theirs = linked
    with pytest.raises(PeerError, match=r"^it has been silent for 0\.05 s$"):
        ours.receive()
    with pytest.raises(PeerError, match=r"^it has been silent for 0\.05 s$"):
        for _ in range(10_000):
            ours.send(Message(None))


def test_buffers_are_used_again_and_grow(linked: Any) -> None:
    ours, theirs = linked
    for size in (5, 5, 3, 9000, 5, 9001):
        x = torch.arange(float(size))
        ours.send(Message([x, x[1:]]))
        ours.send(Message(x))
        assert [t.tolist() for t in read(*theirs.receive())] == [x.tolist(), x[1:].tolist()]
        assert torch.equal(read(*theirs.receive()), x)
        assert len(ours._buffers) == 2


def test_a_message_gives_back_what_it_was_made_of() -> None:
    """One tensor at two places is one, views are apart. The order in memory stays, an expanded
    dimension too: else kernels may give other bits than under threads."""
    x = torch.randn(3, 4, requires_grad=True)
    value = {
        "x": x,
        "again": (x, x.t(), x[:, :1].expand(3, 9)),
        "none": [torch.empty(0, 2), 1, None, torch.tensor(3)],
    }
    message = Message(value)
    body = torch.full((message.nbytes,), 7, dtype=torch.uint8)
    message.write(body)
    found = read(message.head, body)
    again, transposed, expanded = found["again"]
    assert again is found["x"] and again.requires_grad and again.is_leaf
    assert torch.equal(transposed, x.t()) and transposed.stride() == (1, 4)
    assert torch.equal(expanded, x[:, :1].expand(3, 9)) and expanded.stride() == (1, 0)
    empty, one, nothing, three = found["none"]
    assert empty.shape == (0, 2) and three.dtype == torch.int64
    assert (one, nothing, three.item()) == (1, None, 3)


def _held(_: int, __: int) -> int:
    """How many descriptors two pipes leave open."""
    counts = []
    for _ in range(3):  # the first opens what stays
        with ProcessPipe(tower(), [2, 4], timeout=20) as pipe:
            one_f_one_b(pipe, *batch(8))
        dist.barrier()
        gc.collect()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    return counts[-1] - counts[0]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux lists them")
def test_nothing_is_held_by_closed_pipes(ranks: Ranks) -> None:
    assert ranks.run(_held) == [0, 0]


# Random numbers, owners, replicas


def _drawn(_: int, __: int) -> list[float]:
    """What the default generator gives after some steps. Only the first stage has dropout."""
    x, y = batch(4)
    found = []
    with ProcessPipe(nn.Sequential(nn.Dropout(0.5), *tower()), [1, 6], timeout=20) as pipe:
        torch.manual_seed(3)
        for training in (True, True, False):
            pipe.train(training)
            pipe.train_step(x, y, square_error, "gpipe", 2)
            pipe.eval(x)
            found.append(torch.rand(()).item())
    return found


def test_all_ranks_draw_once_per_train_step_whether_their_layers_draw_or_not(ranks: Ranks) -> None:
    """Else their generators, and all that is drawn from them later, would come apart."""
    torch.manual_seed(3)
    expected = []
    for _ in range(3):
        torch.randint(2**62, ())
        expected.append(torch.rand(()).item())
    assert ranks.run(_drawn) == [expected, expected]


def shared_by_three() -> nn.Sequential:
    torch.manual_seed(2)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
    for layer in (layers[1], layers[2]):
        layer.weight = layers[0].weight
    return layers


def _tied_and_hooked(_: int, __: int) -> tuple[dict[str, Any], list[Any], list[str]]:
    """Gradients, what hooks saw, and what this rank owns."""
    seen: list[Any] = []
    x, _y = batch(6)
    with ProcessPipe(shared_by_three(), [1, 1, 1], timeout=20) as pipe:
        for name, p in pipe.named_parameters().items():
            p.register_hook(lambda g, name=name: seen.append((name, g.clone())))
        pipe.train_step(x, x, square_error, "1f1b", 3)
        found = {name: p.grad for name, p in sorted(pipe.named_parameters().items())}
    return found, seen, list(pipe.owned_parameters())


def test_a_parameter_of_three_ranks_has_one_sum_in_the_order_of_the_stages(
    three_ranks: Ranks,
) -> None:
    """The bits of threads on each of them; hooks see it once, and whole; the first rank owns it."""
    plain, (x, _y) = shared_by_three(), batch(6)
    with Pipe(cut(plain, (1, 1, 1), ["cpu:0", "cpu:1", "cpu:2"])) as pipe:
        pipe.train_step(x, x, square_error, "1f1b", 3)
    expected = take_gradients(plain)
    answers = three_ranks.run(_tied_and_hooked)
    for rank, (found, seen, _) in enumerate(answers):
        wanted = {name: expected[name] for name in sorted(("0.weight", f"{rank}.bias"))}
        assert_same_bits(found, wanted)
        assert len(seen) == 2
        assert_same_bits(dict(sorted(seen)), wanted)
    owned = [owned for _, _, owned in answers]
    assert owned == [["0.weight", "0.bias"], ["1.bias"], ["2.bias"]]


def _averaging(rank: int, _: int) -> list[tuple[list[bool], dict[str, Any]]]:
    """Of two replicas of one stage, by schedule: of the buckets, a parameter each, whether their
    exchange started before the last backward ended; and the mean gradients, by name."""
    mesh, found = make_mesh(2, 1, 1, 20.0), []
    x, y = (t.chunk(2)[rank] for t in batch(8))
    for schedule in ("1f1b", "zb"):  # whole backwards, and halves
        events: list[Any] = []

        def note(*event: Any, events: list[Any] = events) -> None:
            events.append(event)

        group = mesh.pipeline.group
        with ProcessPipe(tower(), [6], group=group, recorder=note, timeout=20) as pipe:
            buckets = GradientBuckets(
                pipe.parameters(), mesh.data.group, bucket_bytes=1, recorder=note
            )
            pipe.train_step(x, y, square_error, schedule, 2)
            buckets.finish()
            last = max(end for kind, *_, end in events if kind in "BW")
            early = [start < last for kind, *_, start, _ in events if kind == "all_reduce"]
            found.append((early, {n: p.grad for n, p in pipe.named_parameters().items()}))
    return found


def test_replicas_exchange_gradients_while_the_last_backward_runs(ranks: Ranks) -> None:
    """Layer by layer, each when its own part of the backward has ended."""
    sums = in_one_process(tower(), *batch(8))
    mean = {name: g / 2 for name, g in sums.items() if name != "loss"}
    for answer in ranks.run(_averaging):
        for early, gradients in answer:
            assert early == [True] * len(mean)
            assert_close(gradients, mean)

"""A rank that fails, or dies, ends the waiting of all others; mistakes are named."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.links import MismatchError
from pipeline.parcels import Layout, PeerError
from pipeline.process import ProcessPipe
from pipeline.shared_messages import SharedReceiver, SharedSender
from tests.pipeline.pipeline_models import Call, batch, square_error, tower
from tests.ranks import Ranks

TRANSPORTS = ["shared memory", "groups"]
SOON = 10.0  # seconds; the time-out of the pipes is 30


class Fuse(nn.Module):
    """Raises in the forward or the backward of its third call."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.calls = where, 0

    def forward(self, x: Tensor) -> Tensor:
        return Wire.apply(x, self)

    def blow(self, where: str) -> None:
        if where == self.where and x_is_real():
            self.calls += 1
            if self.calls == 3:
                raise ZeroDivisionError("on purpose")


def x_is_real() -> bool:
    """Whether this is no dry forward: those have a mode that makes all new tensors fake."""
    return type(torch.empty(0)) is Tensor


class Wire(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        ctx.fuse = fuse
        fuse.blow("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        ctx.fuse.blow("backward")
        return g, None


def _caught(function: Callable[[], Any]) -> tuple[str, list[str], float]:
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        notes = list(getattr(error, "__notes__", []))
        return f"{type(error).__name__}: {error}", notes, time.monotonic() - start
    return "nothing", [], time.monotonic() - start


def _blown(_: int, __: int, transport: str, where: str, culprit: int) -> list[Any]:
    layers = list(tower())
    sizes = [2, 2, 2]
    layers.insert(2 * culprit + 1, Fuse(where))
    sizes[culprit] += 1
    share = transport == "shared memory"
    with ProcessPipe(nn.Sequential(*layers), sizes, share_memory=share, timeout=30) as pipe:
        first = _caught(lambda: pipe.train_step(*batch(8), square_error, "1f1b", 4))
        # A rank that could do all of its part before has no error in this step, but in the next.
        second = _caught(lambda: pipe.train_step(*batch(8), square_error, "1f1b", 4))
        if pipe.rank == culprit:
            assert {p.grad for p in pipe.parameters()} == {None}
        dist.barrier()
    return [first, second]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_an_error_on_one_stage_ends_all_and_says_where(
    three_ranks: Ranks, transport: str, where: str, culprit: int
) -> None:
    answers = three_ranks.run(_blown, transport, where, culprit)
    for rank, (first, second) in enumerate(answers):
        text, notes, seconds = first if first[0] != "nothing" else second
        assert seconds < SOON
        if rank == culprit:
            assert text == "ZeroDivisionError: on purpose"
            what = {"forward": "forward", "backward": "backward"}[where]
            assert notes[0].startswith(f"in the {what}")
            assert notes[0].endswith(f"of micro-batch 2 on stage {culprit} (cpu)")
        else:
            assert text.startswith(
                (f"PeerError: stage {rank} waited for ", "PeerError: handing ")
            ), text
            if transport == "shared memory":
                assert f"of micro-batch 2 on stage {culprit}" in text
        if first[0] != "nothing":
            assert second[0].startswith("RuntimeError: the pipe cannot be used any more: ")


def _survivor(rank: int, _: int, transports: list[str]) -> list[str]:
    pipes = [
        ProcessPipe(tower(), [2, 4], share_memory=name == "shared memory", timeout=30)
        for name in transports
    ]
    for pipe in pipes:
        pipe.train_step(*batch(8), square_error, "1f1b", 4)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    answers = []
    for pipe in pipes:
        text, _notes, seconds = _caught(
            lambda pipe=pipe: pipe.train_step(*batch(8), square_error, "1f1b", 4)  # type: ignore[misc]
        )
        assert seconds < SOON
        answers.append(text)
    return answers


def test_a_rank_that_is_killed_ends_the_wait_of_its_neighbour() -> None:
    """Ranks of its own: these are not whole afterwards."""
    world = Ranks(2)
    try:
        with pytest.raises((EOFError, AssertionError, ConnectionError)):
            world.run(_survivor, TRANSPORTS)
        assert world.pipes[0].poll(60)
        fine, answers = world.pipes[0].recv()
        assert fine, answers
    finally:
        world.close()
    for answer in answers:
        assert answer.startswith("PeerError: ") and " stage 1" in answer, answer
        assert "it has ended" in answer


def _other_batches(rank: int, _: int) -> list[str]:
    with ProcessPipe(tower(), [2, 4], timeout=30) as pipe:
        x, y = batch(8 if rank == 0 else 4)
        first, _notes, seconds = _caught(lambda: pipe.train_step(x, y, square_error))
        assert seconds < SOON
        dist.barrier()
    return [first]


def test_ranks_with_different_batches_say_so(ranks: Ranks) -> None:
    (first,), (second,) = ranks.run(_other_batches)
    assert "it sent 576 bytes where 320 were expected: give all ranks the same batch" in second
    assert "it has failed" in first


def _surprising(_: int, __: int) -> str:
    """What a stage hands on depends on more than the shapes: on whether it was dry."""
    layers = nn.Sequential(
        nn.Linear(4, 3).double(), Call(lambda x: x.float() if x_is_real() else x), nn.Linear(3, 3)
    )
    with ProcessPipe(layers, [2, 1], timeout=30) as pipe:
        text, _notes, seconds = _caught(lambda: pipe.train_step(*batch(4), square_error))
        assert seconds < SOON
        dist.barrier()
    return text


def test_what_the_dry_forward_did_not_foresee_is_not_sent(ranks: Ranks) -> None:
    first, second = ranks.run(_surprising)
    assert first.startswith(
        f"{MismatchError.__name__}: handing activations from stage 0 to stage 1, micro-batch 0: it "
        "made float32 [4, 3] with a gradient where the dry forward made float64 [4, 3] with"
    )
    assert second.startswith("PeerError: ")
    assert "it has failed: pipeline.links.MismatchError: handing activations from" in second


def _a_number(_: int, __: int) -> tuple[str, list[str], float]:
    x, y = batch(8)
    layers = nn.Sequential(*tower(), Call(lambda x: x.sum()))
    with ProcessPipe(layers, (2, 5), timeout=20) as pipe:
        pipe.eval(x, y, lambda output, _: output, 1)
        found = _caught(lambda: pipe.eval(x, y, num_microbatches=4))
        dist.barrier()
        return found


def test_a_number_per_micro_batch_is_refused(ranks: Ranks) -> None:
    _, (text, _, _) = ranks.run(_a_number)
    assert text.startswith("ValueError: a number per micro-batch cannot be put together")


@pytest.mark.parametrize("sizes", [[2, 4], [5], [6, 0], []])
def test_sizes_that_do_not_fit(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"for 6 layers on 1 ranks: one number per rank, each at"):
        ProcessPipe(tower(), sizes)


def test_parameters_without_a_value() -> None:
    with torch.device("meta"):
        layers = tower()
    with pytest.raises(
        ValueError, match=r"parameter 0\.weight is on the meta device .* initialize"
    ):
        ProcessPipe(layers, [6])


def test_layers_of_another_model() -> None:
    with pytest.raises(ValueError, match="weight of stage 0 is not one of the model's"):
        ProcessPipe(tower(), [6], model=tower())


def test_a_schedule_of_another_number_of_stages_or_that_cannot_run() -> None:
    x, y = batch(4)
    wrong: list[tuple[Any, str]] = [
        ([[], []], "the schedule has 2 stages and the pipe 1"),
        ([[]], "stage 0: B0 is missing"),
    ]
    for plan, message in wrong:
        with ProcessPipe(tower(), [6]) as pipe, pytest.raises(ValueError, match=message):
            pipe.train_step(x, y, square_error, lambda *_, plan=plan: plan)


def test_a_closed_pipe_says_so() -> None:
    pipe = ProcessPipe(tower(), [6])
    pipe.close()
    with pytest.raises(RuntimeError, match="cannot be used any more: it is closed; make a new"):
        pipe.train_step(*batch(4), square_error)


@pytest.mark.parametrize("end", [SharedSender, SharedReceiver])
def test_a_neighbour_that_ends_while_the_channel_is_made(end: Callable[..., Any]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    with ours, pytest.raises(PeerError, match=r"^it has ended$"):
        end(ours, 1.0)


def test_a_neighbour_that_is_silent_while_the_channel_is_made() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.raises(PeerError, match=r"^it is silent$"):
        SharedReceiver(ours, 0.01)


def test_what_a_neighbour_sends_just_before_it_ends_is_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the receiver's looks at the event and at the connection, both by hand."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = SharedSender(theirs, 1.0), SharedReceiver(ours, 1.0)
    layout, read = Layout([((2,), torch.float32)]), os.eventfd_read
    sender.expect([(i, layout) for i in range(3)], 3)
    sender.send(0, layout, [torch.full((2,), 0.0)])

    def look(event: int) -> int:
        found = read(event)
        monkeypatch.undo()
        for i in (1, 2):
            sender.send(i, layout, [torch.full((2,), float(i))])
        sender.close()
        return found

    monkeypatch.setattr(os, "eventfd_read", look)
    found = [receiver.receive(i, layout) for i in range(3)]
    assert [[t.tolist() for t in tensors if t is not None] for tensors in found] == [
        [[float(i)] * 2] for i in range(3)
    ]
    with pytest.raises(PeerError, match=r"^it has ended$"):
        receiver.receive(3, layout)
    receiver.close()

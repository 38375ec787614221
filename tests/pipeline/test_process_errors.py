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

from pipeline.messages import Message, PeerError, read
from pipeline.process import ProcessPipe
from pipeline.shared_messages import SharedLink
from tests.pipeline.pipeline_models import batch, square_error, tower
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
        if where == self.where:
            self.calls += 1
            if self.calls == 3:
                raise ZeroDivisionError("on purpose")


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


@pytest.mark.parametrize("sizes", [[2, 4], [5], [6, 0], []])
def test_sizes_that_do_not_fit(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"for 6 layers, on .* of 1: one number per stage"):
        ProcessPipe(tower(), sizes)


def test_parameters_without_a_value() -> None:
    with torch.device("meta"):
        layers = tower()
    with pytest.raises(
        ValueError, match=r"parameter 0\.weight is on the meta device .* initialize"
    ):
        ProcessPipe(layers, [6])


def test_layers_of_another_model() -> None:
    with pytest.raises(ValueError, match="weight of rank 0 is not one of the model's"):
        ProcessPipe(tower(), [6], model=tower())


def test_a_schedule_of_another_number_of_stages_or_that_cannot_run() -> None:
    x, y = batch(4)
    wrong: list[tuple[Any, str]] = [
        ([[], []], "the schedule has 2 lists and the pipeline 1"),
        ([[]], "the 0 stages on the ranks"),
    ]
    for plan, message in wrong:
        with ProcessPipe(tower(), [6]) as pipe, pytest.raises(ValueError, match=message):
            pipe.train_step(x, y, square_error, lambda *_, plan=plan: plan)


def test_a_closed_pipe_says_so() -> None:
    pipe = ProcessPipe(tower(), [6])
    pipe.close()
    with pytest.raises(RuntimeError, match="cannot be used any more: it is closed; make a new"):
        pipe.train_step(*batch(4), square_error)


def _linked() -> tuple[SharedLink, SharedLink]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return SharedLink(ours, 0.05), SharedLink(theirs, 0.05)


def test_what_a_neighbour_sends_just_before_it_ends_is_received() -> None:
    ours, theirs = _linked()
    for i in range(3):
        theirs.send(Message(torch.full((2,), float(i))))
    ours.send(Message("nobody reads this"))
    theirs.close()
    found = [read(*ours.receive()) for _ in range(3)]
    assert [t.tolist() for t in found] == [[float(i)] * 2 for i in range(3)]
    for wait in (ours.receive, lambda: ours.send(Message(None))):
        with pytest.raises(PeerError, match=r"^it has ended$"):
            wait()
    ours.close()


def test_a_neighbour_that_is_silent_and_one_that_does_not_read() -> None:
    ours, theirs = _linked()
    with pytest.raises(PeerError, match=r"^it has been silent for 0\.05 s$"):
        ours.receive()
    with pytest.raises(PeerError, match=r"^it has been silent for 0\.05 s$"):
        for _ in range(10_000):
            ours.send(Message(None))
    ours.close()
    theirs.close()


def test_buffers_are_used_again_and_grow() -> None:
    ours, theirs = _linked()
    for size in (5, 5, 3, 900, 5, 901):
        x = torch.arange(float(size))
        ours.send(Message([x, x[1:]]))
        ours.send(Message(x))
        assert [t.tolist() for t in read(*theirs.receive())] == [x.tolist(), x[1:].tolist()]
        assert torch.equal(read(*theirs.receive()), x)
        assert len(ours._buffers) == 2
    ours.close()
    theirs.close()

"""A rank that fails, or dies, ends the waiting of all others; mistakes are named; and messages
arrive as they were."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from pipeline.processes.links import PeerError
from pipeline.processes.messages import Message, Received
from pipeline.processes.process import ProcessPipe
from tests.chaos.run import until
from tests.odd_layers import in_one_memory
from tests.pipeline.pipeline_models import Fuse, as_between_gpus, batch, one_f_one_b, tower
from tests.ranks import Ranks
from tests.remote import on_ranks

SOON = 60.0  # seconds, on a busy machine; the time-out of the pipes is 300


def caught(function: Callable[..., Any], *args: Any) -> tuple[str, list[str]]:
    """What it raises, and soon, with its notes."""
    start = time.monotonic()
    try:
        function(*args)
    except Exception as error:
        assert time.monotonic() - start < SOON
        return f"{type(error).__name__}: {error}", list(getattr(error, "__notes__", []))
    return "nothing", []


def evaluate(pipe: ProcessPipe, x: Tensor, _: Tensor) -> None:
    pipe.forward(x)


def _blown(_: int, __: int, culprit: int, where: str, step: Any) -> list[Any]:
    layers, sizes, fuse = list(tower()), [2, 2, 2], Fuse()
    layers.insert(2 * culprit + 1, fuse)
    sizes[culprit] += 1
    layers[0].train(False)
    modes = [layer.training for layer in layers]
    with ProcessPipe(nn.Sequential(*layers), sizes, timeout=SOON) as pipe:
        step(pipe, *batch(8))
        pipe.module.zero_grad()
        fuse.armed = (where, ZeroDivisionError)
        # A rank that could do all of its part before has no error in this step, but soon.
        found = [caught(step, pipe, *batch(8)) for _ in range(4)]
        if pipe.rank == culprit:
            assert {p.grad for p in pipe.parameters()} == {None}
        dist.barrier()
    assert [layer.training for layer in layers] == modes
    return found


@pytest.mark.parametrize(
    ("culprit", "where", "step"),
    [(0, "backward", one_f_one_b), (1, "backward", one_f_one_b), (1, "forward", evaluate)],
)
def test_an_error_on_one_stage_ends_all_and_says_where(
    three_ranks: Ranks, culprit: int, where: str, step: Any
) -> None:
    for rank, found in enumerate(three_ranks.run(_blown, culprit, where, step)):
        (text, notes), *later = [answer for answer in found if answer[0] != "nothing"]
        place = f"of micro-batch 0 on stage {culprit}"
        if rank == culprit:
            assert text == "ZeroDivisionError: on purpose"
            assert notes[0].startswith(f"in the {where}")
            assert notes[0].endswith(f"{place} (cpu)")
        else:
            waiting = rf"waiting for [\w ]+ to (stage|rank) {rank}"
            assert re.match(rf"PeerError: ({waiting}|handing) ?", text), text
        for answer, _ in later:
            assert answer.startswith("RuntimeError: the pipe cannot be used any more: ")


def _survivor(rank: int, _: int) -> list[str]:
    pipe = ProcessPipe(tower(), [2, 4])
    one_f_one_b(pipe, *batch(8))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [caught(one_f_one_b, pipe, *batch(8))[0]]


def test_a_rank_that_is_killed_ends_the_wait_of_its_neighbour(ranks: Ranks) -> None:
    """The next test gets new ranks: these are not whole afterwards."""
    with pytest.raises((EOFError, AssertionError, ConnectionError)):
        ranks.run(_survivor)
    assert ranks.pipes[0].poll(SOON)
    fine, answers = ranks.pipes[0].recv()
    assert fine, answers
    for answer in answers:
        assert answer.startswith("PeerError: ") and " stage 1" in answer, answer
        assert "it has ended" in answer


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return tower()


def closed() -> None:
    pipe = ProcessPipe(tower(), [6])
    pipe.close()
    one_f_one_b(pipe, *batch(4))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ProcessPipe(tower(), [2, 4]), r"2 stages on the ranks \[0, 1\] of 1: every"),
        (lambda: ProcessPipe(tower(), [6, 0], ranks=[0, 0]), "for 6 layers: one number per stage"),
        (
            lambda: ProcessPipe(on_meta(), [6]),
            r"0\.weight is on the meta device: give the function",
        ),
        (
            lambda: ProcessPipe(in_one_memory(), [2]),
            r"0\.weight and 1\.weight share memory, and each rank",
        ),
        (closed, "cannot be used any more: it is closed; make a new"),
    ],
)
def test_what_does_not_fit(call: Callable[[], Any], said: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=said):
        call()


def value(rows: int) -> dict[str, Any]:
    x = torch.arange(4.0 * rows).view(rows, 4).requires_grad_()
    return {
        "x": x,
        "again": (x, x.t(), x[:, :1].expand(rows, 9)),
        "more": [torch.empty(0, 2), 1, None, torch.tensor(3)],
    }


def assert_arrived(found: dict[str, Any], rows: int) -> None:
    """One tensor at two places is one; views are apart, each with its elements in order."""
    x, (again, transposed, expanded) = value(rows)["x"], found["again"]
    assert again is found["x"] and again.requires_grad and again.is_leaf
    assert torch.equal(again, x)
    assert torch.equal(transposed, x.t()) and transposed.is_contiguous()
    assert torch.equal(expanded, x[:, :1].expand(rows, 9)) and expanded.is_contiguous()
    empty, one, nothing, three = found["more"]
    assert empty.shape == (0, 2) and three.dtype == torch.int64
    assert (one, nothing, three.item()) == (1, None, 3)


class Pair(NamedTuple):
    first: Any
    second: Any


class Kind(Enum):
    ONE = "one"


@dataclass
class Plain:
    x: Tensor
    more: Any


def test_whatever_holds_tensors_arrives() -> None:
    x = torch.arange(3.0)
    more = [Kind.ONE, torch.float64, torch.device("cpu"), x.shape, 1j, slice(2), {3}, "text"]
    message = Message((Pair(x, more), BaseModelOutput(last_hidden_state=x), Plain(x, more)))
    body = torch.zeros(message.nbytes, dtype=torch.uint8)
    message.write(body)
    pair, output, plain = Received(message.head, body).load()
    assert type(pair) is Pair and pair.second == plain.more == more and torch.equal(pair.first, x)
    assert type(output) is BaseModelOutput and output.last_hidden_state is pair.first is plain.x


@pytest.mark.filterwarnings("ignore")  # of torch: beta, deprecated, a prototype
@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr", "quantized", "nested"])
def test_what_is_not_dense_is_not_sent(kind: str) -> None:
    x: Any = torch.ones(2, 3)
    ways: dict[str, Callable[[], Tensor]] = {
        "to_sparse": x.to_sparse,
        "to_sparse_csr": x.to_sparse_csr,
        "quantized": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([x[0], x[1, :2]]),
    }
    with pytest.raises(TypeError, match=r"^a stage hands on a tensor that is not dense \(torch"):
        Message(("activations", ways[kind]()))


@pytest.mark.parametrize("apart", [False, True])
@on_ranks(2)
def test_messages_of_any_length_arrive_as_they_were_and_so_do_last_words(
    rank: int, _: int, apart: bool
) -> None:
    """Rank 0 sends, and rank 1 receives in another order, answers, and hangs up."""
    with ProcessPipe(tower(), [2, 4]) as pipe:
        link: Any = pipe._neighbours.links[1 - rank]
        if apart:
            as_between_gpus(pipe, rank)
        process = psutil.Process()
        files = process.num_fds()
        for k, rows in enumerate((5, 5, 3, 3000, 5, 3001, 2900)):
            if rank == 0:
                sends = [*link.send(k, value(rows)), *link.send(-k - 1, rows)]
                while sends:
                    link.wait_for(sends)
            else:
                assert link.receive(-k - 1) == rows
                assert_arrived(link.receive(k), rows)
            dist.barrier()
        if rank == 1:
            for words in ("almost", "last"):
                link.wait_for(link.send(words, words.upper()))
            return
        assert link.receive("almost") == "ALMOST"  # and what comes next may come, too
        assert until(lambda: process.num_fds() < files, SOON)  # gloo has heard that it hung up
        assert link.receive("last") == "LAST"
        with pytest.raises(PeerError, match="it has ended"):
            link.receive("more")
        with pytest.raises(PeerError, match="it has ended"):
            for _ in range(100):
                link.wait_for(link.send("nobody", "reads this"))


@on_ranks(2)
def test_a_message_like_the_one_before_is_one_transfer(rank: int, _: int) -> None:
    """And two after one that was shorter: both ends expect what they have seen. Messages have 500
    to 80,000 numbers; a long one makes those after it longer only a little."""
    transfers, lengths = [], []
    with ProcessPipe(tower(), [2, 4]) as pipe:
        link: Any = pipe._neighbours.links[1 - rank]
        for k, hundreds in enumerate((5, 10, 10, 10, 80, 9, 8, 20, 19)):
            x = torch.ones(hundreds, 100, dtype=torch.float64)
            if rank == 0:
                sends = link.send(k, x)
                transfers.append(len(sends))
                lengths.append(len(sends[0][1]) // 800)
                while sends:
                    link.wait_for(sends)
            else:
                assert link.receive(k).equal(x)
    assert transfers == ([] if rank else [2, 2, 1, 1, 2, 1, 1, 2, 1])
    assert lengths == ([] if rank else [5, 5, 10, 10, 10, 20, 15, 11, 20])


@on_ranks(2)
def test_a_neighbour_that_is_silent_is_not_waited_for_longer(rank: int, _: int) -> None:
    with ProcessPipe(tower(), [2, 4]) as pipe:
        pipe._neighbours._groups[0].set_timeout(timedelta(seconds=0.2))
        if rank == 0:
            start, said = time.monotonic(), r"^waiting for gradients from stage 1 .*: it has "
            with pytest.raises(PeerError, match=said):
                pipe._neighbours.down[1].get(0)
            with pytest.raises(PeerError, match="it has"):
                pipe.from_last(torch.zeros(()))
            assert time.monotonic() - start < SOON
        dist.barrier()

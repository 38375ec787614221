"""What a rank of a ProcessPipe keeps right beside its gradients: random numbers, hooks, who owns
what, the memory of messages; and a rank whose evaluation fails."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from data_parallel.gradients import GradientBuckets
from pipeline.messages import Message, read
from pipeline.pipe import Pipe
from pipeline.process import ProcessPipe
from pipeline.shared_messages import _listen
from runtime.mesh import make_mesh
from tests.pipeline.pipeline_models import (
    assert_close,
    assert_same_bits,
    batch,
    cut,
    square_error,
    tower,
)
from tests.pipeline.test_process_errors import SOON, _caught
from tests.ranks import Ranks


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


def _shared_by_three() -> nn.Sequential:
    torch.manual_seed(2)
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).double()
    for layer in (layers[1], layers[2]):
        layer.weight = layers[0].weight
    return layers


def _x_and_y() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(2, 6, 16, dtype=torch.float64, generator=generator)
    return x, y


def _tied_and_hooked(_: int, __: int) -> dict[str, Any]:
    """Gradients, what hooks saw, and what this rank owns."""
    seen: list[Any] = []
    with ProcessPipe(_shared_by_three(), [1, 1, 1], timeout=20) as pipe:
        for name, p in pipe.named_parameters().items():
            p.register_hook(lambda g, name=name: seen.append((name, g.clone())))
        pipe.train_step(*_x_and_y(), square_error, "1f1b", 3)
        grads = {name: p.grad for name, p in pipe.named_parameters().items()}
    return {"gradients": grads, "seen": seen, "owned": list(pipe.owned_parameters())}


def test_a_parameter_of_three_ranks_has_one_sum_in_the_order_of_the_stages(
    three_ranks: Ranks,
) -> None:
    """The bits of threads on each of them; hooks see it once, and whole; the first rank owns it."""
    plain = _shared_by_three()
    with Pipe(cut(plain, (1, 1, 1), ["cpu:0", "cpu:1", "cpu:2"])) as pipe:
        pipe.train_step(*_x_and_y(), square_error, "1f1b", 3)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    answers = three_ranks.run(_tied_and_hooked)
    for rank, answer in enumerate(answers):
        names = ["0.weight", f"{rank}.bias"]
        wanted = {name: expected[name] for name in names}
        assert_same_bits(dict(sorted(answer["gradients"].items())), dict(sorted(wanted.items())))
        assert sorted(name for name, _ in answer["seen"]) == sorted(names)
        assert_same_bits(dict(sorted(answer["seen"])), dict(sorted(wanted.items())))
    assert [answer["owned"] for answer in answers] == [
        ["0.weight", "0.bias"], ["1.bias"], ["2.bias"]
    ]  # fmt: skip


def _averaging(rank: int, _: int) -> list[tuple[list[bool], dict[str, Any]]]:
    """Of two replicas of one stage, by schedule: of the buckets, a parameter each, whether their
    exchange started before the last backward ended; and the mean gradients, by name."""
    mesh, found = make_mesh(2, 1, 1, 20.0), []
    x, y = (t.chunk(2)[rank] for t in batch(8))
    for schedule in ("1f1b", "zb"):  # whole backwards, and halves
        events: list[tuple[str, int, int, float, float]] = []

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
            starts = [start for kind, *_, start, _ in events if kind == "all_reduce"]
            early = [start < last for start in starts]
            found.append((early, {n: p.grad for n, p in pipe.named_parameters().items()}))
    return found


def test_replicas_exchange_gradients_while_the_last_backward_runs(ranks: Ranks) -> None:
    """Layer by layer, each when its own part of the backward has ended."""
    x, y = batch(8)
    plain = tower()
    square_error(plain(x), y).backward()
    mean = {n: p.grad / 2 for n, p in plain.named_parameters() if p.grad is not None}
    for answer in ranks.run(_averaging):
        for early, gradients in answer:
            assert early == [True] * len(mean)
            assert_close(gradients, mean)


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


def test_the_names_of_sockets_are_no_other_machines() -> None:
    """The system's own are numbers of 20 bits, the same on machines that have done the same."""
    listeners = [_listen(1) for _ in range(2)]
    names = {listener.getsockname() for listener in listeners if listener}
    for listener in listeners:
        if listener:
            listener.close()
    assert len(names) == len(listeners)
    assert {len(name) for name in names} == {17}


def _descriptors() -> int:
    gc.collect()  # what earlier tests have left
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def _held(_: int, __: int) -> int:
    """How many descriptors two pipes leave open."""
    x, y = batch(8)
    before = 0
    for k in range(3):
        before = _descriptors() if k == 1 else before  # the first opens what stays
        with ProcessPipe(tower(), [2, 4], timeout=20) as pipe:
            pipe.train_step(x, y, square_error, "1f1b", 4)
        dist.barrier()
    return _descriptors() - before


def test_nothing_is_held_by_closed_pipes(ranks: Ranks) -> None:
    assert ranks.run(_held) == [0, 0]


def _failing_evaluation(rank: int, _: int) -> list[str]:
    x, y = batch(8)
    with ProcessPipe(tower(), [2, 4], timeout=30) as pipe:
        y = y if rank == 0 else y[:5]
        text, _notes, seconds = _caught(lambda: pipe.eval(x, y, square_error, 2))
        assert seconds < SOON
        dist.barrier()
    return [text]


def test_a_rank_that_cannot_evaluate_tells_the_others(ranks: Ranks) -> None:
    (first,), (second,) = ranks.run(_failing_evaluation)
    assert second.startswith("ValueError: the batch is the first dimension of every tensor, but")
    assert first.startswith("PeerError: ")
    assert "it has failed: ValueError: the batch is the first dimension" in first


@pytest.mark.parametrize("training", [True, False])
def test_layers_are_as_they_were_after_an_evaluation_that_failed(training: bool) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    layers = tower().train(training)
    with ProcessPipe(layers, [6]) as pipe, pytest.raises(ZeroDivisionError):
        pipe.eval(*batch(4), broken)
    assert {module.training for module in layers.modules()} == {training}

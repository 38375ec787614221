"""To autograd a Pipe is one function: everything that works on a Sequential works on it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from tests.pipeline.pipeline_models import (
    Call,
    assert_close,
    assert_same_bits,
    batch,
    cut,
    gradients,
    square_error,
    take_gradients,
    tower,
)  # fmt: skip


def test_autograd_grad_returns_gradients_and_leaves_dot_grad_alone() -> None:
    x, y = batch()
    plain, same = tower(), tower()
    want = torch.autograd.grad(square_error(plain(x), y), list(plain.parameters()))
    with Pipe(cut(same), split_size=3) as pipe:
        got = torch.autograd.grad(square_error(pipe(x), y), list(same.parameters()))
    names = [name for name, _ in plain.named_parameters()]
    assert_close(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)))
    assert set(gradients(same).values()) == {None}


def test_two_forwards_before_one_backward() -> None:
    x, y = batch()
    plain, same = tower(), tower()
    (plain(x) * plain(x * 2) - y).sum().backward()
    with Pipe(cut(same), split_size=3) as pipe:
        (pipe(x) * pipe(x * 2) - y).sum().backward()
    assert_close(gradients(same), gradients(plain))


def test_a_pipe_in_the_middle_of_a_graph() -> None:
    x, y = batch()
    plain, same = tower(), tower()
    before, after = nn.Linear(4, 4).double(), nn.Linear(3, 3).double()
    ends = [*before.parameters(), *after.parameters()]
    want = torch.autograd.grad(square_error(after(plain(before(x))), y), ends)
    with Pipe(cut(same), split_size=3) as pipe:
        got = torch.autograd.grad(square_error(after(pipe(before(x))), y), ends)
    assert_close(dict(enumerate(got)), dict(enumerate(want)))  # type: ignore[arg-type]


def test_retain_graph_allows_a_second_backward_and_its_absence_refuses_it() -> None:
    x, y = batch()
    model = tower()
    with Pipe(cut(model), split_size=3) as pipe:
        loss = square_error(pipe(x), y)
        loss.backward(retain_graph=True)
        first = take_gradients(model)
        loss.backward()
        assert_same_bits(take_gradients(model), first)
        output = pipe(x)
        output.sum().backward()
        with pytest.raises(RuntimeError, match="a second backward needs"):
            output.sum().backward()


def test_differentiating_twice_is_refused() -> None:
    x, _ = batch()
    x.requires_grad_()
    with Pipe(cut(tower()), split_size=3) as pipe:
        output = pipe(x).sum()
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            torch.autograd.grad(output, x, create_graph=True)


def test_hooks_see_each_gradient_once_and_whole() -> None:
    x, y = batch()
    plain, same = tower(), tower()
    seen: list[tuple[str, str]] = []

    def watch(model: nn.Module, who: str) -> None:
        for name, p in model.named_parameters():
            p.register_hook(lambda g, key=f"{who} {name} gradient": seen.append((key, "")) or g * 2)  # type: ignore[func-returns-value]
            p.register_post_accumulate_grad_hook(
                lambda _, key=f"{who} {name} accumulated": seen.append((key, ""))
            )

    watch(plain, "plain")
    watch(same, "pipe")
    square_error(plain(x), y).backward()
    expected = gradients(plain)
    with Pipe(cut(same), split_size=2) as pipe:
        square_error(pipe(x), y).backward()
        assert_close(take_gradients(same), expected)
        pipe.train_step(x, y, square_error)
        assert_close(take_gradients(same), expected)
    counts = {key: seen.count((key, "")) for key, _ in seen}
    assert len(counts) == 2 * 2 * 8
    assert {n for key, n in counts.items() if key.startswith("plain")} == {1}
    assert {n for key, n in counts.items() if key.startswith("pipe")} == {2}


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_a_parameter_on_two_stages_gets_the_sum(sizes: tuple[int, int]) -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        model[2].weight = model[0].weight
        return model

    x, _ = batch()
    y = x.flip(0)
    plain, same = tied(), tied()
    square_error(plain(x), y).backward()
    with Pipe(cut(same, sizes), split_size=3) as pipe:
        square_error(pipe(x), y).backward()
        assert_close(take_gradients(same), gradients(plain))
        pipe.train_step(x, y, square_error)
        assert_close(take_gradients(same), gradients(plain))
        assert [len(owned) for owned in pipe.stage_parameters()] == [2, 1]


def test_a_copy_of_a_tied_parameter_on_another_device_follows_the_original() -> None:
    """What two GPUs need, played on one CPU: the copy is its own tensor."""

    def model(copied: bool) -> nn.Sequential:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        first = model.get_parameter("0.weight")
        model[2].weight = nn.Parameter(first.detach().clone()) if copied else first
        return model

    x, _ = batch()
    plain, same = model(copied=False), model(copied=True)
    tied = plain.get_parameter("0.weight")
    original, copy = same.get_parameter("0.weight"), same.get_parameter("2.weight")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, same)]
    with Pipe(cut(same, (1, 2)), split_size=3, replicas={copy: original}) as pipe:
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            square_error(plain(x), x).backward()
            if step % 2:
                square_error(pipe(x), x).backward()
            else:
                pipe.train_step(x, x, square_error)
            assert copy.grad is None
            assert_close({"tied": original.grad}, {"tied": tied.grad})
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(pipe(x), plain(x))
        assert torch.equal(copy, original)
        assert [len(owned) for owned in pipe.stage_parameters()] == [2, 1]


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    x, y = batch()
    plain, same = tower(), tower()
    for model in (plain, same):
        model.get_parameter("0.weight").requires_grad_(False)
        model[4].unused = nn.Parameter(torch.ones(2))
    square_error(plain(x), y).backward()
    assert gradients(plain)["0.weight"] is gradients(plain)["4.unused"] is None
    with Pipe(cut(same), split_size=3) as pipe:
        square_error(pipe(x), y).backward()
        assert_close(take_gradients(same), gradients(plain))
        pipe.train_step(x, y, square_error)
        assert_close(take_gradients(same), gradients(plain))


class AddBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, 4).double())
        self.b = nn.Parameter(torch.randn(2, 4).double())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a + self.b


def test_gradients_that_share_memory_are_not_added_into_each_other() -> None:
    """d(a + b) is one tensor for a, for b and, one stage down, for the input."""

    def build() -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(AddBoth(), AddBoth())

    x = torch.randn(8, 4).double()
    plain, same = build(), build()
    for rows in x.split(2):
        (plain(rows) ** 2).sum().backward()
    with Pipe(cut(same, (1, 1)), split_size=2) as pipe:
        (pipe(x) ** 2).sum().backward()
        assert_close(take_gradients(same), gradients(plain))
        pipe.train_step(x, x, lambda output, _: (output**2).sum())
        assert_close(take_gradients(same), gradients(plain))


def test_only_one_of_several_outputs_is_used() -> None:
    x, _ = batch()
    model = nn.Sequential(nn.Linear(4, 4).double(), Call(lambda h: (h, h * 2)))
    with Pipe(nn.Sequential(WithDevice(model, "cpu:0")), split_size=3) as pipe:
        pipe(x)[1].sum().backward()
    expected = (x.sum(0) * 2).expand(4, 4)
    assert_close({"0.weight": model[0].weight.grad}, {"0.weight": expected})

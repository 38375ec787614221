"""Small models for the tests of the pipeline, and how to cut and compare them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2LMHeadModel

from pipeline.pipe import Pipe
from pipeline.processes.process import ProcessPipe
from pipeline.replicas import place_layers
from pipeline.stage import Stage
from training.tasks.gpt2 import gpt2_config

CPU = ("cpu:0", "cpu:1")
ON_GPUS = [("cpu:0", "cuda:0"), ("cuda:0", "cuda:1")]  # the second takes two of them
DEVICES = [CPU, *ON_GPUS[: torch.cuda.device_count()]]


def tower(seed: int = 0) -> nn.Sequential:
    """Six layers, 4 -> 3 features, float64."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 6), nn.Linear(6, 3)
    ).double()


def cut(
    model: nn.Sequential, sizes: Sequence[int] = (2, 4), devices: Sequence[str] = CPU
) -> nn.Sequential:
    """The same layers, `sizes[s]` of them on `devices[s]`."""
    return place_layers(list(model), sizes, devices)[0]


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(size, 4, dtype=torch.float64, generator=generator)
    return x, torch.randn(size, 3, dtype=torch.float64, generator=generator)


def square_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.to(output.device)).square().sum()


def gradients(model: nn.Module | ProcessPipe) -> dict[str, Any]:
    """By name; sparse ones as dense tensors."""
    parameters = dict(model.named_parameters())  # of a ProcessPipe: this rank's
    return {n: None if p.grad is None else p.grad.to_dense() for n, p in parameters.items()}


def take_gradients(model: nn.Module | ProcessPipe) -> dict[str, Any]:
    """The same; the next ones start anew."""
    result = gradients(model)
    for p in model.parameters():
        p.grad = None
    return result


def in_one_process(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Loss and gradients of a plain model, which every pipeline must have."""
    loss = square_error(model(x), y)
    loss.backward()
    return take_gradients(model) | {"loss": loss.detach()}


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Float64, sums of at most a few hundred terms near 1 in another order: 1e-12 is ample."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        if value is None or other is None:
            assert value is other, name
        else:
            assert other.shape == value.shape, name
            tolerance = 1e-12 * max(1.0, value.abs().max()) if value.numel() else 0.0
            assert ((other.cpu() - value.cpu()).abs() <= tolerance).all(), name


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert different == []


def as_between_gpus(pipe: ProcessPipe, rank: int) -> None:
    """Bodies of messages travel in groups of their own. Both of two ranks call it."""
    groups = [dist.new_group() for _ in range(2)]
    link: Any = pipe._neighbours.links[1 - rank]
    link.bodies = groups if rank == 0 else groups[::-1]


def pipe_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("pipe-"))


# A step of a batch: forward and backward as of any module, or by a schedule.
def forward_backward(pipe: Pipe, x: Any, y: Any) -> Tensor:
    loss = square_error(pipe(x), y)
    loss.backward()
    return loss.detach()


def one_f_one_b(pipe: Pipe | ProcessPipe, x: Any, y: Any) -> Tensor:
    return pipe.train_step(x, y, square_error, "1f1b")


def gpipe(pipe: Pipe, x: Any, y: Any) -> Tensor:
    return pipe.train_step(x, y, square_error, "gpipe")


def zb(pipe: Pipe, x: Any, y: Any) -> Tensor:
    return pipe.train_step(x, y, square_error, "zb")


Step = Callable[[Pipe, Any, Any], Tensor]
STEPS: list[Step] = [forward_backward, one_f_one_b, zb]


def assert_trains_as_alone(make: Callable[[nn.Sequential], Pipe], home: Any = "cpu") -> Tensor:
    """Every step of a Pipe has the loss and the gradients of the tower alone; `pipe(x)` also of the
    input, in the memory of `home`. Returns the last loss."""
    x, y = batch(8)
    expected = in_one_process(tower(), x.requires_grad_(), y)
    for step in STEPS:
        model, pipe_x = tower(), x.detach().to(home)
        pipe_x.requires_grad_(step is forward_backward)
        with make(model) as pipe:
            loss = step(pipe, pipe_x, y)
        assert_close(gradients(model) | {"loss": loss}, expected)
        if step is forward_backward:
            assert_close({"x": pipe_x.grad}, {"x": x.grad})
    return loss


class Call(nn.Module):
    """A layer without parameters that calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Around(nn.Sequential):
    """Has a forward of its own."""

    def forward(self, x: Any) -> Any:
        return x + super().forward(x)


class Fuse(nn.Module):
    """Passes its input on, until armed; then it raises in every forward or every backward."""

    def __init__(self) -> None:
        super().__init__()
        self.armed: tuple[str, type[BaseException]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.blow("forward")
        x = x.clone()
        if x.requires_grad:
            x.register_hook(lambda _: self.blow("backward"))
        return x

    def blow(self, where: str) -> None:
        if self.armed and self.armed[0] == where:
            raise self.armed[1]("on purpose")


class Operators(TorchDispatchMode):
    """Counts the operators that run inside, those of backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[Any]()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        """Those of matrices."""
        aten = torch.ops.aten
        return sum(self.counts[packet] for packet in (aten.mm, aten.addmm, aten.addmm_))


def act(stage: Stage, action: str, x: Tensor, dy: Tensor) -> None:
    """Does an action, such as F0: micro-batch i is x + i."""
    kind, i = action[0], int(action[1:])
    if kind == "F":
        stage.forward(i, (x + i).requires_grad_())
    elif kind == "W":
        stage.backward_weight(i)
    else:
        (stage.backward if kind == "B" else stage.backward_input)(i, [dy])


def gpt2(blocks: int = 3) -> Any:
    """Tied: its head is its embedding."""
    torch.manual_seed(0)
    config = gpt2_config("gpt2-mini", 40, 16, dropout=0.0, n_layer=blocks, n_embd=16, n_head=2)
    return GPT2LMHeadModel(config).double()


def watched(kept: list[Any], most: int) -> Call:
    """Doubles; `kept` gets references to what its backward needs, `most` of which may live."""

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            ctx.kept = h.exp()
            kept.append(weakref.ref(ctx.kept))
            assert alive(kept) <= most
            return h * 2

        @staticmethod
        def backward(_: Any, g: Tensor) -> Tensor:
            return g * 2

    return Call(Save.apply)


def alive(kept: list[Any]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in kept)

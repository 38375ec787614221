"""What a program gives a layout: the options, a maker of optimizers, the timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from training.launch.world import World
from training.optimization import make_optimizer
from training.options import Options
from training.timeline import OFF, Timeline, clock_offset


@dataclass(frozen=True)
class Setup:
    """What a layout is made by, beside the task and the ranks.

    Attributes:
        args: the options of the run; a layout reads those that it has.
        cut: the layers per stage of a checkpoint, which then need not be measured.
    """

    args: Options
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    timeline: Timeline = OFF
    cut: Sequence[int] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, gradients and optimizer state."""
        return torch.float64 if self.args.precision == "fp64" else torch.float32

    def optimizer(
        self, parameters: Iterable[nn.Parameter], stage: int = -1
    ) -> torch.optim.Optimizer:
        """An optimizer whose steps the timeline records."""
        made = self.make_optimizer(parameters)
        self.timeline.watch(made, stage)
        return made

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        if self.args.precision != "bf16":
            return nullcontext()  # others compute in the type of the weights
        return torch.autocast(device.type, dtype=torch.bfloat16)

    def notes(self, device: torch.device) -> list[str]:
        """A warning about the precision on this machine, or nothing."""
        if self.args.precision != "bf16" or device.type != "cpu":
            return []
        cpu = torch.cpu.get_capabilities()
        if cpu.get("architecture") != "x86_64" or cpu.get("avx512_bf16") or cpu.get("amx_bf16"):
            return []  # fast, or unknown
        return [
            "--precision bf16: this CPU has no instructions for it (avx512_bf16 or amx_bf16) and "
            "computes it several times slower than fp32"
        ]


def setup_of(args: Options, world: World, cut: Sequence[int] | None = None) -> Setup:
    """What a layout is made by, see `Setup`. All ranks call it: they compare their clocks. It sets
    how this process' GPU multiplies."""
    if world.device.type == "cuda":  # torch's own default has tf32 in convolutions alone
        exact = "tf32" if args.precision == "tf32" else "ieee"
        torch.backends.cuda.matmul.fp32_precision = exact
        torch.backends.cudnn.conv.fp32_precision = exact  # type: ignore[attr-defined]
    steps = args.timeline + 1 if args.timeline else 0  # pictures leave out the first step
    offset = clock_offset(world) if steps else 0.0
    workers = "stage" if args.num_devices else "rank"
    timeline = Timeline(
        world, num_steps=steps, workers=workers, about={"strategy": args.strategy}, offset=offset
    )
    # Each rank makes its optimizer, of the parameters or shards that it holds.
    return Setup(args, partial(make_optimizer, args), timeline, cut)

"""A model laid out over the ranks, as the training loop sees it; and what a layout is made from.

Problem: the model may be whole on every rank, cut into shards, or cut into stages, and the loop
must not care. A program that needs one layout should not import the others.

Idea: a layout is a `LaidOutModel`. It runs a step's micro-batches, leaves the gradients of the
*global* batch in the parameters that this rank holds, and says which slices of the model they are.
Everything after that (clip, step, save, compare) is the same for all layouts.

    replicated.py   one process, or the whole model on every rank    Replicated
    sharded.py      shards of every layer (ZeRO 2 and 3)             Sharded
    stages.py       stages in processes                              Staged
    on_mesh.py      what the last two have in common                 MeshLayout
    threads.py      stages in threads                StagesInThreads, BlocksInThreads

What a rank holds is one list of records, `Held`, and what follows backward goes by it: clipping by
`counts`, checkpoints by the rectangle, the comparison of replicas by both. Over which ranks
gradients are added up depends on the parameter's name (`data_axes` in on_mesh.py; tied ones in
stages.py).

Three things have three names. `dp_rank` of `dp_size`: which part of each global batch is this
rank's. `Held.replicas`: which ranks hold the same. The axes `pp` and `tp` of a mesh: which place
in the model; `cp`: which positions of every sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runtime.pool import return_freed_memory
from training.launch.compare_ranks import check_replicas
from training.launch.world import World
from training.muon import Muon
from training.optimization import GlobalOptimizer, Recipe, is_bias_of_router, make_optimizer
from training.options import Options
from training.timeline import OFF, Timeline, clock_offset

if TYPE_CHECKING:  # an interface brings in no task
    from training.tasks.cache import Cache
    from training.tasks.task import Step, TrainingTask


@dataclass(frozen=True, eq=False)
class Held:
    """A rectangle of one of the model's tensors, which this rank holds.

    Each element of the model's gradient is counted once in its norm. If several ranks hold it when
    the update begins, one of them counts it (`counts`):

        whole on W replicas          the parameters are dealt out: replica i % W counts the i-th
        in shards over replicas      each rank its shard
        in several copies of shards  the ranks of the first copy, each its shard
        cut over tp, or experts      each rank its part
        whole on all ranks of tp     the first of them
        tied, on several stages      the first of them

    Attributes:
        name: of the tensor in the model.
        tensor: the rectangle's memory, to be saved or loaded into.
        offsets: where it begins in the whole tensor.
        shape: of the whole tensor.
        replicas: the axes along which other ranks hold the same rectangle.
        counts: whether this rank adds its gradient to the norm: see `counts_here`.
        parameter: what an optimizer updates: `tensor` itself, or this rank's slice of a parameter,
            of which `tensor` is a view. The records of one parameter agree on `replicas` and
            `counts`.
    """

    name: str
    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    replicas: tuple[str, ...] = ()
    counts: bool = True
    parameter: nn.Parameter | None = None

    @staticmethod
    def whole(
        name: str, tensor: Tensor, replicas: tuple[str, ...] = (), counts: bool = True
    ) -> Held:
        """A whole tensor."""
        offsets, shape = (0,) * tensor.dim(), tuple(tensor.shape)
        parameter = tensor if isinstance(tensor, nn.Parameter) else None
        return Held(name, tensor, offsets, shape, replicas, counts, parameter)

    def of(self, t: Tensor) -> Tensor:
        """The same rectangle of a tensor that is laid out in memory as `parameter`, such as its
        gradient or optimizer state: a view."""
        if self.parameter is None or self.tensor is self.parameter:
            return t
        begin = self.tensor.storage_offset() - self.parameter.storage_offset()
        view = self.tensor
        return t.as_strided(view.shape, view.stride(), t.storage_offset() + begin)

    @property
    def label(self) -> str:
        """The name, and which rectangle it is if it is not the whole, as w[0:2, 4:8]: shards with
        the same beginning may have different ends."""
        if self.tensor.shape == self.shape:
            return self.name
        sides = zip(self.offsets, self.tensor.shape, strict=True)
        return f"{self.name}[{', '.join(f'{at}:{at + size}' for at, size in sides)}]"


def counts_here(is_first: bool, i: int = 0, rank: int = 0, size: int = 1) -> bool:
    """Whether this rank adds a parameter's gradient to the norm; see `Held`.

    Args:
        is_first: whether this rank is the first along `tp`, and of the stages that hold it.
        i: the parameter's number among those for which that is so.
        rank, size: this rank's place among those that hold the same when the update begins.
    """
    return is_first and i % size == rank


def state_bytes(
    parameters: Iterable[Tensor], optimizers: Iterable[torch.optim.Optimizer] = ()
) -> dict[str, int]:
    """Bytes of `parameters`, `gradients` and `optimizer` state."""
    ps = list(parameters)
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return {
        "parameters": sum(p.nbytes for p in ps),
        "gradients": sum(p.grad.nbytes for p in ps if p.grad is not None),
        "optimizer": sum(v.nbytes for s in states for v in s.values() if isinstance(v, Tensor)),
    }


def parameters_of(held: Iterable[Held], axis: str | None = None) -> list[nn.Parameter]:
    """The parameters of records, each once, in their order: all, or those that ranks along `axis`
    hold alike."""
    chosen = (x.parameter for x in held if axis is None or axis in x.replicas)
    return list(dict.fromkeys(p for p in chosen if p is not None))


class LaidOutModel(ABC):
    """A model on the ranks of a run. All ranks call the same methods in the same order.

    Attributes:
        world: who this rank is.
        setup: what it was made from.
        held: what this rank holds and its optimizers update.
        replicated: what is compared with its replicas, if it is not `held`.
        dp_rank, dp_size: this rank's part of each global batch, and the number of parts.
        mask_rank: its place among ranks that have the same examples, and draw different masks.
        description: how the model is laid out, in words.
        modules: those of this rank's layers; `evaluating` switches their mode.
        module: holds this rank's parameters; None if there is no such single module.
        num_microbatches: per rank and step; None: as suits the device.
        schedule: of the stages, even of a single one; None: there are no stages.
        results_per_rank: whether each rank writes the results of its part of the batch; else rank 0
            writes those of all.
        ranks: the rank or device of each stage, if each has several stages; else None.
        optimizers: of what this rank holds; each parameter is in one of them.
        kind_of_optimizer: makes a `GlobalOptimizer` of them.
        devices: those that this rank computes on.
        cut: layers per stage, which a checkpoint remembers; None: nothing was measured.
        stage_sizes: layers, or blocks, of each stage, if there are several.
    """

    task: TrainingTask
    world: World
    setup: Setup
    held: Sequence[Held]
    replicated: Sequence[Held] = ()
    dp_rank = 0
    dp_size = 1
    mask_rank = 0
    description = ""
    modules: Sequence[nn.Module]
    module: nn.Module | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    results_per_rank = False
    ranks: Sequence[int] | None = None
    devices: Sequence[torch.device]
    optimizers: Sequence[torch.optim.Optimizer]
    kind_of_optimizer: Callable[..., GlobalOptimizer] = GlobalOptimizer
    cut: Sequence[int] | None = None
    stage_sizes: Sequence[int] = ()

    @abstractmethod
    def backward(self, step: Step) -> Tensor:
        """Forward and backward of this rank's micro-batches.

        Returns:
            This rank's part of the summed loss of the global batch; over all ranks they add up.
        """

    def average_gradients(self, module: nn.Module | None) -> None:  # noqa: B027
        """Call it with `module` after `backward`, where most layouts have combined gradients."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Puts this rank's layers into evaluation mode, and computes no gradients. Validation and
        generation run inside it as a whole: switching takes as long as a layer."""
        for module in self.modules:
            module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in self.modules:
                module.train()
            return_freed_memory()  # its blocks are not those of a step: sizes differ

    @abstractmethod
    def outputs(self, x: Any) -> Tensor | None:
        """The model's outputs for one micro-batch, while `evaluating`. `x` is None on a rank that
        has run out of data; the result is None on ranks that do not see the outputs."""

    def measure(self, x: Any, target: Any) -> Tensor | None:
        """The task's `measure` of the outputs; None on ranks that do not see them."""
        # None: no batch left; a forward needs no other rank.
        output = None if x is None else self.outputs(self.task.to_measure(x, target))
        return None if output is None else self.task.measure(output, target)

    @abstractmethod
    def next_tokens(self, ids: Tensor, cache: Cache, num_tokens: int) -> Tensor:
        """The next token of each sentence; see `training.tasks.task.Translator`."""

    def end(self) -> None:  # noqa: B027 (most layouts wait for nobody)
        """This rank has no sentences left to translate; see `training.tasks.task.Translator`."""

    def loaded(self) -> None:  # noqa: B027 (most layouts need do nothing)
        """Call it after new values were written into what is `held`."""

    @property
    def evaluated_microbatches(self) -> int | None:
        """The number of micro-batches that a part of the batch is cut into for `measure`."""
        return self.num_microbatches

    @property
    def sentences(self) -> tuple[int, int]:
        """Which sentences it translates; see `training.tasks.task.Translator`. The ranks
        that hold one model together have the same."""
        return self.dp_rank, self.dp_size

    @property
    def counted(self) -> list[nn.Parameter]:
        """The parameters whose gradients this rank adds to the global norm. Biases of routers
        are left out: their gradients are counts."""
        return parameters_of(x for x in self.held if x.counts and not is_bias_of_router(x.name))

    @property
    def layer_ranks(self) -> Any:
        """A `Communicator` of the ranks that have the same layers, or pieces of them; None: of this
        rank alone. (Programs without ranks do not import `Communicator`.)"""
        return None

    def global_optimizer(self, recipe: Recipe) -> GlobalOptimizer:
        """The optimizer of the weights that are held, which acts on all ranks together."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):  # it needs whole matrices: which rank computes which?
                optimizer.arrange(self.held, self.devices[0], self.layer_ranks)
        return self.kind_of_optimizer(self.optimizers, recipe, self.world, self.counted)

    def check_replicas(self, when: str) -> None:
        """Compares what several ranks hold; `when` is for the error, as "at the start". All ranks
        call it together. Raises RunError, on all ranks, if it differs."""
        copies = {x.label: x.tensor for x in self.replicated or self.held if x.replicas}
        check_replicas(self.world, copies, when)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of `parameters`, `gradients` and `optimizer` state that this rank holds."""
        return state_bytes(parameters_of(self.held), self.optimizers)

    def close(self) -> None:  # noqa: B027 (most layouts have nothing to end)
        """Ends threads."""


@dataclass(frozen=True)
class Setup:
    """What a layout is made from, in addition to the task and the ranks.

    Attributes:
        args: the options of the run; a layout reads those that it has.
        cut: the layers per stage of a checkpoint, which then need not be measured.
    """

    args: Options
    make_optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
    timeline: Timeline = OFF
    cut: Sequence[int] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights, gradients and optimizer state."""
        return torch.float64 if self.args.precision == "fp64" else torch.float32

    def optimizer(
        self, parameters: Iterable[tuple[str, nn.Parameter]], stage: int = -1
    ) -> torch.optim.Optimizer:
        """An optimizer of named parameters, whose steps the timeline records."""
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
    """What a layout is made from, see `Setup`. All ranks call it together: they compare clocks. It
    also sets how this process' GPU multiplies."""
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

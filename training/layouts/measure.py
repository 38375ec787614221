"""How many layers each stage has: as asked, as a checkpoint remembers, or measured.

Stages should take equally long. So rank 0 times the layers one by one, on a micro-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn

from pipeline.partition import balance as balanced
from pipeline.partition import measure_costs
from runtime.even import even_sizes
from runtime.meta import materialize, names_of
from training.launch.errors import UserError
from training.launch.world import World
from training.tasks.task import TrainingTask

from .layout import Setup


def stage_sizes(
    task: TrainingTask, world: World, setup: Setup, num_stages: int, num_microbatches: int
) -> list[int]:
    """Layers per stage, as --balance says. auto: as in the checkpoint, if that had as many stages,
    or else measured. All ranks call it together.

    Args:
        num_microbatches: of a batch. Layers are timed on the last one of the first batch.
    """
    balance, cut = setup.args.balance, setup.cut
    if balance == "auto" and cut is not None and len(cut) == num_stages:
        return list(cut)
    if balance != "auto":
        return sizes_as_asked(balance, task.blocks, num_stages)
    if num_stages == 1:
        return [len(task.layers(task.skeleton()))]

    def measured() -> list[int]:
        step = next(task.steps(0, 0, 1, num_microbatches))
        x, target = step.inputs[-1], step.targets[-1]  # the longest sentences
        model = task.skeleton().to(setup.dtype)  # on the meta device
        names = names_of(model)

        def filled(layer: nn.Module) -> nn.Module:
            """A copy with memory: a rank may lack the memory for all layers."""
            layer, names_of_copy = copy.deepcopy((layer, names))
            materialize(layer, names_of_copy, world.device, task.initialize)
            return layer

        with setup.autocast(world.device):
            layers = task.layers(model)
            costs = measure_costs(layers, x, lambda output: task.loss(output, target), filled)
        return balanced(costs, num_stages)

    return world.on_main(measured)  # the others wait, however long it takes


def cut_in_words(task: TrainingTask, cut: Sequence[int]) -> str:
    """The layers per stage. If a block, which `describe` counts, has several, they are named."""
    layers = " (embedding, halves of blocks, head)" if max(task.blocks) > 1 else ""
    return f"layers per stage: {' | '.join(map(str, cut))}{layers}"


def sizes_as_asked(balance: str, blocks: Sequence[int], num_stages: int) -> list[int]:
    """Layers per stage. `balance` counts blocks, e.g. 3,5, or is uniform; `blocks` has the number
    of layers of each. Raises UserError."""
    edges = accumulate(split_by(balance, len(blocks), num_stages, "blocks"), initial=0)
    return [sum(blocks[a:b]) for a, b in pairwise(edges)]


def split_by(balance: str, total: int, num_stages: int, unit: str) -> list[int]:
    """Blocks or layers per stage, from `uniform` or numbers such as 3,5. Raises UserError."""
    uniform = ",".join(map(str, even_sizes(total, num_stages)))
    try:
        sizes = [int(n) for n in (uniform if balance == "uniform" else balance).split(",")]
    except ValueError:
        sizes = []
    if len(sizes) != num_stages or sum(sizes) != total or min(sizes) < 1:
        raise UserError(
            f"--balance {balance}: it must be auto, or {num_stages} positive numbers that add up "
            f"to the {total} {unit} (uniform is {uniform})"
        )
    return sizes

"""A model in stages on the devices of one process, a worker thread per device.

`StagesInThreads` cuts the whole model: the embedding is on the first stage, the head and the loss
on the last. `BlocksInThreads` is the course's form: only the blocks are in stages; embedding and
head run on the first device while all others wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeline.microbatch import MicroBatches, batch_size
from pipeline.pipe import Pipe
from pipeline.replicas import place_layers
from pipeline.schedules.catalogue import ranks_of_stages
from runtime.graph import move
from runtime.meta import names_of
from runtime.recompute import mode_of
from training.launch.world import World
from training.optimization import GlobalOptimizer
from training.options import PIPELINE_MICROBATCHES
from training.tasks.cache import Cache
from training.tasks.generation import greedy
from training.tasks.gpt2 import Sequences, at_targets, measured, newest_tokens
from training.tasks.task import Step, TrainingTask, whole_model

from .layout import Held, LaidOutModel, Setup
from .measure import cut_in_words, split_by, stage_sizes


class _InOneProcess(LaidOutModel):
    """What both forms have in common: every parameter is in this process."""

    module: nn.Module
    layers: Sequence[nn.Module]

    def next_tokens(self, ids: Tensor, cache: Cache, num_tokens: int) -> Tensor:
        """Layer by layer, each on its own device: one position is too little to pipeline."""
        value: Any = newest_tokens(ids, cache)
        with self.setup.autocast(self.devices[0]):
            for layer in self.layers:
                device = next(layer.parameters()).device  # cpu, whichever slice of the cores
                value = layer(tree_map_only(Tensor, partial(Tensor.to, device=device), value))
        return greedy(value, num_tokens)  # of logits [B, V]


class StagesInThreads(_InOneProcess):
    """The whole model in stages.

    Args:
        devices: of the stages; cpu:0, cpu:1 are slices of the cores.
    """

    schedule: str  # never None, as there are stages
    num_microbatches: int

    def __init__(
        self, task: TrainingTask, world: World, setup: Setup, devices: Sequence[torch.device]
    ) -> None:
        self.task, self.world, self.setup, self.devices = task, world, setup, devices
        args, self.schedule = setup.args, setup.args.schedule
        self.num_microbatches = args.num_microbatches or PIPELINE_MICROBATCHES
        # By stage, the place of its device in `devices`.
        ranks = ranks_of_stages(self.schedule, len(devices), args.chunks)
        self.module = whole_model(task, world.device, setup.dtype)  # still on one device
        self.modules = self.layers = layers = task.layers(self.module)
        sizes = stage_sizes(task, world, setup, len(ranks), self.num_microbatches)
        self.cut = self.stage_sizes = sizes
        # Moves layers to their devices; a tied weight gets a copy on every other GPU that uses it.
        module, replicas = place_layers(layers, sizes, [devices[r] for r in ranks])
        one_at_a_time = self.schedule == "sequential" or len(ranks) == 1
        self.pipe = Pipe(
            module, recorder=setup.timeline, replicas=replicas, sizes=sizes,
            recompute=mode_of(args.recompute, one_at_a_time),
        )  # fmt: skip
        self.held = [Held.whole(name, p) for name, p in self.module.named_parameters()]
        self.ranks = ranks if len(ranks) > len(devices) else None  # only with chunks
        where = ", ".join(str(devices[r]) for r in ranks)
        self.description = f"{cut_in_words(task, sizes)} on {where}"
        # An optimizer per stage, on the stage's worker; a tied weight is in the first one's.
        names = names_of(self.module)
        self.optimizers = [
            setup.optimizer([(names[p], p) for p in parameters], stage)
            for stage, parameters in enumerate(self.pipe.stage_parameters())
        ]
        self.kind_of_optimizer = partial(OptimizerOnWorkers, self.pipe)

    def backward(self, step: Step) -> Tensor:
        """All micro-batches flow through the stages and back, as the schedule says."""
        with self.setup.autocast(self.devices[0]):
            loss = self.pipe.train_step(  # adds to .grad when all stages are done
                MicroBatches(step.inputs), MicroBatches(step.targets), self.task.loss,
                self.schedule, scale=step.scale(),
            )  # fmt: skip
        return loss.detach() * step.divisor  # the sum again

    @property
    def evaluated_microbatches(self) -> int | None:
        """One, which `outputs` cuts."""
        return 1

    def outputs(self, x: Any) -> Tensor | None:
        """The outputs for the whole batch, cut into as many micro-batches as in training."""
        self.pipe.split_size = max(1, -(-batch_size(x) // self.num_microbatches))
        with self.setup.autocast(self.devices[0]):
            output: Tensor = self.pipe(x)  # [N, V] or [m, 3], of all m micro-batches
        return output

    def close(self) -> None:
        """Ends the worker threads."""
        self.pipe.close()


class OptimizerOnWorkers(GlobalOptimizer):
    """An optimizer per stage of a pipe, each used by its stage's worker thread."""

    def __init__(self, pipe: Pipe, *given: Any) -> None:
        super().__init__(*given)  # what every kind is given
        self._pipe = pipe

    def _norms(self) -> list[Tensor]:
        by_stage = self._pipe.run_on_stages(self._norms_of)
        return [norms for of_stage in by_stage for norms in of_stage]

    def _update(self, factor: float | Tensor) -> None:
        self._pipe.run_on_stages(partial(self._update_by, factor=factor))


class BlocksInThreads(_InOneProcess):
    """GPT-2 with its blocks in stages.

    Args:
        split_size: examples per micro-batch; None: the stages work one after the other.
    """

    schedule, num_microbatches = "gpipe", 1

    def __init__(
        self,
        task: TrainingTask,
        world: World,
        setup: Setup,
        devices: Sequence[torch.device],
        split_size: int | None = None,
    ) -> None:
        from pipeline.model_parallel import GPT2LMHeadModelParallel  # imports transformers' models

        self.task, self.world, self.setup, self.devices = task, world, setup, devices
        plain: Any = whole_model(task, world.device, setup.dtype)
        self.module: Any = GPT2LMHeadModelParallel(plain.config).to(setup.dtype)
        self.module.load_state_dict(plain.state_dict())  # the same as in every layout
        self.layers = task.layers(self.module)  # only for next_tokens
        self.modules = [self.module, *self.layers]
        blocks, balance = range(plain.config.n_layer), setup.args.balance
        balance = "uniform" if balance == "auto" else balance
        sizes = split_by(balance, len(blocks), len(devices), "blocks")
        edges = pairwise([0, *accumulate(sizes)])  # (first block, next stage's first) of each
        self.module.parallelize(
            {str(d): list(blocks[a:b]) for d, (a, b) in zip(devices, edges, strict=True)}
        )
        if split_size is not None:  # else the batch is one micro-batch
            self.module._prepare_pipeline_parallel(split_size)
        self.module.transformer.h_pp.recorder = setup.timeline
        self.module.transformer.h_pp.recompute = mode_of(setup.args.recompute, split_size is None)
        where = ", ".join(map(str, devices))
        self.stage_sizes = sizes
        self.description = f"blocks per stage: {' | '.join(map(str, sizes))} on {where}"
        self.held = [Held.whole(name, p) for name, p in self.module.named_parameters()]
        self.optimizers = [setup.optimizer(self.module.named_parameters(), 0)]

    def backward(self, step: Step) -> Tensor:
        """The batch is one piece to the embedding and the head; `h_pp` cuts it for the blocks."""
        (x,), (target,) = step.inputs, step.targets  # `num_microbatches` is 1
        loss = self.task.loss(self.outputs(x), target)
        (loss / step.divisor).backward()  # of the blocks: that runs on the workers
        return loss.detach()

    def outputs(self, x: Sequences) -> Tensor:
        """[N, V]; or with labels [1, 3], as from `training.tasks.gpt2.Head`."""
        with self.setup.autocast(self.devices[0]):
            hidden = self.module.transformer(input_ids=x.hidden, use_cache=False)[0]  # B T C
            assert x.targets is not None
            hidden, head = at_targets(hidden, move(x.targets, hidden.device)), self.module.lm_head
            if x.labels is None:
                return head(hidden)
            labels = move(x.labels[x.targets != 0], hidden.device)
            return measured(hidden, head.weight, labels)

    def close(self) -> None:
        """Ends the worker threads."""
        self.module._finalize_pipeline_parallel()

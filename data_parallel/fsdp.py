"""Fully sharded data parallelism: each rank holds 1/W of parameters, gradients, optimizer state.

Problem: data parallelism keeps everything W times: with AdamW in fp32, 16 bytes per parameter
(weight, gradient, two moments). A model too large for one rank is too large for a thousand.

Idea (ZeRO): the rank that holds shard r of the parameters also updates it, so only that rank needs
the shard's gradients and optimizer state. Layers gather their parameters just before using them:

    compute   | F0       | F1       | F2 | B2       | B1       | B0       | update
    gather      1          2               1
    free                  0          1              2          1
    reduce                                           2          1          0

While layer k computes, the next layer's parameters and the previous one's gradients are in transit;
no rank holds more than two layers' parameters whole. A layer is freed when it has computed; in
backward, before its gradients are sent. Layer 2 stays after its forward: its backward is next.
(CPU ranks of one machine read each other's memory: there nothing is in transit. A layer's shards
are read when it computes, and its gradients added up when the layer below has its own.) Layer 0 is
an embedding, whose backward needs no weights: it is not gathered again.

`zero` says what is sharded: with 2 gradients and optimizer state, with 3 also the parameters.
(zero1.py shards the optimizer state alone, for any layout.) Bytes in fp32 with AdamW for W ranks
and P parameters, L of them in the largest layer:

    zero   parameters   gradients   moments   lent for a while   sent per rank and micro-batch
    2      4 P          4 P / W     8 P / W   4 L to 8 L         4 P (W-1)/W, and as much per step
    3      4 P / W      4 P / W     8 P / W   8 L to 12 L        12 P (W-1)/W

A step does not wait for the GPU: the CPUs exchange counts and announcements, if the group has them
(`init_process_group("cpu:gloo,cuda:nccl")`).

With `replicas` there are several groups of W ranks, each with all shards (hybrid sharding). Layers
are gathered and gradients scattered inside a group, the ranks of a host. Once per step, ranks with
the same shard add up its gradient, while the last micro-batch's backward goes on: an all-reduce of
4 P / W bytes over the slow network between groups.

All ranks must make the same calls. A rank without examples calls `forward(None)` and
`backward(None)`, and contributes zeros; `train_step` does so by itself.

Gradients are *summed* over ranks and micro-batches. For the mean over all target tokens of the
global batch, divide each micro-batch's summed loss by the global number of tokens.

Papers: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020; Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud",
VLDB 2022 (replicas of groups); Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded
Data Parallel", VLDB 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from runtime.communicator import Communicator, Finish
from runtime.graph import Alias
from runtime.guards import (
    ForeignLeaves,
    is_checked,
    refuse_gradient,
    refuse_gradient_hooks,
    refuse_hooks,
    refuse_own_forward,
    refuse_to_separate,
    tensors_of,
)  # fmt: skip
from runtime.meta import Initialize, names_of
from runtime.pool import private_pool
from runtime.recorder import Recorder, acting
from runtime.waits import control_device

from .buckets import refuse_other_tensors
from .gathered_layer import NO_HOOKS, GatheredLayer, LayerGraph
from .shards import (
    FlatSlice,
    MakeOptimizer,
    ShardedUnit,
    Traits,
    Unit,
    first_value,
    make_with,
    plan_units,
)


class FullyShardedDataParallel:
    """Trains layers sharded over the ranks.

        fsdp = FullyShardedDataParallel(layers, lambda slices: torch.optim.AdamW(slices, lr=1e-3),
                                        names=names, init=init)
        loss = loss_fn(fsdp.forward(x), target) / tokens_of_the_global_batch
        fsdp.backward(loss)
        fsdp.optimizer_step()

    Args:
        layers: run one after the other. Those on the meta device get their values from `init`, the
            others have those of rank 0. From then on parameters have memory only while their layer
            computes: an autograd function of a layer hands its weights to `save_for_backward`, and
            keeps none as an attribute.
        make_optimizer: gets what this rank holds of each trained parameter, a flat tensor, with the
            parameter's name; see `shards.MakeOptimizer`.
        names: of the parameters, and of buffers on the meta device; by default those of
            `nn.Sequential(*layers)`.
        init: fills one parameter or buffer, by its name.
        zero: 2 or 3.
        compute_dtype: the type in which parameters are gathered and layers compute, e.g. bf16.
            Shards, gradients and sums keep the parameters' type. (Autocast's graphs would hold a
            copy of every matrix.)
        device: where to compute.
        group: the ranks that share the shards; by default all.
        replicas: the ranks that hold the same shards in other groups; by default there are none.
        recorder: is told of F, B, R (recompute), all_gather and reduce_scatter of each layer; and,
            without a layer, of all_reduce (of the numbers of micro-batches), reduce_scatter (the
            rest after backward), optimizer, and barrier (around an update).
        recompute: computes layers again in backward (runtime/recompute.py) if backward gathers
            them anyway: all but the last and embeddings.
        traits: of a name; parameters with different traits go into different units.

    Raises:
        ValueError: there is nothing to train, something is on the meta device without `init`, a
            parameter has a hook on its gradient or shares memory, or ranks have other parameters.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module] | nn.Sequential,
        make_optimizer: MakeOptimizer,
        *,
        names: Mapping[Tensor, str] | None = None,
        init: Initialize | None = None,
        zero: int = 3,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
        recorder: Recorder | None = None,
        recompute: bool = False,
        traits: Callable[[str], Traits] = lambda _: Traits(),
    ) -> None:
        if zero not in (2, 3):
            raise ValueError(f"zero must be 2 or 3, and is {zero}; ZeRO 1 is zero1.py")
        self.communicator = Communicator(group or dist.group.WORLD)  # first: it refuses copies
        self.group = self.communicator.group
        self.device = torch.device(device)
        self.compute_dtype = compute_dtype
        self.recorder = recorder
        if isinstance(layers, nn.Sequential):
            refuse_own_forward(layers)
            refuse_hooks([layers])
        layers = list(layers)
        model = nn.Sequential(*layers)
        names = names_of(model) if names is None else names
        refuse_gradient_hooks(model.named_parameters(), NO_HOOKS)
        refuse_to_separate(names, "each would be sharded by itself")
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("the layers have no parameter that requires a gradient")
        refuse_other_tensors(model.named_parameters(), [self.group, replicas])
        self.replicas, pool = Communicator(replicas), private_pool(self.device)
        self._communicators = {self.group: self.communicator}
        self.units: list[ShardedUnit] = []
        plans, places = plan_units(layers, names, traits)
        for index, (of_layers, common, named) in enumerate(plans):
            of = common.group or self.group
            ranks = self._communicators.setdefault(of, Communicator(of))
            dtype = None if common.exact else compute_dtype
            unit = Unit(index, of_layers, named, ranks.size, dtype)
            self.units.append(ShardedUnit(unit, ranks, self.replicas, pool, self.device, zero))
            self.units[-1].fill(named, init)
        for module in model.modules():  # buffers are small: each rank holds them whole
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    name = names.get(buffer, key)
                    groups = self.group, replicas
                    module._buffers[key] = first_value(buffer, name, groups, self.device, init)
        self.parameters_changed()  # nobody reads before all have filled theirs
        self.layers = [
            GatheredLayer(k, layer, places[k], self.units, recompute, self.device)
            for k, layer in enumerate(layers)
        ]
        self.layers[-1].checkpoint = False  # its backward is next
        self._trained = [u for u in self.units if u.unit.trainable]
        slices = [x for u in self._trained for x in u.trained]
        self.optimizer = make_with(make_optimizer, slices, self.device)
        self._first_trained = min(u.unit.layers[0] for u in self._trained)  # where backward ends
        self._graphs: list[LayerGraph | None] = []  # by layer; None without examples
        self._output: list[Any] = []  # the leaves of the last output in grad mode
        self._steps = 0  # of which some are checked (runtime/guards.py)
        self._microbatch = 0  # backwards since the last step
        # The sums that were started last; and whether nothing more is added to them in this step
        self._reducing: list[tuple[ShardedUnit, Finish, bool]] = []
        self._last_pass = False  # whether this backward is known to be the step's last
        self._over_replicas: list[Finish] = []  # sums on their way, in the step's last backward
        self._summed = False  # over the replicas, too

    # A pass over the layers

    def forward(self, x: Any) -> Any:
        """The output of the last layer for x. A rank without examples passes None and gets None.

        In grad mode the next `backward` belongs to this forward.

        Raises:
            RuntimeError: a layer's output depends on a tensor that requires a gradient and that the
                previous layer did not return in a container of `torch.utils._pytree`; or x requires
                a gradient.
        """
        if torch.is_inference_mode_enabled():  # no training could use what is made in there
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(x)
        self._free_graphs()  # what a forward without a backward has left
        value, training = pytree.tree_map_only(Tensor, self._cast, x), torch.is_grad_enabled()
        if training:
            refuse_gradient(x, "the input", "make what computes it the first of the layers")
        for k, layer in enumerate(self.layers):
            following = _first(later.units for later in self.layers[k + 1 :])
            graph = None
            self._gather(k, layer.units, following)  # without examples too: others wait for it
            if x is not None:
                with self._record("F", k):
                    value, graph = layer.forward(value, is_checked(self._steps))
            self._graphs.append(graph)
            # Keep the last layer's parameters: its backward is next.
            if following or not training:
                _free(layer.units, following)
        if training:
            self._output = pytree.tree_leaves(value)
            aliases = {y: Alias.apply(y) for y in tensors_of(value) if y.requires_grad}
            value = pytree.tree_map_only(Tensor, lambda y: aliases.get(y, y), value)
        else:
            self._free_graphs()
        return value

    @torch.no_grad()
    def backward(self, loss: Tensor | None) -> None:
        """Adds the gradients of a loss that was computed from the output of the last forward. When
        it returns, the first layer's gradients are still being summed over the ranks: see
        `finish_gradients`.

        Args:
            loss: None on a rank without examples.

        Raises:
            RuntimeError: no forward in grad mode came before; or the loss needs gradients of
                tensors that forward did not return.
        """
        if not self._graphs:
            raise RuntimeError(
                "call forward() with gradients enabled before every backward(), and after an update"
            )
        if self._summed or self._over_replicas:  # this would add to all replicas' gradients
            raise RuntimeError(
                "the gradients are already summed over all replicas: call optimizer_step() or "
                "zero_grad() before the next backward()"
            )
        gradients = self._gradients_of_output(loss)  # by leaf of the output
        for k, layer in reversed(list(enumerate(self.layers))[self._first_trained :]):
            # what the next layer down needs, to be gathered while this one computes
            below = self.layers[self._first_trained : k]
            following = _first(next_layer.regathered for next_layer in reversed(below))
            self._gather(k, layer.regathered, following)  # nothing for an embedding lookup
            graph = self._graphs.pop()
            of_units: dict[int, list[Tensor | None]] = {}
            if graph is not None and graph.checkpointed:
                with self._record("R", k):
                    layer.recompute(graph)  # needs all units, and such a layer regathers all
            if graph is not None:
                with self._record("B", k):
                    gradients, of_units = layer.backward(graph, gradients)
            del graph  # lets go of the layer's input and output
            # not only what was gathered here: forward has kept the last layer's units
            _free(layer.units, following)
            with self._record("reduce_scatter", k):
                self._start_reduce(k, of_units)  # first waits for the sums of the layer above
        self._free_graphs()
        self._microbatch += 1

    def train_step(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        loss_fn: Callable[[Any, Any], Tensor],
        scale: float = 1.0,
    ) -> Tensor:
        """Forward and backward of this rank's micro-batches; there may be none.

        Args:
            loss_fn: (output, target) to the *sum* of the losses of a micro-batch.
            scale: of the loss and its gradients, e.g. 1 / tokens of the global batch.

        Returns:
            This rank's part of the loss. The sum over the ranks is the loss of the step.

        Raises:
            RuntimeError: see `forward`; or `scale` requires a gradient.
        """
        refuse_gradient(scale, "scale", "let a layer or loss_fn multiply by a parameter")
        most = torch.tensor(len(inputs), device=control_device(self.group, self.device))
        with self._record("all_reduce", -1):
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
            if self.replicas.size > 1:
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.replicas.group)
            passes = int(most)  # all ranks make as many
        total = torch.zeros((), device=self.device)
        for i in range(passes):
            loss = None
            with torch.enable_grad():
                output = self.forward(inputs[i] if i < len(inputs) else None)
                if i < len(inputs):
                    loss = loss_fn(output, targets[i]) * scale
                    total = total + loss.detach()  # in the wider of their types
            self._last_pass = i + 1 == passes
            self.backward(loss)
        return total

    def finish_gradients(self) -> None:
        """Waits until the `grad` of every shard is the sum over the ranks, to be inspected or
        scaled before `optimizer_step` (which also calls this). All ranks must call it."""
        if self._reducing:
            with self._record("reduce_scatter", -1):
                self._finish_sums()
        if self.replicas.size > 1 and self._microbatch and not self._summed:
            with self._record("all_reduce", -1):
                started, self._over_replicas = self._over_replicas, []
                for finish_sum in started or [u.start_sum_of_replicas() for u in self._trained]:
                    finish_sum()
                self.replicas.barrier(self.device)  # all have written their parts of my gradients
                self._summed, self._last_pass = True, False
        for u in self._trained:
            u.hand_back()

    def zero_grad(self) -> None:
        """Drops gradients that no `optimizer_step` has used. All ranks must call it."""
        self.finish_gradients()
        for u in self._trained:
            u.drop_gradient()
        self._microbatch, self._summed = 0, False

    def optimizer_step(self) -> None:
        """Updates this rank's shards and drops the gradients. All ranks must have made the same
        backwards. Without a backward since the last step it changes nothing.
        """
        self.finish_gradients()
        self._free_graphs()  # a backward would take the new values for those of its forward
        self._barrier()  # nobody reads my shards any more
        with self._record("optimizer", -1):
            self.optimizer.step()
        for u in self._trained:
            u.drop_gradient()
            u.publish()
        self._barrier(self._microbatch)  # nobody gathers old values
        self._steps += 1
        self._microbatch, self._summed = 0, False

    # What this rank holds

    def get_local_info(self, layer: int) -> list[FlatSlice]:
        """What this rank holds of each of the layer's parameters, with its values."""
        units = self.layers[layer].units
        return [x for u in units for x in u.trained or u.slices(u.shard)]

    def get_local_grad_shard(self, layer: int) -> list[FlatSlice]:
        """What this rank holds of the gradients of the layer's parameters, summed over all ranks
        and all backwards since the last step."""
        self.finish_gradients()
        units = self.layers[layer].units
        return [x for u in units if u.shard.grad is not None for x in u.slices(u.shard.grad)]

    def gather_param_data(self, layer: int) -> dict[str, Tensor]:
        """The whole parameters of a layer by name, valid until the next forward. All ranks must
        call it."""
        units = self.layers[layer].units
        self._gather(layer, units, [])
        return {
            entry.name: view
            for u in units
            if u.whole is not None
            for entry, view in zip(u.unit.entries, u.unit.views(u.whole), strict=True)
        }

    def parameters_changed(self) -> None:
        """All ranks must call it after writing to the shards. Between a forward and the writes
        there must be a barrier: other ranks may still be reading."""
        self._free_graphs()
        for u in self.units:
            u.publish()
        self._barrier()

    def held_bytes(self) -> dict[str, int]:
        """What this rank holds now, without activations and lent memory."""
        state = self.optimizer.state.values()
        return {
            "parameters": sum(u.nbytes for u in self.units),
            "gradients": sum(u.gradient.nbytes for u in self.units if u.gradient is not None),
            "optimizer": sum(t.nbytes for s in state for t in s.values() if isinstance(t, Tensor)),
        }

    # The parts of a pass

    def _gather(self, layer: int, units: list[ShardedUnit], following: list[ShardedUnit]) -> None:
        """Waits for the units of a layer, and starts to gather the next layer's."""
        for u in units:
            u.start_gather()
        if any(u.arriving is not None for u in units):
            with self._record("all_gather", layer):
                for u in units:
                    u.finish_gather()
        for u in following:
            if u.communicator.overlaps(self.device):
                u.start_gather()  # in transit while this layer computes

    def _gradients_of_output(self, loss: Tensor | None) -> list[Tensor | None]:
        """The gradients of the last layer's output, one per leaf; None for a leaf without one."""
        output, self._output = self._output, []
        if loss is None:
            return [None] * len(output)
        wanted = [y for y in output if isinstance(y, Tensor) and y.requires_grad]
        ForeignLeaves(wanted, ()).refuse(loss, f"the loss after {self.layers[-1].name}")
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
        of_tensor = {id(y): dy for y, dy in zip(wanted, gradients, strict=True)}
        return [of_tensor.pop(id(y), None) for y in output]  # a repeated tensor counts once

    def _start_reduce(self, layer: int, gradients: Mapping[int, Sequence[Tensor | None]]) -> None:
        """Starts to sum a layer's gradients over the ranks, by unit; a rank without examples has
        none, and adds zeros."""
        units = [u for u in self._trained if layer in u.unit.layers]
        if not units:
            return
        self._finish_sums()  # one layer at a time, since the next one uses its memory
        for u in units:
            finish = u.start_sum(gradients.get(u.unit.index))
            self._reducing.append((u, finish, self._last_pass and layer == u.unit.layers[0]))

    def _finish_sums(self) -> None:
        for u, finish, complete in self._reducing:
            finish()
            if complete and self.replicas.size > 1:
                self._over_replicas.append(u.start_sum_of_replicas())  # while backward goes on
        self._reducing = []

    def _barrier(self, number: int | None = None) -> None:
        with self._record("barrier", -1):
            for communicator in self._communicators.values():
                communicator.barrier(self.device, number)

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.compute_dtype) if self.compute_dtype and x.is_floating_point() else x

    def _free_graphs(self) -> None:
        """Frees what a forward has kept for its backward."""
        self._graphs, self._output = [], []
        _free(self.units)

    def _record(self, kind: str, layer: int) -> AbstractContextManager[None]:
        if self.recorder is None:  # the usual case costs the host nothing
            return nullcontext()
        microbatch = -1 if layer < 0 else self._microbatch
        return acting(self.recorder, kind, layer, microbatch, device=self.device)


def _first(of_layers: Iterable[list[ShardedUnit]]) -> list[ShardedUnit]:
    """The units of the first layer that has any."""
    return next((units for units in of_layers if units), [])


def _free(units: Iterable[ShardedUnit], but: Sequence[ShardedUnit] = ()) -> None:
    for u in units:
        if u not in but:
            u.free()

"""What a checkpoint holds of a run: weights, optimizer state, random states.

All tensors are named after parameters, never after the number of a rank, a stage or a parameter
group, so that another layout finds them:

    model.transformer.wte.weight                     a weight
    optimizer.exp_avg.transformer.wte.weight         optimizer state of its shape
    optimizer.step.transformer.wte.weight            optimizer state that is one number
    random.1.cpu, random.1.cuda:0                    the generators of rank 1

What a strategy adds is a function (`Shards`) that says which piece of which parameter a tensor on
this rank is. Python's and NumPy's generators are not in it: training does not draw from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from training.pieces import Piece, StoredTensors, whole

# shards(p, t): the pieces that are `t`, a tensor of p's shape, where p is what this rank holds.
# Their names are those of parameters; the pieces are views of t, so that loading fills it.
Shards = Callable[[Tensor, Tensor], list[Piece]]


def whole_parameters(model: nn.Module) -> Shards:
    """For ranks that hold whole parameters. A tied weight has one name, its first."""
    names = {id(p): name for name, p in model.named_parameters()}
    return lambda p, t: [whole(names[id(p)], t)]


def training_pieces(
    parameters: Iterable[Tensor], optimizers: Iterable[Optimizer], shards: Shards
) -> list[Piece]:
    """The weights and the optimizer state that this rank holds."""
    pieces = [piece for p in parameters for piece in _named("model", shards(p, p.detach()))]
    for optimizer in optimizers:
        for p, slots in optimizer.state.items():
            for slot, value in slots.items():
                if isinstance(value, Tensor):  # SGD's momentum is None until there is one
                    pieces += _slot_pieces(f"optimizer.{slot}", p, value, shards)
    return pieces


def load_training(
    parameters: Iterable[Tensor],
    optimizers: Iterable[Optimizer],
    shards: Shards,
    stored: StoredTensors,
) -> None:
    """Puts weights and optimizer state back.

    Raises:
        CheckpointError: they are of another model.
    """
    stored.load(piece for p in parameters for piece in _named("model", shards(p, p.detach())))
    for optimizer in optimizers:
        state = {
            i: slots
            for i, p in enumerate(_parameters(optimizer))
            if (slots := _load_slots(p, shards, stored))
        }
        # The optimizer puts each where it wants it: `step` of a fused one is on the GPU.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _named(prefix: str, pieces: Iterable[Piece]) -> Iterator[Piece]:
    return (Piece(f"{prefix}.{p.name}", p.tensor, p.offsets, p.shape) for p in pieces)


def _slot_pieces(prefix: str, p: Tensor, value: Tensor, shards: Shards) -> list[Piece]:
    if value.dim():
        return list(_named(prefix, shards(p, value)))
    # One number for a flat buffer of many parameters is the number of each of them.
    return [whole(f"{prefix}.{n}", value.clone()) for n in {s.name: None for s in shards(p, p)}]


def _load_slots(p: Tensor, shards: Shards, stored: StoredTensors) -> dict[str, Tensor]:
    """The optimizer state of a parameter; none if it had no gradient before the checkpoint. Of a
    flat buffer some parameters may have had one, and others not: theirs is zero."""
    slots: dict[str, Tensor] = {}
    for name in {piece.name: None for piece in shards(p, p)}:
        for slot in stored.slots("optimizer", name):
            key = f"optimizer.{slot}.{name}"
            if not stored.shape(key):
                slots.setdefault(slot, stored.tensor(key, torch.float32))
                continue
            slots.setdefault(slot, torch.zeros_like(p))
            pieces = _slot_pieces(f"optimizer.{slot}", p, slots[slot], shards)
            stored.load(piece for piece in pieces if piece.name == key)
    return slots


def generator_pieces(rank: int, devices: Sequence[torch.device]) -> list[Piece]:
    """The random states of this rank: of the CPU, and of the GPUs that it uses."""
    return [whole(f"random.{rank}.cpu", torch.get_rng_state())] + [
        whole(f"random.{rank}.{device}", torch.cuda.get_rng_state(device))
        for device in devices
        if device.type == "cuda"
    ]


def load_generators(rank: int, devices: Sequence[torch.device], stored: StoredTensors) -> bool:
    """Puts the random states of this rank back. False, and nothing done, where the checkpoint has
    none of this rank or of these devices: it was written by fewer, or by others."""
    gpus = [device for device in devices if device.type == "cuda"]
    if any(f"random.{rank}.{where}" not in stored for where in ("cpu", *gpus)):
        return False
    torch.set_rng_state(stored.tensor(f"random.{rank}.cpu", torch.uint8))
    for device in gpus:
        torch.cuda.set_rng_state(stored.tensor(f"random.{rank}.{device}", torch.uint8), device)
    return True

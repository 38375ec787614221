"""A device without float64, as Apple's GPUs are: what the project computes in it, the CPU does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from runtime import waits
from tests.equivalence.compare import laid_out
from tests.equivalence.table import find
from tests.remote import on_device
from training.launch.world import World
from training.loop import train

CUDA = torch.device("cuda", 0)


@contextmanager
def without_float64() -> Iterator[None]:
    """Inside, the device refuses float64 as Apple's do."""
    from tests.device.tensors import DeviceTensor  # on the device

    new = DeviceTensor.__new__

    def made(cls: Any, raw: Tensor, at: int) -> Any:
        if raw.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return new(cls, raw, at)

    with (
        patch.object(DeviceTensor, "__new__", made),
        patch.object(waits, "WITHOUT_FLOAT64", ("cuda",)),
    ):
        yield


@pytest.mark.parametrize("name", ["threads1-1f1b-m3", "pipeline1-1f1b-m3"])
@on_device
def test_a_step(name: str) -> None:
    """Backward, the norm of the gradient, and the update."""

    def trained(device: torch.device) -> tuple[float, float]:
        with laid_out(find(name), World(device=device), torch.float32) as training:
            train(training.model, training.optimizer, islice(training._steps(), 2), "", rank=1)
            return training.optimizer.loss, training.optimizer.norm

    with without_float64():
        with pytest.raises(TypeError, match="float64"):
            torch.ones(3, device=CUDA).double()
        found = trained(CUDA)
    assert found == pytest.approx(trained(torch.device("cpu")), rel=1e-4)


@on_device
def test_an_evaluation() -> None:
    world = World(device=CUDA)
    task = find("single-one_more").problem.task(world, torch.float32)
    logits = torch.eye(5, 64)
    target = torch.tensor([0, 1, 2, 3, 9])  # the last is wrong
    with without_float64():
        found = task.measure(logits.to(CUDA), target.to(CUDA))
    assert found.tolist() == task.measure(logits, target).tolist()
    assert found[1:].tolist() == [4, 5]

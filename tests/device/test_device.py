"""The device without hardware does what CUDA does, as far as the project relies on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.device.seen import watch
from tests.remote import on_device


@on_device
def test_tensors_of_two_devices_do_not_mix() -> None:
    x, y = torch.ones(3, device="cuda"), torch.ones(3, device="cuda:1")
    assert [str(t.device) for t in (x, y, x + 1)] == ["cuda:0", "cuda:1", "cuda:0"]
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
        x + y
    with pytest.raises(RuntimeError, match="at least two devices, cuda:1 and cpu"):
        torch.stack([y, torch.ones(3)])
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3)[torch.ones(3, dtype=torch.bool, device="cuda")]
    with pytest.raises(TypeError, match="numpy"):
        np.asarray(x)
    with pytest.raises(RuntimeError, match="ordinal"):
        torch.cuda.set_device(2)
    total = x[torch.tensor([0, 2])] * torch.tensor(2.0) + y.to(x.device, non_blocking=True)[0]
    assert total.tolist() == [3.0, 3.0]  # one number of the CPU is fine, and an index


@on_device
def test_what_the_host_waits_for_is_seen() -> None:
    host, x = torch.ones(3), torch.ones(3, device="cuda")
    pinned = host.pin_memory()
    assert [pinned.is_pinned(), host.is_pinned()] == [True, False]
    with watch() as seen:
        pinned.to("cuda", non_blocking=True)
        x.to("cuda:1")
        pinned.copy_(x, non_blocking=True)
        quiet = list(seen.waits)
        x.sum().item()
        x.nonzero()
        x[x > 0]
        host.to("cuda", non_blocking=True)
        pinned.to("cuda")
        x.cpu()
        torch.cuda.synchronize()
        torch.cuda.current_stream().synchronize()
        torch.cuda.current_stream().record_event().synchronize()
    assert quiet == []
    assert [wait.why for wait in seen.waits] == [
        "item", "nonzero", "boolean index", "copy from the CPU, pageable", "copy from the CPU",
        "copy to the CPU", "synchronize", "stream.synchronize", "event.synchronize",
    ]  # fmt: skip
    assert all(w.where.startswith(f"{__file__}:") for w in seen.waits)
    assert [(c.source, c.target) for c in seen.copies[:3]] == [
        ("cpu", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:0", "cpu"),
    ]  # fmt: skip

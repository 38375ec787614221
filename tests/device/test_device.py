"""The device without hardware is as CUDA is, where the project relies on it."""

from __future__ import annotations

import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.device.seen import phase, watch
from tests.device.session import on_device


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
        x.numpy()
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
        with phase("loud"):
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
    assert [(w.phase, w.why) for w in seen.waits] == [
        ("loud", why) for why in (
            "item", "nonzero", "boolean index", "copy from the CPU, pageable", "copy from the CPU",
            "copy to the CPU", "synchronize", "stream.synchronize", "event.synchronize",
        )
    ]  # fmt: skip
    assert all(w.where.startswith(f"{__file__}:") for w in seen.waits)
    assert [(c.source, c.target) for c in seen.copies[:3]] == [
        ("cpu", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:0", "cpu"),
    ]  # fmt: skip


@on_device
def test_backward_runs_on_a_thread_of_the_device_and_on_the_forwards_stream() -> None:
    threads: list[str] = []
    x = torch.ones(3, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    with watch() as seen:
        with torch.cuda.stream(side):
            y = x.exp()
        y.register_hook(lambda _: threads.append(threading.current_thread().name))
        y.backward(torch.ones_like(y))
        with torch.autograd.set_multithreading_enabled(False):
            x.exp().backward(torch.ones_like(y))
    assert threads != [threading.current_thread().name]
    streams = [(k.operator, k.stream) for k in seen.kernels]
    assert streams[:3] == [("exp", side.stream_id), ("ones_like", 0), ("mul", side.stream_id)]
    assert seen.kernels[2].where == "[ExpBackward0]"
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@on_device
def test_each_device_draws_from_its_own_generator() -> None:
    torch.manual_seed(3)
    x = torch.ones(1000, device="cuda:1")
    cpu, first, second = torch.rand(3), F.dropout(x), F.dropout(x)
    assert 400 < first.count_nonzero() < 600 and not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), cpu) and torch.equal(F.dropout(x), first)
    generator = torch.Generator("cuda:1").manual_seed(5)
    state = generator.get_state()
    drawn = torch.rand(3, generator=generator, device="cuda:1")
    generator.set_state(state)
    assert torch.equal(torch.rand(3, generator=generator, device="cuda:1"), drawn)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, generator=torch.Generator(), device="cuda:1")


@on_device
def test_attention_is_one_kernel_and_right() -> None:
    torch.manual_seed(0)
    host = [torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mine = [x.detach().to("cuda").requires_grad_() for x in host]
    q, k, v = mine
    with watch() as seen:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum().backward()
    q, k, v = host
    F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum().backward()
    for x, y in zip(host, mine, strict=True):
        assert x.grad is not None and y.grad is not None
        torch.testing.assert_close(y.grad.cpu(), x.grad)
    assert seen.operators["attention"] == seen.operators["attention_backward"] == 1


@on_device
def test_a_tensor_is_pickled_with_its_device_and_saved_by_torch() -> None:
    x = nn.Parameter(torch.arange(3.0, device="cuda:1"))
    again = pickle.loads(pickle.dumps(x))
    assert isinstance(again, nn.Parameter) and again.device == x.device and torch.equal(again, x)
    file = io.BytesIO()
    torch.save({"x": x.detach().cpu()}, file)
    assert torch.load(io.BytesIO(file.getvalue()))["x"].tolist() == [0.0, 1.0, 2.0]

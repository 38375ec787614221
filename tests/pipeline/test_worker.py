"""Workers: one thread per device, on its own cores. (On which streams: test_pipe_on_device.py; what
they raise: test_pipe_errors.py.)"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from pipeline.worker import Task, create_workers
from runtime.cores import core_slice

DEVICES = [torch.device("cpu:0"), torch.device("cpu:1")]


def ask(in_queue: Any, out_queue: Any, function: Any) -> Any:
    in_queue.put(Task(function))
    ok, payload = out_queue.get(timeout=30)
    assert ok, payload
    return payload[1]


def test_workers_have_their_own_cores_and_leave_the_callers_threads_alone() -> None:
    before = torch.get_num_threads()
    in_queues, out_queues = create_workers(DEVICES)
    slices = [core_slice(k, len(DEVICES)) for k in range(len(DEVICES))]
    for in_queue, out_queue, cores in zip(in_queues, out_queues, slices, strict=True):
        assert ask(in_queue, out_queue, torch.get_num_threads) == len(cores)
        if hasattr(os, "sched_getaffinity"):
            assert ask(in_queue, out_queue, lambda: os.sched_getaffinity(0)) == set(cores)
        in_queue.put(None)
    found: list[int] = []
    fresh = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    fresh.start()
    fresh.join()
    assert [torch.get_num_threads(), *found] == [before, before]

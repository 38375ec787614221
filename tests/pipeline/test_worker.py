"""Workers: one thread per device, on its own cores. (On which streams: test_pipe_on_device.py; what
they raise: test_pipe_errors.py.)"""

from __future__ import annotations

import os
import threading

import torch

from pipeline.pipe import Pipe
from runtime.cores import core_slice
from tests.pipeline.pipeline_models import cut, tower


def test_workers_have_their_own_cores_and_leave_the_callers_threads_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(9)  # which no worker has
    slices = [core_slice(k, 2) for k in range(2)]
    found: list[int] = []
    with Pipe(cut(tower())) as pipe:
        assert pipe.run_on_stages(lambda _: torch.get_num_threads()) == [len(s) for s in slices]
        if hasattr(os, "sched_getaffinity"):
            assert pipe.run_on_stages(lambda _: os.sched_getaffinity(0)) == [set(s) for s in slices]
        fresh = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        fresh.start()
        fresh.join()
    found.append(torch.get_num_threads())
    torch.set_num_threads(before)
    assert found == [9, 9]

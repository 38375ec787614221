"""Fixtures that more than one package's tests use.

Only processes that run tests import torch; the one that hands tests out to workers does not.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from tests.device.session import Device
    from tests.ranks import Ranks

# Until `start_server`: what is imported stays. To search it for garbage takes a fifth of the time.
gc.disable()

# The threads of an operator wait for each other asleep. By default they spin, which takes the cores
# from the other worker's tests. OpenMP reads this once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What a test compares bit for bit is computed on the CPU, on every machine, also by the programs
# that it starts, which would take a GPU. `make gpu` has tests that take what devices there are.
if "TESTS_SEE_GPUS" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Their tests wait for programs that start from nothing, as users start them.
WAITING = ("test_faults.py", "test_notice.py", "test_failures.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first: workers take a file at a time, and would wait for the last.
    Tests of whole runs take longer than others."""
    numbers = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[bool, bool, bool, int, Path]:
        on_device = "device" in str(item.path.relative_to(item.config.rootpath))
        short = item.path.parent.name not in ("equivalence", "project")
        return item.path.name not in WAITING, not on_device, short, -numbers[item.path], item.path

    items.sort(key=place)


class OneOnDevices(LoadFileScheduling):
    """One worker takes all files of tests on devices, which share processes that have them."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "devices" if "device" in file else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, since some tests wait; four fill any machine."""
    return min((os.cpu_count() or 1) + 1, 4)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneOnDevices:
    return OneOnDevices(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The tests have imported what the server has. (Their tensors are small: they need no second
    thread, and a fork would not have it.) What ranks print belongs to the test that runs them."""
    from tests.ranks import start_server

    capture: Any = session.config.pluginmanager.getplugin("capturemanager")
    capture.resume_global_capture()
    start_server()
    capture.suspend_global_capture()


@pytest.fixture(scope="session")
def _worlds() -> Iterator[dict[int, Ranks]]:
    """By the number of ranks."""
    worlds: dict[int, Ranks] = {}
    yield worlds
    for world in worlds.values():
        world.close()


@pytest.fixture
def world_of(_worlds: dict[int, Ranks]) -> Callable[[int], Ranks | None]:
    """The world of so many ranks with a gloo process group, started when it is first asked for, and
    anew after a test in which one failed; None for one process."""

    def world(n: int) -> Ranks | None:
        from tests.ranks import Ranks

        if n in _worlds and _worlds[n].broken:
            _worlds.pop(n).close()
        if n > 1 and n not in _worlds:
            _worlds[n] = Ranks(n)
        return _worlds.get(n)

    return world


@pytest.fixture
def ranks(world_of: Callable[[int], Ranks]) -> Ranks:
    """Two ranks."""
    return world_of(2)


@pytest.fixture
def three_ranks(world_of: Callable[[int], Ranks]) -> Ranks:
    """Sums whose order matters, and parts that are not halves."""
    return world_of(3)


@pytest.fixture
def four_ranks(world_of: Callable[[int], Ranks]) -> Ranks:
    """Two axes of two."""
    return world_of(4)


@pytest.fixture(scope="session")
def _devices() -> Iterator[list[Device]]:
    from tests.device import guard, session

    if reason := guard.missing():
        pytest.skip(reason)
    processes = [session.Device()]
    yield processes
    processes[0].close()


@pytest.fixture
def device(_devices: list[Device]) -> Device:
    """A process with two CUDA devices without hardware (tests/device); made anew after a test that
    has ended it."""
    if _devices[0].broken:
        _devices[0].close()
        from tests.device.session import Device

        _devices[0] = Device()
    return _devices[0]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default workdir is made in the current folder. Nobody was started by torchrun, and there
    is no network, and no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

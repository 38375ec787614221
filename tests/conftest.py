"""Fixtures that more than one package's tests use."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadFileScheduling

from tests.device import guard
from tests.device.session import Device
from tests.ranks import Ranks

# Their tests wait for programs that start from nothing, as users start them.
WAITING = ("test_faults.py", "test_notice.py", "test_failures.py", "test_tutorial.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first: workers take a file at a time, and would wait for the last."""
    numbers = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[bool, bool, int, Path]:
        on_device = "device" in str(item.path.relative_to(item.config.rootpath))
        return item.path.name not in WAITING, not on_device, -numbers[item.path], item.path

    items.sort(key=place)


class OneOnDevices(LoadFileScheduling):
    """One worker takes all files of tests on devices, which share processes that have them."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "devices" if "device" in file else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneOnDevices:
    return OneOnDevices(config, log)


def pytest_collection_finish() -> None:
    """What the libraries hold stays, and is not searched for garbage any more. Tensors are small:
    a second thread would only spin."""
    gc.freeze()
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _two_ranks() -> Iterator[list[Ranks]]:
    worlds = [Ranks(2)]
    yield worlds
    worlds[0].close()


@pytest.fixture
def ranks(_two_ranks: list[Ranks]) -> Ranks:
    """Two ranks with a gloo process group; made anew after a test in which one failed."""
    if _two_ranks[0].broken:
        _two_ranks[0].close()
        _two_ranks[0] = Ranks(2)
    return _two_ranks[0]


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    """Three ranks: sums whose order matters, and parts that are not halves."""
    world = Ranks(3)
    yield world
    world.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four ranks: two axes of two."""
    world = Ranks(4)
    yield world
    world.close()


@pytest.fixture(scope="session")
def _devices() -> Iterator[list[Device]]:
    if reason := guard.missing():
        pytest.skip(reason)
    processes = [Device()]
    yield processes
    processes[0].close()


@pytest.fixture
def device(_devices: list[Device]) -> Device:
    """A process with two CUDA devices without hardware (tests/device); made anew after a test that
    has ended it."""
    if _devices[0].broken:
        _devices[0].close()
        _devices[0] = Device()
    return _devices[0]


@pytest.fixture
def world_of(request: pytest.FixtureRequest) -> Callable[[int], Ranks | None]:
    """The world of so many ranks, started when it is asked for; None for one process."""
    names = {2: "ranks", 3: "three_ranks", 4: "four_ranks"}
    return lambda n: None if n == 1 else request.getfixturevalue(names[n])


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default workdir is made in the current folder. Nobody was started by torchrun, and there
    is no network, and no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

"""A full disk, and files in the place of folders: one line, with what works, and before training
where it can be known then."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.project.programs import TINY
from tests.project.test_bad_options import ended, no_run_begins  # noqa: F401 (a fixture)
from training import workdir

pytestmark = pytest.mark.usefixtures("elsewhere")

UNLIMITED = resource.RLIM_INFINITY


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Lets no file become larger: who writes more, Python or Rust, is told so by the system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("no_run_begins")
def test_before_a_run_begins(capfd: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    Path("work").mkdir()
    Path("work/checkpoints").touch()
    for program, work, room, place, reason in (
        ("run_data_parallel", "there", 10_000, "there", "File too large"),
        ("run_pipeline", "file/here", UNLIMITED, "file/here", "Not a directory"),
        ("train ddp", "work", UNLIMITED, "work/checkpoints", "File exists"),
    ):
        with full_disk(room):
            assert ended(f"{program} --workdir {work}", capfd) == (
                2,
                f"--workdir {work}: nothing can be written to {place} ({reason}); make room there, "
                "or name a folder of your own, as --workdir workdir\n",
            )


def test_a_disk_that_is_full_when_the_tokenizer_is_written(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a library in Rust, whose exceptions are no OSErrors."""
    monkeypatch.setattr(workdir, "ROOM", 1)
    with full_disk(room=2000):
        status, said = ended(f"run_pipeline {TINY} --workdir work", capfd)
    assert status == 1
    assert said.startswith("work/tokenizer.json: cannot be written (File too large")
    assert said.endswith("); make room there, or write elsewhere\n")
    assert said.count("\n") == 1

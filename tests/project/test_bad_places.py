"""A full disk, folders that may not be read, and files in the place of folders: one line, with what
works, and before training where it can be known then."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.project.programs import TINY
from tests.project.test_bad_options import ended, no_run_begins  # noqa: F401 (a fixture)
from training import workdir

ALL = ("run_data_parallel ", "run_pipeline ", "train ddp ")
pytestmark = pytest.mark.usefixtures("in_a_folder_of_all")


@pytest.fixture
def in_a_folder_of_all(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Who is not root may enter it, as they may not enter pytest's."""
    del elsewhere
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        monkeypatch.chdir(folder)
        yield
        for path in Path(folder).iterdir():
            path.chmod(0o755)
        monkeypatch.undo()


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Lets no file become larger: who writes more, Python or Rust, is told so by the system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def no_root() -> Iterator[None]:
    """As a user whom permissions bind."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.usefixtures("no_run_begins")
@pytest.mark.parametrize("program", ALL)
def test_before_a_run_begins(program: str, capfd: pytest.CaptureFixture[str]) -> None:
    def said(line: str) -> str:
        status, text = ended(program + line, capfd)
        assert status == 2 and text.count("\n") == 1, text
        return text

    with full_disk(room=10_000):
        assert said("--workdir there") == (
            "--workdir there: nothing can be written to there (File too large); make room there, "
            "or name a folder of your own, as --workdir workdir\n"
        )
    Path("file").touch()
    assert said("--workdir file/here") == (
        "--workdir file/here: nothing can be written to file/here (Not a directory); make room "
        "there, or name a folder of your own, as --workdir workdir\n"
    )
    Path("closed").mkdir(mode=0)
    with no_root():
        text = said("--dataset closed/inner --workdir work")
    assert text.startswith("--dataset closed/inner: ") and "(Permission denied); " in text


@pytest.mark.usefixtures("no_run_begins")
def test_checkpoints_that_are_no_folder_to_write_to(capfd: pytest.CaptureFixture[str]) -> None:
    """Which is known before training, and not at the first save."""
    for work, reason in (("file", "File exists"), ("link", "File exists"),
                         ("closed", "Permission denied")):  # fmt: skip
        Path(work).mkdir()
        Path(work).chmod(0o777)
        place = Path(work, "checkpoints")
        if work == "file":
            place.touch()
        elif work == "link":
            place.symlink_to("nothing")
        else:
            place.mkdir(mode=0o555)
        with no_root():
            assert ended(f"run_pipeline --workdir {work}", capfd) == (
                2,
                f"--workdir {work}: nothing can be written to {work}/checkpoints ({reason}); make "
                "room there, or name a folder of your own, as --workdir workdir\n",
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

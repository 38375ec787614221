"""A full disk, folders that may not be read, and files in the place of folders: one line, with what
works, and before training where it can be known then."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.figure import Figure

from project import folders, run_data_parallel, run_pipeline, train
from project.session import open_session
from tests.project.conftest import ROOT, run
from tests.project.test_bad_options import ended
from training.checkpoint import Saver, newest

DP, PP, TRAIN = PROGRAMS = (run_data_parallel, run_pipeline, train)
TINY = "--n_layer 1 --n_embd 32 --n_head 2 --n_train 8 --n_validation 4 --n_test 2 --batch_size 4 "


def before(program: ModuleType) -> str:
    return "ddp " if program is TRAIN else ""


@pytest.fixture(autouse=True)
def _in_a_folder_of_all(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Who is not root may enter it, as they may not enter pytest's. No run begins."""

    request.getfixturevalue("elsewhere")

    def begin(*_: object) -> None:
        raise AssertionError("it has begun")

    monkeypatch.setattr(DP, "launch", begin)
    monkeypatch.setattr(TRAIN, "launch", begin)
    monkeypatch.setattr(PP, "open_session", begin)
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


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("option", ["--workdir there", "--export there/model"])
def test_a_disk_that_is_full_at_the_start(
    program: ModuleType, option: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with full_disk(room=10_000):
        status, said = ended(program, before(program) + option, capfd)
    example = option.split()[0] + (" exported" if "export" in option else " workdir")
    assert (status, said) == (
        2,
        f"{option}: nothing can be written there (File too large); make room, or name a folder "
        f"elsewhere, as {example}\n",
    )


def test_a_disk_that_is_full_when_the_tokenizer_is_written(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a library in Rust, whose exceptions are no OSErrors."""
    monkeypatch.setattr(PP, "open_session", open_session)
    monkeypatch.setattr(folders, "ROOM", 1)
    with full_disk(room=10_000):
        status, said = ended(PP, f"--device cpu --workdir work {TINY}", capfd)
    assert status == 1
    assert said.startswith("work/tokenizer.json: cannot be written (File too large")
    assert said.endswith("); make room there, or name another folder\n")
    assert said.count("\n") == 1


# The program, but once it has claimed its folders there is hardly room left.
FILLED = """
import resource, sys
sys.path.insert(0, {root!r})
from project import options, train

def filled(*args, launch=train.launch):
    resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))
    launch(*args)

if __name__ == "__main__":
    train.launch = filled
    options.run_program(train.main)
"""


@pytest.mark.parametrize(
    ("timeline", "file"), [("0", "summary.json"), ("2", "timeline_rank0.json")]
)
def test_a_disk_that_is_full_when_results_are_written(
    tmp_path: Path, timeline: str, file: str
) -> None:
    script, work = tmp_path / "train.py", tmp_path / "work"
    script.write_text(FILLED.format(root=str(ROOT), room=400))
    done = run(
        work, str(script), "single", "--workdir", str(work), "--device", "cpu", "--keep", "0",
        "--vgg_width", "4", "--n_train", "8", "--n_validation", "4", "--num_batches", "2",
        "--batch_size", "4", "--timeline", timeline, "--master_port", "0",
    )  # fmt: skip
    assert (done.status, done.stderr) == (
        1,
        f"train.py: error: {work / file}: cannot be written (File too large); make room there, "
        "or name another folder\n",
    )
    assert [path.name for path in work.iterdir()] == []


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("option", ["dataset", "model", "export"])
def test_a_folder_that_may_not_be_entered(
    program: ModuleType, option: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("closed").mkdir()
    Path("closed").chmod(0)
    line = f"{before(program)}--{option} closed/inner --workdir work"
    with no_root():
        status, said = ended(program, line, capfd)
    assert status == 2 and said.count("\n") == 1
    assert said.startswith(f"--{option} closed/inner: ") and "(Permission denied); " in said


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("resume", ["", " --resume"])
@pytest.mark.parametrize("kind", ["a file", "no reading", "no writing", "a link to nothing"])
def test_checkpoints_that_are_no_folder_to_write_to(
    program: ModuleType, resume: str, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Which is known before training, and not at the first save."""
    Path("work").mkdir()
    Path("work").chmod(0o777)
    place = Path("work/checkpoints")
    if kind == "a file":
        place.touch()
    elif kind == "a link to nothing":
        place.symlink_to("nothing")
    else:
        place.mkdir()
        place.chmod(0 if kind == "no reading" else 0o555)
    with no_root():
        status, said = ended(program, f"{before(program)}--workdir work{resume}", capfd)
    reason = {"a file": "Not a directory", "a link to nothing": "No such file or directory"}
    assert (status, said) == (
        2,
        "--workdir work: work/checkpoints is no folder whose checkpoints this run can read and "
        f"write ({reason.get(kind, 'Permission denied')}); move it away, or take another "
        "--workdir, as work_2\n",
    )


def save(state: dict[str, Any]) -> Path:
    return Saver(Path("work/checkpoints"), 9).save("x", [], state)


def test_a_manifest_of_brackets_gives_way_to_the_checkpoint_before_it() -> None:
    first, second = save({"n": 1}), save({"n": 2})
    (second / "manifest.json").write_text("[" * 100_000 + "]" * 100_000)
    checkpoint, refused = newest(Path("work/checkpoints"))
    assert checkpoint is not None and checkpoint.folder == first and checkpoint.state == {"n": 1}
    assert refused == {second.name: f"{second}: its manifest.json cannot be read"}


def test_a_picture_that_cannot_be_drawn_is_no_matter_of_an_option_that_is_not_there(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--output is plot.py's."""
    monkeypatch.setattr(PP, "open_session", open_session)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    name = "run_pipeline.py"
    line = f"--device cpu --n_epochs 1 --workdir work {TINY}"
    monkeypatch.setattr("sys.argv", [name, *line.split()])
    with pytest.raises(SystemExit) as end:
        PP.run_program(PP.main)
    assert end.value.code == 1
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"{name}: error: --workdir work has all results, but not their picture, which python "
        "project/plot.py training work draws (work/training.png: nothing can be written there "
        "(No space left on device); --output works with a file in a folder of your own)"
    )

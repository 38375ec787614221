"""Checkpoints: a crash at any instant, a full disk, a flipped bit. There is always a good one."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.ranks import Ranks
from training import checkpoint as module
from training import pieces
from training.checkpoint import Checkpoint, Saver, clean, names, newest, set_aside
from training.pieces import CheckpointError, SaveError, whole

SHARD = "shard-00001-model-00001-of-00001.safetensors"


def save(folder: Path, value: int, keep: int = 2, spare: tuple[str, ...] = ()) -> Path:
    """A checkpoint in whose every part `value` stands."""
    tensors = [whole("x", torch.full((3, 2), float(value))), whole("n", torch.tensor(value))]
    saver = Saver(folder, keep, spare=spare)
    saved = saver.save(
        f"step{value}", tensors, {"step": value}, {"note.txt": f"{value}\n".encode()}
    )
    saver.prune()
    return saved


def value_of(checkpoint: Checkpoint | None) -> int | None:
    """The `value` of a checkpoint, which must be the same in its every part."""
    if checkpoint is None:
        return None
    found = {
        int(checkpoint.read("note.txt")),
        checkpoint.state["step"],
        int(checkpoint.tensors.tensor("n", torch.int64)),
        *checkpoint.tensors.tensor("x", torch.float32).int().flatten().tolist(),
    }
    (value,) = found
    return value


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under `folder`."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# What is written, and what stays


def test_a_checkpoint_is_what_was_saved(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "checkpoints"
    assert save(folder, 7) == folder / "000001-step7"
    assert list(contents(folder)) == [
        f"000001-step7/{file}" for file in ("manifest.json", "note.txt", SHARD, "state.json")
    ]
    found, refused = newest(folder)
    assert (value_of(found), refused) == (7, {})


def test_nothing_in_it_is_a_pickle(tmp_path: Path) -> None:
    files = {Path(name).name: content for name, content in contents(save(tmp_path, 7)).items()}
    tensors = files.pop(SHARD)
    size = int.from_bytes(tensors[:8], "little")
    assert set(json.loads(tensors[8 : 8 + size])) == {"__metadata__", "x", "n"}
    assert len(tensors) == 8 + size + 6 * 4 + 8  # and the numbers themselves
    assert json.loads(files["state.json"]) == {"step": 7}
    assert list(json.loads(files["manifest.json"])) == ["format", "files"]


def test_the_newest_stay(tmp_path: Path) -> None:
    for value in range(1, 5):
        save(tmp_path, value, keep=3)
    assert names(tmp_path) == ["000002-step2", "000003-step3", "000004-step4"]
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["000005-step5"]
    assert listing(tmp_path) == ["000005-step5"]


def test_what_no_finite_step_has_followed_replaces_nothing(tmp_path: Path) -> None:
    saver = Saver(tmp_path, 1)
    for value in range(1, 4):
        saver.save(f"step{value}", [whole("x", torch.tensor(value))], {})
        assert len(names(tmp_path)) == value
    saver.prune()
    assert names(tmp_path) == ["000003-step3"]


def test_a_run_that_begins_anew_leaves_nothing_to_go_on_from_by_mistake(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    set_aside(folder)
    for value in (1, 2):
        save(folder, value)
        set_aside(folder)
        set_aside(folder)  # nothing is there now: what was set aside stays
        assert newest(folder) == (None, {})
        assert value_of(newest(tmp_path / "checkpoints_old")[0]) == value


def test_damaged_ones_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    for value in range(1, 5):
        save(tmp_path, value, keep=9)
    spare = ("000003-step3", "000004-step4")
    save(tmp_path, 5, 2, spare)
    assert names(tmp_path) == ["000002-step2", *spare, "000005-step5"]
    save(tmp_path, 6, 2, spare)
    assert names(tmp_path) == [*spare, "000005-step5", "000006-step6"]


def test_no_folder_and_other_files_are_no_checkpoints(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") == (None, {})
    clean(tmp_path / "none")
    for name in ("1-short", "latest", ".000009-step9.part", "000009"):
        (tmp_path / name).mkdir()
    assert newest(tmp_path) == (None, {})
    clean(tmp_path)
    assert listing(tmp_path) == ["000009", "1-short", "latest"]


# Damage


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Two checkpoints, of which a test damages the newer."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    return tmp_path


def damaged(two: Path) -> str:
    """Why the newer one is refused, the older one being taken."""
    found, refused = newest(two)
    assert value_of(found) == 1
    (line,) = refused.values()
    assert list(refused) == ["000002-step2"]
    assert line.startswith(f"{two / '000002-step2'}: ")
    return line.split(": ", 1)[1]


@pytest.mark.parametrize("file", ["note.txt", SHARD, "state.json"])
def test_a_damaged_file_is_named_and_the_one_before_is_taken(two: Path, file: str) -> None:
    path = two / "000002-step2" / file
    good = path.read_bytes()
    for at in range(0, len(good), max(1, len(good) // 7)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        assert damaged(two) == f"{file} was altered, its checksum differs"
        path.write_bytes(good[:at])
        assert damaged(two) == f"{file} has {at} bytes of {len(good)}"
    path.write_bytes(good + b"\0")
    assert damaged(two) == f"{file} has {len(good) + 1} bytes of {len(good)}"
    path.unlink()
    assert damaged(two) == f"{file} is missing"
    path.write_bytes(good)
    assert value_of(newest(two)[0]) == 2


def test_no_flipped_bit_of_the_manifest_goes_unseen(two: Path) -> None:
    path = two / "000002-step2" / "manifest.json"
    good = path.read_bytes()
    unseen = set()
    for at in range(len(good)):
        for bit in (at % 8, (at + 3) % 8):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
            with suppress(CheckpointError):
                assert value_of(Checkpoint(path.parent)) == 2
                unseen.add(chr(good[at]))
    assert unseen <= {" ", "\n"}  # space between the words, which may as well be a tab


def test_no_truncated_manifest_goes_unseen(two: Path) -> None:
    path = two / "000002-step2" / "manifest.json"
    good = path.read_bytes()
    for size in range(len(good) - 1):  # the last byte is a line's end
        path.write_bytes(good[:size])
        with pytest.raises(CheckpointError, match=r"its manifest.json cannot be read$"):
            Checkpoint(path.parent)
    path.unlink()
    assert damaged(two) == "it has no manifest.json"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"format": "parallel-gpt2 checkpoint 1", "files": {}}', "its format is 'parallel-gpt2"),
        ('{"model": "gpt2"}', "its manifest.json cannot be read"),
        ("[1, 2]", "its manifest.json cannot be read"),
        ('{"format": "parallel-gpt2 checkpoint 2", "files": {}}', "state.json is missing"),
        (
            '{"format": "parallel-gpt2 checkpoint 2", "files": {"../a": {"bytes": 0}}}',
            "../a is missing",
        ),
    ],
)
def test_foreign_ones_are_refused(two: Path, content: str, why: str) -> None:
    (two / "a").touch()
    (two / "000002-step2" / "manifest.json").write_text(content)
    assert damaged(two).startswith(why)


def test_a_file_by_the_name_of_a_checkpoint_is_refused(two: Path) -> None:
    shutil.rmtree(two / "000002-step2")
    (two / "000002-step2").touch()
    assert damaged(two) == "it cannot be read (Not a directory)"


# A crash at any instant


def crash(work: Callable[[], object], folder: Path, at: int) -> bool:
    """Runs `work` in a process that is killed before its `at`-th operation on a file in `folder`;
    a file of tensors is half written by then. False if it had ended before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fork, and threads: they do not run in the child
        child = os.fork()
    if child == 0:
        try:
            _kill_at(folder, at)
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _kill_at(folder: Path, at: int) -> None:
    left = [at]

    def count() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event.split(".")[0] in ("open", "os", "shutil") and str(folder) in str(args):
            count()

    def sync(number: int, fsync: Callable[[int], None] = os.fsync) -> None:
        count()
        fsync(number)

    def save_half(
        tensors: Any, path: Path, metadata: Any, save: Callable[..., None] = save_file
    ) -> None:
        save(tensors, path, metadata)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        count()
        path.write_bytes(content)

    vars(pieces)["save_file"] = save_half
    os.fsync = sync  # type: ignore[assignment]
    sys.addaudithook(hook)


def test_a_crash_at_any_instant_leaves_a_whole_one(tmp_path: Path) -> None:
    save(tmp_path / "start", 1)
    save(tmp_path / "start", 2)
    seen: list[int | None] = []
    for at in range(1, 1000):
        folder = tmp_path / f"crash{at}"
        shutil.copytree(tmp_path / "start", folder)
        if not crash(lambda folder=folder: save(folder, 3), folder, at):  # type: ignore[misc]
            break
        found, refused = newest(folder)
        assert refused == {}
        seen.append(value_of(found))
        clean(folder)
        assert [name for name in listing(folder) if name.startswith(".")] == []
        assert save(folder, 4).name in ("000003-step4", "000004-step4")  # the next run goes on
        assert value_of(newest(folder)[0]) == 4
    assert value_of(newest(folder)[0]) == 3
    late = seen.count(3)  # those in which the new one was there
    assert 0 < late < len(seen)
    assert seen == [2] * (len(seen) - late) + [3] * late
    assert len(seen) > 25


def test_files_are_on_the_disk_before_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure a rename may be there without what it renamed: unless that was
    synced before, and the folders with it."""
    done: list[str] = []
    rename = Path.rename

    def fsync(number: int) -> None:
        done.append(Path(f"/proc/self/fd/{number}").readlink().name)

    def renamed(path: Path, target: Path) -> Path:
        done.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    save(tmp_path, 1)
    part = ".000001-step1.part"
    assert done == [
        SHARD, "state.json", "note.txt", "manifest.json", part, f"{part} -> 000001-step1",
        tmp_path.name,
    ]  # fmt: skip


# A disk that is full


def full_at(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the at-th sync of a file fail as it does on a full disk."""
    left = [at]

    def fsync(_: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fsync)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_a_full_disk_leaves_the_last_one_and_nothing_else(
    two: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(two)
    full_at(at, monkeypatch)
    with pytest.raises(SaveError) as error:
        save(two, 3)
    assert str(error.value) == (
        f"--workdir {two.parent}: rank 0 cannot write a checkpoint ([Errno 28] No space left on "
        "device); --resume goes on from 000002-step2, and --keep 0 saves none"
    )
    assert (contents(two), listing(two)) == (before, ["000001-step1", "000002-step2"])


def test_without_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_at(1, monkeypatch)
    with pytest.raises(SaveError, match=r"there is no earlier one, and --keep 0 saves none$"):
        save(tmp_path / "new", 1)
    assert listing(tmp_path / "new") == []


def test_a_file_that_is_too_large_for_the_system(two: Path) -> None:
    """The library that writes tensors meets the limit: its failure is told like any other."""
    before = contents(two)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(SaveError, match=r"cannot write a checkpoint .*File too large"):
            Saver(two, 2).save("big", [whole("x", torch.zeros(100_000))], {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (contents(two), listing(two)) == (before, ["000001-step1", "000002-step2"])


def test_an_old_one_that_cannot_be_removed_does_not_end_the_run(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(OSError("busy")))
    monkeypatch.setattr(module.Saver, "_begin", lambda *_: _begun(two))
    save(two, 3)
    assert names(two) == ["000002-step2", "000003-step3"]
    monkeypatch.undo()
    clean(two)
    assert listing(two) == ["000002-step2", "000003-step3"]


def _begun(folder: Path) -> str:
    (folder / ".000003-step3.part").mkdir()
    return "000003-step3"


# Several ranks


def save_together(rank: int, world_size: int, folder: Path, failing: int) -> str:
    """Each rank has a row; `failing` meets a full disk."""

    def gather(value: object) -> list[Any]:
        values: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(values, value)
        return values

    row = pieces.Piece("x", torch.full((1, 2), float(rank)), (rank, 0), (world_size, 2))
    patch = pytest.MonkeyPatch()
    if rank == failing:
        full_at(1, patch)
    try:
        return str(Saver(folder, 2, rank, gather).save("a", [row], {"rank": rank}))
    except SaveError as error:
        return str(error)
    finally:
        patch.undo()


def test_ranks_write_together_or_not_at_all(ranks: Ranks, tmp_path: Path) -> None:
    first = str(tmp_path / "000001-a")
    assert ranks.run(save_together, tmp_path, -1) == [first, first]
    before = contents(tmp_path)
    for rank in range(2):
        said = ranks.run(save_together, tmp_path, rank)
        assert said[0] == said[1]
        assert re.search(f"rank {rank} cannot write .*No space left .* from 000001-a,", said[0])
        assert (contents(tmp_path), listing(tmp_path)) == (before, ["000001-a"])
    found, _ = newest(tmp_path)
    assert found is not None
    assert found.state == {"rank": 0}
    assert found.tensors.tensor("x", torch.float32).tolist() == [[0, 0], [1, 1]]

"""Checkpoints: a crash at any instant, a full disk, a flipped bit: there is always a good one. And
what one layout has saved, any other loads."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from tests.project.programs import names_in
from tests.ranks import LIMIT, Ranks
from training.checkpoint import (
    Checkpoint,
    CheckpointError,
    Saver,
    clean,
    enum_member,
    load_training,
    names,
    newest,
    open_checkpoint,
    training_state,
)
from training.launch.errors import RunError
from training.launch.world import World
from training.layouts.layout import Held
from training.layouts.on_mesh import rectangles_of
from training.resume import Resume

SHARD = "__0_0.distcp"
WRITTEN = [".metadata", SHARD, "note.txt", "state.json"]
FULL = OSError(errno.ENOSPC, "No space left on device")


def save(folder: Path, value: int, keep: int = 2) -> str:
    """A checkpoint in whose every part `value` stands."""
    tensors = [
        Held.whole("x", torch.full((3, 2), float(value))),
        Held.whole("n", torch.tensor(value)),
    ]
    saver = Saver(folder)
    name = saver.save(f"step{value}", tensors, {"step": value}, {"note.txt": f"{value}\n".encode()})
    saver.prune(keep)
    return name


def value_of(checkpoint: Checkpoint | None) -> int | None:
    """The `value` of a checkpoint, which must be the same in its every part."""
    if checkpoint is None:
        return None
    x, n = torch.zeros(3, 2), torch.tensor(0)
    Saver(checkpoint.folder.parent).load(checkpoint, [Held.whole("x", x), Held.whole("n", n)])
    (value,) = {
        int(checkpoint.read("note.txt")), checkpoint.state["step"], int(n), *map(int, x.flatten())
    }  # fmt: skip
    return value


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under `folder`."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_checkpoint_is_what_was_saved_and_the_newest_stay(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "checkpoints"
    assert (newest(folder), names(folder)) == ((None, []), [])  # there is no folder yet
    for value in range(1, 5):
        assert save(folder, value, keep=3) == f"00000{value}-step{value}"
    # No checkpoints, or a user's copies of one; the first was to become one.
    others = [
        ".000009-step9.part", ".mine.part", "000001-best", "000001-step1-copy", "000009", "latest"
    ]  # fmt: skip
    for name in others:
        shutil.copytree(folder / "000004-step4", folder / name)
    found, refused = newest(folder)
    assert (value_of(found), refused) == (4, [])
    saver = Saver(folder)
    saver.save("step5", [Held.whole("x", torch.tensor(5))], {}, {})
    assert len(names(folder)) == 4  # until a finite step has followed
    saver.prune(1)
    clean(folder)
    assert names_in(folder) == sorted(["000005-step5", *others[1:]])
    assert all(len(contents(folder / name)) == len(WRITTEN) for name in others[1:])
    beside = Saver(tmp_path / "beside", background=True)
    for step in (1, 2):  # the second waits for the first
        beside.save(f"step{step}", [Held.whole("x", torch.tensor(step))], {}, {})
    beside.wait()
    assert names(tmp_path / "beside") == ["000001-step1", "000002-step2"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    folder = tmp_path / "000002-step2"
    files = contents(folder)
    assert list(files) == WRITTEN
    for file, good in files.items():
        for bad in (good[: len(good) // 2], b"[]" + good, b"{ }", b"", None):
            (folder / file).unlink() if bad is None else (folder / file).write_bytes(bad)
            found, (why,) = newest(tmp_path)
            assert value_of(found) == 1
            what = "missing" if bad is None else "damaged ("
            assert why.startswith(f"{folder}: {file} is {what}")
        (folder / file).write_bytes(good)
    assert value_of(newest(tmp_path)[0]) == 2


UNREADABLE: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("state.json", lambda good: good.replace(b"checkpoint 5", b"checkpoint 6"),
     "its format is 'parallel-gpt2 checkpoint 6', not 'parallel-gpt2 checkpoint 5'"),
    (".metadata", lambda _: b"ctorch.of_another_version\nSize\n.",
     "it needs torch.of_another_version.Size of a different torch; "),
]  # fmt: skip


def test_one_that_may_be_whole_is_neither_passed_over_nor_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another version, or of a disk that does not answer now: a run that went on from the one
    before would put it aside."""
    save(tmp_path / "made", 1)
    save(tmp_path / "made", 2)
    folder, move = tmp_path / "made/000002-step2", "; move it away to go on from the one before it"
    for file, change, why in UNREADABLE:
        good = (folder / file).read_bytes()
        (folder / file).write_bytes(change(good))
        with pytest.raises(CheckpointError) as error:
            newest(tmp_path / "made")
        said = str(error.value)
        assert said.startswith(f"{folder}: {why}") and said.endswith(move)
        (folder / file).write_bytes(good)
    broken = OSError(errno.EIO, "Input/output error")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", Mock(side_effect=broken))
        with pytest.raises(CheckpointError, match=r"state\.json cannot be read now .*put error"):
            newest(tmp_path / "made")
    assert value_of(newest(tmp_path / "made")[0]) == 2
    monkeypatch.setattr(Path, "iterdir", Mock(side_effect=broken))
    with pytest.raises(CheckpointError, match="made: cannot be read now"):
        newest(tmp_path / "made")


def test_what_is_set_aside_is_never_removed(tmp_path: Path) -> None:
    """However often it has the same name."""
    for n in (1, 2):
        save(tmp_path, 1, keep=9)
        (tmp_path / "000002-step2").mkdir()
        (tmp_path / "000002-step2/mine").write_text(str(n))
        loaded = open_checkpoint(tmp_path / "000001-step1")
        Saver(tmp_path).set_aside_after(loaded)
        shutil.rmtree(loaded.folder)
    aside = ["damaged-000002-step2_1", "damaged-000002-step2_2"]
    Saver(tmp_path).prune(1)
    clean(tmp_path)
    assert names_in(tmp_path) == aside
    assert [(tmp_path / name / "mine").read_text() for name in aside] == ["1", "2"]


def test_what_a_user_made_is_not_removed_with_old_checkpoints(tmp_path: Path) -> None:
    """A file in a checkpoint, and a folder that is named as one."""
    note, other = tmp_path / "000002-step2" / "mine.txt", tmp_path / "000001-step9" / "data.csv"
    other.parent.mkdir()
    other.write_text("1, 2")
    assert save(tmp_path, 2, keep=9) == note.parent.name
    note.write_text("my best")
    for value in (3, 4, 5):
        save(tmp_path, value, keep=9)
    (tmp_path / "000003-step3" / SHARD).unlink()  # as if killed while it was being removed
    Saver(tmp_path).prune(1)
    left = sorted(path for path in contents(tmp_path) if not path.startswith("000005-step5/"))
    assert left == ["000001-step9/data.csv", "000002-step2/mine.txt"]
    assert names_in(tmp_path) == ["000001-step9", "000002-step2", "000005-step5"]
    assert value_of(newest(tmp_path)[0]) == 5


def test_a_checkpoint_of_the_version_before_is_loaded(tmp_path: Path) -> None:
    """Its format and sizes were in a file of their own."""
    folder = tmp_path / save(tmp_path, 3)
    (folder / "state.json").write_text('{"step": 3}')
    (folder / "manifest.json").write_text('{"format": "parallel-gpt2 checkpoint 4", "bytes": {}}')
    assert value_of(newest(tmp_path)[0]) == 3


def crash(work: Callable[[], object], folder: Path, at: int) -> bool:
    """Runs `work` in a process that is killed before its `at`-th operation on a file in `folder`.
    False if it had ended before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fork, and threads: they do not run in the child
        child = os.fork()
    if child == 0:
        done, fsync = itertools.count(1), os.fsync

        def seen(event: str, args: tuple[Any, ...]) -> None:
            of_files = event.split(".")[0] in ("open", "os", "shutil", "fsync")
            if of_files and str(folder) in str(args) and next(done) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        def sync(number: int) -> None:
            seen("fsync", (folder,))
            fsync(number)

        os.fsync = sync  # type: ignore[assignment]
        sys.addaudithook(seen)
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_checkpoint_of_others_runs_no_code_of_theirs(tmp_path: Path) -> None:
    touched, folder = tmp_path / "touched", tmp_path / save(tmp_path, 1)
    asks = r"its \.metadata asks for pathlib\.Path\.touch, which no checkpoint of this pro"
    for hostile, said in (
        (pickle.dumps(Touch(touched)), asks),
        (pickle.dumps({"state_dict_metadata": Touch(touched)}), asks),
        (
            b"cbuiltins\ngetattr\n(ctorch\nSize\nX\x05\x00\x00\x00counttR.",
            r"\.metadata is damaged \(count is asked of .*, which is no enumeration\)",
        ),
    ):
        (folder / ".metadata").write_bytes(hostile)
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(folder)
    assert not touched.exists()
    # As Python 3.11.0 to 3.11.3 ask for a member of an enumeration.
    assert enum_member(signal.Signals, "SIGHUP") is signal.SIGHUP
    with pytest.raises(KeyError, match="__class__"):
        enum_member(signal.Signals, "__class__")


def trained(steps: int) -> Any:
    """A laid-out model of two parameters, of which only `a` ever has a gradient."""
    a, b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([a, b])
    for _ in range(steps):
        a.sum().backward()
        optimizer.step()
    return Mock(optimizers=[optimizer], held=[Held.whole("a", a), Held.whole("b", b)])


def test_a_parameter_without_gradients_has_no_state_however_often_it_is_saved(
    tmp_path: Path,
) -> None:
    """Its step of 0 would become that of a flat buffer that it shares with others."""
    model = trained(steps=4)
    for number in range(3):
        Saver(tmp_path).save(f"step{number}", training_state(model), {}, {})
        checkpoint, refused = newest(tmp_path)
        assert checkpoint is not None and refused == []
        assert sorted(name for name in checkpoint.tensors if "step" in name) == ["optimizer.step.a"]
        model = trained(steps=0)
        load_training(Saver(tmp_path), checkpoint, model)
        (state,) = model.optimizers[0].state.values()
        assert state["step"].item() == 4


def test_a_crash_at_any_instant_leaves_an_intact_one(tmp_path: Path) -> None:
    save(tmp_path / "start", 2)
    seen: list[int | None] = []
    for at in range(1, 1000):
        folder = tmp_path / f"crash{at}"
        shutil.copytree(tmp_path / "start", folder)
        if not crash(lambda folder=folder: save(folder, 3), folder, at):  # type: ignore[misc]
            break
        found, refused = newest(folder)
        assert refused == []
        seen.append(value_of(found))
        clean(folder)
        assert [name for name in names_in(folder) if name.startswith(".")] == []
    assert save(folder, 4) == "000003-step4"  # the next run goes on
    assert len(seen) > 20 and set(seen) == {2, 3}
    assert seen == sorted(seen)  # type: ignore[type-var]


def test_files_are_on_the_disk_before_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure a rename may be there without what it renamed: unless that was
    synced before, and the folders with it."""
    done: list[str] = []
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        done.append(f"-> {target.name}")
        return rename(path, target)

    def fsync(number: int) -> None:
        done.append(Path(f"/proc/self/fd/{number}").readlink().name)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    name = save(tmp_path, 1)
    assert done[-7:] == [*WRITTEN, f".{name}.part", f"-> {name}", tmp_path.name]


def full_at(at: int, patch: pytest.MonkeyPatch, error: Exception = FULL) -> None:
    """Makes the at-th sync of a file fail, as it does on a full disk."""
    patch.setattr("os.fsync", Mock(side_effect=[*[None] * (at - 1), error, *[None] * 99]))


def test_a_full_disk_leaves_the_last_one_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 2)
    before = contents(tmp_path)
    full = RuntimeError("[enforce fail] . unexpected pos 704 vs 598")
    errors = [(at, FULL, FULL.strerror) for at in range(1, 8)]
    for at, cause, why in (*errors, (1, full, "its disk is full")):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RunError) as error:
            full_at(at, patch, cause)
            save(tmp_path, 3)
        assert str(error.value) == (
            f"--workdir {tmp_path.parent}: checkpoint 000002-step3: cannot be written ({why}); "
            "make room there, or write elsewhere"
        )
        assert (contents(tmp_path), names_in(tmp_path)) == (before, ["000001-step2"])


def save_rows(
    rank: int, world_size: int, folder: Path, common: bool, background: bool, failing: int
) -> str:
    """Each rank has a row; `failing` meets a full disk."""
    row = torch.full((1, 2), float(rank))
    with pytest.MonkeyPatch.context() as patch:
        saver = saver_of(rank, world_size, folder, common, background)
        if rank == failing:
            full_at(1, patch)
        try:
            name = saver.save("step1", [Held("x", row, (rank, 0), (world_size, 2))], {}, {})
            row.fill_(-1.0)  # the run goes on
            saver.wait()
        except RunError as error:
            return str(error).split(": ")[2].split(" (")[0]
    found = torch.zeros(1, 2)
    saver.load(of_main(saver, name), [Held("x", found, (rank, 0), (world_size, 2))])
    return f"{name} {found.tolist()}"


def saver_of(rank: int, size: int, folder: Path, common: bool, background: bool = False) -> Saver:
    """With a folder in common, or one of its own, as on a host of its own."""
    mine = folder if common else folder / f"host{rank}"
    clean(mine)  # what an earlier run has left; before all ranks meet, as in `Saving`
    return Saver(mine, World(rank, size), timeout=LIMIT, background=background)


def gathered_by_all(rank: int, world_size: int, folder: Path) -> int:
    """The bytes that every rank gets of this one while it saves a megabyte."""
    saver, gather, sizes = saver_of(rank, world_size, folder, common=False), World.gather, [0]

    def seen(world: World, value: Any) -> Any:
        sizes.append(len(pickle.dumps(value)))
        return gather(world, value)

    row = Held("x", torch.ones(1, 1 << 18), (rank, 0), (world_size, 1 << 18))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "gather", seen)
        saver.save("step1", [row], {}, {})
    return max(sizes)


def test_the_files_of_other_hosts_go_to_rank_0_alone(ranks: Ranks, tmp_path: Path) -> None:
    assert max(ranks.run(gathered_by_all, tmp_path)) < 10_000
    assert len((tmp_path / "host0/000001-step1/__1_0.distcp").read_bytes()) > 1_000_000


def of_main(saver: Saver, name: str) -> Checkpoint:
    """The checkpoint that rank 0 finds, on every rank."""
    found = open_checkpoint(saver.folder / name) if saver.world.is_main else None
    checkpoint = saver.world.gather(Resume(found))[0].checkpoint
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize(("common", "background"), [(True, False), (True, True), (False, True)])
def test_ranks_write_together_or_not_at_all(
    ranks: Ranks, tmp_path: Path, common: bool, background: bool
) -> None:
    said = ranks.run(save_rows, tmp_path, common, background, -1)
    assert said == ["000001-step1 [[0.0, 0.0]]", "000001-step1 [[1.0, 1.0]]"]
    before = contents(tmp_path)
    for rank in range(2):
        said = ranks.run(save_rows, tmp_path, common, background, rank)
        assert said == ["cannot be written"] * 2
        clean(tmp_path if common else tmp_path / "host0")
        assert contents(tmp_path) == before


TENSORS = {
    "number": torch.tensor(4.0),
    "vector": torch.arange(3.0).bfloat16(),
    "cube": torch.arange(24.0).view(2, 3, 4),
    "matrix": torch.arange(35.0, dtype=torch.float64).view(5, 7),
}


def wholes(*_: int) -> list[Held]:
    """What a rank holds of a replicated model."""
    return [Held.whole(name, tensor.clone()) for name, tensor in TENSORS.items()]


def flat_shards(rank: int, world_size: int) -> list[Held]:
    """What a rank holds where each tensor is flattened and shared out, in unequal parts."""
    held = []
    for name, tensor in TENSORS.items():
        start, stop = (tensor.numel() * r * (r + 3) // (world_size * (world_size + 3))
                       for r in (rank, rank + 1))  # fmt: skip
        held += rectangles_of(name, tensor.shape, start, tensor.flatten()[start:stop].clone())
    return held


def reshard(rank: int, world_size: int, folder: Path) -> list[str]:
    """Saves in one layout, loads in the other, and says what came back wrong."""
    saver, wrong = saver_of(rank, world_size, folder, common=False), []
    for write, read in ((flat_shards, wholes), (wholes, flat_shards)):
        saved = saver.save("step1", write(rank, world_size), {}, {})
        expected = read(rank, world_size)
        found = [replace(x, tensor=torch.zeros_like(x.tensor)) for x in expected]
        saver.load(of_main(saver, saved), found)
        pairs = zip(expected, found, strict=True)
        wrong += [a.name for a, b in pairs if not torch.equal(a.tensor, b.tensor)]
    return wrong


def test_hosts_without_a_common_folder_load_what_another_layout_saved_and_so_does_the_library(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Each rank writes a part of what all ranks hold, the largest first."""
    assert ranks.run(reshard, tmp_path) == [[], []]
    for name in ("000001-step1", "000002-step1"):
        state = {n: torch.zeros_like(t) for n, t in TENSORS.items()}
        reader = FileSystemReader(tmp_path / "host0" / name)
        load(state, storage_reader=reader, no_dist=True)
        assert all(torch.equal(state[n], t) for n, t in TENSORS.items())
    stored = reader.read_metadata().storage_data.items()
    writer = {index.fqn: info.relative_path for index, info in stored}
    others = dict.fromkeys(("cube", "vector", "number"), "__1_0.distcp")
    assert writer == {"matrix": SHARD, **others}


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    found = open_checkpoint(
        tmp_path / saver.save("step1", [Held.whole("x", torch.zeros(4, 3))], {}, {})
    )
    for name, tensor in (("z", torch.zeros(1)), ("x", torch.zeros(3, 2))):
        shape = re.escape(str(tuple(tensor.shape)))
        said = f"^--resume: {found.folder} has no {name} of shape {shape}: it is of another model"
        with pytest.raises(CheckpointError, match=said):
            saver.load(found, [Held.whole(name, tensor)])

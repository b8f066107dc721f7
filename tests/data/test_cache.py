"""The cache: written whole or not at all, verified when opened, shared by those who race to write it."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carrywave.data.codec import Codec
from carrywave.data.files import arrays, cache
from carrywave.data.files.arrays import NewArray
from carrywave.data.sequences import Sequences
from carrywave.errors import DataError, ResourceError

CODEC = Codec("language", "text", "char", ("a", "b", "<unk>"), size=3)


def build(new: NewArray) -> cache.Entry:
    inputs = new(np.uint8, None)
    inputs.append(np.array([0, 1, 1], np.uint8))
    inputs.append(np.array([0], np.uint8))
    unused = new(np.int64, 2)
    unused.append(np.zeros((3, 2)))
    unused.close()
    flat = inputs.close()
    train = Sequences(flat, np.array([0]), np.array([3]), labels=np.array([7]), names=("x",))
    return cache.Entry({"train": train, "valid": Sequences(flat, np.array([3]), np.array([1]), warm=np.array([0]))}, CODEC, ("a note",))


def refuse(new: NewArray) -> tuple[dict[str, Sequences], Codec]:
    raise AssertionError("built again")


def test_an_entry_is_built_once_and_memory_mapped(tmp_path: Path) -> None:
    cache.fetch(tmp_path, "k", build)
    entry = cache.fetch(tmp_path, "k", refuse)
    train, valid = entry.parts["train"], entry.parts["valid"]
    assert entry.codec == CODEC
    assert (train.inputs.tolist(), train.inputs.dtype, train.labels, train.names) == ([0, 1, 1, 0], np.uint8, np.array([7]), ("x",))
    assert (valid.starts.tolist(), valid.lengths.tolist(), valid.warm, valid.labels, valid.names) == ([3], [1], np.array([0]), None, None)
    assert train.inputs is valid.inputs
    assert isinstance(train.inputs.base, np.memmap)
    assert not train.inputs.flags.writeable
    names = sorted(path.name for path in (tmp_path / "k").iterdir())
    assert names == ["a0", "a1", "b2", "b3", "b4", "b5", "b6", "b7", "content.json"]  # what parts share is stored once


@pytest.mark.parametrize("damage", ["missing", "truncated", "content", "not a folder"])
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    cache.fetch(tmp_path, "k", build)
    place = tmp_path / "k"
    if damage == "missing":
        (place / "a0").unlink()
    elif damage == "truncated":
        (place / "b2").write_bytes((place / "b2").read_bytes()[:-1])
    elif damage == "content":
        (place / "content.json").write_text("{}")
    else:
        for path in place.iterdir():
            path.unlink()
        place.rmdir()
        place.touch()
    with pytest.raises(DataError, match=rf"the cache {place} is damaged; delete the folder {place}$"):
        cache.fetch(tmp_path, "k", refuse)


@pytest.mark.parametrize("error", [DataError("bad row"), KeyboardInterrupt()])
def test_a_failure_midway_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def fail(new: NewArray) -> tuple[dict[str, Sequences], Codec]:
        new(np.uint8, None).append(np.zeros(5))
        raise error

    with pytest.raises(type(error)):
        cache.fetch(tmp_path, "k", fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"cannot be written \(No space left on device\); .*, or set \$CARRYWAVE_CACHE to another folder"),
        (errno.EROFS, r"cannot be written \(Read-only file system\); .*, or set \$CARRYWAVE_CACHE to another folder"),
    ],
)
@pytest.mark.parametrize("where", ["append", "folder"])
def test_no_room_or_no_right_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int, message: str) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    if where == "append":
        monkeypatch.setattr(arrays.FileAppender, "append", full)
    else:
        monkeypatch.setattr(cache.tempfile, "mkdtemp", full)
    with pytest.raises(ResourceError, match=message):
        cache.fetch(tmp_path, "k", build)
    assert list(tmp_path.iterdir()) == []


SIGNALLED = """
import os, signal, sys, time
from pathlib import Path
from carrywave.data.files import cache

def build(new):
    new("u1", None)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

cache.fetch(Path(sys.argv[1]), "k", build)
"""


def test_a_process_that_is_asked_to_stop_keeps_no_draft(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", SIGNALLED, str(tmp_path)], timeout=60)
    assert ended.returncode == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_cache_below_a_home_that_is_not_there_is_refused() -> None:
    with pytest.raises(DataError, match=r"the cache ~nobody-here/c has no place, .*; set \$CARRYWAVE_CACHE to a folder"):
        cache.folder("~nobody-here/c")


def test_a_disk_that_is_full_keeps_no_draft(tmp_path: Path) -> None:
    """Of a file that cannot be closed either: what is buffered does not fit, as here by a limit of file sizes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        with pytest.raises(ResourceError, match=r"the cache .* cannot be written \(File too large\); raise the limit of file sizes"):
            cache.fetch(tmp_path, "k", build)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_the_loser_of_a_race_uses_the_winners_entry(tmp_path: Path) -> None:
    def slow(new: NewArray) -> tuple[dict[str, Sequences], Codec]:
        cache.fetch(tmp_path, "k", build)  # another process is faster
        inputs = new(np.uint8, None)
        inputs.append(np.array([9, 9], np.uint8))
        return cache.Entry({"train": Sequences(inputs.close(), np.array([0]), np.array([2]))}, CODEC)

    assert cache.fetch(tmp_path, "k", slow).parts["train"].inputs.tolist() == [0, 1, 1, 0]
    assert [path.name for path in tmp_path.iterdir()] == [(tmp_path / "k").name]


def test_an_entry_clears_away_the_drafts_of_those_who_were_killed_over_it(tmp_path: Path) -> None:
    left = [tmp_path / f".draft-{key}-abc" for key in ("k", "l")]
    for each in left:
        each.mkdir()
        (each / "a0.npy").touch()
    cache.fetch(tmp_path, "k", build)
    assert {path.name for path in tmp_path.iterdir()} == {(tmp_path / "k").name, left[1].name}


def test_folder_is_asked_for_or_of_the_environment_or_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("CARRYWAVE_CACHE", "/scratch")
    assert cache.folder("~/mine") == Path("/home/me/mine")
    assert cache.folder(None) == Path("/scratch")
    monkeypatch.delenv("CARRYWAVE_CACHE")
    assert cache.folder(None) == Path("/home/me/.cache/carrywave")


@pytest.mark.parametrize(("columns", "rows"), [(None, np.arange(300_000)), (3, np.arange(300_000).reshape(-1, 3))])
def test_appended_files_hold_plain_numbers(tmp_path: Path, columns: int | None, rows: Any) -> None:
    appender = arrays.FileAppender(tmp_path / "x", np.int32, columns)
    for part in np.array_split(rows, 7):
        appender.append(part)
    np.testing.assert_array_equal(appender.close(), rows)
    np.testing.assert_array_equal(np.fromfile(tmp_path / "x", np.int32), rows.ravel())

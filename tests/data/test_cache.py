"""The cache: written whole or not at all, verified when opened, shared by those who race to write it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carrywave.data.codec import Codec
from carrywave.data.files import cache
from carrywave.data.sequences import Sequences
from carrywave.errors import DataError, ResourceError

CODEC = Codec("language", "text", "char", ("a", "b", "<unk>"), size=3)


def build() -> cache.Entry:
    flat = np.array([0, 1, 1, 0], np.uint8)
    train = Sequences(flat, np.array([0]), np.array([3]), labels=np.array([7]), names=("x",))
    return cache.Entry({"train": train, "valid": Sequences(flat, np.array([3]), np.array([1]), warm=np.array([0]))}, CODEC, ("a note",))


def refuse() -> cache.Entry:
    raise AssertionError("built again")


def test_an_entry_is_built_once_and_memory_mapped(tmp_path: Path) -> None:
    cache.fetch(tmp_path, "k", build)
    entry = cache.fetch(tmp_path, "k", refuse)
    train, valid = entry.parts["train"], entry.parts["valid"]
    assert (entry.codec, entry.notes) == (CODEC, ("a note",))
    assert (train.inputs.tolist(), train.inputs.dtype, train.labels, train.names) == ([0, 1, 1, 0], np.uint8, np.array([7]), ("x",))
    assert (valid.starts.tolist(), valid.lengths.tolist(), valid.warm, valid.labels, valid.names) == ([3], [1], np.array([0]), None, None)
    assert train.inputs is valid.inputs
    assert not train.inputs.flags.writeable


@pytest.mark.parametrize("damage", ["missing", "truncated", "content"])
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    cache.fetch(tmp_path, "k", build)
    place = tmp_path / "k"
    if damage == "missing":
        (place / "0.npy").unlink()
    elif damage == "truncated":
        (place / "1.npy").write_bytes((place / "1.npy").read_bytes()[:-1])
    else:
        (place / "content.json").write_text("{}")
    with pytest.raises(DataError, match=rf"the cache {place} is damaged; delete the folder {place}$"):
        cache.fetch(tmp_path, "k", refuse)


@pytest.mark.parametrize("where", ["carrywave.data.files.cache.np.save", "carrywave.data.files.cache.tempfile.mkdtemp"])
@pytest.mark.parametrize(("number", "fact"), [(errno.ENOSPC, "No space left on device"), (errno.EROFS, "Read-only file system")])
def test_no_room_or_no_right_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int, fact: str) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(where, full)
    with pytest.raises(ResourceError, match=rf"cannot be written \({fact}\); .*, or set \$CARRYWAVE_CACHE to another folder"):
        cache.fetch(tmp_path, "k", build)
    assert list(tmp_path.iterdir()) == []


def test_the_loser_of_a_race_uses_the_winners_entry(tmp_path: Path) -> None:
    def slow() -> cache.Entry:
        cache.fetch(tmp_path, "k", build)  # another process is faster
        return cache.Entry({"train": Sequences(np.array([9, 9], np.uint8), np.array([0]), np.array([2]))}, CODEC)

    assert cache.fetch(tmp_path, "k", slow).parts["train"].inputs.tolist() == [0, 1, 1, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


def test_an_entry_clears_away_the_drafts_of_those_who_were_killed_over_it(tmp_path: Path) -> None:
    for key in ("k", "l"):
        (tmp_path / f".draft-{key}-abc").mkdir()
    cache.fetch(tmp_path, "k", build)
    assert {path.name for path in tmp_path.iterdir()} == {"k", ".draft-l-abc"}


def test_folder_is_asked_for_or_of_the_environment_or_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("CARRYWAVE_CACHE", "/scratch")
    assert cache.folder("~/mine") == Path("/home/me/mine")
    assert cache.folder(None) == Path("/scratch")
    monkeypatch.delenv("CARRYWAVE_CACHE")
    assert cache.folder(None) == Path("/home/me/.cache/carrywave")
    with pytest.raises(DataError, match=r"the cache ~nobody-here/c has no place, .*; set \$CARRYWAVE_CACHE to a folder"):
        cache.folder("~nobody-here/c")

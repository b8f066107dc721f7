"""One process of a host hashes a file, and tells the others: they hash only what has changed since."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carrywave.data.files import hashes


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read to be hashed."""
    found: list[str] = []
    plain: Callable[..., Any] = hashlib.file_digest

    def digest(file: Any, name: str) -> Any:
        found.append(Path(file.name).name)
        return plain(file, name)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    return found


def test_who_was_told_does_not_read_the_file(tmp_path: Path, counted: list[str]) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"one")
    right = hashlib.sha256(b"one").hexdigest()
    with hashes.keeping() as kept:
        assert hashes.sha256(path) == right
    told = json.loads(json.dumps(kept))  # as it travels
    assert counted == ["data"]
    with hashes.knowing(told):
        assert hashes.sha256(path) == right
        assert counted == ["data"]
        path.write_bytes(b"two")
        assert hashes.sha256(path) == hashlib.sha256(b"two").hexdigest()
    assert counted == ["data", "data"]
    path.write_bytes(b"one")
    with hashes.knowing(told):
        assert hashes.sha256(path) == right
    assert len(counted) == 3  # written anew: the same bytes, and another time


def test_nothing_is_known_afterwards(tmp_path: Path, counted: list[str]) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"one")
    with hashes.keeping() as kept:
        hashes.sha256(path)
    with hashes.knowing(kept):
        pass
    hashes.sha256(path)
    assert counted == ["data", "data"]
    assert len(kept) == 1


def test_a_file_that_did_not_change_is_not_read_again(tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process too, as long as the folder is kept."""
    path, folder = tmp_path / "data", tmp_path / "hashes"
    path.write_bytes(b"one")
    monkeypatch.setattr(hashes.time, "time", lambda: path.stat().st_ctime + 100)
    with hashes.remembering(folder):
        first = hashes.sha256(path)
    with hashes.remembering(folder):
        assert hashes.sha256(path) == first
    assert counted == ["data"]
    hashes.sha256(path)  # without that folder, it is
    assert counted == ["data"] * 2
    path.write_bytes(b"two")
    with hashes.remembering(folder):
        assert hashes.sha256(path) == hashlib.sha256(b"two").hexdigest()
    assert counted == ["data"] * 3
    next(folder.iterdir()).write_text("{")
    with hashes.remembering(folder):
        assert hashes.sha256(path) == hashlib.sha256(b"two").hexdigest()
    assert counted == ["data"] * 4


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path, counted: list[str]) -> None:
    """It may change again within the resolution of its times."""
    path, folder = tmp_path / "data", tmp_path / "hashes"
    path.write_bytes(b"one")
    with hashes.remembering(folder):
        hashes.sha256(path)
        hashes.sha256(path)
    assert counted == ["data"] * 2
    assert not folder.exists()

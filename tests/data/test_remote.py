"""Data in a store: fetched once, noticed when it changes, and every failure of the library behind it is one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from carrywave.data.files.remote import fetch, is_address
from carrywave.data.files.source import find
from carrywave.errors import DataError


@pytest.fixture
def memory() -> Iterator[Any]:
    """An empty memory file system."""
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("s3://b/x", True), ("memory://x", True), ("C:/x", False), ("C://x", False), ("a.txt", False), ("/s3://x", False)],
)
def test_what_is_an_address(name: str, expected: bool) -> None:
    assert is_address(name) is expected
    assert not is_address(Path(name))


def test_a_file_is_fetched_once_and_again_when_it_changes(memory: Any, tmp_path: Path) -> None:
    memory.pipe_file("/data/words.txt", b"one two")
    first = fetch("memory://data/words.txt", tmp_path)
    assert first.name == "words.txt"  # its ending says how it is read
    assert first.read_bytes() == b"one two"
    first.write_bytes(b"here")
    assert fetch("memory://data/words.txt", tmp_path).read_bytes() == b"here"
    memory.pipe_file("/data/words.txt", b"two one")  # the same size
    assert fetch("memory://data/words.txt", tmp_path).read_bytes() == b"two one"
    assert [path.name for path in tmp_path.rglob(".*")] == []


def test_a_source_is_the_copy_under_the_name_of_the_address(memory: Any, tmp_path: Path) -> None:
    memory.pipe_file("/data/rows.jsonl", b'{"tokens": [1, 2]}\n')
    source = find("memory://data/rows.jsonl", field="data.train", cache=tmp_path)
    assert source.format == "jsonl"
    assert source.name == "memory://data/rows.jsonl"
    assert list(source.lines()) == [(1, b'{"tokens": [1, 2]}')]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("memory://data/none.txt", r"^memory://data/none.txt: not found; check the address, the credentials and the connection$"),
        ("nothing://data", r"^nothing://data: cannot be read \(Protocol not known: nothing\); check the address"),
        ("memory://data", r"^memory://data: cannot be read \(it is a folder\)"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_one_line(memory: Any, tmp_path: Path, address: str, message: str) -> None:
    memory.pipe_file("/data/words.txt", b"one")
    with pytest.raises(DataError, match=message):
        fetch(address, tmp_path)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(address: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(DataError, match=r"s3://b/x needs a package that is not installed \(Install s3fs to access S3\); install it: pip"):
        fetch("s3://b/x", tmp_path)

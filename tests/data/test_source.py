"""Files are found, unpacked and read as a whole, in UTF-8 whatever they were written in."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest

from carrywave.data.files.source import Source, builtin_text, find
from carrywave.errors import DataError


def written(folder: Path, content: bytes, name: str = "a.txt", *, any_bytes: bool = True) -> Source:
    (folder / name).write_bytes(content)
    return find(str(folder / name), field="data.train", any_bytes=any_bytes)


def test_lines_are_numbered_and_the_last_one_needs_no_line_end(tmp_path: Path) -> None:
    assert list(written(tmp_path, b"a\n\nb").lines()) == [(1, b"a"), (2, b""), (3, b"b")]


RAW = "über\n".encode() * 1000


def zipped(*names: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, RAW)
    return made.getvalue()


PACKED = {
    "gz": gzip.compress(RAW),
    "bz2": bz2.compress(RAW),
    "xz": lzma.compress(RAW),
    "zip": zipped("a.txt", "__MACOSX/a.txt"),
    "zst": pa.compress(RAW, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("kind", PACKED)
def test_a_file_is_unpacked_by_its_first_bytes(tmp_path: Path, kind: str) -> None:
    for name in (f"a.txt.{kind}", "a.txt"):
        source = written(tmp_path, PACKED[kind], name, any_bytes=False)
        assert (source.content, source.format) == (RAW, "text")
    assert written(tmp_path, PACKED[kind]).content == PACKED[kind]  # any bytes may look like that
    with pytest.raises(DataError, match=r"a.txt cannot be read .*; check that the file is complete"):
        _ = written(tmp_path, PACKED[kind][: len(PACKED[kind]) // 2], any_bytes=False).content


def test_an_archive_of_several_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds 2 files; unpack it, and name the one to read"):
        _ = written(tmp_path, zipped("a.txt", "b.txt"), any_bytes=False).content


@pytest.mark.parametrize(
    ("content", "asked", "expected", "noted"),
    [
        ("aä€".encode(), "auto", "aä€", None),
        ("aä€".encode("cp1252"), "auto", "aä€", "cp1252"),
        (b"a\x81\xe4", "auto", "a\x81ä", "latin-1"),  # which cp1252 has no character for
        ("aä€".encode("utf-16"), "auto", "aä€", "utf-16"),
        ("aä€".encode("utf-16-be"), "utf-16-be", "aä€", None),
        ("aä€".encode("utf-8-sig"), "auto", "aä€", None),
        ("aä€".encode("utf-8-sig"), "utf-8", "aä€", None),
        ("łódź".encode("cp1250"), "cp1250", "łódź", None),
    ],
)
def test_encodings(tmp_path: Path, content: bytes, asked: str, expected: str, noted: str | None) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    source = find(str(tmp_path / "a.txt"), field="data.train", encoding=asked)
    assert (source.text.removeprefix("\ufeff"), [line.split()[4] for line in source.notes()]) == (expected, [noted] if noted else [])


def test_what_is_not_in_the_encoding_that_is_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xc3\xa4c\xff.")
    with pytest.raises(DataError, match=r"a.txt is not text in utf-8 \(byte 5\); set data.encoding"):
        _ = find(str(tmp_path / "a.txt"), field="data.train", encoding="utf-8").text


def test_missing_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe.txt")
    for name, message in {
        "~nobody-here/d.txt": r"data\.valid=~nobody-here/d\.txt: file not found",
        "no.txt": r"data\.valid=no\.txt: file not found in .*; use the path of an existing file, or builtin:python-topics",
        str(tmp_path): "is a folder",
        "pipe.txt": "is not a regular file",
    }.items():
        with pytest.raises(DataError, match=message):
            find(name, field="data.valid")


def test_paths_are_relative_expanded_and_may_be_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.jsonl", "~/a.jsonl", "link.jsonl"):
        assert find(name, field="data.train").content == b"{}"


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("a.txt", "auto", "text"),
        ("a.JSONL.gz", "auto", "jsonl"),
        ("a.tsv", "auto", "csv"),
        ("a.parquet", "auto", "parquet"),
        ("a", "auto", "text"),
        ("a.txt", "csv", "csv"),
    ],
)
def test_format_by_name_or_as_asked(tmp_path: Path, name: str, asked: str, expected: str) -> None:
    (tmp_path / name).touch()
    assert find(str(tmp_path / name), field="data.train", format=asked).format == expected


def test_builtin_text_is_long_prose() -> None:
    assert find("builtin:python-topics", field="data.train").text == builtin_text()
    assert len(builtin_text()) > 400_000


@pytest.mark.parametrize(("name", "message"), [("a.npz", "has arrays of NumPy, .*numpy.load"), ("a.xlsx", "is an Excel workbook; save")])
def test_files_of_other_programs_are_called_so(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        written(tmp_path, b"PK\x03\x04 and so on", name, any_bytes=False)

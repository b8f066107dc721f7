"""Files are found, decompressed and cut into blocks; whatever the block size, the content is the same."""

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
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.files.source import Source, builtin_text, find
from carrywave.errors import DataError


def written(folder: Path, content: bytes, block_bytes: int, name: str = "a.txt", *, any_bytes: bool = True) -> Source:
    (folder / name).write_bytes(content)
    return find(str(folder / name), field="data.train", block_bytes=block_bytes, any_bytes=any_bytes)


@given(text=st.text(max_size=60), block_bytes=st.integers(3, 9))
def test_text_blocks_join_to_the_whole(tmp_path_factory: pytest.TempPathFactory, text: str, block_bytes: int) -> None:
    source = written(tmp_path_factory.getbasetemp(), text.encode(), block_bytes)
    assert "".join(source.texts()) == text.removeprefix("\ufeff")


@given(lines=st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"")), max_size=9), block_bytes=st.integers(3, 9))
def test_lines_are_those_of_the_whole(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], block_bytes: int) -> None:
    source = written(tmp_path_factory.getbasetemp(), b"".join(line + b"\n" for line in lines), block_bytes)
    assert list(source.lines()) == list(enumerate(lines, start=1))


def test_last_line_needs_no_line_end(tmp_path: Path) -> None:
    assert list(written(tmp_path, b"a\n\nb", 2).lines()) == [(1, b"a"), (2, b""), (3, b"b")]


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
        source = written(tmp_path, PACKED[kind], 1000, name, any_bytes=False)
        assert b"".join(source.blocks()) == RAW
        assert source.format == "text"
    assert b"".join(written(tmp_path, PACKED[kind], 1000).blocks()) == PACKED[kind]  # any bytes may look like that
    with pytest.raises(DataError, match=r"a.txt cannot be read .*; check that the file is complete"):
        list(written(tmp_path, PACKED[kind][: len(PACKED[kind]) // 2], 1 << 20, any_bytes=False).blocks())


def test_an_archive_of_several_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds 2 files; unpack it, and name the one to read"):
        list(written(tmp_path, zipped("a.txt", "b.txt"), 1000, any_bytes=False).blocks())


@pytest.mark.parametrize("block_bytes", [1, 3, 100])
@pytest.mark.parametrize(
    ("content", "asked", "expected", "encoding"),
    [
        ("aä€".encode(), "auto", "aä€", None),
        ("aä€".encode("cp1252"), "auto", "aä€", "cp1252"),
        (b"a\x81\xe4", "auto", "a\x81ä", "latin-1"),  # which cp1252 has no character for
        ("aä€".encode("utf-16"), "auto", "aä€", "utf-16"),
        ("aä€".encode("utf-16-be"), "utf-16-be", "aä€", "utf-16-be"),
        ("aä€".encode("utf-8-sig"), "auto", "aä€", "utf-8-sig"),
        ("łódź".encode("cp1250"), "cp1250", "łódź", "cp1250"),
    ],
)
def test_encodings(tmp_path: Path, content: bytes, asked: str, expected: str, encoding: str | None, block_bytes: int) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    source = find(str(tmp_path / "a.txt"), field="data.train", encoding=asked, block_bytes=block_bytes)
    assert ("".join(source.texts()), source.encoding) == (expected, encoding)
    assert b"".join(source.blocks()).decode("utf-8-sig") == expected
    assert bool(source.notes()) == (asked == "auto" and encoding in ("cp1252", "latin-1", "utf-16"))


def test_what_is_not_in_the_encoding_that_is_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xc3\xa4c\xff.")
    with pytest.raises(DataError, match=r"a.txt is not text in utf-8 \(byte 5\); set data.encoding"):
        list(find(str(tmp_path / "a.txt"), field="data.train", encoding="utf-8").texts())


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert list(written(tmp_path, b"\xef\xbb\xbfab", 8).texts()) == ["ab"]
    assert list(written(tmp_path, b"\xef\xbb\xbfab", 8).lines()) == [(1, b"ab")]


def test_missing_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"data\.train=~nobody-here/d\.txt: file not found"):
        find("~nobody-here/d.txt", field="data.train")
    with pytest.raises(DataError, match=r"data\.valid=no\.txt: file not found in .*; use the path of an existing file"):
        find("no.txt", field="data.valid")
    with pytest.raises(DataError, match="is a folder"):
        find(str(tmp_path), field="data.valid")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match="is not a regular file"):
        find("pipe.txt", field="data.valid")
    with pytest.raises(DataError, match=r"file not found in .*, or builtin:python-topics"):
        find("builtin:other", field="data.valid")


def test_paths_are_relative_expanded_and_may_be_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.jsonl", "~/a.jsonl", "link.jsonl"):
        assert b"".join(find(name, field="data.train").blocks()) == b"{}"


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("a.txt", "auto", "text"),
        ("a.jsonl", "auto", "jsonl"),
        ("a.JSONL.gz", "auto", "jsonl"),
        ("a.csv", "auto", "csv"),
        ("a.tsv", "auto", "csv"),
        ("a.parquet", "auto", "parquet"),
        ("a", "auto", "text"),
        ("a.data", "jsonl", "jsonl"),
        ("a.txt", "csv", "csv"),
    ],
)
def test_format_by_name_or_as_asked(tmp_path: Path, name: str, asked: str, expected: str) -> None:
    (tmp_path / name).touch()
    assert find(str(tmp_path / name), field="data.train", format=asked).format == expected


def test_builtin_text_is_long_prose() -> None:
    source = find("builtin:python-topics", field="data.train")
    assert "".join(source.texts()) == builtin_text()
    assert len(builtin_text()) > 400_000


def test_digest_is_of_the_content(tmp_path: Path) -> None:
    one, two = written(tmp_path, b"x", 1, "one.txt"), written(tmp_path, b"x", 9, "two.txt")
    assert one.digest() == two.digest() != written(tmp_path, b"y", 1, "three.txt").digest()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.npz", "has arrays of NumPy, .*numpy.load"),
        ("a.npy", "has arrays of NumPy"),
        ("a.xlsx", "is an Excel workbook; save the sheet as CSV"),
    ],
)
def test_files_of_other_programs_are_called_so(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(DataError, match=message):
        find(str(tmp_path / name), field="data.train")


def test_a_text_may_begin_as_it_likes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("BZ is how it begins")
    assert next(find(str(tmp_path / "a.txt"), field="data.train").texts()) == "BZ is how it begins"

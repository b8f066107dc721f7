"""Files are found, decompressed and cut into blocks; whatever the block size, the content is the same."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.files.source import Source, builtin_text, find
from carrywave.errors import DataError


def written(folder: Path, content: bytes, block_bytes: int, name: str = "a.txt") -> Source:
    (folder / name).write_bytes(content)
    return find(str(folder / name), field="data.train", block_bytes=block_bytes, any_bytes=True)


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


@pytest.mark.parametrize(
    ("name", "compress"), [("a.txt.gz", gzip.compress), ("a.txt.zst", lambda raw: pa.compress(raw, codec="zstd", asbytes=True))]
)
def test_compressed_by_name(tmp_path: Path, name: str, compress: object) -> None:
    raw = "über\n".encode() * 1000
    assert callable(compress)
    source = written(tmp_path, compress(raw), 1000, name)
    assert b"".join(source.blocks()) == raw
    assert source.format == "text"


@pytest.mark.parametrize(
    ("name", "compress"), [("a.txt.gz", gzip.compress), ("a.txt.zst", lambda raw: pa.compress(raw, codec="zstd", asbytes=True))]
)
def test_truncated_compressed_file_is_refused(tmp_path: Path, name: str, compress: object) -> None:
    assert callable(compress)
    whole = compress(bytes(range(256)) * 100)
    source = written(tmp_path, whole[: len(whole) // 2], 1 << 20, name)
    with pytest.raises(DataError, match=rf"{name} cannot be read .*; check that the file is complete"):
        list(source.blocks())


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 100])
def test_invalid_utf8_is_refused_with_its_place(tmp_path: Path, block_bytes: int) -> None:
    source = written(tmp_path, b"ab\xc3\xa4c\xff.", block_bytes)
    with pytest.raises(DataError, match="byte 5 is not valid utf-8"):
        list(source.texts())


def test_text_that_ends_inside_a_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="byte 1 is not valid utf-8"):
        list(written(tmp_path, b"a\xc3", 8).texts())


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    source = written(tmp_path, b"\xef\xbb\xbfab\xff", 8)
    with pytest.raises(DataError, match="byte 5 "):
        list(source.texts())
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
    with pytest.raises(DataError, match="is not a built-in text; use builtin:python-topics"):
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


def test_compressed_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet.gz").touch()
    with pytest.raises(DataError, match="compressed internally"):
        find(str(tmp_path / "a.parquet.gz"), field="data.train")


def test_builtin_text_is_long_prose() -> None:
    source = find("builtin:python-topics", field="data.train")
    assert "".join(source.texts()) == builtin_text()
    assert len(builtin_text()) > 400_000


def test_digest_is_of_the_content(tmp_path: Path) -> None:
    one, two = written(tmp_path, b"x", 1, "one.txt"), written(tmp_path, b"x", 9, "two.txt")
    assert one.digest() == two.digest() != written(tmp_path, b"y", 1, "three.txt").digest()


WORDS = b"one word after the other\n" * 20


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.txt.bz2"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            bz2.compress(WORDS),
            r"is compressed \(bzip2\), but only \.gz and \.zst files are decompressed automatically; unpack it with: bunzip2",
        ),
        (lzma.compress(WORDS), r"is compressed \(xz\), .* xz -dc"),
        (gzip.compress(WORDS), r"is compressed \(gzip\), .*; rename it to .*\.gz, or unpack it"),
        (pa.compress(WORDS, codec="zstd", asbytes=True), r"is compressed \(zstd\), .*; rename it to .*\.zst, or unpack it"),
        (b"PK\x03\x04" + WORDS, r"is compressed \(zip\), .* unzip"),
    ],
    ids=["bzip2", "xz", "gzip", "zstd", "zip"],
)
def test_what_is_compressed_is_called_so(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as refused:
        find(str(tmp_path / name), field="data.train")
    assert "\n" not in str(refused.value)
    assert find(str(tmp_path / name), field="data.train", format="text", any_bytes=True).head() == content[:16]


def test_rows_are_text_also_if_their_tokens_are_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text|label\n")
    source = find(str(tmp_path / "a.csv"), field="data.train", any_bytes=True, encoding="latin-1", separator="|")
    assert (source.encoding, source.separator()) == ("latin-1", "|")


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.npz", "has arrays of NumPy, .*numpy.load"), ("a.npy", "has arrays of NumPy"), ("a.xls", "is an Excel workbook")],
)
def test_files_of_other_programs_are_called_so(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(DataError, match=message):
        find(str(tmp_path / name), field="data.train")


def test_a_workbook_is_called_so_and_a_text_may_begin_as_it_likes(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(DataError, match=r"a\.xlsx is an Excel workbook; save the sheet as CSV"):
        find(str(tmp_path / "a.xlsx"), field="data.train", format="csv")
    (tmp_path / "a.txt").write_text("BZh is how it begins")
    assert next(find(str(tmp_path / "a.txt"), field="data.train").texts()) == "BZh is how it begins"

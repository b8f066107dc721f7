"""A `Source` is one file as the user named it: located, decompressed according to its name, and read in blocks, never as a whole.

Higher layers read blocks of bytes, blocks of text or numbered lines, and never deal with compression.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from carrywave.data.files import dialect, hashes, hub_datasets, remote
from carrywave.errors import DataError, ResourceError, from_system, one_line, remedy_for
from carrywave.spec.data_spec import BUILTIN_TEXT

Format = Literal["text", "jsonl", "csv", "parquet"]

BLOCK_BYTES = 8 << 20
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
FORMATS: dict[str, Format] = {
    ".txt": "text",
    ".text": "text",
    ".tokens": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
BOM = codecs.BOM_UTF8
PACKED: dict[bytes, tuple[str, str]] = {  # magic bytes of compressed files -> (format, how to decompress)
    b"\x1f\x8b\x08": ("gzip", "rename it to {name}.gz, or unpack it with: gunzip -c {name} > unpacked"),
    b"(\xb5/\xfd": ("zstd", "rename it to {name}.zst, or unpack it with: zstd -dc {name} > unpacked"),
    b"BZh": ("bzip2", "unpack it with: bunzip2 -c {name} > unpacked"),
    b"\xfd7zXZ": ("xz", "unpack it with: xz -dc {name} > unpacked"),
    b"PK\x03\x04": ("zip", "unpack it with: unzip {name}"),
}
EXCEL = "is an Excel workbook; save the sheet as CSV, or pass pandas.read_excel({name!r}) to cw.fit or cw.predict"
ARRAYS = "has arrays of NumPy, which are not read from files; pass those of numpy.load({name!r}) to cw.fit or cw.predict"
FOREIGN = {".xlsx": EXCEL, ".xlsm": EXCEL, ".xls": EXCEL, ".npy": ARRAYS, ".npz": ARRAYS}  # by the end of the name
BLOCK_OF_BZIP2 = b"1AY&SY"  # follows the block-size digit; BZh alone may start a text
ENCODINGS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
MOST_COLUMNS = 20_000
HEAD_BYTES = 16
STANDARD_INPUT = "standard input"
STANDARD_FOLDER = "carrywave-standard-input-"  # how the name of a temporary folder begins that keeps standard input in a file


@dataclass(frozen=True)
class Source:
    """A file, or a text that ships with Python."""

    name: str  # as the user wrote it; used in error messages
    path: Path | None  # None for the built-in text
    format: Format
    compression: str | None = None
    block_bytes: int = BLOCK_BYTES
    encoding: str | None = None  # of text that is not utf-8
    encoding_is_set: bool = False  # rather than found by its byte-order mark
    mark: str | None = None  # between the columns of a CSV file; None: found in its first lines

    @property
    def tabs(self) -> bool:
        """True if the name says that columns are separated by tabs."""
        return ".tsv" in Path(self.name).suffixes

    def head(self) -> bytes:
        """Return the first bytes of the content."""
        with self.guard(self.open) as stream:
            return bytes(self.guard(lambda: stream.read(HEAD_BYTES)))

    def digest(self) -> str:
        """Return the SHA-256 of the stored bytes."""
        if self.path is None:
            return hashlib.sha256(builtin_text().encode()).hexdigest()
        path = self.path
        return str(self.guard(lambda: hashes.sha256(path)))

    def open(self) -> Any:
        """Open a binary stream of the decompressed content."""
        if self.path is None:
            return io.BytesIO(builtin_text().encode())
        file = pa.OSFile(str(self.path), "rb")
        plain = pa.CompressedInputStream(file, self.compression) if self.compression else file
        return plain if self.encoding is None else pa.transcoding_input_stream(plain, self.encoding, "utf-8")

    def blocks(self) -> Iterator[bytes]:
        """Yield the content in blocks of at most `block_bytes`."""
        with self.guard(self.open) as stream:
            while block := self.guard(lambda: stream.read(self.block_bytes)):
                yield bytes(block)

    def guard(self, read: Callable[[], Any]) -> Any:
        """Call `read` and convert pyarrow's errors about a broken file to a `DataError`."""
        try:
            return read()
        except UnicodeEncodeError:
            raise  # of the file's name, not of its content
        except UnicodeError as error:
            fact = f"{self.name} is not text in {self.encoding or 'utf-8'} ({one_line(error)})"
            raise DataError(f"{fact}; set data.encoding to the encoding it was written in") from error
        except (OSError, pa.ArrowException) as error:
            if "Empty CSV file" in str(error):
                raise DataError(f"{self.name} is empty; use a file with a line of column names and at least one row") from error
            if isinstance(error, OSError) and from_system(error) is ResourceError:
                raise ResourceError(f"{self.name} cannot be read ({error.strerror or error}); {remedy_for(error, '')}") from error
            raise DataError(
                f"{self.name} cannot be read ({one_line(error)}); check that the file is complete and in the format its name implies"
            ) from error

    def separator(self) -> str:
        """Return the mark between columns: as asked; else tab or comma according to the name, unless the first lines show another one."""
        usual = "\t" if self.tabs else ","
        lines = dialect.first_lines(self.lines())
        mark = self._checked_separator(lines, usual)
        columns = lines[0].count(mark) + 1 if lines else 0
        if columns > MOST_COLUMNS:  # reading their types alone would take minutes, without a word
            fact = f"{self.name} has {columns:,} columns, and at most {MOST_COLUMNS:,} are read"
            raise DataError(f"{fact}; keep those that matter, or write one row for each series and time, with a column of names")
        return mark

    def _checked_separator(self, lines: list[str], usual: str) -> str:
        if self.mark is None:
            return dialect.find_separator(lines, self.name, usual)
        others = [mark for mark in dialect.SEPARATORS if lines and mark in lines[0]]
        if others and self.mark not in lines[0]:
            fact = f"data.separator is {dialect.written(self.mark)}, but the first line has none, and has {dialect.written(others[0])}"
            raise DataError(f"{self.name}: {fact}; correct data.separator, or remove it")
        return self.mark

    def notes(self) -> tuple[str, ...]:
        """Lines about what was found in the file and was not asked for: its encoding, and the mark between its columns."""
        lines = [] if self.encoding is None or self.encoding_is_set else [f"{self.name}: reading text in {self.encoding}"]
        if self.format == "csv" and self.mark is None and (mark := self.separator()) != ("\t" if self.tabs else ","):
            lines.append(f"{self.name}: columns are separated by {dialect.written(mark)}")
        return tuple(lines)

    def check_utf8(self) -> None:
        """Reject a file in another encoding, and report the line: Arrow would silently read such a column as bytes."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for block in self.blocks():
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as fault:
            for number, line in self.lines():
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    shown = line[max(error.start - 12, 0) : error.end + 12]
                    raise DataError(f"{self.name}:{number}: {shown!r} is not valid utf-8; {to_utf8(self.name)}") from fault

    def texts(self) -> Iterator[str]:
        """Yield the content as blocks of text, without splitting a character whose bytes straddle a block boundary."""
        pending, offset_bytes = b"", 0
        for number, block in enumerate(self.blocks()):
            data = pending + block
            if number == 0 and data.startswith(BOM):
                data, offset_bytes = data[len(BOM) :], len(BOM)
            text, used = self._decode(data, offset_bytes, final=False)
            pending, offset_bytes = data[used:], offset_bytes + used
            if text:
                yield text
        if pending:
            self._decode(pending, offset_bytes, final=True)

    def _decode(self, data: bytes, offset_bytes: int, *, final: bool) -> tuple[str, int]:
        try:
            return codecs.utf_8_decode(data, "strict", final)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.name}: byte {offset_bytes + error.start} is not valid utf-8; {to_utf8(self.name)}, or use data.tokens=byte"
            ) from error

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield numbered lines (from 1) without their line ends."""
        number = 1
        parts: list[bytes] = []
        for index, block in enumerate(self.blocks()):
            data = block[len(BOM) :] if index == 0 and block.startswith(BOM) else block
            *whole, rest = data.split(b"\n")
            for line in whole:
                yield number, b"".join((*parts, line))
                number, parts = number + 1, []
            parts.append(rest)
        last = b"".join(parts)
        if last:
            yield number, last


def find(
    name: str,
    *,
    field: str,
    format: str = "auto",
    block_bytes: int = BLOCK_BYTES,
    any_bytes: bool = False,
    cache: Path | None = None,
    encoding: str = "auto",
    separator: str | None = None,
) -> Source:
    """Return the source for a name in the spec, or raise an error that says what is wrong; `any_bytes`: plain text may be any bytes.

    `encoding` is that of text, auto for utf-8 or what a byte-order mark shows; `separator` the mark between the columns of a CSV file.

    An address in an object store is fetched into the folder `cache`, and so is a dataset of Hugging Face's library.
    """
    if name == BUILTIN_TEXT:
        return Source(name, None, "text", block_bytes=block_bytes)
    if name.startswith("builtin:"):
        raise DataError(f"{field}={name} is not a built-in text; use {BUILTIN_TEXT} or a file path")
    if cache is not None and hub_datasets.is_name(name):
        return Source(name, hub_datasets.fetch(name, field, cache), "parquet", block_bytes=block_bytes)
    path = Path(os.path.expanduser(name)) if cache is None or not remote.is_address(name) else remote.fetch(name, cache)
    if not path.exists():
        setting = "" if field == "data" else f"{field}="  # that of a spec, rather than the input of a command
        raise DataError(f"{setting}{name}: file not found{_from_where(path)}; use the path of an existing file")
    if path.is_dir():
        raise DataError(f"{field}={name} is a folder; use the path of a file")
    if not path.is_file():
        raise DataError(f"{field}={name} is not a regular file, but data is read more than once; write it to a file first")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    kind = suffixes[-2] if compression and len(suffixes) > 1 else suffixes[-1] if suffixes else ""
    name = STANDARD_INPUT if path.parent.name.startswith(STANDARD_FOLDER) else name
    if format == "auto" and kind in FOREIGN and not any_bytes:
        raise DataError(f"{name} {FOREIGN[kind].format(name=name)}")
    source = Source(name, path, named_format(kind, format), compression, block_bytes)
    if source.format == "parquet" and compression:
        raise DataError(f"{field}={name}: Parquet is already compressed internally; decompress the file and rename it to .parquet")
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        remedy = remedy_for(error, "check its permissions")
        raise from_system(error, DataError)(f"{field}={name} cannot be opened ({error.strerror}); {remedy}") from error
    if source.format == "parquet" or (any_bytes and source.format == "text"):
        return source
    head = source.head()
    if packed(head) is not None and (wrong := not_utf8(name, head)) is not None:
        raise DataError(wrong)
    actual_encoding = marked_encoding(head) if encoding == "auto" else None if codecs.lookup(encoding).name == "utf-8" else encoding
    return replace(source, encoding=actual_encoding, encoding_is_set=encoding != "auto", mark=separator)


def named_format(suffix: str, format: str) -> Format:
    """Return the format the spec asks for, else the one the file name implies; text by default."""
    if format in ("text", "jsonl", "csv", "parquet"):
        return format  # type: ignore[return-value]
    return FORMATS.get(suffix, "text")


def builtin_text() -> str:
    """Return the prose of Python's own language reference, about 460 kB of English."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[key] for key in sorted(topics))


def not_utf8(name: object, head: bytes) -> str | None:
    """Return an error message if the first bytes show that the file is not utf-8 text: what it is, and how to fix it."""
    packing = packed(head)
    if packing is not None:
        how, remedy = PACKED[packing]
        if how == "zip" and (what := FOREIGN.get(Path(str(name)).suffix.lower())) is not None:
            return f"{name} {what.format(name=str(name))}"
        read = ".gz and .zst files are decompressed automatically"
        return f"{name} is compressed ({how}), but only {read}; {remedy.format(name=name)}"
    encoding = marked_encoding(head)
    if encoding is not None:
        return f"{name} is text in {encoding}, but utf-8 is expected; convert it with: iconv -f {encoding} -t utf-8 {name} > converted"
    return None


def marked_encoding(head: bytes) -> str | None:
    """Return the encoding that a byte-order mark shows; None for utf-8, or without a mark."""
    return next((encoding for mark, encoding in ENCODINGS.items() if head.startswith(mark)), None)


def packed(head: bytes) -> bytes | None:
    """Return the magic bytes of the compression format that a file starts with, or None."""
    magic = next((mark for mark in PACKED if head.startswith(mark)), None)
    return None if magic == b"BZh" and head[4:10] != BLOCK_OF_BZIP2 else magic


def to_utf8(name: object) -> str:
    """Return advice on how to convert a file to utf-8."""
    return f"set data.encoding (as in data.encoding=latin-1), or convert it with: iconv -f latin1 -t utf-8 {name} > converted"


def _from_where(path: Path) -> str:
    return "" if path.is_absolute() else f" in {Path.cwd()}"

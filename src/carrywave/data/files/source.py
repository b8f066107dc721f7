"""A `Source` is one file as the user named it: located, decompressed and decoded, and read in blocks, never as a whole.

Higher layers read blocks of UTF-8, blocks of text or numbered lines, and never deal with compression or encodings.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import importlib
import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow as pa

from carrywave.data.files import hashes, hub_datasets, remote
from carrywave.errors import DataError, ResourceError, from_system, one_line, remedy_for
from carrywave.spec.data_spec import BUILTIN_TEXT

Format = Literal["text", "jsonl", "csv", "parquet"]

BLOCK_BYTES = 8 << 20
FORMATS: dict[str, Format] = {
    ".txt": "text",
    ".text": "text",
    ".tokens": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".tab": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".feather": "parquet",
    ".arrow": "parquet",
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zip", ".zst")  # at the end of a name; a file is unpacked by its first bytes
EXCEL = "is an Excel workbook; save the sheet as CSV, or pass pandas.read_excel({name!r}) to cw.fit or cw.predict"
ARRAYS = "has arrays of NumPy, which are not read from files; pass those of numpy.load({name!r}) to cw.fit or cw.predict"
FOREIGN = {".xlsx": EXCEL, ".xlsm": EXCEL, ".xls": EXCEL, ".npy": ARRAYS, ".npz": ARRAYS}  # by the end of the name
BINARY = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0", b"\x93NUMPY")  # how workbooks and arrays begin
MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # of byte order, and encodings
WESTERN = ("cp1252", "latin-1")  # what text that is not UTF-8 is in; the second has a character for every byte
HEAD_BYTES = 16
STANDARD_INPUT = "standard input"
STANDARD_FOLDER = "carrywave-standard-input-"  # how the name of a temporary folder begins that keeps standard input in a file


def _unzipped(path: Path) -> Any:
    archive = zipfile.ZipFile(path)
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
    if len(names) != 1:
        raise DataError(f"{path} holds {len(names)} files; unpack it, and name the one to read")
    return archive.open(names[0])


# By the first bytes of a file: how it is unpacked.
UNPACKED: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b\x08": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
    b"PK\x03\x04": _unzipped,
    b"(\xb5/\xfd": lambda path: pa.CompressedInputStream(pa.OSFile(str(path), "rb"), "zstd"),
}
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, pa.ArrowException)


@dataclass(frozen=True)
class Source:
    """A file, or a text that ships with Python."""

    name: str  # as the user wrote it; used in error messages
    path: Path | None  # None for the built-in text
    format: Format
    block_bytes: int = BLOCK_BYTES
    encoding: str | None = None  # of text that is not plain UTF-8; None also for raw bytes
    encoding_is_set: bool = False  # rather than found
    raw: bool = False  # any bytes, which are unpacked only if the name says so

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
        """Open a binary stream of the unpacked content."""
        if self.path is None:
            return io.BytesIO(builtin_text().encode())
        with self.path.open("rb") as file:
            first = file.read(HEAD_BYTES)
        packed = not self.raw or self.path.suffix.lower() in COMPRESSIONS
        unpack = next((unpack for magic, unpack in UNPACKED.items() if packed and first.startswith(magic)), None)
        return self.path.open("rb") if unpack is None else unpack(self.path)

    def _raw(self) -> Iterator[bytes]:
        with self.guard(self.open) as stream:
            while block := self.guard(lambda: stream.read(self.block_bytes)):
                yield bytes(block)

    def content(self) -> bytes:
        """Return the whole content, as UTF-8 whatever the file's encoding: at once where nothing is to be converted."""
        if self.encoding is not None:
            return b"".join(self.blocks())
        with self.guard(self.open) as stream:
            return bytes(self.guard(stream.read))

    def blocks(self) -> Iterator[bytes]:
        """Yield the content in blocks of about `block_bytes`, as UTF-8 whatever the file's encoding."""
        if self.encoding is None:
            yield from self._raw()
            return
        for text in self.texts():
            yield text.encode()

    def texts(self) -> Iterator[str]:
        """Yield the content as blocks of text, without splitting a character whose bytes straddle a block boundary."""
        decoder = codecs.getincrementaldecoder(self.encoding or "utf-8-sig")()
        at = 0
        try:
            for block in self._raw():
                if text := decoder.decode(block):
                    yield text
                at += len(block)
            if text := decoder.decode(b"", final=True):
                yield text
        except UnicodeError as error:
            where = f"byte {at + getattr(error, 'start', 0)}"
            remedy = "set data.encoding to the encoding it was written in"
            raise DataError(
                f"{self.name} is not text in {self.encoding or 'utf-8'} ({where}); {remedy}, or use data.tokens=byte"
            ) from error

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield numbered lines (from 1) in UTF-8 without their line ends."""
        number = 1
        parts: list[bytes] = []
        for index, block in enumerate(self.blocks()):
            data = block.removeprefix(codecs.BOM_UTF8) if index == 0 else block
            *whole, rest = data.split(b"\n")
            for line in whole:
                yield number, b"".join((*parts, line))
                number, parts = number + 1, []
            parts.append(rest)
        last = b"".join(parts)
        if last:
            yield number, last

    def guard(self, read: Callable[[], Any]) -> Any:
        """Call `read` and convert errors about a broken file to a `DataError`."""
        try:
            return read()
        except BROKEN as error:
            if isinstance(error, OSError) and from_system(error) is ResourceError:
                raise ResourceError(f"{self.name} cannot be read ({error.strerror or error}); {remedy_for(error, '')}") from error
            remedy = "check that the file is complete and in the format its name implies"
            raise DataError(f"{self.name} cannot be read ({one_line(error)}); {remedy}") from error

    def notes(self) -> tuple[str, ...]:
        """A line about an encoding that was found and not asked for."""
        found = self.encoding not in (None, "utf-8-sig") and not self.encoding_is_set
        return (f"{self.name}: reading text in {self.encoding} (data.encoding)",) if found else ()


def find(
    name: str,
    *,
    field: str,
    format: str = "auto",
    block_bytes: int = BLOCK_BYTES,
    any_bytes: bool = False,
    cache: Path | None = None,
    encoding: str = "auto",
) -> Source:
    """Return the source for a name in the spec, or raise an error that says what is wrong; `any_bytes`: plain text may be any bytes.

    `encoding` is that of text; auto: what a byte-order mark says, else UTF-8, or cp1252 if it cannot be that.

    An address in an object store is fetched into the folder `cache`, and so is a dataset of Hugging Face's library.
    """
    if name == BUILTIN_TEXT:
        return Source(name, None, "text", block_bytes)
    if cache is not None and hub_datasets.is_name(name):
        return Source(name, hub_datasets.fetch(name, field, cache), "parquet", block_bytes)
    path = Path(os.path.expanduser(name)) if cache is None or not remote.is_address(name) else remote.fetch(name, cache)
    if not path.exists():
        setting = "" if field == "data" else f"{field}="  # that of a spec, rather than the input of a command
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise DataError(f"{setting}{name}: file not found{where}; use the path of an existing file, or {BUILTIN_TEXT}")
    if not path.is_file():
        what = "a folder" if path.is_dir() else "not a regular file, but data is read more than once"
        raise DataError(f"{field}={name} is {what}; use the path of a file")
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSIONS]
    kind = suffixes[-1] if suffixes else ""
    name = STANDARD_INPUT if path.parent.name.startswith(STANDARD_FOLDER) else name
    try:
        with path.open("rb") as file:
            first = file.read(HEAD_BYTES)
    except OSError as error:
        remedy = remedy_for(error, "check its permissions")
        raise from_system(error, DataError)(f"{field}={name} cannot be opened ({error.strerror}); {remedy}") from error
    read_as = FORMATS.get(kind, "text") if format == "auto" else cast(Format, format)
    raw = any_bytes and read_as == "text"
    source = Source(name, path, read_as, block_bytes, raw=raw)
    if kind in FOREIGN and not raw and first.startswith(BINARY):  # a text may have such a name, too
        raise DataError(f"{name} {FOREIGN[kind].format(name=name)}")
    if source.format == "parquet" or raw:
        return source
    return replace(source, encoding=_encoding_of(source) if encoding == "auto" else encoding, encoding_is_set=encoding != "auto")


def _encoding_of(source: Source) -> str | None:
    """The encoding of a text, of which the whole is looked at; None for plain UTF-8."""
    head = source.head()
    if (marked := next((encoding for mark, encoding in MARKS.items() if head.startswith(mark)), None)) is not None:
        return marked
    for encoding in (None, *WESTERN):
        decoder = codecs.getincrementaldecoder(encoding or "utf-8")()
        try:
            for block in source._raw():
                decoder.decode(block)
            decoder.decode(b"", final=True)
            return encoding
        except UnicodeError:
            continue
    raise AssertionError("latin-1 reads anything")


def builtin_text() -> str:
    """Return the prose of Python's own language reference, about 460 kB of English."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[key] for key in sorted(topics))

"""A `Source` is one file as the user named it: located, unpacked, and read once, as a whole, in UTF-8 whatever its encoding."""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow as pa

from carrywave.data.files import hub_datasets, remote
from carrywave.errors import DataError, ResourceError, from_system, one_line, remedy_for
from carrywave.spec.data_spec import BUILTIN_TEXT

Format = Literal["text", "jsonl", "csv", "parquet"]

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
    encoding: str = "auto"  # of text; auto: what a byte-order mark says, else UTF-8, or cp1252 if it cannot be that
    raw: bool = False  # any bytes, which are unpacked only if the name says so

    def head(self) -> bytes:
        """Return the first bytes of the content."""
        with self.guard(self.open) as stream:
            return bytes(self.guard(lambda: stream.read(HEAD_BYTES)))

    def open(self) -> Any:
        """Open a binary stream of the unpacked content."""
        if self.path is None:
            return io.BytesIO(builtin_text().encode())
        with self.path.open("rb") as file:
            first = file.read(HEAD_BYTES)
        packed = not self.raw or self.path.suffix.lower() in COMPRESSIONS
        unpack = next((unpack for magic, unpack in UNPACKED.items() if packed and first.startswith(magic)), None)
        return self.path.open("rb") if unpack is None else unpack(self.path)

    @cached_property
    def _read(self) -> tuple[bytes, str]:
        """The whole content in UTF-8, and the encoding that it was in."""
        with self.guard(self.open) as stream:
            content = bytes(self.guard(stream.read))
        if self.raw:
            return content, "utf-8"
        marked = [encoding for mark, encoding in MARKS.items() if content.startswith(mark)]
        for encoding in [self.encoding] if self.encoding != "auto" else marked or ["utf-8", *WESTERN]:
            try:
                text = content.decode("utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding)
            except UnicodeError as error:
                at, of = getattr(error, "start", 0), encoding
                continue
            return content if encoding == "utf-8" else text.encode(), encoding
        remedy = "set data.encoding to the encoding it was written in, or use data.tokens=byte"
        raise DataError(f"{self.name} is not text in {of} (byte {at}); {remedy}")

    @property
    def content(self) -> bytes:
        """The whole content, as UTF-8 whatever the file's encoding."""
        return self._read[0]

    @property
    def text(self) -> str:
        """The whole content as text."""
        return self.content.decode()

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield numbered lines (from 1) in UTF-8 without their line ends."""
        return enumerate((line.removesuffix(b"\n") for line in io.BytesIO(self.content)), start=1)

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
        if self.encoding != "auto" or self.raw or self.format == "parquet" or self._read[1] in ("utf-8", "utf-8-sig"):
            return ()
        return (f"{self.name}: reading text in {self._read[1]} (data.encoding)",)


def find(
    name: str, *, field: str, format: str = "auto", any_bytes: bool = False, cache: Path | None = None, encoding: str = "auto"
) -> Source:
    """Return the source for a name in the spec, or raise an error that says what is wrong; `any_bytes`: plain text may be any bytes.

    An address in an object store is fetched into the folder `cache`, and so is a dataset of Hugging Face's library.
    """
    if name == BUILTIN_TEXT:
        return Source(name, None, "text")
    if cache is not None and hub_datasets.is_name(name):
        return Source(name, hub_datasets.fetch(name, field, cache), "parquet")
    path = Path(os.path.expanduser(name)) if cache is None or not remote.is_address(name) else remote.fetch(name, cache)
    setting = "" if field == "data" else f"{field}="  # that of a spec, rather than the input of a command
    if not path.exists():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise DataError(f"{setting}{name}: file not found{where}; use the path of an existing file, or {BUILTIN_TEXT}")
    if not path.is_file():
        raise DataError(f"{setting}{name} is {'a folder' if path.is_dir() else 'not a regular file'}; use the path of a file")
    kind = next((suffix.lower() for suffix in path.suffixes[::-1] if suffix.lower() not in COMPRESSIONS), "")
    name = STANDARD_INPUT if path.parent.name.startswith(STANDARD_FOLDER) else name
    try:
        with path.open("rb") as file:
            first = file.read(HEAD_BYTES)
    except OSError as error:
        remedy = remedy_for(error, "check its permissions")
        raise from_system(error, DataError)(f"{field}={name} cannot be opened ({error.strerror}); {remedy}") from error
    read_as = FORMATS.get(kind, "text") if format == "auto" else cast(Format, format)
    raw = any_bytes and read_as == "text"
    if kind in FOREIGN and not raw and first.startswith(BINARY):  # a text may have such a name, too
        raise DataError(f"{name} {FOREIGN[kind].format(name=name)}")
    return Source(name, path, read_as, encoding, raw)


def builtin_text() -> str:
    """Return the prose of Python's own language reference, about 460 kB of English."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[key] for key in sorted(topics))

"""On-disk cache of parsed data, keyed by the files (path, size, time) and by how they are read: arrays that are mapped into memory.

An entry is a directory. It is written to a temporary directory next to its final place, and published with a single rename; a process that
loses the race to publish an entry uses the winner's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike, NDArray

from carrywave.data.codec import Codec
from carrywave.data.files.arrays import FileAppender, NewArray, open_array
from carrywave.data.sequences import Sequences
from carrywave.errors import DataError, from_system, remedy_for, unwinding

FORMAT = 12  # part of every key, so that entries of another format, or read in another way, are never used
ARRAYS = (
    *("inputs", "starts", "lengths", "labels", "tags", "resets", "weights", "step_weights", "spans", "warm"),
    *("units", "means", "spreads", "missing"),
)
CONTENT, DRAFT = "content.json", ".draft-"


@dataclass(frozen=True)
class Entry:
    """The contents of a cache entry."""

    parts: dict[str, Sequences]
    codec: Codec
    notes: tuple[str, ...] = ()  # remarks for the user about how the data was read
    about: Mapping[str, Any] = field(default_factory=dict)  # how a table was read, for programs
    fingerprint: str = ""  # equal for equal data

    def fingerprinted(self) -> Entry:
        """The entry with a hash of its arrays and its codec."""
        digest = hashlib.blake2b(self.codec.to_json().encode(), digest_size=16)
        hashed: set[int] = set()
        for part, sequences in sorted(self.parts.items()):
            for kind in ARRAYS:
                if (array := getattr(sequences, kind)) is not None:
                    digest.update(f"{part} {kind} {array.dtype} {array.shape}".encode())
                    if id(array) not in hashed:  # parts share their rows
                        digest.update(np.ascontiguousarray(array).data)
                        hashed.add(id(array))
        return Entry(self.parts, self.codec, self.notes, self.about, digest.hexdigest())


Build = Callable[[NewArray], Entry]


def folder(setting: str | None) -> Path:
    """Return the cache directory."""
    path = os.path.expanduser(setting or os.environ.get("CARRYWAVE_CACHE") or "~/.cache/carrywave")
    if path.startswith("~"):
        raise DataError(f"the cache {path} has no place, because there is no such home folder; set $CARRYWAVE_CACHE to a folder")
    return Path(path)


def key_of(value: Any) -> str:
    """A hash of plain values."""
    return hashlib.sha256(json.dumps([FORMAT, value], sort_keys=True).encode()).hexdigest()[:32]


def fetch(where: Path, key: str, build: Build) -> Entry:
    """Return the entry for `key`, building it first if it does not exist."""
    place = where / key
    try:
        if not place.exists():
            with unwinding():
                _write(where, place, build)
    except OSError as error:
        _refuse(where, error)
    try:
        return _open(place)
    except (ValueError, KeyError, OSError) as error:
        raise DataError(f"the cache {place} is damaged; delete the folder {place}") from error


def _write(where: Path, place: Path, build: Build) -> None:
    where.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{DRAFT}{place.name}-", dir=where))
    draft.chmod(where.stat().st_mode & 0o777)  # anyone who may read the cache may read its entries
    writers: list[FileAppender] = []
    files: dict[int, tuple[NDArray[Any], str]] = {}  # by id(); holding the array keeps its id from being reused

    class Kept(FileAppender):
        def __init__(self, dtype: DTypeLike, columns: int | None) -> None:
            super().__init__(draft / f"a{len(writers)}", dtype, columns)
            writers.append(self)

        def close(self) -> NDArray[Any]:
            array = super().close()
            files[id(array)] = (array, self.path.name)
            return array

    def layout(array: NDArray[Any]) -> list[Any]:
        """The file of an array, its dtype, columns and rows; what parts share is stored once."""
        columns = None if array.ndim == 1 else array.shape[1]
        if id(array) not in files:
            writer = FileAppender(draft / f"b{len(files)}", array.dtype, columns)
            writers.append(writer)
            writer.append(array)
            writer.close()
            files[id(array)] = (array, writer.path.name)
        return [files[id(array)][1], array.dtype.str, columns, len(array)]

    try:
        built = build(Kept).fingerprinted()
        parts = {
            part: {"names": data.names} | {kind: layout(array) for kind in ARRAYS if (array := getattr(data, kind)) is not None}
            for part, data in built.parts.items()
        }
        content = {"codec": built.codec.to_json(), "parts": parts, "notes": built.notes, "about": dict(built.about)}
        (draft / CONTENT).write_text(json.dumps(content | {"fingerprint": built.fingerprint}))
        draft.rename(place)
        for other in where.glob(f"{DRAFT}{place.name}-*"):  # of a process that was killed, or of one that will find this entry
            shutil.rmtree(other, ignore_errors=True)
    except OSError:
        if not place.exists():  # else another process was faster, and has cleared this draft away
            raise
    finally:
        for writer in writers:
            writer.abandon()
        shutil.rmtree(draft, ignore_errors=True)  # already gone if it was published


def _open(place: Path) -> Entry:
    content = json.loads((place / CONTENT).read_text())
    opened: dict[str, NDArray[Any]] = {}

    def array(name: str, dtype: str, columns: int | None, rows: int) -> NDArray[Any]:
        if name not in opened and len(opened.setdefault(name, open_array(place / name, dtype, columns))) != rows:
            raise ValueError(f"{name} does not have {rows} rows")
        return opened[name]

    parts: dict[str, Sequences] = {}
    for part, layout in content["parts"].items():
        names = layout.pop("names")
        arrays: dict[str, Any] = {kind: array(*where) for kind, where in layout.items()}
        parts[part] = Sequences(**arrays, names=None if names is None else tuple(names))
    return Entry(parts, Codec.from_json(content["codec"]), tuple(content["notes"]), content["about"], content["fingerprint"])


def _refuse(where: Path, error: OSError) -> NoReturn:
    remedy = f"{remedy_for(error, 'make it writable')}, or set $CARRYWAVE_CACHE to another folder"
    raise from_system(error, DataError)(f"the cache {where} cannot be written ({error.strerror or error}); {remedy}") from error

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.sequences import Sequences
from carrywave.errors import DataError, from_system, remedy_for, unwinding

FORMAT = 14  # part of every key, so that entries of another format, or read in another way, are never used
ARRAYS = (
    *("inputs", "starts", "lengths", "labels", "tags", "resets", "weights", "step_weights", "spans", "warm"),
    *("units", "means", "spreads", "missing", "unread"),
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


def folder(setting: str | None) -> Path:
    """Return the cache directory."""
    path = os.path.expanduser(setting or os.environ.get("CARRYWAVE_CACHE") or "~/.cache/carrywave")
    if path.startswith("~"):
        raise DataError(f"the cache {path} has no place, because there is no such home folder; set $CARRYWAVE_CACHE to a folder")
    return Path(path)


def key_of(value: Any) -> str:
    """A hash of plain values."""
    return hashlib.sha256(json.dumps([FORMAT, value], sort_keys=True).encode()).hexdigest()[:32]


def fetch(where: Path, key: str, build: Callable[[], Entry]) -> Entry:
    """Return the entry for `key`, with arrays that are mapped into memory, building it first if it does not exist."""
    place = where / key
    if not place.exists():
        entry = build().fingerprinted()
        try:
            with unwinding():
                _write(where, place, entry)
        except OSError as error:
            _refuse(where, error)
    try:
        return _open(place)
    except (ValueError, KeyError, OSError) as error:
        raise DataError(f"the cache {place} is damaged; delete the folder {place}") from error


def _write(where: Path, place: Path, entry: Entry) -> None:
    where.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{DRAFT}{place.name}-", dir=where))
    draft.chmod(where.stat().st_mode & 0o777)  # anyone who may read the cache may read its entries
    try:
        files: dict[int, str] = {}  # by id() of the array: what parts share is stored once
        parts: dict[str, tuple[Sequence[str] | None, dict[str, str]]] = {}
        for part, data in entry.parts.items():
            mine: dict[str, str] = {}
            for kind in ARRAYS:
                if (array := getattr(data, kind)) is not None:
                    if id(array) not in files:
                        files[id(array)] = f"{len(files)}.npy"
                        np.save(draft / files[id(array)], array, allow_pickle=False)
                    mine[kind] = files[id(array)]
            parts[part] = data.names, mine
        content = {"codec": entry.codec.to_json(), "parts": parts, "notes": entry.notes, "about": dict(entry.about)}
        (draft / CONTENT).write_text(json.dumps(content | {"fingerprint": entry.fingerprint}))
        draft.rename(place)
    except OSError:
        if not place.exists():  # else another process was faster
            raise
    finally:
        killed = where.glob(f"{DRAFT}{place.name}-*") if place.exists() else ()  # drafts of processes that were
        for other in (draft, *killed):
            shutil.rmtree(other, ignore_errors=True)


def _open(place: Path) -> Entry:
    content = json.loads((place / CONTENT).read_text())
    opened = {path.name: _mapped(path) for path in place.glob("*.npy")}
    parts: dict[str, Sequences] = {}
    for part, (names, files) in content["parts"].items():
        arrays: dict[str, Any] = {kind: opened[file] for kind, file in files.items()}
        parts[part] = Sequences(**arrays, names=None if names is None else tuple(names))
    return Entry(parts, Codec.from_json(content["codec"]), tuple(content["notes"]), content["about"], content["fingerprint"])


def _mapped(path: Path) -> NDArray[Any]:
    """An array, mapped into memory, as a plain one: indexing np.memmap itself is slow."""
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _refuse(where: Path, error: OSError) -> NoReturn:
    remedy = f"{remedy_for(error, 'make it writable')}, or set $CARRYWAVE_CACHE to another folder"
    raise from_system(error, DataError)(f"the cache {where} cannot be written ({error.strerror or error}); {remedy}") from error

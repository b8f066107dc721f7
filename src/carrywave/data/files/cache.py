"""On-disk cache of parsed data, keyed by a hash of the files and of how they are read: memory-mapped .npy files, each with a SHA-256.

An entry is a directory. It is written to a temporary directory next to its final place, synced to disk, and published with a
single rename; a process that loses the race to publish an entry uses the winner's. Every file is verified before it is opened.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike, NDArray

from carrywave.data.codec import Codec
from carrywave.data.files import hashes
from carrywave.data.files.arrays import FileAppender, NewArray, open_array
from carrywave.data.sequences import Sequences
from carrywave.errors import DataError, ResourceError, UserError, from_system, remedy_for, unwinding

FORMAT = 9  # part of every key, so that entries of another format, or read in another way, are never used
CHECKS = 5  # part of every entry's name, but not of its key, which runs remember: entries read with fewer checks are never used
ARRAYS = (
    *("inputs", "starts", "lengths", "labels", "tags", "resets", "weights", "step_weights", "spans", "warm"),
    *("units", "means", "spreads", "missing"),
)
STALE_SECONDS = 7 * 24 * 3600
MANIFEST, CONTENT, DRAFT = "manifest.json", "content.json", ".draft-"
PLAIN_NAME = re.compile(r"[a-z0-9_]+\.(npy|json)")

Parts = dict[str, Sequences]


@dataclass(frozen=True)
class Entry:
    """The contents of a cache entry."""

    parts: Parts
    codec: Codec
    notes: tuple[str, ...] = ()  # remarks for the user about how the data was read
    about: Mapping[str, Any] = field(default_factory=dict)  # how a table was read, for programs


Build = Callable[[NewArray], Entry]


def folder(setting: str | None) -> Path:
    """Return the cache directory."""
    path = os.path.expanduser(setting or os.environ.get("CARRYWAVE_CACHE") or "~/.cache/carrywave")
    if path.startswith("~"):
        raise DataError(f"the cache {path} has no place, because there is no such home folder; set $CARRYWAVE_CACHE to a folder")
    return Path(path)


def place_of(where: Path, key: str) -> Path:
    """Return the directory of an entry."""
    return where / f"{key}-{CHECKS}"


def fetch(where: Path, key: str, build: Build) -> Entry:
    """Return the entry for `key`, building it first if it does not exist."""
    place = place_of(where, key)
    try:
        exists = place.exists()
    except OSError as error:
        _refuse(where, error)
    if not exists:
        with unwinding():
            _write(where, place, build)
    return _open(place)


def _write(where: Path, place: Path, build: Build) -> None:
    try:
        where.mkdir(parents=True, exist_ok=True)
        _sweep(where)
        draft = Path(tempfile.mkdtemp(prefix=f"{DRAFT}{place.name}-", dir=where))
        draft.chmod(where.stat().st_mode & 0o777)  # anyone who may read the cache may read its entries
    except OSError as error:
        _refuse(where, error)
    writers: list[FileAppender] = []
    names: dict[int, tuple[NDArray[Any], str]] = {}  # by id(); holding the array keeps its id from being reused

    class Named(FileAppender):
        def __init__(self, dtype: DTypeLike, columns: int | None) -> None:
            self.file_name = f"a{len(writers)}.npy"
            super().__init__(draft / self.file_name, dtype, columns)
            writers.append(self)

        def close(self) -> NDArray[Any]:
            array = super().close()
            names[id(array)] = (array, self.file_name)
            return array

    try:
        built = build(Named)
        layouts = {part: _layout(draft, part, value, names) for part, value in built.parts.items()}
        content = {"codec": built.codec.to_json(), "parts": layouts, "notes": built.notes, "about": dict(built.about)}
        (draft / CONTENT).write_text(json.dumps(content))
        _seal(draft, content)
        _publish(draft, place)
    except OSError as error:
        if not place.exists():  # else another process was faster, and has cleared this draft away
            _refuse(where, error)
    finally:
        for writer in writers:
            writer.abandon()
        shutil.rmtree(draft, ignore_errors=True)  # already gone if it was published


def _sweep(where: Path) -> None:
    """Remove drafts left behind by processes that were killed long ago."""
    for draft in where.glob(f"{DRAFT}*"):
        with contextlib.suppress(OSError):  # its owner may have just published it
            if time.time() - draft.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(draft, ignore_errors=True)


def _layout(draft: Path, part: str, sequences: Sequences, names: dict[int, tuple[NDArray[Any], str]]) -> dict[str, Any]:
    """Map each array of a part to its file; an array shared between parts is stored once."""
    layout: dict[str, Any] = {"names": sequences.names}
    for kind in ARRAYS:
        array = getattr(sequences, kind)
        if array is None:
            continue
        if id(array) not in names:
            file_name = f"{part}{kind}.npy"
            np.save(draft / file_name, array, allow_pickle=False)
            names[id(array)] = (array, file_name)
        layout[kind] = names[id(array)][1]
    return layout


def _seal(draft: Path, content: dict[str, Any]) -> None:
    """Delete unused files, sync the rest to disk, and record the size and hash of each."""
    used = {CONTENT} | {layout[field] for layout in content["parts"].values() for field in ARRAYS if field in layout}
    files = {}
    for path in sorted(draft.iterdir()):
        if path.name not in used:
            path.unlink()
            continue
        _sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": hashes.sha256(path)}
    manifest = draft / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}))
    _sync(manifest)
    _sync(draft)


def _publish(draft: Path, place: Path) -> None:
    try:
        draft.rename(place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return  # another process published the same entry first
    _sync(place.parent)
    for other in place.parent.glob(f"{DRAFT}{place.name}-*"):  # of a process that was killed, or of one that will find this entry
        shutil.rmtree(other, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open(place: Path) -> Entry:
    with _matching(place):
        files = json.loads((place / MANIFEST).read_text())["files"]
        for name, recorded in files.items():
            path = place / name
            # A manifest must not point outside its directory, neither by path nor by symlink.
            if (
                not PLAIN_NAME.fullmatch(name)
                or path.is_symlink()
                or path.stat().st_size != recorded["bytes"]
                or hashes.sha256(path) != recorded["sha256"]
            ):
                raise ValueError(name)
        if CONTENT not in files:
            raise ValueError(CONTENT)
        content = json.loads((place / CONTENT).read_text())
        arrays = {name: open_array(place / name) for name in files if name.endswith(".npy")}
        parts = {part: _sequences(layout, arrays) for part, layout in content["parts"].items()}
        return Entry(parts, Codec.from_json(content["codec"]), tuple(str(note) for note in content["notes"]), content["about"])


def _sequences(layout: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Sequences:
    names = layout["names"]
    fields: dict[str, Any] = {field: arrays[layout[field]] for field in ARRAYS if field in layout}
    return Sequences(**fields, names=None if names is None else tuple(names))


@contextlib.contextmanager
def _matching(place: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # a lack of resources; the file itself is fine
        if isinstance(error, OSError) and number in (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE):
            why = os.strerror(number)
            raise from_system(error, DataError)(
                f"the cache {place} cannot be read ({why}); set $CARRYWAVE_CACHE to a readable folder"
            ) from error
        raise DataError(f"the cache {place} does not match its hash; delete the folder {place}") from error


def _refuse(where: Path, error: OSError) -> NoReturn:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise ResourceError(
            f"no disk space left for the cache {where}; free some, or set $CARRYWAVE_CACHE to a folder with enough space"
        ) from error
    remedy = "set $CARRYWAVE_CACHE to a writable folder"
    if error.errno != errno.EROFS:
        remedy = remedy_for(error, remedy)
    raise from_system(error, DataError)(f"the cache {where} cannot be written ({error.strerror or error}); {remedy}") from error

"""SHA-256 of files, computed once per host: if several workers read the same files, one hashes them and shares the results.

A worker that receives a result compares the file's stat fields (device, inode, size, mtime, ctime), which change whenever the
file does, and hashes the file itself if they differ. In the same way, `remembering` keeps results in a folder, so that a run that starts
again does not read a large file a second time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SETTLED_SECONDS = 2.0  # a file changed this recently may change again without its times showing it, so its hash is not kept

FileHash = tuple[str, list[int], str]  # path, stat fields, SHA-256

_received: dict[str, tuple[list[int], str]] = {}
_collected: list[FileHash] | None = None
_memory: Path | None = None


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        signs = _signs(file.fileno())
        recorded = _received.get(str(path.absolute())) or _recall(path)
        if recorded is not None and recorded[0] == signs:
            digest = recorded[1]
        else:
            settled = time.time() - max(signs[3:]) / 1e9 > SETTLED_SECONDS
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if settled and _signs(file.fileno()) == signs:
                _keep(path, signs, digest)
    if _collected is not None:
        _collected.append((str(path.absolute()), signs, digest))
    return digest


@contextmanager
def keeping() -> Iterator[list[FileHash]]:
    """Within this context, collect hashes so that they can be shared."""
    global _collected
    kept: list[FileHash] = []
    _collected = kept
    try:
        yield kept
    finally:
        _collected = None


@contextmanager
def knowing(hashed: Iterable[FileHash]) -> Iterator[None]:
    """Within this context, reuse the hashes that another process on this host has just computed."""
    _received.update({path: (list(signs), digest) for path, signs, digest in hashed})
    try:
        yield
    finally:
        _received.clear()


@contextmanager
def remembering(folder: Path) -> Iterator[None]:
    """Within this context, keep hashes in this folder, and reuse those of files that have not changed since."""
    global _memory
    before, _memory = _memory, folder
    try:
        yield
    finally:
        _memory = before


def _note_of(path: Path) -> Path | None:
    return None if _memory is None else _memory / f"{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]}.json"


def _recall(path: Path) -> tuple[list[int], str] | None:
    note = _note_of(path)
    try:
        content = None if note is None else json.loads(note.read_bytes())
        return None if content is None else (list(map(int, content["signs"])), str(content["sha256"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None  # not hashed yet, or not readable: it is hashed again


def _keep(path: Path, signs: list[int], digest: str) -> None:
    note = _note_of(path)
    if note is None:
        return
    with suppress(OSError):  # without room for it, the file is hashed again next time
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({"path": str(path.absolute()), "signs": signs, "sha256": digest}))
        draft.replace(note)


def _signs(handle: int) -> list[int]:
    status = os.fstat(handle)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]

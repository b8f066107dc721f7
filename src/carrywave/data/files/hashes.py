"""SHA-256 of files, computed once on a host where several workers read the same: one hashes, and tells the others what it found.

Who was told compares what the file system says of a file (device, inode, size, and the times of its last changes), which any
change to it changes, and hashes it itself where that differs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

Found = tuple[str, list[int], str]  # path, what the file system says, SHA-256

_told: dict[str, tuple[list[int], str]] = {}
_found: list[Found] | None = None


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        signs, known = _signs(file.fileno()), _told.get(str(path.absolute()))
        if known is not None and known[0] == signs:
            return known[1]
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _found is not None:
        _found.append((str(path.absolute()), signs, digest))
    return digest


@contextmanager
def keeping() -> Iterator[list[Found]]:
    """Within it, what is hashed is kept to be told."""
    global _found
    kept: list[Found] = []
    _found = kept
    try:
        yield kept
    finally:
        _found = None


@contextmanager
def knowing(told: Iterable[Found]) -> Iterator[None]:
    """Within it, files that another process of this host has hashed just now are not hashed again."""
    _told.update({path: (list(signs), digest) for path, signs, digest in told})
    try:
        yield
    finally:
        _told.clear()


def _signs(handle: int) -> list[int]:
    known = os.fstat(handle)
    return [known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns, known.st_ctime_ns]

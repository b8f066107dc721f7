"""SHA-256 of files, computed once in each process for as long as a file does not change."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    return _sha256(path.absolute(), signs_of(path))


def signs_of(path: Path) -> tuple[int, ...]:
    """What changes whenever a file does: where it is, its size and its times."""
    status = os.stat(path)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache(maxsize=64)
def _sha256(path: Path, signs: tuple[int, ...]) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

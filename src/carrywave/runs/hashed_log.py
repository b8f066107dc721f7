"""The length and hash of a log that grows, known without reading it again: a snapshot names both, and a resumed run checks them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Self

from carrywave.runs.checkpoint import atomic_files


class HashedLog:
    """Length and SHA-256 of a log as written so far, updated with every row."""

    def __init__(self) -> None:
        self.num_bytes, self.digest = 0, hashlib.sha256()

    @classmethod
    def of(cls, path: Path, num_bytes: int | None = None) -> Self:
        """Of an existing file, or of its first `num_bytes` bytes."""
        found = cls()
        if path.is_file():
            with path.open("rb") as file:
                left = path.stat().st_size if num_bytes is None else num_bytes
                while block := file.read(min(left, atomic_files.BLOCK_BYTES)):
                    found.add(block)
                    left -= len(block)
        return found

    def add(self, data: bytes) -> None:
        """Account for the data written next."""
        self.num_bytes += len(data)
        self.digest.update(data)

"""Arrays that grow by appending, in memory or in a file that is mapped into memory, so that memory use stays flat for large files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class MemoryAppender:
    """Collect an array in memory."""

    def __init__(self, dtype: DTypeLike, columns: int | None) -> None:
        self._empty: NDArray[Any] = np.empty((0,) if columns is None else (0, columns), dtype)
        self._parts: list[NDArray[Any]] = []

    def append(self, rows: NDArray[Any]) -> None:
        """Append a copy of the rows, so that the caller may reuse its buffer."""
        self._parts.append(np.array(rows, self._empty.dtype))

    def close(self) -> NDArray[Any]:
        """Return all rows as one array."""
        return self._parts[0] if len(self._parts) == 1 else np.concatenate([self._empty, *self._parts])


class FileAppender:
    """Write the numbers of rows to a file as they arrive."""

    def __init__(self, path: Path, dtype: DTypeLike, columns: int | None) -> None:
        self.path, self._dtype, self._columns = path, np.dtype(dtype), columns
        self._file = path.open("wb", buffering=1 << 20)

    def append(self, rows: NDArray[Any]) -> None:
        """Append rows."""
        if rows.size:
            self._file.write(np.ascontiguousarray(rows, self._dtype).data.cast("B"))

    def close(self) -> NDArray[Any]:
        """Finish the file and return it as a memory-mapped array."""
        self._file.close()
        return open_array(self.path, self._dtype.str, self._columns)

    def abandon(self) -> None:
        """Close the file without finishing it."""
        with suppress(OSError):  # what is buffered may not fit on the disk, which is why it is abandoned
            self._file.close()


NewArray = Callable[[DTypeLike, int | None], MemoryAppender | FileAppender]  # (dtype, columns or None for a flat array) -> appender


def open_array(path: Path, dtype: str, columns: int | None) -> NDArray[Any]:
    """Open a file of numbers memory-mapped and read-only, as a plain array (indexing np.memmap itself is slow)."""
    mapped: NDArray[Any] = np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)
    return mapped if columns is None else mapped.reshape(-1, columns)


def token_dtype(size: int) -> DTypeLike:
    """Return the smallest dtype that holds tokens 0 … size - 1."""
    return np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.int32

"""Arrays that grow by appending, in memory or directly in a .npy file, so that memory use stays flat for large files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

FLUSH_BYTES = 1 << 20


class Appender(Protocol):
    """An array under construction."""

    def append(self, rows: NDArray[Any]) -> None:
        """Append rows."""

    def close(self) -> NDArray[Any]:
        """Return the complete array; nothing can be appended afterwards."""


NewArray = Callable[[DTypeLike, int | None], Appender]  # (dtype, columns or None for a flat array) -> appender


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
        return np.concatenate([self._empty, *self._parts])


class FileAppender:
    """Write rows to a .npy file as they arrive; the header, which holds the row count, is rewritten at the end."""

    def __init__(self, path: Path, dtype: DTypeLike, columns: int | None) -> None:
        self._path, self._dtype, self._columns = path, np.dtype(dtype), columns
        self._rows = 0
        self._pending = bytearray()
        self._file = path.open("wb")
        self._write_header()

    def _write_header(self) -> None:
        shape = (self._rows,) if self._columns is None else (self._rows, self._columns)
        # NumPy pads this header so that the first dimension can grow without moving the data.
        np.lib.format.write_array_header_1_0(self._file, {"descr": self._dtype.str, "fortran_order": False, "shape": shape})

    def append(self, rows: NDArray[Any]) -> None:
        """Append rows, buffering small writes."""
        self._rows += len(rows)
        self._pending += np.ascontiguousarray(rows, self._dtype).data.cast("B") if rows.size else b""
        if len(self._pending) >= FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._file.write(self._pending)
        self._pending = bytearray()

    def close(self) -> NDArray[Any]:
        """Finish the file and return it as a memory-mapped array."""
        self._flush()
        end = self._file.tell()
        self._file.seek(0)
        self._write_header()
        header_bytes = self._file.tell()
        self._file.close()
        expected = header_bytes + self._rows * self._dtype.itemsize * (1 if self._columns is None else self._columns)
        if end != expected:
            raise RuntimeError(f"{self._path} has {end} bytes, expected {expected}")
        return open_array(self._path)

    def abandon(self) -> None:
        """Close the file without finishing it."""
        with suppress(OSError):  # what is buffered may not fit on the disk, which is why it is abandoned
            self._file.close()


def open_array(path: Path) -> NDArray[Any]:
    """Open a .npy file memory-mapped and read-only, as a plain array (indexing np.memmap itself is slow)."""
    mapped: NDArray[Any] = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    return mapped


def token_dtype(size: int) -> DTypeLike:
    """Return the smallest dtype that holds tokens 0 … size - 1."""
    return np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.int32

"""Writes a command's output to a file that the user named: completely or not at all, and never to anything else.

A regular file is replaced atomically, also behind a symbolic link, which stays; it keeps its permissions. Anything else (a device, a named
pipe, `/dev/stdout`) is written in place; a standard stream that nobody reads any more is hung up. Torch-free.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from carrywave.data.files.remote import check_local
from carrywave.errors import UserError, from_system, remedy_for


def check(path: Path | None, *, wanted: bool = False) -> None:
    """Refuse before the work what could not be written after it. `wanted`: without a file the result goes to stdout, which must be open."""
    if path is None:
        if wanted and sys.stdout is None:
            raise UserError("standard output is closed, so the result would be lost; open it, or pass a file with -o")
        return
    check_local(path)
    status = _status(path)
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise UserError(f"{path} is a folder; pass a file name")
    if _is_in_place(path, status):
        if not os.access(path, os.W_OK):
            raise UserError(f"{path} cannot be written: it is read-only; use another path")
        return
    folder = _target(path).parent
    if not folder.is_dir():
        raise UserError(f"{path} cannot be written: folder {folder} not found; create it, or use another path")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{path} cannot be written: folder {folder} is read-only; use another path")


def write(path: Path, text: str) -> None:
    """Write a text to the file that the user named."""
    with OutputFile(path) as file:
        file.write(text)


def hang_up(stream: TextIO) -> None:
    """Point standard output, or error, that cannot be written elsewhere: Python would fail to flush it at the end."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class OutputFile:
    """A file that is written piece by piece, as a context: complete if the context ends without an error, else as if it never began."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._draft: Path | None = None  # takes the name of the file when it is complete; None: written in place

    def __enter__(self) -> Self:
        check(self.path)
        try:
            status = _status(self.path)
            if _is_in_place(self.path, status):
                self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)
                return self
            target = _target(self.path)
            self._draft = target.with_name(f".{target.name[:40]}.part")  # a fixed name: what a killed process leaves is overwritten
            self._handle = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666 if status is None else 0o600)
            if status is not None:
                os.fchmod(self._handle, stat.S_IMODE(status.st_mode))
        except OSError as error:
            raise self._failed(error) from error
        return self

    def write(self, text: str) -> None:
        """Append a text."""
        self.write_bytes(text.encode(errors="backslashreplace"))  # unpaired surrogates, which JSON can hold and UTF-8 cannot

    def write_bytes(self, data: bytes) -> None:
        """Append bytes."""
        handle = self.fileno()
        try:
            while data:
                data = data[os.write(handle, data) :]
        except BrokenPipeError:
            raise  # nobody reads the named pipe any more: not a mistake, and nothing to remedy
        except OSError as error:
            raise self._failed(error) from error

    def fileno(self) -> int:
        """The descriptor that the file is written through."""
        if self._handle is None:
            raise ValueError(f"{self.path} is not open; use it in a with statement")
        return self._handle

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        handle, draft = self._handle, self._draft
        self._handle = self._draft = None
        try:
            if handle is not None and draft is not None and kind is None:
                os.fsync(handle)
                os.replace(draft, _target(self.path))
                draft = None
        except OSError as fault:
            raise self._failed(fault) from fault
        finally:
            if draft is not None:
                with suppress(OSError):
                    draft.unlink()
            if handle is not None:
                os.close(handle)

    def _failed(self, error: OSError) -> UserError:
        remedy = remedy_for(error, "make the folder writable")
        return from_system(error)(f"{self.path} could not be written: {error.strerror or error}; {remedy}, or use another path")


def _status(path: Path) -> os.stat_result | None:
    """The status of what is at a path, following links; None: nothing."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}; use another path") from error


def _is_in_place(path: Path, status: os.stat_result | None) -> bool:
    """True for what is no regular file, and for what this process has open already, which a new file would not reach."""
    named = [str(path), *([os.readlink(path)] if path.is_symlink() else [])]
    return status is not None and (not stat.S_ISREG(status.st_mode) or any(name.startswith("/proc/self/fd/") for name in named))


def _target(path: Path) -> Path:
    """The file itself, behind all links to it. A path that is no link stays as the user wrote it."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path

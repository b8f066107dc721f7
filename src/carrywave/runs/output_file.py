"""Writes a command's output to a file that the user named: completely or not at all, and never to anything else.

A regular file is replaced atomically, also behind a symbolic link, which stays; it keeps its permissions. While it is written it has no
name at all, where the file system can do that, so a killed process leaves nothing behind. Anything else (a device, a named pipe,
`/dev/stdout`) is written in place; a standard stream that nobody reads any more is hung up. Torch-free.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from carrywave.data.files.remote import check_local
from carrywave.errors import UserError, from_system, remedy_for

MOST_LINKS = 40
OPEN_FILE = re.compile(r"/proc/(?:self|[0-9]+)(?:/task/[0-9]+)?/fd/([0-9]+)")  # what /dev/stdout and /dev/fd/3 resolve to


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
    if _open_file(path) is not None:
        return
    if status is not None and not stat.S_ISREG(status.st_mode):
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
        self._new: _NewFile | None = None

    def __enter__(self) -> Self:
        check(self.path)
        try:
            status = _status(self.path)
            handle = _open_file(self.path)
            if handle is not None:
                self._handle = os.dup(handle)
            elif status is not None and not stat.S_ISREG(status.st_mode):
                self._handle = os.open(self.path, os.O_WRONLY)
            else:
                self._new = _NewFile(_target(self.path), None if status is None else stat.S_IMODE(status.st_mode))
                self._handle = self._new.handle
        except OSError as error:
            raise self._failed(error) from error
        return self

    def write(self, text: str) -> None:
        """Append a text."""
        self.write_bytes(text.encode(errors="backslashreplace"))  # unpaired surrogates, which JSON can hold and UTF-8 cannot

    def write_bytes(self, data: bytes) -> None:
        """Append bytes."""
        if self._handle is None:
            raise ValueError(f"{self.path} is not open; use it in a with statement")
        try:
            while data:
                data = data[os.write(self._handle, data) :]
        except BrokenPipeError:
            raise  # nobody reads the named pipe any more: not a mistake, and nothing to remedy
        except OSError as error:
            raise self._failed(error) from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        handle, new = self._handle, self._new
        self._handle = self._new = None
        try:
            if new is not None and kind is None:
                new.publish()
        except OSError as fault:
            raise self._failed(fault) from fault
        finally:
            if new is not None:
                new.clear()
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


def _target(path: Path) -> Path:
    """The file itself, behind all links to it. A path that is no link stays as the user wrote it."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _open_file(path: Path) -> int | None:
    """The descriptor of this process that a path refers to: opened by name, its file would be written from the beginning."""
    for _ in range(MOST_LINKS):
        match = OPEN_FILE.fullmatch(os.path.join(os.path.realpath(path.parent), path.name))
        if match is not None:
            is_ours = os.path.realpath(path.parent) == os.path.realpath("/proc/self/fd")
            return int(match[1]) if is_ours else None
        if not path.is_symlink():
            return None
        path = path.parent / os.readlink(path)
    return None


class _NewFile:
    """A new version of a file: it takes the old one's name when it is complete."""

    def __init__(self, target: Path, mode: int | None) -> None:
        self._target = target
        self._part = target.with_name(f".{target.name[:40]}.{os.getpid()}.part")
        self._nameless = True
        flags, rights = os.O_WRONLY | os.O_CLOEXEC, 0o666 if mode is None else 0o600
        try:
            if not os.path.isdir("/proc/self/fd"):
                raise OSError("a nameless file could not be given its name")
            self.handle = os.open(target.parent, flags | getattr(os, "O_TMPFILE", os.O_DIRECTORY), rights)
        except OSError:  # neither this system nor every file system has nameless files
            self._nameless = False
            self.handle = os.open(self._part, flags | os.O_CREAT | os.O_TRUNC, rights)
        if mode is not None:
            os.fchmod(self.handle, mode)

    def publish(self) -> None:
        os.fsync(self.handle)
        if self._nameless:
            self.clear()  # of a process that had the same number
            # Python follows the link in /proc, as must be done here, only relative to a folder.
            place = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.link(str(self.handle), self._part, src_dir_fd=place, follow_symlinks=True)
            finally:
                os.close(place)
            self._nameless = False
        os.replace(self._part, self._target)

    def clear(self) -> None:
        with suppress(OSError):
            self._part.unlink()

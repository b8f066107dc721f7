"""Writes a command's output to a file that the user named: completely or not at all, and never to anything else.

A regular file is replaced atomically, also behind a symbolic link, which stays; it keeps its permissions. Anything else (a device, a named
pipe, `/dev/stdout`) is written in place. Torch-free.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path

from carrywave.errors import UserError

MOST_LINKS = 40
OPEN_FILE = re.compile(r"/proc/(?:self|[0-9]+)(?:/task/[0-9]+)?/fd/([0-9]+)")  # what /dev/stdout and /dev/fd/3 resolve to


def check(path: Path | None, *, wanted: bool = False) -> None:
    """Refuse before the work what could not be written after it. `wanted`: without a file the result goes to stdout, which must be open."""
    if path is None:
        if wanted and sys.stdout is None:
            raise UserError("standard output is closed, so the result would be lost; open it, or pass a file with -o")
        return
    known = _known(path)
    if known is not None and stat.S_ISDIR(known.st_mode):
        raise UserError(f"{path} is a folder; pass a file name")
    if _open_file(path) is not None:
        return
    if known is not None and not stat.S_ISREG(known.st_mode):
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
    data = text.encode(errors="backslashreplace")  # unpaired surrogates, which JSON can hold and UTF-8 cannot
    check(path)
    try:
        known = _known(path)
        handle = _open_file(path)
        if handle is not None:
            _write_all(os.dup(handle), data)
        elif known is not None and not stat.S_ISREG(known.st_mode):
            _write_all(os.open(path, os.O_WRONLY), data)
        else:
            _replace(_target(path), data, None if known is None else stat.S_IMODE(known.st_mode))
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror or error}; free disk space, or use another path") from error


def _known(path: Path) -> os.stat_result | None:
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
        found = OPEN_FILE.fullmatch(os.path.join(os.path.realpath(path.parent), path.name))
        if found is not None:
            own = os.path.realpath(path.parent) == os.path.realpath("/proc/self/fd")
            return int(found[1]) if own else None
        if not path.is_symlink():
            return None
        path = path.parent / os.readlink(path)
    return None


def _replace(target: Path, data: bytes, mode: int | None) -> None:
    part = target.with_name(f".{target.name[:40]}.{os.getpid()}.part")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666 if mode is None else 0o600)
        if mode is not None:
            os.fchmod(handle, mode)
        _write_all(handle, data, sync=True)
        os.replace(part, target)
    finally:
        with suppress(OSError):
            part.unlink()


def _write_all(handle: int, data: bytes, *, sync: bool = False) -> None:
    """Write all of the data, and close the descriptor."""
    try:
        while data:
            data = data[os.write(handle, data) :]
        if sync:
            os.fsync(handle)
    finally:
        os.close(handle)

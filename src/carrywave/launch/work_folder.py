"""The temporary folder of a launch, which the next launch removes if this one is killed before it can.

Whoever uses the folder, the launcher and its workers, holds a lock on a file in it, which the kernel releases when they are gone. So a
folder whose lock is free is nobody's; that of a launcher that was killed stays as long as one of its workers is still saving. Torch-free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "carrywave-launch-"
LOCK = "lock"

_held: list[int] = []  # descriptors of the locks that this process holds


@contextmanager
def work_folder() -> Iterator[Path]:
    """A new temporary folder, removed at the end of the context; folders that killed launches have left are removed at its start."""
    sweep(Path(tempfile.gettempdir()))
    handle: int | None = None
    while handle is None:
        place = Path(tempfile.mkdtemp(prefix=PREFIX))
        handle = _lock(place)
    _held.append(handle)
    try:
        yield place
    finally:
        _held.remove(handle)
        shutil.rmtree(place, ignore_errors=True)
        os.close(handle)


def held() -> tuple[int, ...]:
    """The descriptors that workers inherit, so that they hold the lock too."""
    return tuple(_held)


def sweep(where: Path) -> None:
    """Remove the folders of this user's launches of which no process is left."""
    for place in where.glob(f"{PREFIX}*"):
        with suppress(OSError):
            known = place.lstat()
            if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.getuid():
                continue
            # Only an existing file: a launch that has just created its folder has not made its lock yet.
            handle = os.open(place / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(handle)


def _lock(place: Path) -> int | None:
    """Lock a new folder; None if another launch has taken it for a leftover just before."""
    try:
        handle = os.open(place / LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # a file system without locks: then nobody else can take one either
        fcntl.flock(handle, fcntl.LOCK_SH)
    if (place / LOCK).exists():
        return handle
    os.close(handle)
    return None

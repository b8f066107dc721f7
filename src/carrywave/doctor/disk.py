"""Disks: room, write speed with all bytes on the medium, and whether hosts see the same folder. Torch-free.

The folder that is looked at need not exist yet: its nearest parent that does stands for it. Trial files have no name, or are removed at
once, so that nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from carrywave.doctor.finding import Finding, several, size

TRIAL_BYTES, BLOCK_BYTES = 32 << 20, 1 << 20
TRIAL_SECONDS = 2.0
LITTLE_BYTES = 2 << 30
SLOW_BYTES_PER_SECOND = 20e6
TOKEN = ".carrywave-doctor-"
SEE_SECONDS = 3.0  # network file systems show new files late


@dataclass(frozen=True)
class Disk:
    """What one folder offers."""

    use: str  # what the folder is for
    path: str
    kind: str = ""  # of file system
    free_bytes: int = 0
    bytes_per_second: float = 0.0  # written and synced
    error: str = ""  # why nothing can be written


def look(use: str, folder: Path, seconds: float = TRIAL_SECONDS) -> Disk:
    """Look at the disk of a folder: its room, and its speed by writing for a short time."""
    try:
        place = existing(folder)
        status = os.statvfs(place)
        free = status.f_bavail * status.f_frsize
        # Never more than a small part of what is free.
        speed = _speed(place, min(TRIAL_BYTES, free // 8), seconds)
    except OSError as error:
        return Disk(use, str(folder), error=error.strerror or str(error))
    return Disk(use, str(folder), _kind(place), free, speed)


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = Path(os.path.expanduser(folder)).absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def check_disk(disk: Disk, host: str) -> Finding:
    """Whether a disk is good enough to write to."""
    where = f"{disk.use} {disk.path}"
    remedy = "use another folder (--run, CARRYWAVE_CACHE)"
    if disk.error:
        return Finding("wrong", "disk", f"{where} cannot be written ({disk.error})", f"correct its permissions, or {remedy}", host)
    fact = f"{where}: {size(disk.free_bytes)} free"
    if disk.free_bytes < BLOCK_BYTES:
        return Finding("wrong", "disk", f"{fact}, nothing can be written", f"free some space, or {remedy}", host)
    fact += f", {size(disk.bytes_per_second)}/s written and synced" + (f" ({disk.kind})" if disk.kind else "")
    if disk.free_bytes < LITTLE_BYTES:
        return Finding("warning", "disk", f"{fact}: little room for snapshots", f"free some space, or {remedy}", host)
    if disk.bytes_per_second < SLOW_BYTES_PER_SECOND:
        return Finding("warning", "disk", f"{fact}: snapshots will take long", f"{remedy}, or raise train.snapshot_every", host)
    return Finding("fine", "disk", fact, where=host)


def leave_token(folder: Path, name: str) -> Path | None:
    """Leave an empty file for other hosts to see; None if that is not possible. The caller removes it."""
    with contextlib.suppress(OSError):
        path = existing(folder) / f"{TOKEN}{name}"
        path.touch(exist_ok=False)
        return path
    return None


def sees_token(path: Path, seconds: float = SEE_SECONDS) -> bool:
    """True if this host sees the file that another left."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes some network file systems look again
            if path.exists():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def check_shared(folder: str, seen: Mapping[str, bool]) -> Finding:
    """Whether all hosts share the folder of runs; `seen`: by host, if it saw the file that rank 0 left. Pure."""
    blind = sorted(host for host, sees in seen.items() if not sees)
    if not blind:
        return Finding("fine", "run folder", f"{folder} is shared by all hosts")
    fact = f"{folder} of rank 0 is not seen on {several(blind)}: parts of snapshots go there over the network"
    return Finding("fine", "run folder", fact)


def findings(disks: Sequence[Disk], host: str) -> list[Finding]:
    """The findings on the disks of a host."""
    return [check_disk(disk, host) for disk in disks]


def _speed(folder: Path, num_bytes: int, seconds: float) -> float:
    """Bytes per second written to a file without a name, until they are on the medium."""
    block = os.urandom(BLOCK_BYTES)  # some file systems compress
    written = 0
    with tempfile.TemporaryFile(dir=folder, prefix=TOKEN) as file:
        begin = time.perf_counter()
        while written < max(num_bytes, 1) and time.perf_counter() - begin < seconds:
            written += os.write(file.fileno(), block[: max(1, min(len(block), num_bytes - written))])
        os.fsync(file.fileno())
        return written / (time.perf_counter() - begin)


def _kind(folder: Path) -> str:
    """The type of the file system of a folder, as far as the system shows it."""
    best = ("", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text("utf-8", errors="replace").splitlines():
            _, place, kind, *_ = line.split(" ")
            place = place.replace("\\040", " ")
            if folder.is_relative_to(place) and len(place) >= len(best[0]):
                best = place, kind
    return best[1]

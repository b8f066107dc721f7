"""The host itself: cores and what a container allows of them, threads, memory, shared memory, open files, load. Torch-free."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path

from carrywave.doctor.finding import Finding, size
from carrywave.launch.hardware import cores

SHARED_MEMORY = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")
NCCL_SHARED_BYTES = 1 << 30  # what NVIDIA asks containers to provide (--shm-size=1g); Docker's default is 64 MB
TIGHT_MEMORY_BYTES = 1 << 30
FILES_A_WORKER = 4  # open files for each other worker: sockets of gloo and NCCL, with some to spare
FILES_BESIDES = 128
NO_LIMIT = 1 << 60  # how older systems write "no limit"
BUSY = 1.5  # load for each core above which other programs must be at work


@dataclass(frozen=True)
class Host:
    """What a worker sees of its host."""

    host: str
    system: str
    cores: int  # that this process may use
    quota: float | None  # cores' worth of time that its container allows; None: no limit
    threads: int | None  # OMP_NUM_THREADS; None: not set
    memory_bytes: int  # of the machine, or of the container if that is less
    free_bytes: int
    shared_bytes: int | None  # of /dev/shm; None: there is none
    open_files: int
    load: float  # programs that want to run, over the last minute

    @staticmethod
    def here() -> Host:
        """Look at this host."""
        text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        memory, free = _memory()
        return Host(
            socket.gethostname(),
            f"{os.uname().sysname} {os.uname().release} {os.uname().machine}",
            cores(),
            quota(CGROUP),
            int(text) if text.isdecimal() else None,
            memory,
            free,
            _shared(),
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            os.getloadavg()[0],
        )


def quota(folder: Path) -> float | None:
    """The cores' worth of time that a container's limits allow, in either of the two forms that Linux has; None: no limit."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        most, period = (folder / "cpu.max").read_text("ascii").split()
        return None if most == "max" else int(most) / int(period)
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        most_us = int((folder / "cpu" / "cpu.cfs_quota_us").read_text("ascii"))
        return None if most_us <= 0 else most_us / int((folder / "cpu" / "cpu.cfs_period_us").read_text("ascii"))
    return None


def check_cores(host: Host, *, workers: int, on_gpu: bool) -> Finding:
    """Whether the workers of this host have the cores that they count on."""
    what = "cores"
    usable = host.cores if host.quota is None else min(host.cores, host.quota)
    threads = host.threads or max(1, host.cores // workers)
    seen = f"{host.cores} core{'s' * (host.cores > 1)}"
    if host.quota is not None and host.quota < host.cores and threads * workers > max(1.0, host.quota):
        fact = f"the container sees {seen}, but may use the time of {host.quota:.3g}; {workers} x {threads} threads would be held up"
        each = max(1, int(host.quota // workers))
        return Finding("warning", what, fact, f"set OMP_NUM_THREADS={each}, or raise the container's limit", host.host)
    if threads * workers > host.cores:
        each = max(1, host.cores // workers)
        fact = f"{workers} workers of {threads} thread{'s' * (threads > 1)} share {seen}"
        remedy = f"set OMP_NUM_THREADS={each}" if each < threads else f"use at most {host.cores} workers on this host"
        return Finding("warning", what, fact, remedy, host.host)
    if on_gpu and usable < workers:
        return Finding("warning", what, f"{workers} workers with a GPU each have {usable:.3g} cores", "give each at least one", host.host)
    return Finding("fine", what, f"{seen}, {workers} worker{'s' * (workers > 1)} of {threads} thread{'s' * (threads > 1)}", where=host.host)


def check_memory(host: Host) -> Finding:
    """Whether there is memory left."""
    fact = f"{size(host.free_bytes)} of {size(host.memory_bytes)} free"
    if host.free_bytes < TIGHT_MEMORY_BYTES:
        return Finding("warning", "memory", fact, "end other programs, or workers may be killed for lack of memory", host.host)
    return Finding("fine", "memory", fact, where=host.host)


def check_shared_memory(host: Host, *, gpus: int) -> Finding:
    """Whether /dev/shm is large enough for NCCL, which uses it between GPUs of one host."""
    what = "shared memory"
    if host.shared_bytes is None:
        fact, enough = f"there is no {SHARED_MEMORY}", False
    else:
        fact, enough = f"{SHARED_MEMORY} has {size(host.shared_bytes)}", host.shared_bytes >= NCCL_SHARED_BYTES
    if gpus > 1 and not enough:
        return Finding("warning", what, f"{fact}, less than NCCL may need", "start the container with --shm-size=1g or more", host.host)
    return Finding("fine", what, fact, where=host.host)


def check_files(host: Host, *, world: int) -> Finding:
    """Whether a worker may open a connection to each of the others."""
    needed = FILES_BESIDES + FILES_A_WORKER * world
    fact = f"a process may open {host.open_files} files"
    if 0 <= host.open_files < needed:  # -1: without limit
        fact += f", but one of {world} workers may need {needed}"
        return Finding("wrong", "open files", fact, f"raise the limit (ulimit -n {needed})", host.host)
    return Finding("fine", "open files", fact, where=host.host)


def check_load(host: Host) -> Finding:
    """Whether other programs are at work; looked at before the measurement begins."""
    fact = f"load {host.load:.2g} on {host.cores} core{'s' * (host.cores > 1)}"
    if host.load > BUSY * host.cores:
        return Finding("warning", "load", f"{fact}: other programs are at work", "end them, or figures here and training suffer", host.host)
    return Finding("fine", "load", fact, where=host.host)


def _memory() -> tuple[int, int]:
    """Bytes of memory, and how many of them are free; a container's limit counts if it is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    for most, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        with contextlib.suppress(OSError, ValueError):
            limit = int((CGROUP / most).read_text("ascii"))
            if limit < min(total, NO_LIMIT):
                return limit, max(0, min(free, limit - int((CGROUP / used).read_text("ascii"))))
    return total, free


def _shared() -> int | None:
    with contextlib.suppress(OSError):
        status = os.statvfs(SHARED_MEMORY)
        return status.f_blocks * status.f_frsize
    return None

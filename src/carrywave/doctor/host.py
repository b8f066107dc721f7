"""What a worker sees of its own host and device: versions, cores, memory, open files, disks, its name, its GPU."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import socket
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from carrywave import __version__
from carrywave.data.files import cache
from carrywave.doctor.report import Finding, size
from carrywave.errors import UserError
from carrywave.kernels.hopper import persistent
from carrywave.launch.hardware import cores, nvidia_smi, visible
from carrywave.parallel.devices import pick_device
from carrywave.parallel.startup.addresses import GLOO, leads_home

CGROUP = Path("/sys/fs/cgroup")
TIGHT_MEMORY_BYTES, LITTLE_DISK_BYTES = 1 << 30, 2 << 30
TRIAL_BYTES, TRIAL_SECONDS, SLOW_BYTES_PER_SECOND = 32 << 20, 2.0, 20e6
FILES_BESIDES, FILES_A_WORKER = 128, 4  # open files: of a worker, and for each other one
HELD_BYTES, HOT_CELSIUS = 1 << 30, 85


def versions() -> dict[str, str]:
    """The versions that should be the same on all workers."""
    numbers = {"carrywave": __version__, "torch": metadata.version("torch"), "python": platform.python_version()}
    if torch.cuda.is_available():
        numbers |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
        numbers["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        numbers["GPU driver"] = next(iter(nvidia_smi("driver_version")), "unknown")
    return numbers


def of_host(*, workers: int, world: int, run: str) -> Iterator[Finding]:
    """The findings on this host, of whose workers there are so many. `run`: the folder of runs."""
    host = socket.gethostname()
    yield check_cores(cores(), quota(), workers, host)
    free = memory_free()
    tight = "end other programs, or workers may be killed for lack of memory" if free < TIGHT_MEMORY_BYTES else ""
    yield Finding("warning" if tight else "fine", "memory", f"{size(free)} free", tight, host)
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], FILES_BESIDES + FILES_A_WORKER * world
    few = f"raise the limit (ulimit -n {needed})" if 0 <= limit < needed else ""  # -1: without limit
    fact = f"a process may open {limit} files" + f", but one of {world} workers may need {needed}" * bool(few)
    yield Finding("wrong" if few else "fine", "open files", fact, few, host)
    yield check_disk("run folder", Path(run), host)
    yield check_disk("cache", cache.folder(None), host)


def check_cores(seen: int, allowed: float | None, workers: int, host: str) -> Finding:
    """Whether the workers of this host have the cores that they count on; `allowed`: how many a container's limit is worth."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    threads = int(text) if text.isdecimal() and int(text) else max(1, seen // workers)
    usable = seen if allowed is None else min(seen, allowed)
    fact = f"{seen} core{'s' * (seen > 1)}, {workers} worker{'s' * (workers > 1)} of {threads} thread{'s' * (threads > 1)}"
    if threads * workers <= max(1.0, usable):
        return Finding("fine", "cores", fact, where=host)
    fact += f", but the container may use the time of {usable:.3g}" * (usable < seen)
    return Finding("warning", "cores", fact, f"set OMP_NUM_THREADS={max(1, int(usable // workers))}, or start fewer workers", host)


def quota() -> float | None:
    """The cores' worth of time that a container's limit allows; None: no limit."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        most, period = (CGROUP / "cpu.max").read_text("ascii").split()
        return None if most == "max" else int(most) / int(period)
    return None


def memory_free() -> int:
    """Bytes of memory that are free; a container's limit counts if it is lower."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((CGROUP / f"memory.{name}").read_text("ascii")) for name in ("max", "current"))
        return max(0, min(free, limit - used))
    return free


def check_disk(use: str, folder: Path, host: str) -> Finding:
    """Room and speed of the disk of a folder, or of its nearest parent that exists, by writing to a file without a name."""
    remedy = "free some space, or use another folder (--run, CARRYWAVE_CACHE)"
    try:
        folder = folder.expanduser().absolute()
        place = next(each for each in (folder, *folder.parents) if each.is_dir())
        status = os.statvfs(place)
        free = status.f_bavail * status.f_frsize
        block, begin, written = os.urandom(1 << 20), time.perf_counter(), 0  # random: some file systems compress
        with tempfile.TemporaryFile(dir=place) as file:
            while written < min(TRIAL_BYTES, free // 8) and time.perf_counter() - begin < TRIAL_SECONDS:
                written += os.write(file.fileno(), block)
            os.fsync(file.fileno())
            rate = written / (time.perf_counter() - begin)
    except OSError as error:
        return Finding(
            "wrong", "disk", f"{use} {folder} cannot be written ({error.strerror})", f"correct its permissions, or {remedy}", host
        )
    fact = f"{use} {folder}: {size(free)} free, {size(rate)}/s written and synced"
    if not written:
        return Finding("wrong", "disk", f"{fact}: nothing can be written", remedy, host)
    if free < LITTLE_DISK_BYTES or rate < SLOW_BYTES_PER_SECOND:
        trouble = "little room for snapshots" if free < LITTLE_DISK_BYTES else "snapshots will take long"
        return Finding("warning", "disk", f"{fact}: {trouble}", remedy, host)
    return Finding("fine", "disk", fact, where=host)


def check_name(*, several_hosts: bool | None) -> Finding:
    """Whether this host's own name leads other hosts here: many systems map it to 127.0.1.1, where every other host finds itself, so that a
    rendezvous hangs. `several_hosts`: None if nobody said.
    """
    host = socket.gethostname()
    if several_hosts is False or not leads_home():
        return Finding("fine", "host name", f"{host} is a name that leads here", where=host)
    fact = f"{host} resolves its own name to loopback, so that other hosts cannot reach its workers: a rendezvous would hang"
    remedy = f"set {GLOO} to an interface that others reach, or map the name to its address in /etc/hosts"
    if several_hosts is None:
        return Finding("warning", "host name", fact.replace("so that", "which is enough on one machine; with several,"), remedy, host)
    return Finding("wrong", "host name", fact, remedy, host)


def check_meeting(address: str, port: int) -> Finding:
    """Whether workers could meet at this address."""
    what, spot, host = "meeting point", f"{address}:{port}", socket.gethostname()
    try:
        with socket.create_connection((address, port), timeout=3.0):
            return Finding("fine", what, f"something listens at {spot}", where=host)
    except ConnectionRefusedError:
        return Finding("fine", what, f"{spot} can be reached; nothing listens there yet", where=host)
    except OSError as error:
        remedy = "check the address, the firewall and that host"
        return Finding("wrong", what, f"{spot} cannot be reached from here ({error.strerror or error})", remedy, host)


def choose_device(setting: str, local_rank: int | None) -> tuple[torch.device, Finding | None]:
    """The device that a worker would use; and, if it does not get the GPU that is there, why."""
    try:
        device = pick_device(setting, local_rank)
        if device.type == "cuda":
            torch.cuda.get_device_properties(device)
        elif setting != "cpu" and visible():
            built = "this torch is built for CPUs" if torch.version.cuda is None else "torch does not see it"
            raise UserError(f"nvidia-smi shows a GPU, but {built}; install a torch for CUDA that fits the driver (nvidia-smi)")
    except (UserError, RuntimeError) as error:
        fact, _, remedy = str(error).partition("; ")
        return torch.device("cpu"), Finding("wrong", "devices", fact, remedy or "see whether the driver fits (nvidia-smi)")
    return device, None


def of_gpu(device: torch.device, where: str) -> Iterator[Finding]:
    """The findings on a worker's GPU; what nvidia-smi does not tell is left out."""
    properties = torch.cuda.get_device_properties(device)
    uuids = [uuid.removeprefix("GPU-") for uuid in nvidia_smi("uuid")]
    place = uuids.index(str(properties.uuid)) if str(properties.uuid) in uuids else 0

    def told(field: str) -> int:
        with contextlib.suppress(ValueError, IndexError):
            return int(nvidia_smi(field)[place], 0)
        return 0

    fact, held = f"{properties.name}, {size(properties.total_memory)}", told("memory.used") << 20
    busy = "end the other programs on it (nvidia-smi lists them)" if held > HELD_BYTES else ""
    yield Finding("warning" if busy else "fine", "GPU", fact + f": others hold {size(held)}" * bool(busy), busy, where)
    if errors := told("ecc.errors.uncorrected.volatile.total"):
        fact = f"{properties.name} reports {errors} uncorrected memory errors: results may be wrong"
        yield Finding("wrong", "GPU health", fact, "reset it (nvidia-smi --gpu-reset) or take it out of service", where)
    if (celsius := told("temperature.gpu")) >= HOT_CELSIUS:
        yield Finding("warning", "GPU health", f"{properties.name} is at {celsius} degrees Celsius", "check its cooling", where)
    refusal = persistent.device_refusal(device.index or 0)
    broken = bool(refusal) and "needs a Hopper GPU" not in refusal
    fact = f"the persistent kernels do not run, cuDNN does: {refusal}" if refusal else "the persistent kernels run"
    yield Finding("warning" if broken else "fine", "kernels", fact, "install what is missing (docs/architecture.md)" * broken, where)

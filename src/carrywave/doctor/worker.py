"""What a worker knows of itself: its place among all, versions, settings, host, network, disks and device. It goes to rank 0 as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from carrywave import __version__
from carrywave.data.files import cache
from carrywave.doctor import disk, gpu
from carrywave.doctor.disk import Disk
from carrywave.doctor.finding import Finding, set_variables
from carrywave.doctor.gpu import Gpu
from carrywave.doctor.host import Host, check_cores, check_files, check_load, check_memory, check_shared_memory
from carrywave.doctor.network import Network, Target, check_name
from carrywave.parallel.memory import peer_access
from carrywave.parallel.memory.peer_access import Neighbour
from carrywave.parallel.startup.environment import SHARE_GPU, TRANSPORT
from carrywave.parallel.startup.launcher_env import worker_file
from carrywave.parallel.startup.process_identity import identity

# Settings that workers should have in common; the first must be, because it decides what carries their messages.
SETTINGS = (TRANSPORT, SHARE_GPU, "CARRYWAVE_KERNEL", "CARRYWAVE_CAPTURE", "CARRYWAVE_TIMEOUT_SECONDS", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Place:
    """A worker's place in a launch."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int | None = None  # None: the launcher does not say

    @property
    def first_host(self) -> bool:
        """True if this is the host of rank 0, as far as the ranks show: launchers usually number one host after the other."""
        return self.rank == self.local_rank

    @property
    def several_hosts(self) -> bool:
        """True if there are workers on other hosts, as far as the ranks show."""
        return self.rank != self.local_rank or (self.local_size is not None and self.local_size < self.size)


@dataclass(frozen=True)
class Worker:
    """All that a worker reports of itself."""

    rank: int
    local_rank: int
    home: str  # what tells hosts apart, even those of one name
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    host: Host
    network: Network
    device: str
    neighbour: Neighbour
    gpu: Gpu | None = None
    unusable: str = ""  # why it does not have the GPU that it should have
    disks: tuple[Disk, ...] = ()  # of the first worker of a host
    shares: Finding | None = None  # the finding on shares of a GPU
    door: tuple[str, int] = ("", 0)  # where it listens for others to try, on the first worker of a host

    @staticmethod
    def of(values: Mapping[str, Any]) -> Worker:
        """Build one from parsed JSON."""
        return TypeAdapter(Worker).validate_python(values)

    @property
    def leads(self) -> bool:
        """True for the first worker of a host, which speaks for it."""
        return self.local_rank == 0

    @property
    def called(self) -> str:
        """How to call it in a sentence."""
        return f"rank {self.rank} on {self.host.host}"


def versions() -> dict[str, str]:
    """The versions that should be the same on all workers."""
    numbers = {"carrywave": __version__, "torch": metadata.version("torch"), "python": platform.python_version()}
    if torch.version.cuda is not None:
        numbers["CUDA"] = torch.version.cuda
    if torch.cuda.is_available():
        numbers["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        numbers["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return numbers


def look(place: Place, device_name: str, network: Network, run: str, door: tuple[str, int] = ("", 0)) -> Worker:
    """Look at this process's host and device. `run`: the folder of runs; one in an object store has no disk to look at."""
    smi = gpu.ask_smi() if device_name != "cpu" else {}  # before this process uses a GPU itself
    at = None if place.size == 1 else worker_file().device(place.local_rank)
    device, unusable = gpu.choose(device_name, at)
    host = Host.here()
    process = identity(os.getpid())
    folders: list[tuple[str, Path]] = [] if "://" in run else [("run folder", Path(run))]
    folders.append(("cache", cache.folder(None)))
    return Worker(
        place.rank,
        place.local_rank,
        f"{process['boot']} {process['net']} {process['host']}",
        versions(),
        set_variables(SETTINGS),
        host,
        network,
        str(device),
        peer_access.this_worker(device),
        gpu.look(device, smi) if device.type == "cuda" else None,
        unusable,
        tuple(disk.look(use, folder) for use, folder in folders) if place.local_rank == 0 else (),
        gpu.check_shares(host.host),
        door,
    )


def check_host(worker: Worker, *, workers: int, gpus: int, world: int, hosts: int | None) -> list[Finding]:
    """The findings on a host, by its first worker. Pure."""
    host = worker.host
    findings = [
        check_name(worker.network, hosts=hosts),
        check_cores(host, workers=workers, on_gpu=gpus > 0),
        check_load(host),
        check_memory(host),
        check_shared_memory(host, gpus=gpus),
        check_files(host, world=world),
        *disk.findings(worker.disks, host.host),
    ]
    return findings if worker.shares is None else [*findings, worker.shares]


def check_device(worker: Worker, *, sharing: int = 1) -> list[Finding]:
    """The findings on a worker's device; `sharing` workers use it. Pure."""
    where = worker.called
    if worker.gpu is None:
        return gpu.check_usable(worker.unusable, where)
    held = gpu.check_memory(worker.gpu, where, workers=sharing)
    return [held, gpu.check_health(worker.gpu, where), gpu.check_kernels(worker.gpu, where)]


def by_home(workers: Sequence[Worker]) -> dict[str, list[Worker]]:
    """The workers of each host, in the order of ranks."""
    homes: dict[str, list[Worker]] = {}
    for worker in sorted(workers, key=lambda each: each.rank):
        homes.setdefault(worker.home, []).append(worker)
    return homes


def doors(workers: Sequence[Worker]) -> dict[int, Target]:
    """Where the first worker of each host listens, by its rank."""
    firsts = [group[0] for group in by_home(workers).values()]
    return {one.rank: Target(one.host.host, one.rank, *one.door) for one in firsts if one.door[1]}

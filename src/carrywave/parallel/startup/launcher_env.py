"""What a launcher tells the processes that it starts: RANK and the like in variables, and our own launchers the rest in one file.

Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from carrywave.errors import WorkerError

WORKER = "CARRYWAVE_WORKER"  # the path of the file, in workers that carrywave itself started
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # how many processes mpirun started
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set in workers that torchrun started
_AT_START = os.getpid(), os.getppid()  # a process whose parent is gone gets another


class FitCall(BaseModel):
    """The call of `fit` in a user's script that a worker is for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int  # from 0
    earlier: tuple[dict[str, Any] | None, ...]  # what came of the calls before it
    result: Path  # the file to write its own result to


class WorkerFile(BaseModel):
    """What one of our own launchers tells the workers of a host; in any other process, nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    launch: str = ""  # the name of the launch; empty for processes that only measure
    attempt: int = 0  # how often the launch has restarted its workers
    fewer: bool = False  # this attempt has fewer workers than the launch started with
    agent: bool = False  # torch's elastic agent watches them, on several hosts
    one_host: bool = False  # all workers are on this host, and the process that started them watches all of them
    store: Path | None = None  # the file in which they rendezvous; None: at MASTER_ADDR
    folder: Path | None = None  # where they leave their beats and why they failed; None: nobody would read it
    parent: int | None = None  # the process that they end with
    devices: tuple[int, ...] = ()  # the index of each worker's device, by local rank; empty: the local rank
    threads_dealt: bool = False  # OMP_NUM_THREADS is the launcher's choice, not the user's
    fit: FitCall | None = None

    def write(self, path: Path) -> dict[str, str]:
        """Write the file; returns the variable that names it."""
        path.write_text(self.model_dump_json(), encoding="utf-8")
        return {WORKER: str(path)}

    def device(self, local_rank: int) -> int:
        """The index of a worker's device on its host."""
        return self.devices[local_rank] if local_rank < len(self.devices) else local_rank


class _Dealt:
    """Whether this process chose OMP_NUM_THREADS itself, as its share of the cores that an engine gave it."""

    threads = False


def worker_file() -> WorkerFile:
    """What this process was told by the launcher that started it."""
    path = os.environ.get(WORKER, "")
    return _read(path) if path else WorkerFile()


@lru_cache(maxsize=8)
def _read(path: str) -> WorkerFile:
    try:
        return WorkerFile.model_validate_json(Path(path).read_bytes())
    except (OSError, ValidationError) as error:
        shown = path if len(path) <= 60 else f"{path[:57]}…"
        raise WorkerError(
            f"{WORKER}={shown} is not a file that carrywave has written; unset it: carrywave sets it for the workers that it starts"
        ) from error


def parent_process() -> int | None:
    """The process that this worker ends with: ours that started it, or torchrun's agent; None: no launcher of this host is known."""
    if (ours := worker_file().parent) is not None or TORCHRUN not in os.environ:
        return ours
    process, agent = _AT_START
    return agent if process == os.getpid() else os.getppid()  # forked since


def deal_threads() -> None:
    """Note that OMP_NUM_THREADS, as this process is about to set it, is not the user's choice."""
    _Dealt.threads = True


def threads_dealt() -> bool:
    """True if OMP_NUM_THREADS was set by a launcher and not by the user."""
    return _Dealt.threads or worker_file().threads_dealt


def launched(environment: Mapping[str, str] | None = None) -> bool:
    """True if a launcher started this process as one of several workers, as RANK or WORLD_SIZE shows."""
    given = os.environ if environment is None else environment
    return "RANK" in given or "WORLD_SIZE" in given


def check_not_of_mpi() -> None:
    """Refuse a process that mpirun started with others: it speaks no MPI, so each of them would do all of the work alone."""
    for name in MPI_SIZES:
        count = os.environ.get(name, "")
        if not launched() and count.isdecimal() and int(count) > 1:
            fact = f"MPI started {count} processes ({name}), and each would train alone, because carrywave does not speak MPI"
            raise WorkerError(f"{fact}; start it with torchrun or srun instead, or unset {name} to train alone in each")


def is_first() -> bool:
    """True if this process is the one that prints and writes: a single process, or rank 0."""
    return os.environ.get("RANK", "0") == "0"

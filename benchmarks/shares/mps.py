"""Shares of a GPU: several workers run on one GPU at the same time, each on a part of its multiprocessors, as if on smaller GPUs.

NVIDIA's MPS does this: a daemon through which processes use the GPU side by side. The daemon started here is our own, in a temporary
folder, and ends with the process that started it; a daemon of somebody else is never used or stopped. Shares are for trying out and
testing plans: the whole GPU as one device is faster. Torch-free.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO

from benchmarks.shares import gpu_probe, mps_guard
from carrywave.errors import WorkerError
from carrywave.launch.hardware import nvidia_smi, visible
from carrywave.parallel.startup.environment import MOST_SHARES, OVERLAPPING, SHARE_GPU

TOOL = "nvidia-cuda-mps-control"
PIPES, LOGS, PERCENT = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
START_SECONDS = 20.0  # for the daemon to start and answer
SETTLE_SECONDS = 15.0  # for a GPU to be cleared of workers that were killed
POLL_SECONDS = 0.05
LONGEST_FOLDER = 80  # characters: the daemon listens on sockets in its folder, whose paths are limited to 107


class Shares:
    """Each GPU divided into shares for `count` workers, each with `percent` of the multiprocessors, by default an equal part. A context.

    `environment` holds the variables that every worker needs. This process itself is not affected.
    """

    def __init__(self, count: int, percent: int | None = None) -> None:
        self._tool, part = _checked(count, percent)
        self._folder = _folder()
        pipes = {PIPES: str(self._folder), LOGS: str(self._folder)} | _visible_by_name()
        self.environment = pipes | {PERCENT: str(part), OVERLAPPING: "1", SHARE_GPU: str(count)}
        self._of_daemon = {name: value for name, value in os.environ.items() if name != PERCENT} | pipes
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Shares:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def settle(self) -> None:
        """Wait until workers can start again after some were killed: what they left on the GPU is cleared away in its own time. If that
        takes long, the daemon is replaced.
        """
        if not self._is_free(SETTLE_SECONDS):
            self._stop()
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._start()
            self._is_free(SETTLE_SECONDS)  # if it still is not, the workers say why

    def _is_free(self, seconds: float) -> bool:
        """True as soon as a new process can use the GPUs; False if none can for so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                command = [sys.executable, "-I", gpu_probe.__file__]
                asked = subprocess.run(command, env=os.environ | self.environment, capture_output=True, check=False, timeout=seconds)
                if asked.returncode != gpu_probe.BUSY:
                    return True
            time.sleep(POLL_SECONDS)
        return False

    def _start(self) -> None:
        with (self._folder / "output").open("w+b") as output:
            # Isolated and in a session of its own: neither the user's Python settings nor Ctrl-C should reach it.
            command = [sys.executable, "-I", mps_guard.__file__, self._tool, str(self._folder)]
            self._guard = subprocess.Popen(
                command, env=self._of_daemon, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )
            try:
                _await(self._guard, self._tool, self._of_daemon, output)
            except BaseException:
                self._stop()
                raise

    def _stop(self) -> None:
        """Have the guard stop the daemon, and wait until both are gone, and their folder."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        assert guard.stdin is not None
        with suppress(BrokenPipeError):
            guard.stdin.write(b"\n")
            guard.stdin.flush()
        with suppress(BrokenPipeError):
            guard.stdin.close()
        guard.wait()


@contextmanager
def shares(count: int, percent: int | None = None) -> Iterator[dict[str, str]]:
    """The environment variables of workers on shares."""
    with Shares(count, percent) as divided_gpu:
        yield divided_gpu.environment


def divided(count: int) -> AbstractContextManager[dict[str, str]]:
    """As `shares`, but a count of 1 leaves the GPU whole and starts nothing."""
    return shares(count) if count > 1 else nullcontext({})


def _checked(count: int, percent: int | None) -> tuple[str, int]:
    """The path of the program that runs MPS, and each worker's percentage; raises where there can be no shares."""
    if not 1 <= count <= MOST_SHARES:
        raise WorkerError(f"a GPU cannot be shared by {count} workers under MPS; use a number from 1 to {MOST_SHARES}")
    part = 100 // count if percent is None else percent
    if not 1 <= part <= 100:
        raise WorkerError(f"a share of {part}% of a GPU is not possible; use a whole percentage from 1 to 100")
    if other := os.environ.get(PIPES):
        raise WorkerError(
            f"{PIPES}={other} belongs to an MPS daemon that carrywave did not start; unset it, or start the workers under that daemon with "
            "torchrun"
        )
    remedy = f"unset {SHARE_GPU}, or set it to 1 to let workers take turns"
    if not visible():
        raise WorkerError(f"shares of a GPU need an NVIDIA GPU, and nvidia-smi shows none; {remedy}")
    tool = shutil.which(TOOL)
    if tool is None:
        raise WorkerError(
            f"shares of a GPU need NVIDIA's MPS, but {TOOL} is not installed; install it with the driver's tools, or {remedy}"
        )
    return tool, part


def _folder() -> Path:
    """A new folder for the daemon's sockets and logs, which nobody else may enter."""
    short = len(tempfile.gettempdir()) <= LONGEST_FOLDER - len("/carrywave-mps-12345678")
    return Path(tempfile.mkdtemp(prefix="carrywave-mps-", dir=None if short else "/tmp"))


def _visible_by_name() -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by the GPUs' own names: the daemon renumbers what it serves, so an index would mean another GPU to workers."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return {}
    names = nvidia_smi("uuid")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[entry] if isinstance(entry, int) else entry for entry in visible())}


def _await(guard: subprocess.Popen[bytes], tool: str, environment: Mapping[str, str], output: IO[bytes]) -> None:
    """Return when the daemon answers."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError, subprocess.TimeoutExpired):
            asked = subprocess.run(
                [tool], input=b"get_server_list\n", env=environment, capture_output=True, check=False, timeout=START_SECONDS
            )
            if asked.returncode == 0:
                return
        if guard.poll() is not None:
            break
        time.sleep(POLL_SECONDS)
    output.seek(0)
    last = output.read().decode(errors="replace").strip().rpartition("\n")[2]
    raise WorkerError(
        f"NVIDIA's MPS did not start on this machine ({last or 'it said nothing'}); check that this user may run {TOOL}, or set "
        f"{SHARE_GPU}=1 to let workers take turns"
    )

"""Workers whose messages and sums are in memory that they share, as on GPUs of one host, where waiting in vain is a CUDA error.

HARM is JSON, `{"ATTEMPT": [RANK, COUNT, HOW]}`: what happens to a worker when it raises a signal for the COUNT-th time, in the middle of a
step. HOW is a signal, "exit", "ValueError", "CUDA error" or "sleep". PATIENCE_SECONDS is how long the others wait.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import _mapped
from _mapped import MappedMemory

from carrywave.launch import launch_record
from carrywave.parallel import mesh
from carrywave.parallel.startup.launcher_env import worker_file

ASYNCHRONOUS = "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."


def device_error(text: str) -> RuntimeError:
    return torch.AcceleratorError(f"CUDA error: {text}{ASYNCHRONOUS}\n")


class DeviceMemory(MappedMemory):
    """What a harmed neighbour leaves to wait for is never given up, except with a CUDA error."""

    count = 0

    def signal(self, rank: int, number: int) -> None:
        DeviceMemory.count += 1
        who, at, how = json.loads(os.environ.get("HARM", "{}")).get(str(launch_record.attempt()), (-1, 0, ""))
        if int(os.environ["RANK"]) == who and DeviceMemory.count == at:
            harm(how)
        super().signal(rank, number)

    def _turn(self, flags: Tensor, number: int, before: int, after: int) -> None:
        try:
            super()._turn(flags, number, before, after)
        except RuntimeError:
            raise device_error("unspecified launch failure") from None


def harm(how: str) -> None:
    if how == "exit":
        os._exit(7)
    if how == "ValueError":
        raise ValueError("oops")
    if how == "CUDA error":
        raise device_error("an illegal memory access was encountered")
    if how == "sleep":
        time.sleep(60)
    else:
        os.kill(os.getpid(), getattr(signal, how))


def install() -> None:
    _mapped.LIMIT_SECONDS = float(os.environ.get("PATIENCE_SECONDS", "1"))
    MappedMemory.meeting = worker_file().store or Path()
    mesh.symmetric_memory = DeviceMemory  # type: ignore[attr-defined]
    mesh.peer_access.in_reach = lambda there, ranks: True


if __name__ == "__main__":
    from carrywave.cli.main import app

    install()
    app(prog_name="carrywave")

"""Trains on a Ray cluster with Ray Train's TorchTrainer, which places the workers, watches them, and starts all of them again if one dies.

In each of Ray's workers, our own runs as a process, with the variables that torchrun would give it: it is the same program as everywhere
else, its exit code counts, and it may die without harm to Ray. Ray pickles what it exchanges.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from carrywave.errors import WorkerError
from carrywave.launch import exit_reports
from carrywave.launch.exit_reports import FAULT, FINAL, INTERRUPTED, Ended
from carrywave.parallel.liveness.failure_file import CAUSES
from carrywave.parallel.startup.launcher_env import WorkerFile

PASSED = ("CARRYWAVE_", "OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "PYTHONPATH")  # variables of this process that the workers get
PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when the one that started it ends


def start_on_ray(command: Sequence[str], workers: int, on_gpus: bool, restarts: int) -> Ended:
    """Run `command` in workers on the cluster that RAY_ADDRESS names or that this machine is part of, or else on one of this machine."""
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise WorkerError("--on ray needs Ray Train, which is not installed; install it with: pip install 'carrywave[ray]'") from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    told = {
        "command": list(command[1:]),
        "folder": os.getcwd(),
        "launch": uuid.uuid4().hex,
        "variables": {name: value for name, value in os.environ.items() if name.startswith(PASSED)},
    }
    cores = max(1, int(os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0]))
    with tempfile.TemporaryDirectory(prefix="carrywave-ray-") as storage:
        trainer = TorchTrainer(
            work,
            train_loop_config=told,
            torch_config=TorchConfig(backend="gloo"),  # for the meeting alone
            scaling_config=ScalingConfig(num_workers=workers, use_gpu=on_gpus, resources_per_worker={"CPU": cores, "GPU": int(on_gpus)}),
            run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=restarts)),
        )
        try:
            said = trainer.fit().return_value or {}  # of rank 0; Ray keeps metrics only with a checkpoint
        except KeyboardInterrupt as stop:
            return Ended(getattr(stop, "code", INTERRUPTED), "stopped; it goes on from its last snapshot with --resume")
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            return Ended(FAULT, lines[-1] if lines else type(error).__name__)
        finally:
            ray.shutdown()
    return Ended(int(said.get("code", 0)), str(said.get("message", "")))


def work(told: dict[str, Any]) -> dict[str, Any]:
    """Run one of our workers in one of Ray's, and tell how it ended. Raises if another start may mend what went wrong."""
    # Ray's own process group keeps its port, so that ours needs another.
    port = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        with socket.create_server((os.environ["MASTER_ADDR"], 0), family=_family(os.environ["MASTER_ADDR"])) as free:
            port += free.getsockname()[1]
    dist.all_reduce(port)
    with tempfile.TemporaryDirectory(prefix="carrywave-launch-") as place:
        folder = Path(place)
        (folder / CAUSES).mkdir()
        # Whether this is another attempt is not known here: if it is, the run of this launch is there.
        file = WorkerFile(launch=told["launch"], attempt=1, folder=folder, parent=os.getpid())
        variables = {**os.environ, **told["variables"], "MASTER_PORT": str(int(port)), **file.write(folder / "worker.json")}
        command = [sys.executable, *told["command"]]
        code = subprocess.Popen(command, env=variables, cwd=told["folder"], preexec_fn=_end_with_parent).wait()
        rank, size = dist.get_rank(), dist.get_world_size()
        ended = exit_reports.ended({rank: code}, exit_reports.read(folder / CAUSES), size)
    if ended.code != 0 and ended.code not in FINAL:
        raise RuntimeError(ended.message)
    return {"code": ended.code, "message": ended.message}


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

"""Starts worker processes that run a measurement together, and reads back their results. Torch-free: only the workers import torch.

The measured module's `work(world, job)` yields rows; each worker writes its own to a file, one JSON object per line. Workers rendezvous
through a file store and communicate over the loopback interface. They exit when the process that started them exits, however that happens.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from carrywave import heap
from carrywave.errors import RunError
from carrywave.parallel.startup.launcher_env import WorkerFile

Row = dict[str, Any]

POLL_SECONDS = 0.05
LAUNCHERS = ("CARRYWAVE_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "SLURM_")
KEPT = tuple(f"CARRYWAVE_{name}" for name in ("CACHE", "KERNEL", "CAPTURE", "SHARE_GPU", "TRANSPORT", "START_SECONDS", "TIMEOUT_SECONDS"))


def start(
    module: str, job: Mapping[str, Any], workers: int, *, threads: int = 1, environment: Mapping[str, str] | None = None, name: str = ""
) -> list[list[Row]]:
    """Run `work` of a module in `workers` processes of `threads` threads each; returns the rows of each, by rank. `name` is for errors."""
    with tempfile.TemporaryDirectory(prefix="carrywave-crew-") as path:
        folder = Path(path)
        (folder / "job.json").write_text(json.dumps(dict(job)), encoding="utf-8")
        command = [sys.executable, "-m", "carrywave.parallel.worker_pool", module, path]
        crew: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(workers):
                own = environment_of(folder, rank, workers, threads) | dict(environment or {})
                with (folder / f"{rank}.log").open("wb") as log:
                    crew.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=own))
            _check(crew, folder, name or module)
        finally:
            for process in crew:
                process.kill()
                process.communicate()
        texts = [(folder / f"{rank}.jsonl").read_text(encoding="utf-8") for rank in range(workers)]
        return [[json.loads(line) for line in text.splitlines()] for text in texts]


def _check(crew: Sequence[subprocess.Popen[bytes]], folder: Path, name: str) -> None:
    """Wait until all have exited, and raise if one failed: of several, the one that is the cause, and has not only lost contact."""
    codes: list[int | None] = [None]
    while None in codes and not any(codes):
        time.sleep(POLL_SECONDS)
        codes = [process.poll() for process in crew]
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        last = {rank: (folder / f"{rank}.log").read_text(errors="replace").strip().rpartition("\n")[2] for rank in failed}
        from carrywave.parallel.liveness.lost_contact import sounds_lost

        cause = min(failed, key=lambda rank: sounds_lost(last[rank]))
        raise RunError(f"worker {cause} of {name} exited with code {codes[cause]}: {last[cause] or 'no output'}")


def environment_of(folder: Path, rank: int, workers: int, threads: int) -> dict[str, str]:
    """This process's environment, with its import path, the worker's rank and threads, and loopback for all messages."""
    of_worker = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": str(threads),
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo0" if sys.platform == "darwin" else "lo"),
        **WorkerFile(one_host=True, store=folder / "store").write(folder / "worker.json"),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
    }
    # A worker of a run may start a pool: its own launcher's variables must not reach the pool.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS) or name in KEPT}
    return inherited | of_worker


def end_with_parent() -> None:
    """Exit with the parent: it holds the other end of stdin and never writes, so end-of-file means it is gone, however that happened."""
    os.read(0, 1)
    os._exit(1)


def main(module: str, folder: Path) -> None:
    """Run one worker from start to end."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    heap.keep()
    import torch
    from torch import distributed as dist

    from carrywave.parallel.world import join, leave

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    job: dict[str, Any] = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    world = join(job.get("device", "cpu"))
    with (folder / f"{world.rank}.jsonl").open("w", encoding="utf-8") as out:
        for row in importlib.import_module(module).work(world, job):
            out.write(json.dumps(row) + "\n")
    if world.size > 1:
        dist.barrier()
    leave(world)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

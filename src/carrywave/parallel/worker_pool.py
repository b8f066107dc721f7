"""Starts worker processes that time something together, and reads back what each wrote. Torch-free: torch is theirs.

A module with `work(world, job)` gives rows; each worker writes its own to a file, one JSON object a line. Workers meet through a store
in a file and talk over the loopback interface. They end with the process that started them, however that came about.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carrywave import heap
from carrywave.errors import RunError

Row = dict[str, Any]

POLL_SECONDS = 0.05
LAUNCHERS = ("CARRYWAVE_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "SLURM_", "TF_CONFIG")
KEPT = tuple(f"CARRYWAVE_{name}" for name in ("CACHE", "KERNEL", "CAPTURE", "SHARE_GPU", "START_SECONDS", "TIMEOUT_SECONDS"))


def start(
    module: str, job: Mapping[str, Any], workers: int, *, threads: int = 1, environment: Mapping[str, str] | None = None, name: str = ""
) -> list[list[Row]]:
    """Runs `work` of a module in so many processes of so many threads each; the rows of each, by rank. `name` is for errors."""
    with tempfile.TemporaryDirectory(prefix="carrywave-crew-") as place:
        folder = Path(place)
        (folder / "job.json").write_text(json.dumps(dict(job)), encoding="utf-8")
        command = [sys.executable, "-m", "carrywave.parallel.worker_pool", module, place]
        crew: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(workers):
                own = _environment(folder, rank, workers, threads) | dict(environment or {})
                with (folder / f"{rank}.log").open("wb") as log:
                    crew.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=own))
            failed = _wait(crew)
        finally:
            for process in crew:
                process.kill()
                process.communicate()
        if failed:
            # Of several that fail at once, one is the cause, and the others only miss it.
            last = {rank: (folder / f"{rank}.log").read_text(errors="replace").strip().rpartition("\n")[2] for rank in failed}
            from carrywave.parallel.liveness.lost_contact import sounds_lost

            cause = min(failed, key=lambda rank: sounds_lost(last[rank]))
            raise RunError(
                f"worker {cause} of {name or module} ended with exit code {crew[cause].returncode}: {last[cause] or 'it said nothing'}"
            )
        texts = [(folder / f"{rank}.jsonl").read_text(encoding="utf-8") for rank in range(workers)]
        return [[json.loads(line) for line in text.splitlines()] for text in texts]


def _wait(crew: list[subprocess.Popen[bytes]]) -> list[int]:
    """Until all have ended well, or some have not: their ranks."""
    while True:
        codes = [process.poll() for process in crew]
        bad = [rank for rank, code in enumerate(codes) if code]
        if bad or all(code == 0 for code in codes):
            return bad
        time.sleep(POLL_SECONDS)


def _environment(folder: Path, rank: int, workers: int, threads: int) -> dict[str, str]:
    """This process's, with its import path, the worker's place and threads, and loopback for all messages."""
    own = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": str(threads),
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo0" if sys.platform == "darwin" else "lo"),
        "CARRYWAVE_STORE": str(folder / "store"),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
    }
    # A worker of a run may start a crew: what its launcher told it is not for the crew.
    told = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS) or name in KEPT}
    return told | own


def _end_with_parent() -> None:
    """The parent holds the other end of the standard input, and writes nothing: its end is the parent's, however that came about."""
    os.read(0, 1)
    os._exit(1)


def main(module: str, folder: Path) -> None:
    """A worker's whole life."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
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

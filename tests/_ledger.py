"""`python _ledger.py train …`: the command line, with workers that log what they train on.

Each worker appends a line to `$CARRYWAVE_LEDGER/RANK.jsonl` for every completed step: the attempt, the optimizer step, the time, and for
every lane the sequence and steps it held, taken from the batch itself. Each line is a single write, so a kill leaves only whole lines.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from carrywave.launch import launch_record

FOLDER = "CARRYWAVE_LEDGER"
PROBE = Path(__file__).parents[1] / "benchmarks" / "shares" / "gpu_probe.py"
SETTLE_SECONDS = 30.0


def keep(folder: str, rank: int) -> None:
    """Patch the training loop so that every step of this process appends its line."""
    from carrywave.data.batch import Batch
    from carrywave.train.loop import Loop

    handle = os.open(f"{folder}/{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    plain: Any = Loop._step

    def lanes_of(batch: Batch) -> list[list[int]]:
        columns = (batch.lanes, batch.sequence, batch.offset, batch.lengths)
        return [list(numbers) for numbers in zip(*(column.tolist() for column in columns), strict=True) if numbers[3]]

    def step(self: Loop, group: list[Batch], *more: Any) -> Any:
        done = plain(self, group, *more)
        # The monotonic clock is shared by all processes of a host.
        line = {"attempt": launch_record.attempt(), "step": self.state.step, "seconds": time.monotonic()}
        windows = [[batch.epoch, lanes_of(batch)] for batch in group]
        os.write(handle, json.dumps(line | {"windows": windows}).encode() + b"\n")
        return done

    Loop._step = step  # type: ignore[assignment, method-assign]


def settle() -> None:
    """Wait until a GPU under MPS is cleared of workers that were killed; on a GPU of one's own there is nothing to wait for."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline and subprocess.run([sys.executable, "-I", str(PROBE)], check=False).returncode:
        time.sleep(0.1)


def main() -> None:
    """Run `python -m carrywave`, with a ledger in each worker."""
    if "RANK" in os.environ and "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        settle()
    if FOLDER in os.environ and "RANK" in os.environ:
        keep(os.environ[FOLDER], int(os.environ["RANK"]))
    runpy.run_module("carrywave", run_name="__main__")


if __name__ == "__main__":
    main()

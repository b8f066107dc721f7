"""`python -m carrywave.benchmarks._ledger train …`: the command line, in workers that keep a ledger of what they train on.

Each worker appends a line to `$CARRYWAVE_LEDGER/RANK.jsonl` for every step that it has finished: which attempt and optimizer step, when,
and of every lane which steps of which sequence, from the batch itself. A kill leaves whole lines: each is one write.
"""

from __future__ import annotations

import json
import os
import runpy
import time
from typing import Any

from carrywave.launch import launch_record
from carrywave.parallel.liveness import heartbeat

FOLDER = "CARRYWAVE_LEDGER"


def keep(folder: str, rank: int) -> None:
    """Have every step of this process write its line."""
    from carrywave.data.batch import Batch
    from carrywave.train.loop import Loop

    handle = os.open(f"{folder}/{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    plain: Any = Loop._step

    def lanes_of(batch: Batch) -> list[list[int]]:
        columns = (batch.lanes, batch.sequence, batch.offset, batch.lengths)
        return [list(numbers) for numbers in zip(*(column.tolist() for column in columns), strict=True) if numbers[3]]

    def step(self: Loop, group: list[Batch], *more: Any) -> Any:
        done = plain(self, group, *more)
        # A monotonic clock is the same for all processes of a host.
        line = {"attempt": launch_record.attempt(), "step": self.progress.step, "seconds": time.monotonic()}
        windows = [[batch.epoch, lanes_of(batch)] for batch in group]
        os.write(handle, json.dumps(line | {"windows": windows}).encode() + b"\n")
        return done

    Loop._step = step  # type: ignore[assignment, method-assign]


def main() -> None:
    """What `python -m carrywave` does, with the ledger in workers."""
    heartbeat.start()
    if FOLDER in os.environ and "RANK" in os.environ:
        keep(os.environ[FOLDER], int(os.environ["RANK"]))
    runpy.run_module("carrywave", run_name="__main__")


if __name__ == "__main__":
    main()

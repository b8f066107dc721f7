"""Pools of workers that stay, and do one request after another, so that pools of different sizes can take turns on one device.

A request and its answers are files in a folder of the pool: workers without a request sleep on the host and leave the device alone. A pool
that ends early, or that does not answer in time, is given up, and the others go on.

A module that runs in such a pool defines `work(world, job)` as for `parallel.worker_pool`, and takes its requests from `requests`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from carrywave.errors import RunError
from carrywave.parallel import worker_pool
from carrywave.parallel.worker_pool import Row

POLL_SECONDS = 0.002
START_SECONDS, ANSWER_SECONDS = 180.0, 60.0
END_SECONDS = 10.0  # for workers to leave in good order; those that are stuck are then ended
_END = "end"


class StandingPool:
    """`workers` processes that run a module's `work`; starts them without waiting, ends them when the context is left."""

    def __init__(self, module: str, workers: int, *, job: Mapping[str, Any], environment: Mapping[str, str], name: str) -> None:
        self.workers, self.name = workers, name
        self.folder = Path(tempfile.mkdtemp(prefix="carrywave-pool-"))
        self.lost = ""  # why the pool is no longer there
        self._asked = 0
        given = {**job, "requests": str(self.folder)}

        def run() -> None:
            try:
                worker_pool.start(module, given, workers, environment=environment, name=name)
            except Exception as error:
                self.lost = self.lost or str(error)
            else:
                self.lost = self.lost or f"the workers of {name} are done"

        self._thread = threading.Thread(target=run, name=f"pool {name}", daemon=True)

    def __enter__(self) -> StandingPool:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def ask(self, timeout_seconds: float | None = None, **request: Any) -> list[Row]:
        """Have all workers do something; returns their answers, by rank. Raises if the pool is gone or does not answer."""
        if self.lost:
            raise RunError(self.lost)
        wait_seconds = timeout_seconds or (ANSWER_SECONDS if self._asked else START_SECONDS)
        number, self._asked = self._asked, self._asked + 1
        _write(self.folder / f"ask-{number}", request)
        files = [self.folder / f"answer-{number}-{rank}" for rank in range(self.workers)]
        deadline = time.monotonic() + wait_seconds
        while not all(file.exists() for file in files):
            if not self._thread.is_alive():
                raise RunError(self.lost)
            if time.monotonic() > deadline:
                self.lost = f"the workers of {self.name} did not answer within {wait_seconds:.0f} s"
                self.end(seconds=0.0)
                raise RunError(self.lost)
            time.sleep(POLL_SECONDS)
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]

    def end(self, seconds: float = END_SECONDS) -> None:
        """Let the workers leave; those that have not after a while are stuck and end when the folder is gone."""
        if self.folder.exists():
            (self.folder / _END).touch()
            self._thread.join(seconds)
            shutil.rmtree(self.folder, ignore_errors=True)
        self._thread.join(END_SECONDS)


def requests(job: Mapping[str, Any], rank: int) -> Iterator[tuple[Row, Callable[[Row], None]]]:
    """In a worker: the requests in order, each with the function that takes its answer, until the pool ends."""
    folder = Path(job["requests"])
    threading.Thread(target=_end_with_folder, args=(folder,), daemon=True).start()
    number = 0
    while True:
        file = folder / f"ask-{number}"
        while not file.exists():
            if (folder / _END).exists():
                return
            time.sleep(POLL_SECONDS)
        answer = folder / f"answer-{number}-{rank}"
        yield json.loads(file.read_text(encoding="utf-8")), lambda row, answer=answer: _write(answer, row)  # type: ignore[misc]
        number += 1


def _write(file: Path, row: Mapping[str, Any]) -> None:
    """Write a file that others see only when it is complete."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(dict(row)), encoding="utf-8")
    part.replace(file)


def _end_with_folder(folder: Path) -> None:
    """End this process when its pool is gone: it may be waiting for a device that never answers."""
    while folder.exists():
        time.sleep(0.2)
    os._exit(1)

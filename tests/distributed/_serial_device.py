"""A `SerialDevice` carries out batches of messages one at a time, in the order in which they are issued, as NCCL's kernels run on a GPU
that has room for one of them only. gloo sends nothing before its receive is posted, so that a message takes both of its ends here too."""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch.distributed as dist


class SerialDevice:
    """Stands in for `torch.distributed.batch_isend_irecv`."""

    def __init__(self) -> None:
        self._carry_out = dist.batch_isend_irecv
        self._issued: queue.SimpleQueue[tuple[list[Any], SerialWork]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def batch_isend_irecv(self, operations: list[Any]) -> list[SerialWork]:
        """Issue a batch; it starts when all before it have completed."""
        work = SerialWork()
        self._issued.put((operations, work))
        return [work]

    def _run(self) -> None:
        while True:
            operations, work = self._issued.get()
            try:
                for each in self._carry_out(operations):
                    each.wait()
            except Exception as error:
                work.error = error
            work.done.set()


class SerialWork:
    """A batch that was issued."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error

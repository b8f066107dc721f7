"""`python -m carrywave.benchmarks.sync_runs.worker JOB.json`: one of the workers of `bench sync`; trains one run after the other.

Started once for each worker with a launcher's variables. Rank 0 writes what became of each run as soon as it is over, and the
bytes that it sent from the first step to the last, as the kernel counts them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from carrywave.errors import UserError
from carrywave.parallel import worker_pool
from carrywave.spec.load import parse
from carrywave.train.fit import train
from carrywave.train.loop import Loop

RESULTS = "results.jsonl"  # in the folder of the job, a line for each run that is over
ACKED = slice(120, 128)  # tcpi_bytes_acked in Linux's struct tcp_info


def sent_bytes() -> int:
    """What the connections of this process that are open now have sent, and the other side has received."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                    info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKED.stop)
                    total += int.from_bytes(info[ACKED], sys.byteorder)
        except OSError:  # closed meanwhile
            continue
    return total


class Counted:
    """The bytes sent in training steps: neither the weights that are handed out before the first, nor what a run writes after the last."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.last = 0

    def watch(self) -> None:
        """Patch the training loop so that every step of this process looks at the counter."""
        plain: Any = Loop._step

        def step(loop: Loop, *given: Any) -> Any:
            self.first = sent_bytes() if self.first is None else self.first
            done = plain(loop, *given)
            self.last = sent_bytes()
            return done

        Loop._step = step  # type: ignore[assignment, method-assign]


def main(path: Path) -> None:
    """Carry out the runs of a job; a user error ends all workers with its message."""
    threading.Thread(target=worker_pool.end_with_parent, daemon=True).start()
    job: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    counted = Counted()
    counted.watch()
    for number, spec in enumerate(job["specs"]):
        counted.first = None
        try:
            result = train(parse(spec), run=path.parent / f"run-{number}", device=job["device"])
        except UserError as error:
            sys.exit(str(error))
        if os.environ["RANK"] == "0":
            with (path.parent / RESULTS).open("a", encoding="utf-8") as file:
                print(json.dumps({"metrics": result.metrics, "sent_bytes": counted.last - (counted.first or 0)}), file=file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Workers watch each other, each the next one in a ring, on one host or several.

A worker whose process exits is noticed at once, because its connections close. A stopped one keeps them open, and the others would wait for
the message timeout. So every worker increments a counter in the rendezvous store, and when the counter stalls, its neighbour exits with a
one-line message; the launcher then stops or restarts them all. While training steps follow each other the limit is short; before and after,
when long work may hold the interpreter, it is the message timeout. A silent worker on the same host is also killed, because a stopped
process would not react to the launcher's SIGTERM. Time in which this process itself did not run (a frozen machine) does not count.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.distributed import Store  # type: ignore[attr-defined]

from carrywave.parallel.liveness import heartbeat, lost_contact
from carrywave.parallel.liveness.failure_file import folder, leave
from carrywave.parallel.liveness.heartbeat import BEAT_SECONDS, Silence
from carrywave.parallel.startup.environment import seconds_of
from carrywave.parallel.startup.launcher_env import worker_file
from carrywave.parallel.startup.process_identity import identity
from carrywave.parallel.world import TIMEOUT_SECONDS, World, shared_store

FAULT = 1  # exit code of a worker that gives up
LEFT = "left"


@contextmanager
def watched(world: World) -> Iterator[None]:
    """Inside this context, this worker beats and watches its neighbour."""
    store = None if world.size == 1 else shared_store()
    over = threading.Event()
    threads: list[threading.Thread] = []
    if store is not None and heartbeat.silent_seconds() < math.inf:
        watch = _NeighbourWatch(store, world.rank, world.size)
        threads = [
            threading.Thread(target=work, args=(over,), name="carrywave-neighbour", daemon=True) for work in (watch.talk, watch.look)
        ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        heartbeat.rest()
        over.set()
        for thread in threads:
            thread.join(BEAT_SECONDS)


class _NeighbourWatch:
    """One worker's counter, and its view of the next one's. One thread accesses the store, which may block it; the other watches."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.other, self.size = store, rank, (rank + 1) % size, size
        self.limit_seconds = heartbeat.silent_seconds()
        self.long_seconds = max(self.limit_seconds, seconds_of("CARRYWAVE_TIMEOUT_SECONDS", TIMEOUT_SECONDS))
        self.every_seconds = min(BEAT_SECONDS, self.limit_seconds / 5)
        self.count = 0  # iterations of `talk`
        self.gone = False  # the store's process is gone, which every worker notices by its own connections
        self.other_beat: tuple[object, bool] | None = None  # the other's counter, and whether it is training

    def talk(self, over: threading.Event) -> None:
        """Increment this worker's counter in the store, and read the other's."""
        try:
            while not over.wait(self.every_seconds):
                self.count += 1
                self.store.set(f"beat/{self.rank}", json.dumps([self.count, heartbeat.is_training()]))
                if self.store.check([f"beat/{self.other}"]):
                    count, training = json.loads(self.store.get(f"beat/{self.other}"))
                    self.other_beat = count, bool(training)
            self.store.set(f"beat/{self.rank}", json.dumps([LEFT, False]))
        except RuntimeError:
            self.gone = True

    def look(self, over: threading.Event) -> None:
        """Give up when the other worker, or the store, has been silent for too long."""
        other, store = Silence(), Silence()
        before = time.monotonic()
        while not over.wait(self.every_seconds) and not self.gone:
            now = time.monotonic()
            passed, before = min(now - before, 2 * self.every_seconds), now
            # A process that holds the interpreter for long is silent too, but not while it is training. All workers take steps together:
            # while one trains, so does the other, even if its last message is older.
            training = heartbeat.is_training() or (self.other_beat is not None and self.other_beat[1])
            limit_seconds = self.limit_seconds if training else self.long_seconds
            if store.after(self.count, passed) > limit_seconds:
                self._give_up(None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0, store.seconds)
            if self.other_beat is None or self.other_beat[0] == LEFT:
                continue
            if other.after(self.other_beat, passed) > limit_seconds and store.seconds < 2 * self.every_seconds:
                self._give_up(self.other, other.seconds)

    def _give_up(self, rank: int | None, seconds: float) -> None:
        """Exit because this rank fell silent; None means the launcher, which hosts the store."""
        process = None if rank is None else lost_contact.reported(rank)
        causes, since = folder(), time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        host = "" if process is None or worker_file().one_host else f" on {process['host']}"
        who = f"worker {rank} of {self.size}{host}" if rank is not None else "the process that keeps the rendezvous store"
        message = f"{who} gave no sign of life for {seconds:.0f} s, since {since} (stopped or unreachable?)"
        # First, what happened: the cause is what is known before the other is killed.
        if causes is not None:
            leave(causes, "silent", FAULT, message, peer=rank)
        else:
            print(f"carrywave: rank {self.rank}: {message}", file=sys.stderr, flush=True)
        # If it is on this host, and still the same process.
        if process is not None and rank != self.rank and process.items() >= identity(process["pid"]).items():
            with suppress(OSError):
                os.kill(process["pid"], signal.SIGKILL)
        os._exit(FAULT)

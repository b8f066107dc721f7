"""Through which the launchers of several hosts see each other: a store at the first one's address, which their workers use too.

A launcher writes what it has to say under a key of its own, and reads what concerns it, a few times a second. All of this happens in a
thread, because a store blocks when a link is down; the launcher itself sees only what was read last, and for how long nothing has changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from carrywave.errors import WorkerError
from carrywave.launch.cluster.states import COMMANDS, STATE, Commands, HostState, SeenHost
from carrywave.launch.engines.hosts import Hosts
from carrywave.parallel.liveness.heartbeat import Silence
from carrywave.parallel.startup import door, native_logs
from carrywave.parallel.startup.rendezvous import open_store

CYCLE_SECONDS = 0.2
EARLIER_SECONDS = 3.0  # for a launcher to show that it is alive: it says something in every cycle
KEY = "commands"  # of the commands


class HostStore:
    """One launcher's connection to the others. The first host opens the store; the others join it, each time under a new number.

    Hosts of another job are turned away before they have a number, and so is a second launcher of a host whose first one is alive.
    """

    def __init__(self, hosts: Hosts, state: HostState, start_seconds: float, silent_seconds: float) -> None:
        native_logs.hush()
        self.hosts, self.node = hosts, hosts.node
        self.state = state  # what this host says
        self.commands = Commands()  # written by the first host, read by the others
        self.seen: dict[int, SeenHost] = {}  # the other hosts, as the first one sees them
        self.every_seconds = min(CYCLE_SECONDS, silent_seconds / 5)
        self._heard = 0  # exchanges so far
        self._broken = False  # the store is gone
        self._silence, self._looked = Silence(), time.monotonic()
        self._silences: dict[tuple[int, int], Silence] = {}  # of the other hosts' launchers
        self._led, self._read = time.monotonic(), ""  # when the first host last looked; the number of the commands that were last read
        address, port = hosts.meeting
        opened = open_store(address, port, self.node == 0, start_seconds)
        place = f"port {port} on {address}"
        job = hosts.identity
        room = door.enter(opened, door.HOSTS, job, place, start_seconds) if self.node else door.put_up(opened, door.HOSTS, job)
        self._store: Store = PrefixStore(f"carrywave/{room}/hosts", opened)
        self._refuse_if_there()
        self.join = int(self._store.add(f"joins/{self.node}", 1))
        self._over = threading.Event()
        work = self._lead if self.node == 0 else self._follow
        self._thread = threading.Thread(target=self._exchange, args=(work,), name="carrywave-hosts", daemon=True)
        self._thread.start()

    def _refuse_if_there(self) -> None:
        """Refuse if another launcher of this host is alive: this one was started twice, and not again."""
        join = int(self._store.add(f"joins/{self.node}", 0))
        if not join or not self._store.check([f"host/{self.node}/{join}"]):
            return
        said = self._store.get(f"host/{self.node}/{join}")
        if STATE.validate_json(said.partition(b" ")[2]).launcher == self.state.launcher:
            return  # this one, which had lost contact
        deadline = time.monotonic() + EARLIER_SECONDS
        while time.monotonic() < deadline:
            if self._store.get(f"host/{self.node}/{join}") != said:
                who = self.hosts.who(self.node)
                raise WorkerError(f"{who} already takes part in this job, from another process; end that one first, or choose another port")
            time.sleep(self.every_seconds)

    def silent_seconds(self) -> float:
        """For how long nothing was heard from the first host; without end if the connection is gone."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * self.every_seconds), now
        return float("inf") if self._broken else self._silence.after(self._heard, passed)

    def close(self) -> None:
        """Say no more. A thread that the store blocks is left behind."""
        self._over.set()
        self._thread.join(2 * self.every_seconds)

    def _exchange(self, work: Callable[[int], None]) -> None:
        beat = 0
        try:
            while not self._over.is_set():
                beat += 1
                work(beat)
                self._over.wait(self.every_seconds)
        except RuntimeError:
            self._broken = True

    def _follow(self, beat: int) -> None:
        self._store.set(f"host/{self.node}/{self.join}", f"{beat} {STATE.dump_json(self.state).decode()}")
        if not self._store.check([KEY]):
            return
        number, _, text = self._store.get(KEY).decode().partition(" ")
        if number != self._read:
            self._read, self.commands = number, COMMANDS.validate_json(text)
            self._heard += 1

    def _lead(self, beat: int) -> None:
        self._store.set(KEY, f"{beat} {COMMANDS.dump_json(self.commands).decode()}")
        now = time.monotonic()
        passed, self._led = min(now - self._led, 2 * CYCLE_SECONDS), now
        found: dict[int, SeenHost] = {}
        for node in range(1, len(self.hosts.names)):
            join = int(self._store.add(f"joins/{node}", 0))
            if not join or not self._store.check([f"host/{node}/{join}"]):
                continue
            number, _, text = self._store.get(f"host/{node}/{join}").decode().partition(" ")
            silence = self._silences.setdefault((node, join), Silence())
            found[node] = SeenHost(join, STATE.validate_json(text), silence.after(number, passed))
        self.seen = self.seen | found  # a new one: the launcher may be reading the old one
        self._heard += 1

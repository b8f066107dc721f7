"""Starts one worker per device of this host, restarts them when one dies, and reports one exit code and one cause.

Workers of a single host rendezvous through a file and communicate over loopback: nothing listens where another machine could reach it. With
several hosts they rendezvous at the address the user gave.

A worker that dies (killed, crashed, stopped, lost) ends the attempt; the next attempt resumes from the last snapshot by itself. User errors
and orderly exits are final. So are repeated deaths: restarts are counted, and a snapshot newer than at the previous death resets the count;
an internal error that repeats without a newer snapshot, or occurs before the first step, is not retried. If fewer devices are acceptable, a
device whose worker dies twice before its first step is dropped, and the remaining ones share the same global batch.

torch's elastic agent is not used: it terminates all workers as soon as one exits with anything but 0, so an orderly stop (75, 130) would
cut off the others' snapshot; its rendezvous unpickles data and listens on all interfaces; and it cannot continue with fewer workers on a
host.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from carrywave.errors import WorkerError, option
from carrywave.launch import exit_reports, launch_record
from carrywave.launch.exit_reports import STOPPED, Ended
from carrywave.launch.hardware import cores, visible
from carrywave.launch.shares import divided
from carrywave.launch.supervisor import POLL_SECONDS, AttemptOutcome, Signals, WorkerGroup, supervise
from carrywave.launch.tf_config import Hosts
from carrywave.parallel.startup.environment import SHARE_GPU

RESTARTS = 3  # without progress in between, unless the user sets another limit
DEATHS_AT_START = 2  # deaths of a device's worker before its first step, after which the device is dropped


def is_worker() -> bool:
    """True if `start` started this process."""
    return exit_reports.folder() is not None


def start(
    command: Sequence[str],
    devices: int,
    *,
    hosts: Hosts | None = None,
    environment: Mapping[str, str] | None = None,
    restarts: int = 0,
    min_devices: int | None = None,
    shares: int = 1,
    say: Callable[[str], None] | None = None,
    attend: Callable[[WorkerGroup, Path, Signals], AttemptOutcome] = supervise,
) -> Ended:
    """Run `command` in `devices` workers on this host and wait for them to end. They learn their rank from the environment.

    If one dies, all are restarted, up to `restarts` times without progress; with `min_devices` below `devices`, also with fewer workers.
    With several hosts, a death ends all of them, and whoever started the hosts has to restart them. With `shares` above 1 each GPU is
    divided among so many workers. `attend` runs one attempt, if not on this host then elsewhere.
    """
    if shares > 1:
        (say or _say)(_of_shares(devices, shares))
    meeting = None if hosts is None else _Meeting(hosts, devices)
    with tempfile.TemporaryDirectory(prefix="carrywave-") as name, Signals() as signals, divided(shares) as of_shares:
        launch = {**of_shares, **(environment or {}), launch_record.LAUNCH: uuid.uuid4().hex}
        decide = _Decide(devices, 0 if meeting is not None else restarts, min_devices or devices)
        number = 0
        run: Path | None = None
        while True:
            shared = launch | {launch_record.ATTEMPT: str(number)} | ({launch_record.FEWER: "1"} if len(decide.places) < devices else {})
            folder = Path(name) / f"attempt-{number}"
            crew = _crew(command, decide.places, shared, folder, meeting)
            outcome = attend(crew, folder, signals)
            # A worker that dies early has not reported its run; the previous attempt did.
            outcome = replace(outcome, run=outcome.run or run)
            run = outcome.run
            ended = _with_logs(outcome, signals)
            if ended.lost and meeting is not None:
                ended = replace(ended, message=f"{ended.message.partition(';')[0]}{meeting.advice(ended.peer)}")
            if ended.died and signals.asked is None and signals.noted:
                # The signal arrived when no worker was left to receive it.
                signals.asked = signals.noted.pop()
                return _asked_to_stop(Ended(128 + signals.asked), outcome.run)
            again = None if signals.asked is not None or not ended.died else decide.after(outcome)
            if again is None:
                return replace(ended, message=ended.message + decide.given_up) if ended.died else ended
            (say or _say)(again)
            number += 1


def _of_shares(devices: int, shares: int) -> str:
    """What to say of workers that share GPUs; raises if there are too many of them."""
    gpus = len(visible())
    most = shares * gpus
    if gpus and devices > most:
        raise WorkerError(
            f"{devices} workers have only {most} shares of {gpus} GPU{'s' * (gpus > 1)}; use {option('devices', most)}, or set "
            f"{SHARE_GPU}={-(-devices // gpus)}"
        )
    workers = f"{devices} worker{'s' * (devices > 1)}"
    return f"{workers} on 1/{shares} of a GPU each, to try it out: one worker on the whole GPU is faster"


def _say(line: str) -> None:
    # A live display that was killed leaves the cursor hidden.
    shown = "\x1b[?25h" if sys.stderr.isatty() else ""
    print(f"{shown}carrywave: {line}", file=sys.stderr, flush=True)


def _crew(command: Sequence[str], places: Sequence[int], shared: dict[str, str], folder: Path, meeting: _Meeting | None) -> WorkerGroup:
    here = len(places)
    if "OMP_NUM_THREADS" not in os.environ:
        shared["OMP_NUM_THREADS"] = str(max(1, cores() // here))
        shared["CARRYWAVE_THREADS_DEALT"] = "1"  # so that workers do not take it for the user's choice
    if meeting is None:
        first, size = 0, here
        shared["CARRYWAVE_STORE"] = str(folder / "store")
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        shared |= {name: loopback for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ}
    else:
        first, size = meeting.first_rank, meeting.size
        shared |= meeting.environment
    own = {}
    for local_rank, place in enumerate(places):
        numbers = {"RANK": first + local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": here}
        own[first + local_rank] = {key: str(value) for key, value in numbers.items()} | {"CARRYWAVE_PLACE": str(place)}
    return WorkerGroup(command, shared, own, size)


def _with_logs(outcome: AttemptOutcome, signals: Signals) -> Ended:
    """How an attempt ended, after copying its logs into the run's folder."""
    ended, run = outcome.ended, outcome.run
    logs = outcome.outputs.publish(run)
    if logs is None and ended.died and ended.rank is not None and not ended.trace and not ended.lost:
        outcome.outputs.show_errors(ended.rank)
    outcome.outputs.close()
    ended = replace(ended, logs=logs)
    return ended if signals.asked is None else _asked_to_stop(ended, run)


def _asked_to_stop(ended: Ended, run: Path | None) -> Ended:
    """Treat a stop before the attempt's first step as an orderly one if there is a snapshot to resume from."""
    at_once = ended.code in {128 + number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)} and not ended.message
    return Ended(STOPPED) if at_once and launch_record.last_step(run) is not None else ended


class _Decide:
    """Decides what follows a death: another attempt, one with fewer workers, or giving up."""

    def __init__(self, devices: int, restarts: int, least: int) -> None:
        self.places = list(range(devices))  # the devices in use, by index on this host
        self.given_up = ""  # what to append to the final message
        self._devices, self._restarts, self._least = devices, restarts, least
        self._used = 0
        self._step = -1  # of the newest snapshot at the previous death
        self._message = ""
        self._at_start: Counter[int] = Counter()  # deaths before the first step, by device

    def after(self, outcome: AttemptOutcome) -> str | None:
        """The line to print before the next attempt; None if there is no next attempt."""
        if self._restarts == 0:
            return None
        ended, step = outcome.ended, launch_record.last_step(outcome.run)
        place = None if ended.rank is None else self.places[ended.rank]
        reached = -1 if step is None else step
        progressed = reached > self._step
        repeated = bool(ended.trace) and not progressed and (outcome.steps == 0 or ended.message == self._message)
        if progressed:
            self._used, self._step = 0, reached
        if progressed or outcome.steps:
            self._at_start.clear()
        elif place is not None:
            self._at_start[place] += 1
        self._used += 1
        self._message = ended.message
        what = ended.message.partition(";")[0]
        where = "from the beginning" if step is None else f"from step {step}"
        may_shrink = len(self.places) > self._least
        if may_shrink and place is not None and (self._at_start[place] >= DEATHS_AT_START or self._used > self._restarts):
            self.places.remove(place)
            self._used = 0
            self._at_start.clear()
            return f"{what}; continuing with {len(self.places)} of {self._devices} workers {where}"
        if repeated and not may_shrink:
            self.given_up = "" if outcome.steps == 0 else "; it failed again at the same point"
            return None
        if self._used > self._restarts:
            self.given_up = f"; gave up after {self._restarts} restart{'s' * (self._restarts != 1)} without progress"
            return None
        return f"{what}; restarting {where} (restart {self._used} of {self._restarts})"


class _Meeting:
    """Rendezvous of several hosts: each announces its worker count in a store at the first one's address, which the workers use too."""

    def __init__(self, hosts: Hosts, devices: int) -> None:
        from carrywave.parallel.startup import native_logs
        from carrywave.parallel.startup.rendezvous import open_store, start_seconds

        native_logs.hush()
        seconds = start_seconds()
        host, port = hosts.meeting
        count = len(hosts.addresses)
        self.store = open_store(host, port, hosts.node == 0, seconds)
        self.store.set(f"host/{hosts.node}", str(devices))
        deadline = time.monotonic() + seconds
        while missing := [node for node in range(count) if not self.store.check([f"host/{node}"])]:
            if time.monotonic() > deadline:
                named = ", ".join(f"{hosts.names[node]} ({hosts.addresses[node]})" for node in missing)
                raise WorkerError(
                    f"{named} did not show up within {seconds:g} s; start it there too (to wait longer, set CARRYWAVE_START_SECONDS)"
                )
            time.sleep(POLL_SECONDS)
        each = [int(self.store.get(f"host/{node}")) for node in range(count)]
        self._node_of = [node for node, here in enumerate(each) for _ in range(here)]  # the host of each rank
        self._hosts = hosts
        self.first_rank, self.size = sum(each[: hosts.node]), sum(each)
        self.environment = {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store already exists, so rank 0 need not open it
        }
        interface = interface_of(hosts.own_host)
        if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            self.environment["GLOO_SOCKET_IFNAME"] = interface

    def advice(self, rank: int | None) -> str:
        """Advice for when contact with that rank was lost: which host it is on, and what to do."""
        hosts = self._hosts
        # Without a rank it was the first host, which holds the store; seen from the first host, it may be any other.
        nodes = [self._node_of[rank]] if rank is not None else [0] if hosts.node else range(1, len(hosts.names))
        named = ", ".join(f"{hosts.addresses[node]} ({hosts.names[node]})" for node in nodes)
        return (
            f"; check {named}: if it has ended, its output says why; if not, make sure that the hosts can reach each other; "
            "then start every host again with --resume"
        )


def interface_of(host: str) -> str | None:
    """The network interface with the address by which the others know this host: its own name often resolves to loopback only."""
    try:
        import fcntl

        address = socket.inet_aton(socket.gethostbyname(host))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = name.encode()[:15].ljust(40, b"\0")
                try:
                    answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR on Linux
                except OSError:
                    continue
                if answer[20:24] == address:
                    return name
    except (OSError, UnicodeError, ImportError):
        pass
    return None

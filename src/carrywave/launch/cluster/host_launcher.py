"""Starts workers on one of several hosts, in step with the launchers of the others.

Every launcher tells the first one how its workers are, and does what the first one commands (`coordinator`): it starts an attempt with the
others, ends it when it has failed elsewhere, and starts the next. If the first host cannot be reached, a launcher ends its workers and
tries to reach it again for a while; a launcher of the first host that was started anew in the meantime takes up where the old one was.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from carrywave.errors import WorkerError
from carrywave.launch import launch_record
from carrywave.launch.cluster.coordinator import Coordinator, look_at
from carrywave.launch.cluster.host_store import HostStore
from carrywave.launch.cluster.states import Commands, HostState, Member, SeenHost
from carrywave.launch.engines.hosts import Hosts
from carrywave.launch.exit_reports import FAULT, Ended
from carrywave.launch.supervisor import POLL_SECONDS, Signals, WorkerGroup, asked_to_stop, supervise, with_logs
from carrywave.parallel.liveness import heartbeat
from carrywave.parallel.startup.addresses import address_towards, interface_of
from carrywave.parallel.startup.launcher_env import WorkerFile

SLOW_SECONDS = 300.0  # the limit of a launcher's silence if heartbeats are off
TRY_SECONDS = 2.0  # for one attempt to reach the first host


@dataclass(frozen=True)
class HostJob:
    """What to run on this host, and how often and with how many to try again."""

    command: Sequence[str]
    devices: int
    hosts: Hosts
    environment: Mapping[str, str]
    restarts: int
    least: int | None
    start_seconds: float
    launch: str  # a name that no other launcher has; that of the launch if this is the first host
    resumes: Path | None = None  # the run that the workers go on with, if that is known before they say so


class HostLauncher:
    """The launcher of one host. Created before signals are recorded: until the first host answers, they end the process."""

    def __init__(self, job: HostJob, say: Callable[[str], None]) -> None:
        self.job, self.hosts, self._say = job, job.hosts, say
        limit = heartbeat.silent_seconds()
        self.silent_seconds = SLOW_SECONDS if limit == float("inf") else limit
        self.state = HostState(job.devices, socket.gethostname(), address_towards(self.hosts.meeting[0]), launcher=job.launch)
        self.store = HostStore(self.hosts, self.state, job.start_seconds, self.silent_seconds)
        self.coordinator: Coordinator | None = None
        if self.hosts.node == 0:
            self.coordinator = Coordinator(
                self.hosts,
                job.launch,
                restarts=job.restarts,
                least=job.least,
                start_seconds=job.start_seconds,
                silent_seconds=self.silent_seconds,
                now=time.monotonic(),
                newest_step=lambda: launch_record.last_step(self._known_run()),
            )
        self.printed: int | None = None  # lines of the commands that were printed; None: those of the first ones are not for this launcher
        self.run: Path | None = None
        self.waits = False  # said that the run goes on without this host

    def run_until_the_end(
        self, folder: Path, signals: Signals, environment: Mapping[str, str], settle: Callable[[], None] = lambda: None
    ) -> Ended:
        """Take part in attempts until the launch has ended. `environment` is for the workers, besides that of the job; `settle` waits until
        the devices are free of the workers of an earlier attempt.
        """
        logs: Path | None = None
        while True:
            commands = self._await_commands(signals)
            if isinstance(commands, Ended):
                return commands
            if commands.ended is not None:
                self._tell_all()
                return replace(commands.ended, logs=logs)
            member = commands.member(self.hosts.node, self.store.join)
            assert member is not None
            number, launch = commands.attempt, commands.launch
            if number:
                settle()
            self._put(replace(self.state, attempt=number, ends=None, steps=0, launch=launch, before=number, asked=None))
            place = folder / f"attempt-{commands.attempt}-{self.store.join}"
            outcome = supervise(self._crew(commands, member, environment), place, signals, partial(self._elsewhere, commands.attempt))
            self.run = outcome.run or self.run
            logs = with_logs(replace(outcome, run=self.run), signals, host=f"-host-{self.hosts.node}").logs
            self._put(replace(self.state, ends=outcome.ends, steps=outcome.steps, run=str(self.run or "")))

    def _await_commands(self, signals: Signals) -> Commands | Ended:
        """Wait for commands that concern this launcher: an attempt to start, or the end. An end of its own if the first host is gone."""
        while True:
            commands = self._look()
            if commands.launch:
                for line in commands.lines[len(commands.lines) if self.printed is None else self.printed :]:
                    self._say(line)
                self.printed = len(commands.lines)
            if commands.ended is not None:
                return commands
            begun = commands.attempt > self.state.attempt and commands.over_seconds is None
            if begun and commands.member(self.hosts.node, self.store.join) is not None:
                if signals.asked is not None:
                    # The attempt began before the first host knew: the workers are to be told.
                    signals.noted.insert(0, signals.asked)
                    signals.asked = None
                return commands
            if begun and not self.waits and all(member.node != self.hosts.node for member in commands.members):
                self.waits = True
                self._say("the run goes on without this host, which waits for its next restart")
            if signals.noted:
                number = signals.noted.pop(0)
                if signals.asked is not None or (self.hosts.node and self._first_is_silent()):
                    return asked_to_stop(Ended(128 + number), self.run)
                signals.asked = number
                self._put(replace(self.state, asked=number))
            if self._first_is_silent():
                gone = self._reach_again(signals)
                if gone is not None:
                    return gone
            time.sleep(POLL_SECONDS)

    def _look(self) -> Commands:
        """The commands; on the first host, after a look at all hosts."""
        if self.coordinator is not None:
            before = self.coordinator.commands
            commands = self.coordinator.look(self.store.seen | {0: SeenHost(self.store.join, self.state)}, time.monotonic())
            if commands.ended is not None and before.ended is None:
                commands = replace(commands, ended=asked_to_stop(commands.ended, self._known_run()))
                self.coordinator.commands = commands
            self.store.commands = commands
        return self.store.commands

    def _known_run(self) -> Path | None:
        """The run's folder: of this host's workers, or as others know it."""
        others = [Path(seen.state.run) for seen in self.store.seen.values() if seen.state.run]
        return self.run or next(iter(others), self.job.resumes)

    def _elsewhere(self, attempt: int) -> float | None:
        """Whether this attempt is over on the other hosts: the seconds that are left to the workers of this one, or None."""
        commands = self._look()
        if self._first_is_silent() or commands.attempt != attempt or commands.ended is not None:
            return 0.0
        return commands.over_seconds

    def _first_is_silent(self) -> bool:
        return self.hosts.node > 0 and self.store.silent_seconds() > self.silent_seconds

    def _reach_again(self, signals: Signals) -> Ended | None:
        """Try to reach the first host again, and join it anew; how this launcher ends if that fails."""
        seconds = self.job.start_seconds
        who = self.hosts.who(0)
        gone = Ended(FAULT, f"contact with {who} was lost{look_at(self.hosts, [0])}", died=True)
        before = self.store
        before.close()
        if not self.job.restarts:
            return gone
        self._say(f"contact with {who} was lost; trying to reach it again for up to {seconds:g} s")
        deadline = time.monotonic() + seconds
        known = self.state
        fresh = HostState(known.devices, known.host, known.address, known.launch, known.before, run=known.run, launcher=known.launcher)
        while time.monotonic() < deadline:
            if signals.noted:
                return asked_to_stop(Ended(128 + signals.noted.pop(0)), self.run)
            try:
                self.store = HostStore(self.hosts, fresh, TRY_SECONDS, self.silent_seconds)
            except (WorkerError, RuntimeError):
                time.sleep(POLL_SECONDS)
                continue
            self.state, self.printed, self.waits = fresh, None, False
            return None
        return replace(gone, message=f"{who} could not be reached for {seconds:g} s{look_at(self.hosts, [0])}")

    def _put(self, state: HostState) -> None:
        self.state = self.store.state = state

    def _tell_all(self) -> None:
        """Before this launcher leaves: on the first host, which holds the store, wait until the others have read how it ended."""
        self._put(replace(self.state, read=True))
        deadline = time.monotonic() + self.job.start_seconds
        while time.monotonic() < deadline and not self._first_is_silent():
            waiting = [each for each in self.store.seen.values() if not each.state.read and each.silent_seconds < self.silent_seconds]
            if self.hosts.node or not waiting:
                break
            time.sleep(POLL_SECONDS)
        # One more exchange, so that the first host need not wait for this one.
        time.sleep(0.0 if self.hosts.node == 0 else self.store.every_seconds * 2)
        self.store.close()

    def _crew(self, commands: Commands, member: Member, environment: Mapping[str, str]) -> WorkerGroup:
        """The workers of this host in an attempt."""
        address, port = self.hosts.meeting
        shared = {
            **environment,
            **self.job.environment,
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store already exists, so rank 0 need not open it
        }
        interface = self._interface()
        if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            shared["GLOO_SOCKET_IFNAME"] = interface
        file = WorkerFile(launch=commands.launch, attempt=commands.attempt, fewer=commands.fewer)
        first, size = commands.first_rank(self.hosts.node), commands.size
        return WorkerGroup.of(self.job.command, member.devices, file, shared, first=first, size=size, direct=False)

    def _interface(self) -> str | None:
        """The interface by which the other hosts reach this one: that of the address they know, or that on the way to them."""
        named = self.hosts.own_host and interface_of(self.hosts.own_host)
        if named:
            return named
        others = [seen.state.address for seen in self.store.seen.values()] if self.hosts.node == 0 else [self.hosts.meeting[0]]
        addresses = (address_towards(other) for other in others if other)
        return next((found for address in addresses if address and (found := interface_of(address))), None)

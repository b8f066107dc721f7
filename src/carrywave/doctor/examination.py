"""The course of an examination: each worker looks at itself, they meet, rank 0 compares, they try the network and measure together.

Nothing here trusts the network before it was tried. A worker says at once what is wrong with its own host, before it waits for anybody;
workers tell each other what they know through the rendezvous store, which needs only the way to rank 0; whether hosts reach each other is
tried with plain connections; and only then do they join a process group to measure. The report is rank 0's, or, if a host cannot meet
rank 0, one for each such host.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from carrywave.doctor import agreement, disk, measurement, verdicts, worker
from carrywave.doctor import profile as profiles
from carrywave.doctor.device_speed import DeviceSpeed
from carrywave.doctor.finding import Finding, of_error, well
from carrywave.doctor.links import MeasuredLink, check_links
from carrywave.doctor.meeting import Guard, Meeting
from carrywave.doctor.network import MISLED_SECONDS, Listener, Network, Target, check_meeting, check_name, check_reach, try_all
from carrywave.doctor.report import Report, finding_text
from carrywave.doctor.speed import check_speeds
from carrywave.doctor.worker import Place, Worker
from carrywave.errors import ContactLost, UserError, WorkerError
from carrywave.parallel.liveness import heartbeat, lost_contact
from carrywave.parallel.startup.launcher_env import launched, worker_file
from carrywave.parallel.startup.rendezvous import number, reason, start_seconds
from carrywave.parallel.world import World, join, launch_store, leave
from carrywave.plan.profile import Profile
from carrywave.runs import output_file

LOOK_SECONDS = 60.0  # for a worker to look at its own host: a disk may not answer
TRY_SECONDS = 20.0  # for hosts to try to reach each other
MEASURE_SECONDS = 90.0
PROFILE_SECONDS = 900.0
LATER_SECONDS = 10.0  # others wait so much longer than rank 0, which reports
BYE_SECONDS = 5.0
MOST_TRIED = 16  # other hosts that each host tries


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    device: str = "auto"
    run: str = "runs"
    meet: tuple[str, int] | None = None  # a meeting point to try, without a launcher
    profile: Path | None = None


Deliver = Callable[[Report], None]
Say = Callable[[str], None]


def place_here() -> Place:
    """This process's place, from the launcher's variables."""
    if not launched():
        return Place()
    rank, size, local_rank = number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK")
    if size < 1 or rank >= size:
        raise WorkerError(f"RANK={rank} is out of range for WORLD_SIZE={size}; correct the launcher's variables")
    return Place(rank, size, local_rank, number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else None)


def examine(request: Request, deliver: Deliver, say: Say) -> int:
    """Examine this machine, or all machines of a launch; returns the exit code. Only workers that report call `deliver`, once."""
    place = place_here()
    if place.size > 1:
        heartbeat.start()
        return _Launched(place, request, deliver, say).examine()
    return _alone(place, request, deliver)


def _alone(place: Place, request: Request, deliver: Deliver) -> int:
    """Examine a machine with one worker."""
    findings: list[Finding] = []
    guard = Guard(lambda what, seconds: deliver(Report((*findings, verdicts.too_long(what, seconds)))))
    guard.allow("looking at this host", LOOK_SECONDS)
    this_worker = worker.look(place, request.device, Network.here(None if request.meet is None else request.meet[0]), request.run)
    device = torch.device(this_worker.device)
    findings += verdicts.of_launch([this_worker], hosts=1 if launched() else None)
    if request.meet is not None:
        findings.append(check_meeting(*request.meet, first=None))
    guard.allow("device speed", MEASURE_SECONDS)
    speeds: dict[int, DeviceSpeed] = {}
    try:
        row = measurement.measure(World.alone(device), [this_worker.home], lambda what: None)
        speeds[0] = row["speed"]
        if request.profile is not None:
            guard.allow("the profile", PROFILE_SECONDS)
            findings.append(_write_profile(request.profile, profiles.measure(device.type, 1), ()))
    except UserError as error:
        findings.append(of_error("profile", error))
    except RuntimeError as error:
        findings.append(verdicts.failed({0: {"error": reason(error), "lost": False}}, [], {0: this_worker}))
    guard.done()
    findings += check_speeds(speeds, {0: this_worker.called})
    report = Report(tuple(findings), (this_worker,), speeds)
    deliver(report)
    return report.code


class _Launched:
    """One worker's part in the examination of a launch."""

    def __init__(self, place: Place, request: Request, deliver: Deliver, say: Say) -> None:
        self.place, self.request, self.deliver, self.say = place, request, deliver, say
        self.findings: list[Finding] = []  # by this worker; of rank 0, all that will be reported
        self.workers: dict[int, Worker] = {}  # on rank 0
        self.meeting: Meeting | None = None
        self.guard = Guard(self._last_word)

    @property
    def leads(self) -> bool:
        return self.place.local_rank == 0

    def examine(self) -> int:
        """Take part from beginning to end; returns the exit code."""
        self._allow("looking at this host", LOOK_SECONDS)
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        network = Network.here(address or None)
        early = self._say_early(network, address, port)
        listener = Listener(network) if self.leads and self.place.several_hosts else None
        try:
            door = ("", 0) if listener is None else (listener.address, listener.port)
            this_worker = worker.look(self.place, self.request.device, network, self.request.run, door)
            if not self._meet(this_worker, early):
                return self._apart(this_worker)
            if self.place.rank == 0:
                return self._conduct()
            return self._follow()
        finally:
            if listener is not None:
                listener.close()

    def _say_early(self, network: Network, address: str, port: str) -> list[Finding]:
        """Report what keeps this host from meeting others before it waits for them; returns what makes it pointless to wait."""
        if not self.leads or not self.place.several_hosts:
            return []
        findings = [check_name(network, hosts=2)]
        if address and port.isdecimal() and not self.place.first_host:
            # Rank 0 may be late; what is looked for is an address that leads to this host itself, or nowhere.
            findings.append(check_meeting(address, int(port), first=False, seconds=MISLED_SECONDS))
        for finding in findings:
            if finding.level == "wrong":
                self.say(finding_text(finding))
        return [finding for finding in findings if finding.what == "meeting point"]

    def _meet(self, this_worker: Worker, early: Sequence[Finding]) -> bool:
        """Go to the meeting point and describe this worker; False if it cannot be reached."""
        if not well(early):
            self.findings += early
            return False
        seconds = start_seconds()
        self._allow("the meeting point", 2 * seconds + LATER_SECONDS)
        try:
            self.meeting = Meeting(launch_store(self.place.rank, self.place.size, seconds), self.place)
            self.meeting.tell("worker", this_worker)
        except UserError as error:
            self.findings.append(of_error("meeting point", error, this_worker.host.host))
            return False
        except RuntimeError as error:
            fact = f"the rendezvous store does not answer ({reason(error)})"
            self.findings.append(Finding("wrong", "meeting point", fact, "check that rank 0 runs", this_worker.host.host))
            return False
        return True

    def _apart(self, this_worker: Worker) -> int:
        """The report of a host that could not meet rank 0."""
        self.guard.done()
        if self.leads:
            several_hosts = self.place.several_hosts
            hosts = 2 if several_hosts else 1
            of_host = worker.check_host(this_worker, workers=self.place.local_size or 1, gpus=0, world=self.place.size, hosts=hosts)
            self.deliver(Report((*self.findings, *of_host, *worker.check_device(this_worker)), (this_worker,)))
        return 1

    # Rank 0.

    def _conduct(self) -> int:
        meeting, place = self._meeting, self.place
        seconds = start_seconds()
        self._allow("the other workers", seconds + LATER_SECONDS)
        self.workers = {rank: Worker.of(values) for rank, values in meeting.collect("worker", range(place.size), seconds).items()}
        absent = [rank for rank in range(place.size) if rank not in self.workers]
        if absent:
            self.findings.append(verdicts.stayed_away(absent, self.workers, place, seconds))
        workers = list(self.workers.values())
        homes = worker.by_home(workers)
        # Workers that we started ourselves say nothing of how many hosts there will be.
        self.findings += verdicts.of_launch(workers, hosts=None if worker_file().one_host else len(homes))
        if self.request.meet is not None:
            self.findings.append(check_meeting(*self.request.meet, first=None))
        if len(homes) > 1:
            self._try_hosts(workers)
        else:
            meeting.order("try", None)
        stop = absent or any(finding.level == "wrong" and finding.what in verdicts.STOPS for finding in self.findings)
        meeting.order("measure", None if stop else [worker_.home for worker_ in workers])
        rows: dict[int, dict[str, Any]] = {}
        if stop:
            self.findings.append(Finding("warning", "speed", "devices and links were not measured", "correct the rest first"))
        else:
            rows = self._measured_by_all(workers)
        return self._end(self._report(rows))

    def _try_hosts(self, workers: Sequence[Worker]) -> None:
        """Have the hosts try to reach each other, and to see the folder of runs."""
        self._allow("the hosts to try each other", TRY_SECONDS + LATER_SECONDS)
        doors = worker.doors(workers)
        remote = "://" in self.request.run
        token = None if remote else disk.leave_token(Path(self.request.run), uuid.uuid4().hex)
        try:
            shown = {str(rank): [target.host, target.rank, target.address, target.port] for rank, target in doors.items()}
            self._meeting.order("try", {"doors": shown, "token": None if token is None else str(token)})
            self._try(self._meeting.hear("try", BYE_SECONDS))
            firsts = {group[0].rank: group[0] for group in worker.by_home(workers).values()}
            tried = self._meeting.collect("tried", firsts, TRY_SECONDS)
        finally:
            if token is not None:
                with contextlib.suppress(OSError):
                    token.unlink()
        hosts = {rank: first.host.host for rank, first in firsts.items()}
        failed = {rank: {int(other): why for other, why in each["failed"].items()} for rank, each in tried.items()}
        self.findings += check_reach(hosts, doors, failed)
        if silent := [rank for rank in hosts if rank not in tried]:
            self.findings.append(verdicts.fell_silent(silent, self.workers, TRY_SECONDS))
        if token is not None:
            self.findings.append(disk.check_shared(self.request.run, {hosts[rank]: bool(each["sees"]) for rank, each in tried.items()}))

    def _measured_by_all(self, workers: Sequence[Worker]) -> dict[int, dict[str, Any]]:
        self._allow("the measurement", MEASURE_SECONDS)
        self._measure([worker_.home for worker_ in workers])
        rows: dict[int, dict[str, Any]] = self._meeting.collect("row", range(self.place.size), LATER_SECONDS)
        errors = {rank: row for rank, row in rows.items() if "error" in row}
        if errors or len(rows) < self.place.size:
            self.findings.append(verdicts.failed(errors, [rank for rank in range(self.place.size) if rank not in rows], self.workers))
        return {rank: row for rank, row in rows.items() if "error" not in row}

    def _report(self, rows: dict[int, dict[str, Any]]) -> Report:
        names = {rank: each.called for rank, each in self.workers.items()}
        hosts = {rank: each.host.host for rank, each in self.workers.items()}
        speeds = {rank: DeviceSpeed(**row["speed"]) for rank, row in rows.items()}
        links = [MeasuredLink(**link) for row in rows.values() for link in row["links"]]
        clocks = {hosts[int(rank)]: (ahead, doubt) for row in rows.values() for rank, (ahead, doubt) in row["clocks"].items()}
        self.findings += [*agreement.check_clocks(clocks), *check_links(links, hosts), *check_speeds(speeds, names)]
        self.findings += verdicts.of_self_test({rank: row["self_test"] for rank, row in rows.items()}, self.workers)
        if self.request.profile is not None and rows:
            self._allow("the profile", PROFILE_SECONDS)
            here = [each for each in self.workers.values() if each.home == self.workers[0].home]
            kind = self.workers[0].device.partition(":")[0]
            try:
                self.findings.append(_write_profile(self.request.profile, profiles.measure(kind, len(here)), links))
            except UserError as error:
                self.findings.append(of_error("profile", error))
            self.findings += verdicts.other_devices(list(self.workers.values()))
        return Report(
            tuple(self.findings),
            tuple(self.workers.values()),
            speeds,
            tuple(links),
            clocks,
        )

    def _end(self, report: Report) -> int:
        """Report, let the others go, and wait a moment for them: the store may end with this process."""
        self.guard.done()
        try:
            self.deliver(report)
        finally:
            self._meeting.order("end", report.code)
            self._meeting.collect("bye", [rank for rank in self.workers if rank], BYE_SECONDS)
        return report.code

    # The others.

    def _follow(self) -> int:
        seconds = start_seconds() + LATER_SECONDS
        self._allow("rank 0", 2 * seconds + TRY_SECONDS)
        if self.leads:
            self._try(self._meeting.hear("try", seconds))
        homes = self._meeting.hear("measure", seconds + TRY_SECONDS)
        if homes is not None:
            self._allow("the measurement", MEASURE_SECONDS + LATER_SECONDS)
            self._measure(homes)
        patience = MEASURE_SECONDS + (0 if self.request.profile is None else PROFILE_SECONDS)
        self._allow("the report of rank 0", patience + LATER_SECONDS)
        code = self._meeting.hear("end", patience)
        self.guard.done()
        with contextlib.suppress(RuntimeError):
            self._meeting.tell("bye", "")
        if code is None and self.leads:
            self.say(f"rank {self.place.rank}: contact with rank 0 was lost before it reported; see its own output, on its host")
        return 1 if code is None else int(code)

    def _try(self, order: Any) -> None:
        """Try to reach other hosts, and to see the file that rank 0 left; report the outcome."""
        if not order:
            return
        doors = [Target(host, rank, address, port) for host, rank, address, port in order["doors"].values()]
        others = [door for door in doors if door.rank != self.place.rank]
        # In a ring from here on, so that on a large cluster every host is tried by some.
        others.sort(key=lambda door: (door.rank < self.place.rank, door.rank))
        failed = try_all(others[:MOST_TRIED])
        sees = order["token"] is not None and disk.sees_token(Path(order["token"]))
        self._meeting.tell("tried", {"failed": failed, "sees": sees})

    # All of them.

    def _measure(self, homes: Sequence[str]) -> None:
        """Join the others, measure with them, and report the outcome."""
        world: World | None = None
        try:
            self._at("connecting")
            world = join(self.request.device)
            row = measurement.measure(world, homes, self._at)
        except (UserError, ContactLost) as error:
            row = {"error": str(error), "lost": isinstance(error, ContactLost)}
        except (RuntimeError, OSError) as error:
            row = {"error": reason(error), "lost": lost_contact.lost(error)}
        self._meeting.tell("row", row)
        if "error" in row:
            self._at(f"{verdicts.FAILED}{row['error']}")
        if world is not None:
            leave(world)  # also after a failure: others see the connection close, and do not wait for this worker

    def _at(self, what: str) -> None:
        self._meeting.tell("at", what)

    @property
    def _meeting(self) -> Meeting:
        assert self.meeting is not None
        return self.meeting

    def _allow(self, what: str, seconds: float) -> None:
        self.guard.allow(what, seconds)

    def _last_word(self, what: str, seconds: float) -> None:
        """Report what is known when something takes too long; the process ends afterwards."""
        late = verdicts.too_long(what, seconds)
        if self.place.rank == 0:
            if self.meeting is not None and what == "the measurement":
                late = verdicts.stuck(self.meeting.where(), self.workers, seconds)
            self.deliver(Report((*self.findings, late), tuple(self.workers.values())))
        elif self.leads:
            time.sleep(1.0)  # launchers end everyone when one ends, so rank 0 goes first
            self.say(f"rank {self.place.rank}: {late.sentence}")


def _write_profile(path: Path, profile: Profile, links: Sequence[MeasuredLink]) -> Finding:
    output_file.write(path, profiles.completed(profile, profiles.name_of(path), links).to_json())
    return Finding("fine", "profile", f"written to {path}; carrywave plan --profile {path} and CARRYWAVE_PROFILE={path} use it")

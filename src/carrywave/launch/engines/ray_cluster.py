"""Runs workers on a Ray cluster: seats for them in a placement group, watched until all have ended. `launcher.start` does the rest.

Seats are actors of our own, not Ray Train's workers: those train in a thread of the actor, which no signal reaches, and report a failure
as an exception of Ray. So a run ends here as it does everywhere, with one exit code and one cause, and a worker that dies is replaced in
the same way. Torch-free.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from carrywave.errors import WorkerError, option
from carrywave.launch.engines.ray_seat import Outcome, Seat, SeatPlace
from carrywave.launch.exit_reports import FAULT, INTERRUPTED, MISTAKE, RESOURCE, STOPPED, Ended
from carrywave.launch.supervisor import FAULT_SECONDS, GRACE_SECONDS, AttemptOutcome, Signals, WorkerGroup
from carrywave.launch.worker_logs import Outputs, show
from carrywave.parallel.startup.door import SECRET
from carrywave.parallel.startup.launcher_env import WorkerFile

POLL_SECONDS = 0.2
HEAD_SECONDS = 5.0  # for a Ray head to accept a connection
KILL_SECONDS = 10.0  # for a seat to kill its worker, before the seat itself is killed
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # the user's own choice counts
PASSED = ("CARRYWAVE_", "OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "PYTHON")  # variables of this process that the workers get
LOCAL = ("OMP_NUM_THREADS", *INTERFACES)  # what `launcher` tells the workers of one host


class RayCluster:
    """A connection to a Ray cluster, on which `supervise` runs attempts."""

    def __init__(self, ray: Any, on_gpus: bool, start_seconds: float) -> None:
        self._ray, self._on_gpus, self._start_seconds = ray, on_gpus, start_seconds

    @property
    def gpus(self) -> int:
        """The GPUs of all nodes."""
        return int(self._ray.cluster_resources().get("GPU", 0))

    def supervise(self, crew: WorkerGroup, folder: Path, signals: Signals) -> AttemptOutcome:
        """Run one attempt. As `supervisor.supervise`, but the workers are where Ray has room for them."""
        folder.mkdir(parents=True)
        outputs = Outputs(folder / "logs")
        with self._seated(len(crew.own), signals) as seats:
            if not seats:
                signals.asked = signals.noted.pop(0)
                return AttemptOutcome(Ended(128 + signals.asked), 0, None, outputs)
            places = self._asked([seat.place.remote() for seat in seats])
            order = by_node(places)
            seats, places = [seats[index] for index in order], [places[index] for index in order]
            # What a launch on one host tells its workers about that host is not for these.
            shared = {name: value for name, value in os.environ.items() if name.startswith(PASSED) and name != SECRET}  # it never travels
            shared |= {name: value for name, value in crew.shared.items() if name not in LOCAL}
            every = [own | shared | {name: own[name] for name in own if name not in INTERFACES} for own in variables(places)]
            file = WorkerFile(launch=crew.file.launch, attempt=crew.file.attempt, fewer=crew.file.fewer).model_dump(mode="json")
            start = list(crew.command[1:]), os.getcwd()
            work = [seat.work.remote(*start, file, own, crew.size) for seat, own in zip(seats, every, strict=True)]
            ended = _SeatWatch(self._ray, seats, work, places, signals).until_all_have_ended()
        for outcome in ended:
            for name, data in outcome.logs.items():
                (outputs.folder / name).write_bytes(data)
        run = next((outcome.run for outcome in ended if outcome.run is not None), None)
        steps = max(outcome.steps for outcome in ended)
        return AttemptOutcome(combined([outcome.ended for outcome in ended]), steps, None if run is None else Path(run), outputs)

    @contextmanager
    def _seated(self, count: int, signals: Signals) -> Iterator[list[Any]]:
        """Seats in a placement group, all or none; empty if a signal came while waiting for it."""
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        need = {"CPU": max(1, int(os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0]))} | ({"GPU": 1} if self._on_gpus else {})
        group = placement_group([need] * count, strategy="PACK")
        try:
            deadline = time.monotonic() + self._start_seconds
            ready = group.ready()
            while not self._ray.wait([ready], timeout=POLL_SECONDS)[0]:
                if signals.noted:
                    yield []
                    return
                if time.monotonic() > deadline:
                    raise self._no_room(count, need)
            made = self._ray.remote(num_cpus=need["CPU"], num_gpus=need.get("GPU", 0), max_concurrency=4, max_restarts=0)(Seat)
            seats = []
            for index in range(count):
                where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
                seats.append(made.options(scheduling_strategy=where).remote())
            try:
                yield seats
            finally:
                for seat in seats:
                    self._ray.kill(seat)
        finally:
            remove_placement_group(group)

    def _asked(self, questions: Sequence[Any]) -> list[SeatPlace]:
        try:
            found: list[SeatPlace] = self._ray.get(list(questions), timeout=self._start_seconds)
        except self._ray.exceptions.RayError as error:
            why = str(error).strip().partition("\n")[0]
            raise WorkerError(
                f"Ray could not start the workers ({why}); make sure that carrywave is installed on every node, in the same version"
            ) from error
        return found

    def _no_room(self, count: int, need: Mapping[str, float]) -> WorkerError:
        have = self._ray.cluster_resources()
        what = " and ".join(f"{amount * count:g} {name}s" for name, amount in need.items())
        there = " and ".join(f"{have.get(name, 0):g} {name}s" for name in need)
        return WorkerError(
            f"{count} workers need {what}, and Ray had no room for them within {self._start_seconds:g} s (it has {there} in all); "
            f"use fewer with {option('devices')}, add nodes, or set CARRYWAVE_START_SECONDS to wait longer"
        )


@contextmanager
def connected(device: str) -> Iterator[RayCluster]:
    """The Ray cluster that this process is in or RAY_ADDRESS names; where there is none, one of this machine, as long as the context."""
    try:
        import ray
    except ImportError as error:
        raise WorkerError("--on ray needs Ray, which is not installed; install it with: pip install 'carrywave[ray]'") from error
    from carrywave.parallel.startup.rendezvous import start_seconds

    exists = _check_head(ray)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a Ray that we start tells nobody
    try:
        # A Ray that we start listens on loopback alone; one that is there already listens where its owner has it listen.
        own = {} if exists else {"address": "local", "_node_ip_address": "127.0.0.1"}
        ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = os.environ.get("RAY_ADDRESS")
        named = f"at RAY_ADDRESS={where}" if where else "of this machine"
        why = str(error).strip().partition("\n")[0]
        raise WorkerError(
            f"there is no connection to the Ray cluster {named} ({why}); start it with ray start, set RAY_AUTH_TOKEN if it asks for one, "
            "or unset RAY_ADDRESS"
        ) from error
    try:
        found = int(ray.cluster_resources().get("GPU", 0))
        if device == "cuda" and not found:
            raise WorkerError("device cuda was requested, but the Ray cluster has no GPU; use --device cpu")
        yield RayCluster(ray, device != "cpu" and found > 0, start_seconds())
    finally:
        ray.shutdown()


def _check_head(ray: Any) -> bool:
    """Whether there is a cluster to join. Ray joins the one that was last started on this machine, and waits for minutes if that is gone:
    better to ask first.
    """
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        return True
    noted = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
    try:
        host, _, port = noted.read_text(encoding="utf-8").strip().rpartition(":")
        number = int(port)
    except (OSError, ValueError):
        return False
    try:
        socket.create_connection((host, number), HEAD_SECONDS).close()
    except OSError as error:
        raise WorkerError(
            f"{noted} names a Ray cluster at {host}:{port}, but nothing answers there ({error}); start it again with ray start, "
            f"or remove {noted}, so that a cluster of this machine is started"
        ) from error
    return True


def by_node(places: Sequence[SeatPlace]) -> list[int]:
    """The seats in the order of their ranks: those of one node next to each other, nodes as they come."""
    nodes = list(dict.fromkeys(place.node for place in places))
    return sorted(range(len(places)), key=lambda index: (nodes.index(places[index].node), index))


def variables(places: Sequence[SeatPlace]) -> list[dict[str, str]]:
    """The launcher's variables for the worker of each seat, given in the order of ranks."""
    first = places[0]
    one_node = all(place.node == first.node for place in places)
    found = []
    for rank, place in enumerate(places):
        here = [index for index, other in enumerate(places) if other.node == place.node]
        numbers = {
            "RANK": rank,
            "WORLD_SIZE": len(places),
            "LOCAL_RANK": here.index(rank),
            "LOCAL_WORLD_SIZE": len(here),
            "MASTER_PORT": first.port,
        }
        own = {name: str(value) for name, value in numbers.items()}
        own["MASTER_ADDR"] = "127.0.0.1" if one_node else first.address
        if one_node:  # nothing listens where another machine could reach it
            own |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        elif place.interface is not None:
            own["GLOO_SOCKET_IFNAME"] = place.interface
        if gpus := [gpu for index in here for gpu in places[index].gpus]:
            # Every worker sees all GPUs of the run on its node: those that exchange messages in device memory need to.
            own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        found.append(own)
    return found


def combined(ends: Sequence[Ended]) -> Ended:
    """How all workers ended, from the ends of each, in the order in which they came."""
    failed = [end for end in ends if end.code not in (0, STOPPED, INTERRUPTED)]
    for end in failed:
        if not end.lost:
            return end
    if failed:  # all of them lost contact; one that names the peer says more
        return min(failed, key=lambda end: end.peer is None)
    return next((end for code in (INTERRUPTED, STOPPED) for end in ends if end.code == code), Ended(0))


class _SeatWatch:
    """Watches seats until the worker of each has ended."""

    def __init__(self, ray: Any, seats: Sequence[Any], work: Sequence[Any], places: Sequence[SeatPlace], signals: Signals) -> None:
        self._ray, self._seats, self._places, self._signals = ray, seats, places, signals
        self._running = {reference: rank for rank, reference in enumerate(work)}
        self._news: dict[int, Any] = {}  # by rank: a question that has not been answered yet
        self._ends: list[Outcome] = []
        self._deadline: float | None = None  # when the remaining workers are killed, and then their seats
        self._told = False

    def until_all_have_ended(self) -> list[Outcome]:
        while self._running:
            self._pass_on_signals()
            self._pass_on_output()
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=POLL_SECONDS)
            for reference in ready:
                rank = self._running.pop(reference)
                self._show_the_rest(rank)
                self._ends.append(self._outcome(reference, rank))
            self._end_the_others()
        return self._ends

    def _outcome(self, reference: Any, rank: int) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError:
            raise  # a fault of the seat itself
        except self._ray.exceptions.RayError:
            where = self._places[rank]
            what = f"worker {rank} of {len(self._seats)} was lost with its Ray actor on {where.host} ({where.address})"
            return Outcome(Ended(FAULT, f"{what}; check that this node is still there", rank=rank, died=True))
        return outcome

    def _end_the_others(self) -> None:
        """After a failure the others have a moment to tell what they know; then they are killed."""
        now = time.monotonic()
        failed = [outcome.ended for outcome in self._ends if outcome.ended.code not in (0, STOPPED, INTERRUPTED)]
        if failed and self._deadline is None:
            self._deadline = now + (GRACE_SECONDS if failed[0].code in (MISTAKE, RESOURCE) else FAULT_SECONDS)
        elif self._deadline is not None and now > self._deadline:
            for rank in self._running.values():
                if self._told:
                    self._ray.kill(self._seats[rank])
                else:
                    self._seats[rank].stop.remote(signal.SIGTERM, signal.SIGKILL)
            self._told, self._deadline = True, now + KILL_SECONDS

    def _pass_on_signals(self) -> None:
        while self._signals.noted:
            number = self._signals.noted.pop(0)
            if self._signals.asked is None or number != signal.SIGHUP:
                self._signals.asked = self._signals.asked or number
                for rank in self._running.values():
                    self._seats[rank].stop.remote(int(number))

    def _pass_on_output(self) -> None:
        asked = {reference: rank for rank, reference in self._news.items()}
        answered = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else []
        for reference in answered:
            self._show(self._news.pop(asked[reference]))
        for rank in set(self._running.values()) - set(self._news):
            self._news[rank] = self._seats[rank].news.remote()

    def _show_the_rest(self, rank: int) -> None:
        """Show what a worker has printed up to its end."""
        if rank in self._news:
            self._show(self._news.pop(rank))
        self._show(self._seats[rank].news.remote())

    def _show(self, answer: Any) -> None:
        with suppress(self._ray.exceptions.RayError):  # a seat that is gone: its end tells more
            for descriptor, data in self._ray.get(answer, timeout=KILL_SECONDS).items():
                show(descriptor, data)

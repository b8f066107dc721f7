"""What must be alike on all workers, and what follows from all of them together: versions, settings, clocks, transport. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carrywave.doctor.finding import Finding, ranks, several
from carrywave.doctor.worker import SETTINGS, Worker
from carrywave.errors import UserError
from carrywave.parallel.memory import peer_access
from carrywave.parallel.startup.environment import SHARE_GPU, TRANSPORT
from carrywave.plan.show.text import seconds_text

REFUSED = ("carrywave", "torch", "CUDA", "NCCL")  # training with different ones is refused, or fails within NCCL
APART_SECONDS = 1.0  # between clocks: then logs of two hosts cannot be read side by side


def check_versions(workers: Sequence[Worker]) -> list[Finding]:
    """Whether all workers have the same versions; names the ranks that do not."""
    findings: list[Finding] = []
    names = list(dict.fromkeys(name for worker in workers for name in worker.versions))
    for name in names:
        odd = differing([worker.versions.get(name, "none") for worker in workers])
        if odd is not None:
            usual, others = odd
            values = ", ".join(f"{value} on {_of(workers, places)}" for value, places in others.items())
            level: Any = "wrong" if name in REFUSED else "warning"
            findings.append(
                Finding(level, "versions", f"{name} is {values}, but {usual} elsewhere", f"install the same {name} on all hosts")
            )
    drivers = [worker.gpu.driver or "unknown" for worker in workers if worker.gpu is not None]
    if (odd := differing(drivers)) is not None:
        values = several([f"{value} ({len(places)} workers)" for value, places in odd[1].items()])
        findings.append(
            Finding("warning", "versions", f"the GPU driver is {values}, but {odd[0]} elsewhere", "install the same driver everywhere")
        )
    if findings or not workers:
        return findings
    same = ", ".join(f"{name} {value}" for name, value in workers[0].versions.items())
    return [Finding("fine", "versions", same + (f", the same on {len(workers)} workers" if len(workers) > 1 else ""))]


def check_settings(workers: Sequence[Worker]) -> list[Finding]:
    """Whether variables that workers should have in common are the same."""
    findings: list[Finding] = []
    for name in SETTINGS:
        odd = differing([worker.settings.get(name, "unset") for worker in workers])
        if odd is not None:
            values = ", ".join(f"{value} on {_of(workers, places)}" for value, places in odd[1].items())
            level: Any = "wrong" if name == TRANSPORT else "warning"
            findings.append(
                Finding(level, "settings", f"{name} is {values}, but {odd[0]} elsewhere", "set it to the same value on all workers")
            )
    return findings


def differing(values: Sequence[str]) -> tuple[str, dict[str, list[int]]] | None:
    """The usual value, and where others are; None if all are the same. Of equally frequent ones, the first is the usual."""
    if len(set(values)) < 2:
        return None
    usual = Counter(values).most_common(1)[0][0]
    others: dict[str, list[int]] = defaultdict(list)
    for place, value in enumerate(values):
        if value != usual:
            others[value].append(place)
    return usual, dict(others)


def _of(workers: Sequence[Worker], places: Sequence[int]) -> str:
    hosts = dict.fromkeys(workers[place].host.host for place in places)
    return f"{ranks([workers[place].rank for place in places])} ({several(list(hosts))})"


@dataclass(frozen=True)
class Transport:
    """What would carry messages and sums, and why."""

    name: str  # device memory, NCCL, gloo; empty: a single worker sends nothing
    why: str


def transport(workers: Sequence[Worker]) -> Transport:
    """What workers that are replicas of each other would use: the rules of `parallel.mesh` and `parallel.world`, with reasons."""
    if len(workers) == 1:
        return Transport("", "one worker sends nothing")
    neighbours = [worker.neighbour for worker in workers]
    setting = workers[0].settings.get(TRANSPORT, "auto")
    alone = all(one.gpu for one in neighbours) and len({one.gpu for one in neighbours}) == len(neighbours)
    within_reach = peer_access.in_reach(neighbours, range(len(neighbours)))
    if setting in ("auto", "device") and within_reach:
        return Transport("device memory", "GPUs of one host that reach each other's memory")
    if alone and setting != "gloo":
        homes = len({one.host for one in neighbours})
        return Transport("NCCL", f"every worker has a GPU of its own, {_beside(homes, setting)}")
    if setting == "gloo":
        return Transport("gloo", f"{TRANSPORT}=gloo asks for it")
    if not any(one.gpu for one in neighbours):
        return Transport("gloo", "the workers are on CPUs")
    return Transport("gloo", "workers share a GPU" if all(one.gpu for one in neighbours) else "some workers have no GPU")


def _beside(homes: int, setting: str) -> str:
    if setting == "nccl":
        return f"and {TRANSPORT}=nccl asks for it"
    return f"on {homes} hosts" if homes > 1 else "but they do not reach each other's memory"


def check_transport(workers: Sequence[Worker]) -> Finding:
    """Which transport would be used, and whether one that was asked for is possible."""
    setting = workers[0].settings.get(TRANSPORT, "auto")
    try:
        if setting not in peer_access.TRANSPORTS:
            raise UserError(f"{TRANSPORT}={setting} is not a transport; use one of {', '.join(peer_access.TRANSPORTS)}")
        chosen = transport(workers)
        if len(workers) > 1 and setting == "device" and chosen.name != "device memory":
            raise UserError(f"{TRANSPORT}=device needs GPUs of one host that reach each other's memory; unset it, or set it to auto")
        if len(workers) > 1 and setting == "nccl" and chosen.name != "NCCL":
            raise UserError(f"{TRANSPORT}=nccl needs a GPU of its own for every worker; unset it, or set it to auto")
    except UserError as error:
        fact, _, remedy = str(error).partition("; ")
        return Finding("wrong", "transport", fact, remedy)
    return Finding("fine", "transport", f"{chosen.name}: {chosen.why}" if chosen.name else chosen.why)


def check_gpus(workers: Sequence[Worker]) -> list[Finding]:
    """Whether workers have a GPU each, or may share them."""
    findings: list[Finding] = []
    on_gpu = [worker for worker in workers if worker.gpu is not None]
    if on_gpu and len(on_gpu) < len(workers):
        without = [worker.rank for worker in workers if worker.gpu is None]
        fact = f"{ranks(without)} of {len(workers)} have no GPU, the others have: everyone would wait for them, over gloo"
        findings.append(Finding("wrong", "devices", fact, "start workers only where there is a GPU, or pass --device cpu to all"))
    uses = Counter((worker.home, worker.gpu.uuid) for worker in on_gpu if worker.gpu is not None)
    shared = [worker for worker in on_gpu if worker.gpu is not None and uses[worker.home, worker.gpu.uuid] > 1]
    if shared and any(worker.settings.get(SHARE_GPU, "0") == "0" for worker in shared):
        fact = f"{ranks([worker.rank for worker in shared])} share a GPU"
        remedy = f"start one worker for each GPU, or set {SHARE_GPU}=1 to let them take turns, for a trial"
        findings.append(Finding("wrong", "devices", fact, remedy))
    return findings


def check_clocks(offsets: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """How far clocks of other hosts are from that of rank 0: seconds, and how uncertain that is, by host."""
    findings = [
        Finding(
            "warning",
            "clocks",
            f"the clock of {host} is {seconds_text(abs(seconds))} {'ahead of' if seconds > 0 else 'behind'} that of rank 0",
            "synchronize the clocks (chrony, ntpd); training does not depend on them, but logs do",
            host,
        )
        for host, (seconds, doubt) in offsets.items()
        if abs(seconds) - doubt > APART_SECONDS
    ]
    if findings or not offsets:
        return findings
    most = max(abs(seconds) + doubt for seconds, doubt in offsets.values())
    return [Finding("fine", "clocks", f"at most {seconds_text(most)} from that of rank 0")]

"""What follows from what the workers reported, and what they did not: the verdicts on a launch as a whole. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from carrywave.doctor import agreement, measurement, worker
from carrywave.doctor.finding import Finding, ranks, several
from carrywave.doctor.meeting import behind
from carrywave.doctor.worker import Place, Worker

# What keeps workers from joining each other: measuring together would hang, or fail with less to say.
STOPS = ("host name", "network", "devices", "transport", "settings", "meeting point", "open files")
OWN_OUTPUT = "its own output says more; correct that, and examine again"
FAILED = "failed: "  # how the last message of a worker that could not go on begins


def of_launch(present: Sequence[Worker], *, hosts: int | None) -> list[Finding]:
    """What follows from the workers' reports."""
    findings: list[Finding] = [*agreement.check_versions(present), *agreement.check_settings(present), *agreement.check_gpus(present)]
    if present:
        findings.append(agreement.check_transport(present))
    for group in worker.by_home(present).values():
        gpus = [each.gpu.uuid for each in group if each.gpu is not None]
        findings += worker.check_host(group[0], workers=len(group), gpus=len(set(gpus)), world=len(present), hosts=hosts)
        for each in group:
            findings += worker.check_device(each, sharing=gpus.count(each.gpu.uuid) if each.gpu is not None else 1)
    return findings


def stayed_away(absent: Sequence[int], present: Mapping[int, Worker], place: Place, seconds: float) -> Finding:
    """Who did not come, by all that is known of them."""
    hint = ""
    if place.local_size is not None and place.size % place.local_size == 0:
        nodes = sorted({rank // place.local_size for rank in absent})
        gone = [node for node in nodes if all(rank in absent for rank in range(node * place.local_size, (node + 1) * place.local_size))]
        whole = ", with all workers" if gone == nodes else ""
        hint = f" (host{'s' * (len(nodes) > 1)} number {several([str(node) for node in nodes])}, from 0{whole})"
    hosts = several(list(dict.fromkeys(each.host.host for each in present.values())))
    fact = f"{ranks(absent)} of {place.size}{hint} did not show up within {seconds:g} s; workers on {hosts} did"
    remedy = "start every worker, and see there why it cannot reach rank 0 (to wait longer, set CARRYWAVE_START_SECONDS)"
    return Finding("wrong", "workers", fact, remedy)


def fell_silent(silent: Sequence[int], present: Mapping[int, Worker], seconds: float) -> Finding:
    """Workers that came, and then did not answer any more."""
    fact = f"{several([present[rank].called for rank in silent])} did not say within {seconds:g} s whether other hosts can be reached"
    return Finding("wrong", "network", fact, OWN_OUTPUT)


def too_long(what: str, seconds: float) -> Finding:
    """Something took longer than it may."""
    return Finding("wrong", "hang", f"{what} took more than {seconds:g} s", "see whether a disk, a device or the network does not answer")


def stuck(at: Mapping[int, str], present: Mapping[int, Worker], seconds: float) -> Finding:
    """The measurement took longer than it may; `at` is what each rank was about to do."""
    slow, phase = behind(at, measurement.PHASES)
    if not slow:
        return too_long("the measurement", seconds)
    who = several([present[rank].called if rank in present else f"rank {rank}" for rank in slow])
    if phase.startswith(FAILED):
        return Finding("wrong", "measurement", f"{who}: {phase.removeprefix(FAILED)}", OWN_OUTPUT)
    fact = f"the measurement did not end within {seconds:g} s: {who} had come no further than {phase}"
    return Finding("wrong", "hang", fact, "see whether that device or its network does not answer (NCCL_DEBUG=INFO, GLOO_SOCKET_IFNAME)")


def failed(errors: Mapping[int, Mapping[str, Any]], silent: Sequence[int], present: Mapping[int, Worker]) -> Finding:
    """The measurement failed on these ranks, or was not finished by the silent ones. One that failed is the cause; others lost contact."""
    first = min(errors, key=lambda rank: (bool(errors[rank]["lost"]), rank), default=None)
    if first is None:
        return Finding("wrong", "measurement", f"{ranks(silent)} did not finish the measurement", OWN_OUTPUT)
    fact, _, remedy = str(errors[first]["error"]).partition("; ")
    return Finding(
        "wrong", "measurement", f"{present[first].called}: {fact}", OWN_OUTPUT if errors[first]["lost"] else remedy or OWN_OUTPUT
    )


def of_self_test(rows: Mapping[int, Sequence[Mapping[str, Any]]], present: Mapping[int, Worker]) -> list[Finding]:
    """Whether the workers computed what one device does; `rows` of each rank, as `measure.self_test` returns them."""
    wrong = [(rank, row) for rank, rank_rows in rows.items() for row in rank_rows if not row["error"] <= row["limit"]]
    if wrong:
        rank, row = wrong[0]
        tried = f"{row['plan']} over {row['over']} in {row['precision']}"
        fact = f"{tried} do not show the losses of one device: {present[rank].called} is off by {row['error']:.1g}"
        remedy = (
            "do not train on these devices; try another CARRYWAVE_TRANSPORT, and see whether memory or a link is faulty (pytest tests/gpu)"
        )
        return [Finding("wrong", "self-test", fact, remedy)]
    alike = [f"{row['plan']} over {row['over']} in {row['precision']} ({row['error']:.0e})" for row in next(iter(rows.values()), [])]
    return [Finding("fine", "self-test", f"{several(alike)} have the losses of one device, up to this error")] if alike else []


def other_devices(present: Sequence[Worker]) -> list[Finding]:
    """Warn about workers whose devices the profile does not describe."""
    names = [each.device.partition(":")[0] if each.gpu is None else each.gpu.name for each in present]
    odd = [each for each, name in zip(present, names, strict=True) if name != names[0]]
    if not odd:
        return []
    hosts = several(list(dict.fromkeys(each.host.host for each in odd)))
    fact = f"the profile describes the devices of {present[0].host.host}; those of {hosts} differ"
    return [Finding("warning", "profile", fact, "write one there too, and name both in a file for carrywave plan --cluster")]

"""The profile that the planner uses, for all models: this host's devices on a few usual sizes, and the links as they were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from carrywave.doctor.links import MeasuredLink
from carrywave.parallel import worker_pool
from carrywave.plan.profile import Link, Profile, Transport
from carrywave.train.start.machine import empty, extended, job_of, threads, usual_calls

TRANSPORTS: dict[str, Transport] = {"device memory": "device memory", "NCCL": "NCCL", "gloo": "gloo"}
PRECISIONS = {"cpu": ("fp32",), "cuda": ("bf16", "fp32", "tf32")}


def measure(kind: str, workers: int) -> Profile:
    """Measure this host's devices, cpu or cuda, in processes of their own: one alone, then as many as there are workers on it."""
    profile = empty(kind)
    for precision in PRECISIONS[kind]:
        for count in sorted({1, workers}):
            job = job_of(usual_calls(kind), precision, kind)
            rows = worker_pool.start("carrywave.train.start.timing", job, count, threads=threads(count), name="the measurement")
            profile = extended(profile, rows, precision)
    return replace(profile, devices_per_host=workers)


def completed(profile: Profile, name: str, links: Sequence[MeasuredLink]) -> Profile:
    """The profile with the slowest measured link of each kind. Pure."""
    within, between = (
        min((link for link in links if link.kind == kind), key=lambda link: link.bytes_per_second, default=None)
        for kind in ("within a host", "between hosts")
    )
    return replace(
        profile,
        name=name,
        within=profile.within if within is None else _link(within),
        between=profile.between if between is None else _link(between),
    )


def name_of(path: Path) -> str:
    """What a profile in this file is called."""
    return path.name.removesuffix(".json")


def _link(link: MeasuredLink) -> Link:
    return Link(link.latency_seconds, link.bytes_per_second, "measured", TRANSPORTS.get(link.transport, ""))

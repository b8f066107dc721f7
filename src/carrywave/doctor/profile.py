"""The profile that the planner uses, for all models: this host's devices on a grid of sizes, and the links as they were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from carrywave.doctor.links import MeasuredLink
from carrywave.measure.grid import OPTIMIZERS, PRECISIONS, modest_grid
from carrywave.measure.profiles import Wanted, empty, extended
from carrywave.plan.profile import Link, Profile, Reduction, Transport

TRANSPORTS: dict[str, Transport] = {"device memory": "device memory", "NCCL": "NCCL", "gloo": "gloo"}


def measure(kind: str, workers: int) -> Profile:
    """Measure this host's devices, cpu or cuda, in processes of their own: one alone, then as many as there are workers on it."""
    profile = empty(kind)
    for precision in PRECISIONS if kind == "cuda" else ("fp32",):
        wanted = Wanted(modest_grid(kind, precision), OPTIMIZERS if precision in ("bf16", "fp32") else (), links=False)
        profile = extended(profile, kind, precision, wanted, 1, launched=True, environment={})
    if workers > 1:
        # Cores share caches and memory, so that what several take is timed too; GPUs have their own.
        asks = modest_grid(kind, "fp32") if kind == "cpu" else []
        wanted = Wanted(asks, OPTIMIZERS if kind == "cpu" else (), links=True)
        profile = extended(profile, kind, "fp32", wanted, workers, launched=False, environment={})
    return replace(profile, devices_per_host=workers)


def completed(profile: Profile, name: str, links: Sequence[MeasuredLink], sums: Sequence[Reduction]) -> Profile:
    """The profile with the slowest measured link of each kind, and all-reduces between hosts. Pure."""
    within, between = (
        min((link for link in links if link.kind == kind), key=lambda link: link.bytes_per_second, default=None)
        for kind in ("within a host", "between hosts")
    )
    return replace(
        profile,
        name=name,
        within=profile.within if within is None else _link(within),
        between=profile.between if between is None else _link(between),
        reductions=(*profile.reductions, *sums),
    )


def name_of(path: Path) -> str:
    """What a profile in this file is called."""
    return path.name.removesuffix(".json")


def _link(link: MeasuredLink) -> Link:
    return Link(link.latency_seconds, link.bytes_per_second, "measured", TRANSPORTS.get(link.transport, ""))

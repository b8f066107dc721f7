"""A `Cluster` is a number of hosts with devices of one kind, and the links between them; `place` assigns the workers of a plan to devices.

Ranks fill the hosts in order, and `plan.placement` says which of them does what, as in the runtime: the stages of a replica are on one
host where they can be.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, Strict

from carrywave.errors import PlanError
from carrywave.plan.placement import arrange
from carrywave.plan.profile import LINKS, Link, Profile, validated

MOST_DEVICES = 1 << 16

Number = Annotated[int, Strict(), Field(ge=1, le=MOST_DEVICES)]


@dataclass(frozen=True)
class ClusterFile:
    """A cluster as it is written in a file. `within` and `between` are names of links, or their figures."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    devices: Number | list[Number]  # of each host
    hosts: Number | None = None
    profile: str | None = None
    within: Link | str | None = None
    between: Link | str | None = None


@dataclass(frozen=True)
class Placement:
    """Where the workers of replicas × stages are."""

    crossing: tuple[bool, ...]  # for each edge between stages: True if it crosses hosts in any replica
    hosts: int
    crowd: int  # workers on the fullest host


@dataclass(frozen=True)
class Cluster:
    """The devices of each host, in order, and their links: those of the profile where none are given."""

    profile: Profile
    sizes: tuple[int, ...]
    within: Link | None = None
    between: Link | None = None  # between hosts; shared by the devices of a host

    def __post_init__(self) -> None:
        if len(self.sizes) > 1 and self.between is None and self.profile.between is None:
            raise PlanError(f"the link between the {len(self.sizes)} hosts of the cluster is unknown; set `between`")

    @staticmethod
    def uniform(profile: Profile, devices: int, per_host: int | None = None) -> Cluster:
        """A cluster of `devices` devices, filling hosts one after another."""
        if not 1 <= devices <= MOST_DEVICES:
            raise PlanError(f"devices={devices} cannot be planned for; use 1 to {MOST_DEVICES}")
        each = per_host or profile.devices_per_host
        full, rest = divmod(devices, each)
        return Cluster(profile, (each,) * full + (rest,) * bool(rest))

    @staticmethod
    def of(values: object, profile: Callable[[str | None], Profile], where: str = "cluster") -> Cluster:
        """Build and validate a cluster from parsed YAML; `profile` finds one by name or file, or the one meant without."""
        given = validated(ClusterFile, values, where)
        sizes = [given.devices] * (given.hosts or 1) if isinstance(given.devices, int) else given.devices
        if given.hosts not in (None, len(sizes)):
            raise PlanError(f"{where}: hosts={given.hosts}, but devices lists {len(sizes)}; leave out hosts")
        links = [_link(each, f"{where}: {name}") for name, each in (("within", given.within), ("between", given.between))]
        # Plans use devices from the front, so put large hosts first: their devices have more neighbours on the same host.
        return Cluster(profile(given.profile), tuple(sorted(sizes, reverse=True)), *links)

    @property
    def devices(self) -> int:
        """Number of devices on all hosts."""
        return sum(self.sizes)

    def link(self, *, crossing: bool) -> Link:
        """The link between two devices, on one host or crossing hosts."""
        within = self.within or self.profile.within
        return (self.between or self.profile.between or within) if crossing else within

    def place(self, replicas: int, stages: int) -> Placement:
        """Place replicas × stages workers on the first devices of the cluster."""
        used = replicas * stages
        if used > self.devices:
            raise PlanError(f"replicas={replicas} x stages={stages} needs {used} devices, but the cluster has {self.devices}; use fewer")
        filled = [number for number, size in enumerate(self.sizes) for _ in range(size)][:used]
        home = [filled[rank] for rank in arrange(filled, stages)]
        firsts = range(0, used, stages)
        return Placement(
            tuple(any(home[first + stage] != home[first + stage + 1] for first in firsts) for stage in range(stages - 1)),
            filled[-1] + 1,
            max(Counter(filled).values()),
        )

    def sum_seconds(self, placed: Placement, workers: int, num_bytes: int, groups: int = 1) -> float:
        """Seconds of an all-reduce over this many of the placed workers: ring or tree, whichever is faster.

        `groups` all-reduces run at the same time and share the link of their host; within a host, each device has a link of its own.
        """
        if workers < 2 or num_bytes == 0:
            return 0.0
        apart = placed.hosts > 1 and (workers > placed.crowd or placed.hosts * workers > placed.crowd)
        link = self.link(crossing=True) if apart else self.within or self.profile.sums or self.profile.within
        rate = link.bytes_per_second / (groups if apart else 1)
        ring = 2 * (workers - 1) * link.latency_seconds + 2 * (workers - 1) / workers * num_bytes / rate
        tree = 2 * math.ceil(math.log2(workers)) * link.latency_seconds + 2 * num_bytes / rate
        return min(ring, tree)


def _link(given: str | Link | None, where: str) -> Link | None:
    if not isinstance(given, str):
        return given
    if given not in LINKS:
        raise PlanError(f"{where}={given!r} is not a known link; use {', '.join(LINKS)}, or give latency_seconds and bytes_per_second")
    return LINKS[given]

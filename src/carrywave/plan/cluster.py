"""A `Cluster` is a set of hosts with devices and the links between them; `place` assigns the workers of a plan to devices.

Ranks fill the hosts in order, and `plan.placement` says which of them does what, as in the runtime: the stages of a replica are on one
host where they can be. Hosts may have different kinds of devices; a plan is as fast as the slowest of those that it uses.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from carrywave.errors import PlanError
from carrywave.plan.placement import arrange
from carrywave.plan.profile import Link, Profile, validated

MOST_DEVICES = 1 << 16


@dataclass(frozen=True)
class Host:
    """A machine with devices of one kind."""

    devices: int
    profile: Profile


@dataclass(frozen=True)
class Placement:
    """Where the workers of replicas × stages are."""

    kinds: tuple[Profile, ...]  # of the devices used
    crossing: tuple[bool, ...]  # for each edge between stages: True if it crosses hosts in any replica
    hosts: int
    crowd: int  # workers on the fullest host


@dataclass(frozen=True)
class Cluster:
    """Hosts in order, and their links; omitted links are taken from the profiles."""

    hosts: tuple[Host, ...]
    within: Link | None = None
    between: Link | None = None  # between hosts; shared by the devices of a host

    def __post_init__(self) -> None:
        if not self.hosts:
            raise PlanError("the cluster has no hosts; list at least one")
        for number, host in enumerate(self.hosts):
            if host.devices < 1:
                raise PlanError(f"host {number} of the cluster has devices={host.devices}; set at least 1, or remove the host")
        if len(self.hosts) > 1 and self.between is None and any(host.profile.between is None for host in self.hosts):
            raise PlanError(f"the link between the {len(self.hosts)} hosts of the cluster is unknown; set `between`")

    @staticmethod
    def uniform(profile: Profile, devices: int) -> Cluster:
        """A cluster of `devices` devices of one kind, filling hosts one after another."""
        if devices < 1:
            raise PlanError(f"devices={devices} leaves no device to train on; use 1 or more")
        if devices > MOST_DEVICES:
            raise PlanError(f"devices={devices} is more than the planner supports; use at most {MOST_DEVICES}")
        full, rest = divmod(devices, profile.devices_per_host)
        return Cluster((Host(profile.devices_per_host, profile),) * full + ((Host(rest, profile),) if rest else ()))

    @staticmethod
    def of(values: object, profile: Callable[[str], Profile], links: Mapping[str, Link] | None = None, where: str = "cluster") -> Cluster:
        """Build and validate a cluster from parsed YAML.

        `hosts` is a number of equal hosts, each with `devices` devices of `profile`, or a list of mappings that may each give their own.
        `within` and `between` are names from `links`, or mappings with latency_seconds and bytes_per_second. The argument `profile` finds a
        profile by name or file.
        """
        keys = ("hosts", "devices", "profile", "within", "between")
        given = _mapping(values, keys, where)
        profiles: dict[str, Profile] = {}

        def host(part: Mapping[str, Any], here: str) -> Host:
            name, devices = part.get("profile", given.get("profile")), part.get("devices", given.get("devices"))
            if not isinstance(name, str):
                raise PlanError(f"{here}: profile={name!r} is not the name or file of a profile; set one")
            if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
                raise PlanError(f"{here}: devices={devices!r} is not a number of devices; use at least 1 for each host")
            if name not in profiles:
                profiles[name] = profile(name)
            return Host(devices, profiles[name])

        hosts = given.get("hosts", 1)
        if isinstance(hosts, int) and hosts > MOST_DEVICES:
            raise PlanError(f"{where}: hosts={hosts} is more than the planner supports; use at most {MOST_DEVICES}")
        if isinstance(hosts, int) and not isinstance(hosts, bool) and hosts >= 1:
            each: tuple[Host, ...] = (host({}, where),) * hosts
        elif isinstance(hosts, list) and hosts:
            each = tuple(host(_mapping(one, keys[1:3], f"{where}: hosts[{i}]"), f"{where}: hosts[{i}]") for i, one in enumerate(hosts))
        else:
            raise PlanError(f"{where}: hosts={hosts!r} is neither a number of hosts nor a list of them; set at least one")
        # Plans use devices from the front, so put large hosts first: their devices have more neighbours on the same host.
        each = tuple(sorted(each, key=lambda one: -one.devices))
        return Cluster(each, *(_link(given.get(name), links or {}, f"{where}: {name}") for name in ("within", "between")))

    @property
    def devices(self) -> int:
        """Number of devices on all hosts."""
        return sum(host.devices for host in self.hosts)

    def link_within(self, profiles: tuple[Profile, ...]) -> Link:
        """The link between devices of a host; the slowest among these kinds."""
        return self.within or min((profile.within for profile in profiles), key=lambda link: link.bytes_per_second)

    def link_between(self, profiles: tuple[Profile, ...]) -> Link:
        """The link between hosts; the slowest among these kinds."""
        links = [profile.between for profile in profiles if profile.between is not None]
        return self.between or min(links, key=lambda link: link.bytes_per_second, default=self.link_within(profiles))

    def place(self, replicas: int, stages: int) -> Placement:
        """Place replicas × stages workers on the first devices of the cluster."""
        used = replicas * stages
        if used > self.devices:
            raise PlanError(f"replicas={replicas} x stages={stages} needs {used} devices, but the cluster has {self.devices}; use fewer")
        filled = [number for number, host in enumerate(self.hosts) for _ in range(host.devices)][:used]
        home = [filled[rank] for rank in arrange(filled, stages)]
        firsts = range(0, used, stages)
        return Placement(
            tuple({id(self.hosts[host].profile): self.hosts[host].profile for host in filled}.values()),
            tuple(any(home[first + stage] != home[first + stage + 1] for first in firsts) for stage in range(stages - 1)),
            filled[-1] + 1,
            max(Counter(filled).values()),
        )

    def sum_seconds(self, placed: Placement, workers: int, num_bytes: int, groups: int = 1) -> float:
        """Seconds of an all-reduce over this many of the placed workers: ring or tree, whichever is faster.

        `groups` all-reduces run at the same time and share the link of their host.
        """
        if workers < 2 or num_bytes == 0:
            return 0.0
        apart = placed.hosts > 1 and (workers > placed.crowd or placed.hosts * workers > placed.crowd)
        if apart:
            link = self.link_between(placed.kinds)
        else:
            link = self.within or min((kind.sums or kind.within for kind in placed.kinds), key=lambda each: each.bytes_per_second)
        # Only links between hosts are shared; each device has its own link within a host.
        rate = link.bytes_per_second / (groups if apart else 1)
        ring = 2 * (workers - 1) * link.latency_seconds + 2 * (workers - 1) / workers * num_bytes / rate
        tree = 2 * math.ceil(math.log2(workers)) * link.latency_seconds + 2 * num_bytes / rate
        return min(ring, tree)


def _mapping(values: object, keys: tuple[str, ...], where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise PlanError(f"{where} must be a mapping with {', '.join(keys)}, got {values!r}; correct it")
    if unknown := [key for key in values if key not in keys]:
        near = difflib.get_close_matches(str(unknown[0]), keys, n=1)
        raise PlanError(
            f"{where}: unknown key {unknown[0]!r}; " + (f"did you mean {near[0]}?" if near else f"the keys are {', '.join(keys)}")
        )
    return values


def _link(values: object, links: Mapping[str, Link], where: str) -> Link | None:
    if values is None:
        return None
    if isinstance(values, str):
        if values not in links:
            raise PlanError(
                f"{where}={values!r} is not a known link; use one of {', '.join(links) or 'none'}, "
                "or set its latency_seconds and bytes_per_second"
            )
        return links[values]
    return validated(Link, values, where)

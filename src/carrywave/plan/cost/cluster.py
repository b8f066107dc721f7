"""A `Cluster` is a set of hosts with devices and the links between them; `place` assigns the workers of a plan to devices.

Ranks fill the hosts in order, and `plan.placement` says which of them does what, as in the runtime: the stages of a replica are on one
host where they can be. (If all hosts are alike, the order of the ranks is as good as any.) The replicas of a stage may be on different
kinds of devices; they wait for each other at every step, so a stage is as fast as its slowest device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from carrywave.errors import PlanError
from carrywave.plan.cost.profile import Link, Profile, unknown_key, validated
from carrywave.plan.placement import arrange

MOST_DEVICES = 1 << 16


@dataclass(frozen=True)
class Host:
    """A machine with devices of one kind."""

    devices: int
    profile: Profile


@dataclass(frozen=True)
class Placed:
    """The placement of replicas × stages workers."""

    profiles: tuple[tuple[Profile, ...], ...]  # per stage: the kinds of devices it runs on, over all replicas
    crossing: tuple[bool, ...]  # per edge between stages: True if it crosses hosts in any replica
    apart: bool  # True if the replicas of a stage are on several hosts
    hosts: int
    crowd: int  # workers on the fullest host

    @cached_property
    def kinds(self) -> tuple[Profile, ...]:
        """The distinct kinds of devices, by identity, since profiles are expensive to compare."""
        return tuple({id(profile): profile for kinds in self.profiles for profile in kinds}.values())


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

    def place(self, replicas: int, stages: int) -> Placed:
        """Place replicas × stages workers on the first devices of the cluster."""
        size, first = self.hosts[0].devices, self.hosts[0].profile
        used = replicas * stages
        if used > self.devices:
            raise PlanError(f"replicas={replicas} x stages={stages} needs {used} devices, but the cluster has {self.devices}; use fewer")
        full = -(-used // size)  # hosts needed if all were like the first
        alike = self.hosts[:full]
        if (
            full <= len(self.hosts)
            and all(host.devices == size for host in alike[:-1])
            and alike[-1].devices >= used - (full - 1) * size
            and all(host.profile == first for host in alike)
        ):
            return _equal(replicas, stages, size, first)
        return self._count(replicas, stages)

    def homes(self, replicas: int, stages: int) -> list[int]:
        """The host of each worker, replica by replica, stage by stage."""
        filled = [number for number, host in enumerate(self.hosts) for _ in range(host.devices)][: replicas * stages]
        return [filled[rank] for rank in arrange(filled, stages)]

    def _count(self, replicas: int, stages: int) -> Placed:
        """Place workers one by one, for hosts that differ."""
        home = self.homes(replicas, stages)
        profiles: list[tuple[Profile, ...]] = []
        for stage in range(stages):
            kinds: list[Profile] = []
            for host in dict.fromkeys(home[stage::stages]):
                if all(self.hosts[host].profile is not kind for kind in kinds):
                    kinds.append(self.hosts[host].profile)
            profiles.append(tuple(kinds))
        ranks = range(0, replicas * stages, stages)
        return Placed(
            tuple(profiles),
            tuple(any(home[rank + stage] != home[rank + stage + 1] for rank in ranks) for stage in range(stages - 1)),
            any(len(set(home[stage::stages])) > 1 for stage in range(stages)),
            max(home) + 1,
            max(home.count(host) for host in set(home)),
        )


def _equal(replicas: int, stages: int, size: int, profile: Profile) -> Placed:
    """Place workers on hosts of equal size, without enumerating them: the pattern of host boundaries repeats every `size` replicas."""
    used = replicas * stages
    ranks = range(0, min(replicas, size) * stages, stages)
    crossing = tuple(any((rank + stage + 1) % size == 0 for rank in ranks) for stage in range(stages - 1))
    return Placed(((profile,),) * stages, crossing, replicas > 1 and used > size, -(-used // size), min(used, size))


def reduce_seconds(cluster: Cluster, placed: Placed, workers: int, num_bytes: int, groups: int = 1) -> float:
    """Seconds of an all-reduce: ring or tree, whichever is faster, corrected by the measured all-reduces.

    `groups` all-reduces run at the same time and share the link of their host.
    """
    if workers < 2 or num_bytes == 0:
        return 0.0
    kinds = placed.kinds
    apart = placed.hosts > 1 and (placed.apart or workers > placed.crowd)
    link = cluster.link_between(kinds) if apart else cluster.link_within(kinds)
    # Only links between hosts are shared; each device has its own link within a host.
    rate = link.bytes_per_second / (groups if apart else 1)
    own = cluster.between is None if apart else cluster.within is None  # measured all-reduces apply only to the profile's own link
    return _model(workers, num_bytes, link.latency_seconds, rate) * (_correction(kinds[0], workers, num_bytes, apart=apart) if own else 1.0)


def _model(workers: int, num_bytes: float, latency: float, rate: float) -> float:
    ring = 2 * (workers - 1) * latency + 2 * (workers - 1) / workers * num_bytes / rate
    tree = 2 * math.ceil(math.log2(workers)) * latency + 2 * num_bytes / rate
    return min(ring, tree)


def _correction(profile: Profile, workers: int, num_bytes: int, *, apart: bool) -> float:
    """Measured over modelled time, averaged over the measured all-reduces with weights that favour the nearest ones."""
    link = profile.between if apart else profile.within
    samples = [each for each in profile.reductions if each.apart == apart]
    if not samples or link is None:
        return 1.0
    total = off = 0.0
    for each in samples:
        apart_by = math.log2(each.workers / workers) ** 2 * 4 + math.log2(each.num_bytes / num_bytes) ** 2
        weight = 1.0 / (apart_by * apart_by + 1e-9)
        total += weight
        off += weight * math.log(each.seconds / _model(each.workers, each.num_bytes, link.latency_seconds, link.bytes_per_second))
    return math.exp(off / total)


def _mapping(values: object, keys: tuple[str, ...], where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise PlanError(f"{where} must be a mapping with {', '.join(keys)}, got {values!r}; correct it")
    if unknown := [key for key in values if key not in keys]:
        raise PlanError(unknown_key(str(unknown[0]), keys, where))
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

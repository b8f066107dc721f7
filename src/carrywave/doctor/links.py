"""Links between workers: which pairs are measured, and which link is slower than others of its kind."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from carrywave.doctor.finding import Finding, size
from carrywave.plan.show.text import seconds_text

LinkKind = Literal["within a host", "between hosts"]
SLOW = 2.0  # times as slow as others of its kind
BELIEVABLE = 1e13  # bytes a second; more is noise: a large message took no longer than a small one on a busy machine


class Pair(NamedTuple):
    """Two ranks that exchange messages."""

    first: int
    second: int
    kind: LinkKind


@dataclass(frozen=True)
class MeasuredLink:
    """What a link between two ranks showed."""

    first: int
    second: int
    kind: LinkKind
    latency_seconds: float
    bytes_per_second: float
    transport: str


def pairs(homes: Sequence[str]) -> list[list[Pair]]:
    """Rounds of pairs, given the host of each rank; the pairs of a round have no rank in common and are measured at once. Pure.

    Within each host it is the first two workers. Between hosts it is the first workers of neighbours in a ring, so that a slow host shows
    on both of its sides.
    """
    groups: dict[str, list[int]] = {}
    for rank, home in enumerate(homes):
        groups.setdefault(home, []).append(rank)
    rounds = [[Pair(group[0], group[1], "within a host") for group in groups.values() if len(group) > 1]]
    firsts = [group[0] for group in groups.values()]
    edges = list(itertools.pairwise(firsts))
    for begin in (0, 1):
        rounds.append([Pair(first, second, "between hosts") for first, second in edges[begin::2]])
    if len(firsts) > 2:
        rounds.append([Pair(firsts[0], firsts[-1], "between hosts")])
    return [each for each in rounds if each]


def check_links(links: Sequence[MeasuredLink], hosts: Mapping[int, str]) -> list[Finding]:
    """What links of each kind are like, and which of them is slow. `hosts`: names by rank. Pure."""
    findings: list[Finding] = []
    kinds: tuple[LinkKind, ...] = ("within a host", "between hosts")
    for kind in kinds:
        some = [link for link in links if link.kind == kind]
        if not some:
            continue
        latency = statistics.median(link.latency_seconds for link in some)
        timed = [link for link in some if link.bytes_per_second < BELIEVABLE]
        rate = f"{size(statistics.median(link.bytes_per_second for link in timed))}/s" if timed else "a rate that noise hides"
        how = f"{seconds_text(latency)}, {rate} by {some[0].transport}"
        findings.append(Finding("fine", f"link {kind}", how + (f" (median of {len(some)})" if len(some) > 1 else "")))
        for link in timed:
            others = [other for other in timed if other is not link]
            if others:
                findings += _slow(link, others, hosts)
    return findings


def _slow(link: MeasuredLink, others: Sequence[MeasuredLink], hosts: Mapping[int, str]) -> list[Finding]:
    rate = statistics.median(other.bytes_per_second for other in others)
    factor = rate / link.bytes_per_second
    if factor < SLOW:
        return []
    ends = (
        f"rank {link.first} and rank {link.second} on {hosts[link.first]}"
        if link.kind == "within a host"
        else f"{hosts[link.first]} (rank {link.first}) and {hosts[link.second]} (rank {link.second})"
    )
    fact = f"the link between {ends} carries {size(link.bytes_per_second)}/s, others {size(rate)}/s: {factor:.2g} times as slow"
    return [Finding("warning", f"link {link.kind}", fact, "check its cable, switch port and interface; everyone waits for the slowest")]

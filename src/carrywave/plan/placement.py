"""Which rank does what: replicas × stages over workers that sit on hosts. The stages of a replica stay on one host where they can.

Ranks are the launcher's, and hosts may have any number of them in any order (Slurm can deal them out in turn). Positions are replica by
replica, stage by stage; `arrange` says which rank takes each. Messages between stages then pass between hosts as rarely as possible,
and sums over replicas, of which there is one a step, go across. Where the launcher's order is as good as any it is kept. Torch-free.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from carrywave.plan.plan import Plan

MOST_HOSTS = 16  # described, each in its line


def arrange(hosts: Sequence[Hashable], stages: int) -> tuple[int, ...]:
    """The rank at each position, given the host of each rank. Rank 0 always takes the first position."""
    size = len(hosts)
    as_given = tuple(range(size))
    if stages == 1 or stages >= size:
        return as_given
    whole: list[tuple[int, ...]] = []
    rest: list[int] = []
    by_host: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    for ranks in by_host.values():
        full = len(ranks) - len(ranks) % stages
        whole += [tuple(ranks[first : first + stages]) for first in range(0, full, stages)]
        rest += ranks[full:]
    # What is left over on the hosts is combined, host by host. Ranks ascend along a pipeline, which links between stages rely on.
    whole += [tuple(sorted(rest[first : first + stages])) for first in range(0, len(rest), stages)]
    packed = tuple(rank for pipeline in sorted(whole) for rank in pipeline)
    return packed if crossings(hosts, packed, stages) < crossings(hosts, as_given, stages) else as_given


def crossings(hosts: Sequence[Hashable], ranks: Sequence[int], stages: int) -> int:
    """How many neighbouring stages are on different hosts."""
    pairs = ((ranks[at], ranks[at + 1]) for at in range(len(ranks) - 1) if (at + 1) % stages)
    return sum(hosts[one] != hosts[other] for one, other in pairs)


@dataclass(frozen=True)
class Seat:
    """Where a worker sits, and what it does there."""

    rank: int
    host: str
    local_rank: int
    replica: int
    stage: int


def seats(hosts: Sequence[str], local_ranks: Sequence[int], plan: Plan) -> list[Seat]:
    """The seat of every rank, in the launcher's order."""
    at = {rank: position for position, rank in enumerate(arrange(hosts, plan.stages))}
    return [Seat(rank, hosts[rank], local_ranks[rank], *divmod(at[rank], plan.stages)) for rank in range(len(hosts))]


def describe(seated: Sequence[Seat]) -> list[str]:
    """A line for each host, in the launcher's order: `node0: replica 0: stages 0-1 on ranks 0-1; replica 1: stage 0 on rank 2`."""
    hosts = list(dict.fromkeys(seat.host for seat in seated))
    lines = [f"{host}: {'; '.join(_parts([seat for seat in seated if seat.host == host]))}" for host in hosts[:MOST_HOSTS]]
    return [*lines, f"and {len(hosts) - MOST_HOSTS} more hosts"] if len(hosts) > MOST_HOSTS else lines


def _parts(seated: Sequence[Seat]) -> list[str]:
    """What one host has of each replica."""
    replicas: dict[int, list[Seat]] = {}
    for seat in sorted(seated, key=lambda seat: (seat.replica, seat.stage)):
        replicas.setdefault(seat.replica, []).append(seat)
    return [
        f"replica {replica}: {_numbers('stage', [seat.stage for seat in each])} on {_numbers('rank', [seat.rank for seat in each])}"
        for replica, each in replicas.items()
    ]


def _numbers(noun: str, numbers: Sequence[int]) -> str:
    """`ranks 0-3`, `ranks 0, 2` or `rank 1`."""
    in_a_row = list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))
    text = f"{numbers[0]}-{numbers[-1]}" if in_a_row and len(numbers) > 1 else ", ".join(map(str, numbers))
    return f"{noun}{'s' * (len(numbers) > 1)} {text}"

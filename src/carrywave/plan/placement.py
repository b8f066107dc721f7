"""Which rank does what: replicas × stages over workers that sit on hosts. The stages of a replica stay on one host where they can.

Ranks are the launcher's, and hosts may have any number of them in any order (Slurm can deal them out in turn). Positions are replica by
replica, stage by stage; `arrange` says which rank takes each. Messages between stages then pass between hosts as rarely as possible,
and sums over replicas, of which there is one a step, go across. Where the launcher's order is as good as any it is kept. Torch-free.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from carrywave.plan.plan import Plan

MOST_HOSTS = 16  # described one by one


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
    """A line for each host, in the launcher's order: `node0: ranks 0-1 (local 0-1): replica 0, stages 0-1`."""
    hosts = list(dict.fromkeys(seat.host for seat in seated))
    lines = [f"{host}: {'; '.join(_runs([seat for seat in seated if seat.host == host]))}" for host in hosts[:MOST_HOSTS]]
    if len(hosts) > MOST_HOSTS:
        lines.append(f"and {len(hosts) - MOST_HOSTS} more hosts")
    return lines


def _runs(seated: Sequence[Seat]) -> list[str]:
    """Neighbours that do alike in one go: consecutive stages of a replica, or one stage of consecutive replicas."""
    runs: list[list[Seat]] = []
    for seat in seated:
        run = runs[-1] if runs else []
        step = (seat.rank - run[-1].rank, seat.local_rank - run[-1].local_rank) if run else (0, 0)
        moved = (seat.replica - run[-1].replica, seat.stage - run[-1].stage) if run else (0, 0)
        same_way = len(run) < 2 or moved == (run[1].replica - run[0].replica, run[1].stage - run[0].stage)
        if run and step == (1, 1) and moved in ((0, 1), (1, 0)) and same_way:
            run.append(seat)
        else:
            runs.append([seat])
    return [_run(run) for run in runs]


def _run(run: Sequence[Seat]) -> str:
    first, last = run[0], run[-1]
    who = f"{_range_text('rank', first.rank, last.rank)} ({_range_text('local', first.local_rank, last.local_rank, plural='local')})"
    return f"{who}: {_range_text('replica', first.replica, last.replica)}, {_range_text('stage', first.stage, last.stage)}"


def _range_text(noun: str, first: int, last: int, plural: str = "") -> str:
    return f"{noun} {first}" if first == last else f"{plural or f'{noun}s'} {first}-{last}"

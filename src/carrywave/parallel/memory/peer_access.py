"""Which workers can write to each other's GPU memory: those of one host whose GPUs reach each other, or that have shares of one GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from carrywave.errors import SpecError
from carrywave.parallel.startup.environment import TRANSPORT, shares_run_at_once
from carrywave.parallel.startup.process_identity import identity
from carrywave.parallel.world import World, all_gather_json

TRANSPORTS = ("auto", "device", "nccl", "gloo")


@dataclass(frozen=True)
class Neighbour:
    """What a worker reports to the others about its GPU."""

    host: str
    gpu: str  # its UUID; empty: none
    reaches: tuple[str, ...]  # the GPUs that it can write to, its own included if workers have shares of it


def asked() -> str:
    """The transport that the environment asks for."""
    name = os.environ.get(TRANSPORT, "") or "auto"
    if name not in TRANSPORTS:
        raise SpecError(f"{TRANSPORT}={name} is not a transport; use one of {', '.join(TRANSPORTS)}")
    return name


def neighbours(world: World) -> list[Neighbour]:
    """What every rank reports about itself. Collective: every rank must call it."""
    reports = all_gather_json(world, asdict(this_worker(world.device)))
    return [Neighbour(one["host"], one["gpu"], tuple(one["reaches"])) for one in reports]


def in_reach(neighbours: Sequence[Neighbour], ranks: Sequence[int]) -> bool:
    """True if each of these workers can write to the memory of all the others."""
    group = [neighbours[rank] for rank in ranks]
    return all(
        one.gpu and one.host == group[0].host and all(other.gpu in one.reaches for other in group if other is not one) for one in group
    )


def this_worker(device: torch.device) -> Neighbour:
    """What this worker reports about itself."""
    process = identity(os.getpid())
    host = f"{process['host']} {process['boot']}"  # hosts may have one name
    if device.type != "cuda":
        return Neighbour(host, "", ())
    index = device.index or 0
    reaches = [_uuid(n) for n in range(torch.cuda.device_count()) if n != index and torch.cuda.can_device_access_peer(index, n)]
    if shares_run_at_once():
        reaches.append(_uuid(index))
    return Neighbour(host, _uuid(index), tuple(reaches))


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)

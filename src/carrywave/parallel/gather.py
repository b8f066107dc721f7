"""Moves named tensors to and from rank 0 through host memory: what is written to disk, and what is read from it.

A JSON header describes the tensors, which follow one by one. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from carrywave.parallel.liveness import lost_contact
from carrywave.parallel.world import World, all_gather_json

Named = Mapping[str, Tensor]


@lost_contact.kept
def collect(world: World, tensors: Named) -> list[dict[str, Tensor]]:
    """On rank 0, the tensors of every rank, by rank; empty on other ranks. Collective."""
    if world.size == 1:
        return [dict(tensors)]
    headers = all_gather_json(world, _header(tensors))
    if world.rank > 0:
        for tensor in tensors.values():
            dist.send(tensor.detach().cpu().contiguous(), 0)
        return []
    by_rank = [dict(tensors)]
    for rank, header in enumerate(headers[1:], start=1):
        received: dict[str, Tensor] = {}
        for name, shape, dtype in header:
            received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.recv(received[name], rank)
        by_rank.append(received)
    return by_rank


@lost_contact.kept
def broadcast(world: World, tensors: Named | None, keep: Callable[[str, Tensor], Tensor | None] | None = None) -> dict[str, Tensor]:
    """The tensors of rank 0, on every rank, in host memory (on rank 0 unchanged). Collective.

    `keep`: what is kept of each, or None, so that no rank but 0 ever has more than one whole tensor.
    """
    keep = keep or _all_of_it
    if world.size == 1:
        return {name: part for name, tensor in (tensors or {}).items() if (part := keep(name, tensor)) is not None}
    header = all_gather_json(world, _header(tensors or {}) if world.rank == 0 else None)[0]
    kept: dict[str, Tensor] = {}
    for name, shape, dtype in header:
        if world.rank == 0 and tensors is not None:
            whole = tensors[name]
            dist.broadcast(whole.detach().cpu().contiguous(), 0)
        else:
            whole = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(whole, 0)
        if (part := keep(name, whole)) is not None:
            kept[name] = part
    return kept


def _all_of_it(name: str, tensor: Tensor) -> Tensor:
    return tensor


def _header(tensors: Named) -> list[Any]:
    return [[name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()]

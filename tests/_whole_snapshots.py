"""Snapshots as values: read from a run's folder, changed, and written again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from carrywave.runs.checkpoint.snapshot import last, read_snapshot, under, write_snapshot

GROUPS = {"parameters": "weights/", "optimizer": "optimizer/", "carry": "carry/", "outer": "outer/", "replica": "replica/"}


@dataclass(frozen=True)
class Snapshot:
    """The state of a run between two optimizer steps."""

    parameters: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    carry: Mapping[str, Tensor] = field(default_factory=dict)  # by layer name; lanes are the second dimension
    outer: Mapping[str, Tensor] = field(default_factory=dict)  # what replicas that train on their own share, besides the parameters
    replica: Mapping[str, Tensor] = field(default_factory=dict)  # and what each has of its own, by its number
    meta: dict[str, Any] = field(default_factory=dict)


def save(folder: Path, step: int, snapshot: Snapshot, keep: int = 9) -> Path:
    """Write a snapshot into the folder of snapshots; returns its file."""
    tensors = {prefix + name: tensor for group, prefix in GROUPS.items() for name, tensor in getattr(snapshot, group).items()}
    write_snapshot(folder, step, tensors, snapshot.meta, keep)
    return last(folder)


def load(folder: Path) -> Snapshot:
    """The last snapshot in the folder of snapshots."""
    stored = read_snapshot(folder)
    return Snapshot(**{group: under(prefix, stored.tensors) for group, prefix in GROUPS.items()}, meta=stored.meta)

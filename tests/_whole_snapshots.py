"""OpaqueModel snapshots in memory, and on disk in one go: what a run writes and reads by parts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.manifest import GROUPS, Manifest
from carrywave.runs.checkpoint.snapshot import (
    TEMPORARY,
    Tensors,
    open_stored,
    publish,
    ranged,
    ranges_of,
    refuse_not_finite,
    sweep,
    write_part,
    write_weights,
)


@dataclass(frozen=True)
class Snapshot:
    """The complete state of a run between two optimizer steps."""

    parameters: Tensors  # each once: a tied parameter under its first name
    optimizer: Tensors = field(default_factory=dict)
    carry: Tensors = field(default_factory=dict)  # by layer name; lanes are the second dimension
    extra: Tensors = field(default_factory=dict)  # loss scale, running sums of metrics
    outer: Tensors = field(default_factory=dict)  # what replicas that train on their own share, besides the parameters
    replica: Tensors = field(default_factory=dict)  # and what each has of its own, by its number
    meta: dict[str, Any] = field(
        default_factory=dict
    )  # JSON: cursor, seed, learning rate, spec, fingerprint, history, log sizes; tuples come back as lists


def save(folder: Path, name: str, snapshot: Snapshot, keep: int, *, best: bool = False) -> Path:
    """Write a whole snapshot into the folder of snapshots, point `last` to it, and keep at most `keep`; returns its folder."""
    meta = json.loads(json.dumps(snapshot.meta))
    groups = {group: getattr(snapshot, group) for group in GROUPS}
    groups["carry"] = {ranged(key, 0, tensor.shape[1]): tensor for key, tensor in snapshot.carry.items()}
    with atomic_files.writing(f"snapshot {folder / name}", "the previous snapshot is kept; "):
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        draft = folder / f"{TEMPORARY}{name}"
        try:
            draft.mkdir()
            files = write_part(draft, groups)
            return publish(draft, name, Manifest(files, meta), keep, best=best)
        except BaseException:
            atomic_files.remove(draft)
            raise


def load(path: Path) -> Snapshot:
    """Load the last snapshot in a folder of snapshots, or the one in this very folder; every byte is verified."""
    stored = open_stored(path)
    groups = {group: stored.read(group, stored.manifest.forms(group)) for group in GROUPS if group != "carry"}
    carry = {name: stored.lanes(name) for name in ranges_of(stored.manifest.forms("carry"))}
    return Snapshot(**groups, carry=carry, meta=stored.meta)


def save_weights(path: Path, parameters: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write only the weights, as one safetensors file, atomically."""
    refuse_not_finite(path, parameters)
    with atomic_files.writing(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_weights(path, parameters, metadata)

"""Which keys of the train section belong to which `train.sync`, and what cannot be combined with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

# The modes that read a key; any other mode would ignore it.
READ_BY = {
    "sync_every": ("local", "diloco", "async"),
    "sync_dtype": ("local", "diloco"),
    "sync_fragments": ("diloco",),
    "block_momentum": ("local",),
    "block_nesterov": ("local",),
    "outer_lr": ("diloco",),
    "outer_momentum": ("diloco",),
    "max_staleness": ("async",),
}


class Train(Protocol):
    """What is read of the train section here."""

    sync: Any
    sync_every: int
    sync_fragments: int
    block_momentum: float
    block_nesterov: bool
    optimizer: Any
    reproducible: bool


def check_sync(train: Train, defaults: Mapping[str, Any]) -> None:
    """Refuse keys that the mode would ignore, and settings that it cannot honour."""
    for key, modes in READ_BY.items():
        # A resolved spec lists every key, so one that has its default value is no mistake.
        if train.sync not in modes and getattr(train, key) != defaults[key]:
            raise ValueError(f"{key} is for train.sync={' or '.join(modes)}, not for train.sync={train.sync}; remove it")
    if train.sync == "step":
        return
    if train.reproducible:
        raise ValueError(f"reproducible needs an exchange at every step, which train.sync={train.sync} does without; remove one of them")
    if train.optimizer == "ntasgd":
        raise ValueError(f"optimizer=ntasgd averages the weights of every step, which train.sync={train.sync} does not exchange; use sgd")
    if train.block_nesterov and not train.block_momentum:
        raise ValueError("block_nesterov needs block_momentum above 0; set it, or remove block_nesterov")
    if train.sync_every % train.sync_fragments:
        raise ValueError(
            f"sync_every {train.sync_every} is not a multiple of sync_fragments {train.sync_fragments}; make it one, "
            "because one fragment is exchanged every sync_every / sync_fragments steps"
        )

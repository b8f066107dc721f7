"""Which keys of the train section belong to which `train.sync`, and what cannot be combined with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The modes that read a key; any other mode would ignore it.
READ_BY = {
    "sync_every": ("local", "diloco", "async"),
    "sync_momentum": ("local", "diloco"),
    "sync_lr": ("diloco",),
    "sync_staleness": ("async",),
}


def check_sync(train: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse keys that the mode would ignore, and settings that it cannot honour."""
    sync = train["sync"]
    for key, modes in READ_BY.items():
        # A resolved spec lists every key, so one that has its default value is no mistake.
        if sync not in modes and train[key] != defaults[key]:
            raise ValueError(f"{key} is for train.sync={' or '.join(modes)}, not for train.sync={sync}; remove it")
    if sync == "step":
        return
    if train["optimizer"] == "ntasgd":
        raise ValueError(f"optimizer=ntasgd averages the weights of every step, which train.sync={sync} does not exchange; use sgd")
    if train["ema"] is not None:
        raise ValueError(f"ema averages the weights of every step, which train.sync={sync} does not exchange; remove one of them")

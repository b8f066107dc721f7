"""Which device a worker computes on, as the user names it, and whether workers may share one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from carrywave.errors import SpecError, WorkerError, option
from carrywave.parallel.startup import environment
from carrywave.parallel.startup.rendezvous import on_every_rank


def settled(device: torch.device) -> torch.device:
    """The device with its index: a bare `cuda` means the device that is current now, whatever becomes current later."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def pick_device(name: str, local_rank: int | None = None) -> torch.device:
    """Parse a device: cpu, cuda, a GPU by its index (cuda:1), or `auto`, the GPU if there is one. Without an index, worker `local_rank` of
    a host takes the GPU of that index (modulo their number), and a single worker takes the current one.
    """
    kind, colon, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (colon and (kind != "cuda" or not index.isdecimal())):
        raise SpecError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:INDEX")
    available = torch.cuda.is_available()
    if kind == "cuda" and not available:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "" if seen is None else f" (CUDA_VISIBLE_DEVICES={seen})"
        raise SpecError(f"device cuda was requested, but no GPU is available{hint}; use {option('device', 'cpu')}")
    if kind == "cpu" or not available:
        return torch.device("cpu")
    if index:
        if int(index) >= torch.cuda.device_count():
            gpus = torch.cuda.device_count()
            raise SpecError(f"device {name} not found: this host has {gpus} GPU{'s' * (gpus != 1)}, from cuda:0; use one of them")
        return torch.device("cuda", int(index))
    return settled(torch.device("cuda")) if local_rank is None else torch.device("cuda", local_rank % torch.cuda.device_count())


def check_gpus(workers_seen: Sequence[Mapping[str, Any]]) -> None:
    """Refuse workers that share a GPU, since they would only take turns on it. The environment may allow it for trials."""
    if environment.may_share_gpu():
        return
    gpus = [(one["host"], one["gpu"]) for one in workers_seen if one["gpu"]]
    for host, gpu in gpus:
        if gpus.count((host, gpu)) > 1:
            workers = [one["host"] for one in workers_seen].count(host)
            distinct = len({each for where, each in gpus if where == host})
            raise on_every_rank(too_few_gpus(workers, distinct, host))


def too_few_gpus(workers: int, gpus: int, host: str | None = None) -> WorkerError:
    """The error for more workers than GPUs."""
    return WorkerError(
        f"{workers} workers{f' of host {host}' if host else ''} have only {gpus} GPU{'s' * (gpus > 1)}; "
        f"start one worker per GPU, or set {environment.SHARE_GPU}=1 to let them take turns, for a trial"
    )


def made_current(device: torch.device) -> torch.device:
    """The device, after making it the one that torch uses by default."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device

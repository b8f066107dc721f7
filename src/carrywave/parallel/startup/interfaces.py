"""Checks the network interfaces that the environment names for gloo and NCCL before anybody connects.

An unknown name is thus reported clearly, on every worker. torch would report it only on the worker that has it, while the others wait.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import ProcessGroupGloo

from carrywave.errors import WorkerError
from carrywave.parallel.startup.addresses import is_loopback
from carrywave.parallel.startup.rendezvous import on_every_rank, reason

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def unreachable(*, on_gpu: bool) -> str:
    """Why other workers cannot connect to this one, as a sentence with its remedy; empty if they can."""
    interfaces = [name for _, name in socket.if_nameindex()]
    for variable, missing in ((GLOO, _missing_for_gloo(interfaces)), (NCCL, _missing_for_nccl(interfaces) if on_gpu else None)):
        if missing is not None:
            return (
                f"{variable}={os.environ[variable]}: this host has no network interface {missing} "
                f"(it has {', '.join(interfaces)}); correct or unset it"
            )
    try:
        _try_gloo()
    except (RuntimeError, OSError) as error:
        named = os.environ.get(GLOO)
        which = f"through {named} ({GLOO})" if named else "by its own name"
        return f"no connection can be made to this host {which}: {reason(error)}; set {GLOO} to one of {', '.join(interfaces)}"
    return ""


def leads_home() -> bool:
    """True if gloo would advertise a loopback address, which leads every other host to itself: what this host's own name resolves to."""
    if os.environ.get(GLOO):
        return False
    try:
        resolved = socket.getaddrinfo(socket.gethostname(), None)
        return all(is_loopback(str(address[0])) for *_, address in resolved)
    except (OSError, UnicodeError):
        return True  # torch then falls back to loopback too


def check_hosts(workers: Sequence[Mapping[str, Any]]) -> None:
    """Refuse, on all workers alike, if one of them is unreachable through its configured interface, or from other hosts."""
    faults = [str(one["fault"]) for one in workers]
    several = len({(one["boot"], one["net"]) for one in workers}) > 1
    for rank, one in enumerate(workers):
        if faults[rank]:
            raise on_every_rank(WorkerError(faults[rank] if len(set(faults)) == 1 else f"rank {rank}: {faults[rank]}"))
        if several and one["home"]:
            raise on_every_rank(
                WorkerError(
                    f"host {one['host']} resolves its own name to loopback, so other hosts cannot reach its rank {rank}; "
                    f"set {GLOO} on it to an interface that they can reach, such as eth0"
                )
            )


def _missing_for_gloo(interfaces: list[str]) -> str | None:
    named = os.environ.get(GLOO, "")
    return next((name for name in named.split(",") if name not in interfaces), None) if named else None


def _missing_for_nccl(interfaces: list[str]) -> str | None:
    """The value of NCCL's variable if it matches no interface, else None.

    NCCL matches prefixes of interface names; a leading = asks for exact names, a leading ^ excludes names.
    """
    named = os.environ.get(NCCL, "")
    if not named or named.startswith("^"):
        return None
    names = named.removeprefix("=").split(",")
    fits = any(name == each if named.startswith("=") else name.startswith(each) for name in interfaces for each in names)
    return None if fits else named


def _try_gloo() -> None:
    """Do what torch will do: listen briefly at the address it would use."""
    named = os.environ.get(GLOO, "")
    for name in named.split(",") if named else [""]:
        ProcessGroupGloo.create_device(interface=name) if name else ProcessGroupGloo.create_default_device()

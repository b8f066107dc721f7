"""The rendezvous of workers before they can communicate: a small key-value store, in a file or at an address, that shows who is missing.

Every worker registers in the store, so a missing one is named after a minute instead of half an hour of silence.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from carrywave.errors import ContactLost, PortError, UserError, WorkerError, short
from carrywave.parallel.startup.addresses import GLOO, LOOPBACK
from carrywave.parallel.startup.environment import seconds_of
from carrywave.parallel.startup.launcher_env import worker_file

START_SECONDS = 60.0
NAMED = 8  # most ranks named in a message


def number(name: str) -> int:
    """An integer from the launcher's environment variables."""
    text = os.environ.get(name)
    if text is None:
        given = "RANK" if "RANK" in os.environ else "WORLD_SIZE"
        hint = " (under srun, to SLURM_LOCALID)" if name == "LOCAL_RANK" else ""
        raise WorkerError(f"{given} is set but {name} is not; start the workers with torchrun, or set it too{hint}")
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise WorkerError(f"{name}={short(text)} is not a whole number >= 0; correct it, or start the workers with torchrun")
    return int(text)


def start_seconds() -> float:
    """How long to wait for workers that do not show up."""
    return seconds_of("CARRYWAVE_START_SECONDS", START_SECONDS)


def find_store(rank: int, seconds: float) -> Store:
    """The rendezvous store: the file of a local launch, the store of torchrun's agent, or one that rank 0 opens."""
    path = worker_file().store
    if path is not None:
        # Without a worker count: given one, torch deletes the file as soon as that many of its store objects are gone.
        store: Store = FileStore(str(path))
        store.set_timeout(timedelta(seconds=seconds))
        return store
    address = os.environ.get("MASTER_ADDR")
    if not address:
        raise WorkerError("RANK is set but MASTER_ADDR is not; start the workers with torchrun, or set it to the host of rank 0")
    port = number("MASTER_PORT")
    if not 0 < port < 2**16:
        raise WorkerError(f"MASTER_PORT={port} is not a port; use a number from 1 to 65535")
    # torch's way of saying that the launcher has opened the store, so rank 0 need not.
    opened = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return open_store(address, port, rank == 0 and not opened, seconds)


def open_store(address: str, port: int, first: bool, seconds: float) -> TCPStore:
    """The store at an address: the first worker opens it there, the others connect to it.

    If the address is numeric and belongs to this host, the first worker listens only there. Otherwise, since a name may resolve differently
    on other hosts, it listens on all interfaces; it then reaches its own store through loopback, as the address may be one only the others
    can use.
    """
    nobody = WorkerError(f"nothing answered at {address}:{port} within {seconds:g} s; start rank 0 there, or correct the address and port")
    try:
        socket.getaddrinfo(address, port)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "not a host name"
        raise WorkerError(f"host {short(address)} not found ({why}); correct the address of rank 0") from error
    handle = _listen(address, port) if first else None
    at = "127.0.0.1" if first and handle is None else address
    if not first:
        _await_listener(address, port, seconds, nobody)
    made: list[TCPStore | RuntimeError] = []

    def make() -> None:
        timeout = timedelta(seconds=seconds)
        try:
            made.append(TCPStore(at, port, None, first, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=handle))
        except RuntimeError as error:
            made.append(error)

    # In a thread, because torch waits forever for the greeting of a program that is not a store.
    thread = threading.Thread(target=make, name="carrywave-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if not made:
        raise nobody if first else WorkerError(f"a program other than rank 0 answered at {address}:{port}; use a free port")
    if isinstance(made[0], RuntimeError):
        message = str(made[0]).lower()
        taken = "eaddrinuse" in message or "address already in use" in message
        raise (_taken(address, port) if taken else nobody) from made[0]
    return made[0]


def _listen(address: str, port: int) -> int | None:
    """The file descriptor of a socket listening at a numeric address; None if the address is a name, or not one of this host's."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    listener = socket.socket(socket.AF_INET if parsed.version == 4 else socket.AF_INET6)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise _taken(address, port) from error
        if error.errno == errno.EACCES:
            raise WorkerError(f"this user may not open port {port}; use one from 1024 to 65535") from error
        return None
    return listener.detach()


def _taken(address: str, port: int) -> PortError:
    remedy = "use a free one (MASTER_PORT, CARRYWAVE_PORT, --master-port)"
    return PortError(f"port {port} on {address} is in use by another program, or another training; {remedy}")


def _await_listener(address: str, port: int, seconds: float, nobody: WorkerError) -> None:
    """Wait until something listens there. torch would retry too, but log a page for each attempt."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise nobody from error
        time.sleep(0.1)


def everyone(store: Store, rank: int, size: int, about: Mapping[str, Any], seconds: float) -> list[dict[str, Any]]:
    """Register this worker, wait for the others, and return what each reported about itself."""
    if store.add(f"seats/{rank}", 1) > 1:
        fact = f"rank {rank} of {size} is already there, or was: another process of this job, or another job at the same address"
        raise ContactLost(f"{fact}; restart all workers, or use another port")
    store.set(_here(rank), json.dumps({**about, "size": size}))
    deadline = time.monotonic() + seconds
    found: list[dict[str, Any]] = []
    try:
        while len(found) < size:
            if store.check([_here(len(found))]):
                found.append(json.loads(store.get(_here(len(found)))))
                _check_size(len(found) - 1, found[-1]["size"], size)
                continue
            if store.check(["absent"]):
                raise _absent(json.loads(store.get("absent")), size, seconds)
            if time.monotonic() > deadline:
                missing = [other for other in range(len(found), min(size, 1000)) if not store.check([_here(other)])]
                store.set("absent", json.dumps(missing))
                time.sleep(1.0)  # gives the others time to read it, before the store goes away with this process
                raise _absent(missing, size, seconds)
            time.sleep(0.05)
        return found
    except RuntimeError as error:
        raise WorkerError(f"rank {rank} of {size} lost the rendezvous store ({short(str(error))}); restart all workers") from error


def _here(rank: int) -> str:
    return f"here/{rank}"


def _check_size(rank: int, theirs: int, size: int) -> None:
    """Refuse a worker of another job at the same address. Whoever is of the same size is compared in more detail once all are there."""
    if theirs != size:
        remedy = "start every worker with the same command, and another job at another port"
        raise WorkerError(f"rank {rank} is one of {theirs} workers, and this one of {size}; {remedy}")


def _absent(missing: Sequence[int], size: int, seconds: float) -> UserError:
    named = [str(rank) for rank in missing[:NAMED]] + ["others"] * (len(missing) > NAMED)
    who = f"rank {named[0]}" if len(named) == 1 else f"ranks {', '.join(named[:-1])} and {named[-1]}"
    error = WorkerError(
        f"{who} of {size} did not show up within {seconds:g} s; start every worker, and check that each can reach rank 0 "
        "(to wait longer, set CARRYWAVE_START_SECONDS)"
    )
    return on_every_rank(error, reported_by=next((rank for rank in range(size) if rank not in missing), 0))


def on_every_rank(error: UserError, reported_by: int = 0) -> UserError:
    """Mark an error as raised by every worker, to be reported by one of them."""
    error.reported_by = reported_by
    return error


def reason(error: BaseException) -> str:
    """The first line of an error, without the location in torch's source."""
    line = str(error).strip().partition("\n")[0]
    return short(re.sub(r"^\[[^]]*\.\w+:\d+\]\s*", "", line).rstrip(".") or type(error).__name__)


def check_hosts(workers: Sequence[Mapping[str, Any]]) -> None:
    """Refuse, on all workers alike, if workers of other hosts cannot reach one of them: the host where all meet has a name that leads each
    host to itself.
    """
    several = len({(one["boot"], one["net"]) for one in workers}) > 1
    for rank, one in enumerate(workers):
        if several and one["interface"] == LOOPBACK:
            remedy = f"use its address in place of the name, or set {GLOO} on it to an interface such as eth0"
            raise on_every_rank(WorkerError(f"other hosts cannot reach rank {rank}: its host {one['host']} resolves to loopback; {remedy}"))

"""How other hosts reach this one: its own name, its interfaces, the way to the meeting point; and whether they do. Torch-free.

Gloo gives others the address of the interface in GLOO_SOCKET_IFNAME, or else what the host's own name resolves to. Many systems map that
name to 127.0.0.1 or 127.0.1.1, an address that leads every other host to itself: nobody answers, and a rendezvous hangs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carrywave.doctor.finding import Finding
from carrywave.parallel.startup.addresses import addresses, is_loopback
from carrywave.parallel.startup.launcher_env import worker_file

GLOO = "GLOO_SOCKET_IFNAME"
CONNECT_SECONDS = 3.0
MISLED_SECONDS = 5.0  # for a meeting point that seems to be on this host, but should be on another


@dataclass(frozen=True)
class Network:
    """What this host knows of its own addresses."""

    host: str
    resolved: tuple[str, ...]  # what its own name resolves to; empty: nothing
    interfaces: Mapping[str, tuple[str, ...]]  # addresses by name
    named: str = ""  # the interfaces in GLOO_SOCKET_IFNAME
    way: str = ""  # the interface that leads to the meeting point; empty: unknown
    foreign: bool = False  # the host's own name resolves to an address that is not this host's

    @staticmethod
    def here(meeting: str | None = None) -> Network:
        """Look at this host. `meeting`: the name or address of the host where workers meet."""
        interfaces = addresses()
        named = os.environ.get(GLOO, "")
        if worker_file().one_host and named in ("lo", "lo0"):
            named = ""  # our own launcher's choice for workers of one host
        toward = None if meeting is None else _local_end(meeting)
        way = next((name for name, addresses in interfaces.items() if toward in addresses), "")
        resolved = _resolve(socket.gethostname())
        return Network(socket.gethostname(), resolved, interfaces, named, way, bool(resolved) and not _is_local(resolved[0]))

    @property
    def address(self) -> str:
        """The address that gloo would give to others; empty if there is none."""
        if self.named:
            return next((address for name in self.named.split(",") for address in self.interfaces.get(name, ())), "")
        return self.resolved[0] if self.resolved else ""

    @property
    def leads_home(self) -> bool:
        """True if that address leads every other host to itself."""
        return not self.address or is_loopback(self.address)

    @property
    def outward(self) -> str:
        """The interface that others are likely to reach; empty if there is only loopback."""
        names = [name for name, addresses in self.interfaces.items() if addresses and not all(map(is_loopback, addresses))]
        return self.way if self.way in names else names[0] if names else ""


def check_name(network: Network, *, hosts: int | None) -> Finding:
    """Whether other hosts can reach workers of this one. `hosts`: how many take part; None: not known."""
    what, host = "host name", network.host
    if network.named:
        missing = [name for name in network.named.split(",") if name not in network.interfaces]
        if missing:
            fact = f"{GLOO}={network.named}: this host has no network interface {missing[0]} (it has {', '.join(network.interfaces)})"
            return Finding("wrong", what, fact, "correct or unset it", host)
        if network.leads_home and (hosts or 1) > 1:
            fact = f"{GLOO}={network.named} is loopback ({network.address or 'no address'}), so that other hosts cannot reach this one"
            return Finding("wrong", what, fact, _use(network), host)
        return Finding("fine", what, f"{host}; workers are reached through {network.named} ({network.address})", where=host)
    leads = ", ".join(dict.fromkeys(network.resolved)) or "nothing"
    if not network.leads_home:
        if network.foreign and hosts != 1:
            fact = f"{host} resolves its own name to {leads}, which is not an address of this host: nobody can reach its workers there"
            return Finding("warning" if hosts is None else "wrong", what, fact, _use(network), host)
        return Finding("fine", what, f"{host} resolves to {leads}", where=host)
    fact = f"{host} resolves its own name to {leads}"
    if hosts == 1 or not network.outward:
        return Finding("fine", what, f"{fact}, which is enough on one machine", where=host)
    if hosts is None:
        fact += ", which is enough on one machine; with several, a rendezvous at that name hangs, because others are led to themselves"
        return Finding("warning", what, fact, f"before a launch on several hosts, {_use(network)}", host)
    return Finding("wrong", what, f"{fact}, so that other hosts cannot reach its workers: a rendezvous would hang", _use(network), host)


def _use(network: Network) -> str:
    name = network.outward or "an interface that they can reach"
    return f"set {GLOO}={name} on it, or map its name to an address that others can reach in /etc/hosts"


def check_meeting(address: str, port: int, *, first: bool | None, seconds: float = CONNECT_SECONDS) -> Finding:
    """Whether the meeting point can be used. `first`: it is on this host; None: that is for the address to show."""
    what, where = "meeting point", socket.gethostname()
    resolved = _resolve(address)
    if not resolved:
        fact = f"host {address} of the meeting point is not found from here"
        return Finding("wrong", what, fact, "correct the address of rank 0, or give it as a number", where)
    of_this_host = {one for addresses in addresses().values() for one in addresses}
    at_home = any(one in of_this_host or is_loopback(one) for one in resolved)
    answer = connect(resolved[0], port, seconds)
    spot = f"{address}:{port}" + ("" if address in resolved else f" ({resolved[0]})")
    if first is False and at_home and answer:
        fact = f"{address} is the host of rank 0, but leads to {resolved[0]} here, which is this host itself: a rendezvous would hang"
        return Finding("wrong", what, fact, f"map {address} to the other host's address in /etc/hosts, or use that address", where)
    if not answer:
        return Finding("fine", what, f"something listens at {spot}", where=where)
    if at_home:
        return _check_port(spot, resolved[0], port, where)
    if answer == os.strerror(errno.ECONNREFUSED):
        return Finding("fine", what, f"{spot} can be reached; nothing listens there yet", where=where)
    # Not the fault of the meeting point: that host may only be late.
    return Finding(
        "wrong", "network", f"{spot} cannot be reached from here ({answer})", "check the address, the firewall and that host", where
    )


def _check_port(spot: str, address: str, port: int, where: str) -> Finding:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            fact = f"port {port} cannot be opened here ({error.strerror})"
            return Finding("wrong", "meeting point", fact, "use a free one (MASTER_PORT, --master-port)", where)
    return Finding("fine", "meeting point", f"{spot} is this host, and the port is free", where=where)


def connect(address: str, port: int, seconds: float = CONNECT_SECONDS) -> str:
    """Try to connect; why it failed, or an empty text if it worked."""
    try:
        with socket.create_connection((address, port), timeout=seconds):
            return ""
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


class Listener:
    """A port at the address that gloo would give to others, for them to try while this object is open."""

    def __init__(self, network: Network) -> None:
        self.address, self.port = "", 0
        self._socket: socket.socket | None = None
        if not network.address:
            return
        with contextlib.suppress(OSError):
            self._socket = socket.create_server((network.address, 0), family=socket.AF_INET6 if ":" in network.address else socket.AF_INET)
            self.address, self.port = network.address, self._socket.getsockname()[1]
            threading.Thread(target=self._accept, args=(self._socket,), name="carrywave-doctor", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    @staticmethod
    def _accept(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                listening.accept()[0].close()


@dataclass(frozen=True)
class Target:
    """Where a host listens, for others to try."""

    host: str
    rank: int
    address: str
    port: int


def try_all(targets: Sequence[Target], seconds: float = CONNECT_SECONDS) -> dict[int, str]:
    """Try to connect to other hosts, all at once; why it failed, by rank, for those where it did."""
    failed: dict[int, str] = {}

    def attempt(target: Target) -> None:
        why = connect(target.address, target.port, seconds)
        if why:
            failed[target.rank] = why

    threads = [threading.Thread(target=attempt, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds + 2
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(failed)


def check_reach(hosts: Mapping[int, str], targets: Mapping[int, Target], failed: Mapping[int, Mapping[int, str]]) -> list[Finding]:
    """What the tries showed: `failed` has, for each rank that tried, why it could not reach others. Pure."""
    findings = [
        Finding(
            "wrong",
            "network",
            f"{hosts[rank]} cannot connect to {targets[other].host} at {targets[other].address} ({why}), where its workers would listen",
            f"open all ports between the hosts in the firewall, or set {GLOO} on {targets[other].host} to an interface that others reach",
            hosts[rank],
        )
        for rank, several in sorted(failed.items())
        for other, why in sorted(several.items())
    ]
    return findings or [Finding("fine", "network", f"{len(targets)} hosts can connect to each other")]


def _resolve(name: str) -> tuple[str, ...]:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in entries))


def _is_local(address: str) -> bool:
    """True if this host can listen at an address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
        trial.bind((address, 0))
        return True
    return False


def _local_end(address: str) -> str:
    """The address from which this host would send to another; nothing is sent."""
    for resolved in _resolve(address)[:1]:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET6 if ":" in resolved else socket.AF_INET, socket.SOCK_DGRAM) as trial,
        ):
            trial.connect((resolved, 9))
            return str(trial.getsockname()[0])
    return ""

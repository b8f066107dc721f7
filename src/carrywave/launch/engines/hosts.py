"""`Hosts`: the machines that train together, as an engine or the user names them, and which of them this one is.

Each engine has a file with `read(environment) -> Hosts | None`, and `surroundings` asks all of them. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from carrywave import __version__
from carrywave.errors import WorkerError

PORT = "CARRYWAVE_PORT"  # where hosts rendezvous if their engine names no port
USUAL_PORT = 29500
SLURM = "Slurm"


@dataclass(frozen=True)
class Hosts:
    """The hosts of a cluster, in the same order on all of them, and the index of this one. They rendezvous at the first one's address."""

    addresses: tuple[str, ...]  # host:port of the first; of the others what is known: host:port, or nothing
    names: tuple[str, ...]  # for messages: worker 1, chief 0
    node: int
    source: str = "TF_CONFIG"  # what named them, for messages
    workers: int | None = None  # on each host, if the engine says so
    job: str = ""  # the engine's id of the job, if it has one
    asked: Mapping[str, str] = field(default_factory=dict)  # what they are to do together (`door.job_of`)

    @property
    def meeting(self) -> tuple[str, int]:
        """Host and port of node 0, where all hosts rendezvous."""
        return host_and_port(self.addresses[0], self.source)

    @property
    def own_host(self) -> str:
        """The name or address by which the other hosts know this one; empty if the engine does not tell it."""
        own = self.addresses[self.node]
        return own and host_and_port(own, self.source)[0]

    @property
    def identity(self) -> dict[str, str]:
        """What makes a process one of these hosts, and not one of another job that came to the same port."""
        # On Slurm, a node knows the addresses of the first one and its own, and the names of all.
        listed = self.names if self.source == SLURM else self.addresses
        return {"version": __version__, "hosts": ",".join(listed), "job": self.job, **self.asked}

    def who(self, node: int) -> str:
        """A host in words: its name, and its address if known."""
        return f"{self.names[node]} ({self.addresses[node]})" if self.addresses[node] else self.names[node]


def host_and_port(address: str, source: str) -> tuple[str, int]:
    """The parts of `host:port`; an address of IPv6 is in brackets."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise WorkerError(f"{source}: {address!r} is not host:port; write it like hostA:2222")
    return host.removeprefix("[").removesuffix("]"), int(port)


def with_port(host: str, port: int) -> str:
    """`host:port`, with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def usual_port(environment: Mapping[str, str]) -> int:
    """The port of the rendezvous if neither the engine nor the user names one."""
    return whole(environment, PORT, 1, 2**16 - 1) if PORT in environment else USUAL_PORT


def whole(environment: Mapping[str, str], name: str, least: int, most: int = 10**6) -> int:
    """A whole number from the environment, within bounds."""
    text = environment[name].strip()
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not least <= int(text) <= most:
        raise WorkerError(f"{name}={text[:40]} is not a whole number from {least} to {most}; correct or unset it")
    return int(text)


def all_or_none(environment: Mapping[str, str], names: tuple[str, ...], engine: str) -> bool:
    """True if all of an engine's variables are set, False if none is; some of them alone are refused."""
    given = [name for name in names if environment.get(name, "").strip()]
    missing = [name for name in names if name not in given]
    if given and missing:
        raise WorkerError(f"{given[0]} is set but {missing[0]} is not; {engine} sets both: set it too, or unset {given[0]}")
    return not missing

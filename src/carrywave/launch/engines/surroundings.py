"""Where this process is: alone, a worker that a launcher started, or on one of several hosts that an engine or the user names.

The only module that asks the engines; nothing outside of their files knows their variables. A worker (RANK or WORLD_SIZE is set, as by
torchrun or by ourselves) is a worker whatever else is set: torchrun may itself run under Kubeflow or SkyPilot. Otherwise at most one
engine may name hosts. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from carrywave.errors import WorkerError
from carrywave.launch.engines import kubeflow, skypilot, slurm, tf_config
from carrywave.launch.engines.hosts import Hosts, host_and_port, usual_port, with_port
from carrywave.parallel.startup.launcher_env import WORKER, launched


class Engine(NamedTuple):
    """An engine that starts one process on each host, or names the workers of one host."""

    name: str
    read: Callable[[Mapping[str, str]], Hosts | None]


ENGINES = (  # an engine that starts a process on each host: its file, here; nothing else
    Engine("Slurm", slurm.read),
    Engine("TF_CONFIG", tf_config.read),
    Engine("Kubeflow (PET_ variables)", kubeflow.read),
    Engine("SkyPilot", skypilot.read),
)


@dataclass(frozen=True)
class Surroundings:
    """What this process finds around it."""

    engine: str = ""  # in words; empty for a process that was started by hand, alone
    hosts: Hosts | None = None  # several hosts, each of which starts workers of its own
    workers: int | None = None  # to start on this host, if the engine says so
    is_worker: bool = False  # a launcher has started this process as a worker


def find(environment: Mapping[str, str], names: str | None = None, index: int | None = None) -> Surroundings:
    """Where this process is. `names` and `index` are the user's `--hosts` and `--host-index`."""
    by_hand = named_hosts(names, index, environment)
    if launched(environment):
        # Our own workers get the command of the process that started them, `--hosts` included.
        if by_hand is not None and WORKER not in environment:
            raise WorkerError("--hosts names hosts, but a launcher has already started this worker (RANK is set); remove --hosts")
        return Surroundings("launcher", is_worker=True)
    found = [(engine.name, hosts) for engine in ENGINES if (hosts := engine.read(environment)) is not None]
    if by_hand is not None:
        found.append(("--hosts", by_hand))
    if len(found) > 1:
        one, other = found[0][0], found[1][0]
        raise WorkerError(f"{one} and {other} both say which hosts train together; keep one, and unset or remove the other")
    if not found:
        return Surroundings()
    engine, hosts = found[0]
    return Surroundings(engine, hosts if len(hosts.addresses) > 1 else None, hosts.workers)


def jobs(environment: Mapping[str, str]) -> list[str]:
    """The names of the engine's job that this process belongs to, which stay the same when the engine starts it again."""
    task = skypilot.job(environment)
    return [] if task is None else [f"skypilot {task}"]


def named_hosts(names: str | None, index: int | None, environment: Mapping[str, str]) -> Hosts | None:
    """The hosts of `--hosts` and `--host-index`; None if neither is given. All meet at the first one's port."""
    if names is None and index is None:
        return None
    if names is None:
        raise WorkerError(f"--host-index is {index}, but no hosts are named; name all of them, as in --hosts hostA,hostB")
    first, *others = (name.strip() for name in names.split(","))
    meeting = _address(first, usual_port(environment))
    addresses = (meeting, *(_address(name, host_and_port(meeting, "--hosts")[1]) for name in others))
    hosts = [host_and_port(address, "--hosts")[0] for address in addresses]
    if len(set(addresses)) != len(addresses):
        twice = next(host for host, address in zip(hosts, addresses, strict=True) if addresses.count(address) > 1)
        raise WorkerError(f"--hosts names {twice} twice; list every host once")
    if index is None:
        raise WorkerError(f"--hosts names {len(hosts)} hosts, but not which one this is; pass --host-index, from 0 to {len(hosts) - 1}")
    if not 0 <= index < len(hosts):
        raise WorkerError(f"--host-index {index} is out of range for {len(hosts)} hosts; use a number from 0 to {len(hosts) - 1}")
    return Hosts(addresses, tuple(f"host {each}" for each in range(len(hosts))), index, "--hosts")


def _address(name: str, port: int) -> str:
    if not name:
        raise WorkerError("--hosts has an empty name; write it like --hosts hostA:29500,hostB")
    bare = name.count(":") > 1 and not name.startswith("[")  # an address of IPv6 without a port
    return with_port(name.strip("[]"), port) if bare or ":" not in name.rpartition("]")[2] else name

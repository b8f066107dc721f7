"""Reads hosts that the user names: `--hosts hostA:29500,hostB --host-index 0`, the same list on every host. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from carrywave.errors import WorkerError
from carrywave.launch.engines.hosts import Hosts, host_and_port, usual_port, with_port


def read(names: str | None, index: int | None, environment: Mapping[str, str]) -> Hosts | None:
    """The hosts of `--hosts` and `--host-index`; None if neither is given. Only the first host's port is used."""
    if names is None and index is None:
        return None
    if names is None:
        raise WorkerError(f"--host-index is {index}, but no hosts are named; name all of them, as in --hosts hostA,hostB")
    usual = usual_port(environment)
    addresses = tuple(_address(name.strip(), usual) for name in names.split(","))
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

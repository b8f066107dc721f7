"""Hosts on one machine with links of a given rate between them: network namespaces, joined by a bridge in one more.

Each host has a pair of virtual interfaces to the bridge, both ends of which send at most so many Mbit/s (`tc … tbf`). Needs root;
everything is removed at the end.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from carrywave.errors import RunError

INTERFACE = "eth0"  # of every host, in its own namespace
BURST_BYTES, QUEUE_MS = 131_072, 200  # sent at once: more than a tick of the kernel's clock lets through at 100 Mbit/s


def address(host: int) -> str:
    """The address of a host."""
    return f"10.78.0.{host + 1}"


@contextmanager
def hosts(count: int, mbit: int) -> Iterator[list[list[str]]]:
    """The words to put before a command, to run it on each of the hosts."""
    switch, names = f"cw{os.getpid()}s", [f"cw{os.getpid()}h{number}" for number in range(count)]
    try:
        _do(["ip", "netns", "add", switch])
        _do(["ip", "-n", switch, "link", "add", "bridge0", "type", "bridge"])
        _do(["ip", "-n", switch, "link", "set", "bridge0", "up"])
        for number, name in enumerate(names):
            port = f"port{number}"
            _do(["ip", "netns", "add", name])
            _do(["ip", "link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch])
            _do(["ip", "-n", switch, "link", "set", port, "master", "bridge0", "up"])
            _do(["ip", "-n", name, "addr", "add", f"{address(number)}/24", "dev", INTERFACE])
            _do(["ip", "-n", name, "link", "set", INTERFACE, "up"])
            _do(["ip", "-n", name, "link", "set", "lo", "up"])
            for where, device in ((name, INTERFACE), (switch, port)):
                limit = ["tbf", "rate", f"{mbit}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]
                _do(["tc", "-n", where, "qdisc", "add", "dev", device, "root", *limit])
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _do(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RunError(f"{' '.join(command)}: {getattr(error, 'stderr', '') or error}; leave out --link, or run as root") from None

"""Hosts on one machine with links of a given rate between them: network namespaces, joined by a bridge in one more.

Each worker has a namespace, and a pair of virtual interfaces to the bridge, both ends of which send at most so many Mbit/s (`tc … tbf`).
Needs root; everything is removed at the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from carrywave.errors import RunError

INTERFACE = "eth0"  # of every worker, in its own namespace
BURST_BYTES = 131_072  # sent at once: more than a tick of the kernel's clock lets through at 100 Mbit/s
QUEUE_MS = 200


def reason() -> str | None:
    """Why there can be no such links here; None if it can be tried."""
    if not sys.platform.startswith("linux"):
        return "network namespaces exist only on Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{missing[0]} is not installed (iproute2)" if missing else None


@contextmanager
def hosts(count: int, mbit: int) -> Iterator[list[list[str]]]:
    """The words to put before a command, to run it on each of the hosts."""
    switch, names = f"cw{os.getpid()}s", [f"cw{os.getpid()}h{number}" for number in range(count)]
    # Namespaces outlive the process: a request to end it must not skip their removal.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        _do(["ip", "netns", "add", switch])
        _do(["ip", "-n", switch, "link", "add", "bridge0", "type", "bridge"])
        _do(["ip", "-n", switch, "link", "set", "bridge0", "up"])
        for number, name in enumerate(names):
            port = f"port{number}"
            _do(["ip", "netns", "add", name])
            _do(["ip", "link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch])
            _do(["ip", "-n", switch, "link", "set", port, "master", "bridge0", "up"])
            _do(["ip", "-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", INTERFACE])
            _do(["ip", "-n", name, "link", "set", INTERFACE, "up"])
            _do(["ip", "-n", name, "link", "set", "lo", "up"])
            for where, device in ((name, INTERFACE), (switch, port)):
                limit = ["tbf", "rate", f"{mbit}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]
                _do(["tc", "-n", where, "qdisc", "add", "dev", device, "root", *limit])
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        signal.signal(signal.SIGTERM, before)


def _do(command: Sequence[str]) -> None:
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise RunError(f"{' '.join(command)}: {made.stderr.strip() or 'failed'}; leave out --link, or run where it is permitted")

"""Which network interface of this host the other hosts reach: its own name often resolves to loopback only. Torch-free."""

from __future__ import annotations

import socket

from carrywave.parallel.startup.addresses import addresses, is_loopback


def interface_of(host: str) -> str | None:
    """The network interface with this address, or that of this name; None if there is none, or it is loopback."""
    try:
        known = socket.gethostbyname(host)
        return None if is_loopback(known) else next((name for name, own in addresses().items() if known in own), None)
    except (OSError, UnicodeError):
        return None


def address_towards(host: str) -> str:
    """This host's address on the way to another one; empty if there is no way. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            address = str(probe.getsockname()[0])
        return "" if is_loopback(address) else address
    except (OSError, UnicodeError):
        return ""

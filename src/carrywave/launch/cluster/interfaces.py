"""Which network interface of this host the other hosts reach: its own name often resolves to loopback only. Torch-free."""

from __future__ import annotations

import ipaddress
import socket


def interface_of(host: str) -> str | None:
    """The network interface with this address, or that of this name; None if there is none, or it is loopback."""
    try:
        import fcntl

        known = socket.gethostbyname(host)
        if ipaddress.ip_address(known).is_loopback:
            return None
        address = socket.inet_aton(known)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = name.encode()[:15].ljust(40, b"\0")
                try:
                    answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR on Linux
                except OSError:
                    continue
                if answer[20:24] == address:
                    return name
    except (OSError, UnicodeError, ImportError, ValueError):
        pass
    return None


def address_towards(host: str) -> str:
    """This host's address on the way to another one; empty if there is no way. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            address = str(probe.getsockname()[0])
        return "" if ipaddress.ip_address(address).is_loopback else address
    except (OSError, UnicodeError, ValueError):
        return ""

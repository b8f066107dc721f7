"""By which network interface other hosts reach this one. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import sys

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"  # which interface gloo and NCCL use; the user's own choice counts
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def is_loopback(address: str) -> bool:
    """True for 127.0.0.1 and its like."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return False


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address; None if it cannot be found, which leaves the choice to gloo."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def address_towards(host: str) -> str:
    """This host's address on the way to another one; empty if there is no way. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""


def leads_home() -> bool:
    """True if this host's own name resolves to loopback, and no interface is named: it leads other hosts to themselves."""
    if os.environ.get(GLOO):
        return False
    try:
        return all(is_loopback(str(address[0])) for *_, address in socket.getaddrinfo(socket.gethostname(), None))
    except (OSError, UnicodeError):
        return True


def choose_interface(meeting: str) -> str:
    """Have gloo connect through the interface that leads to the host where all meet, whatever this host's own name resolves to; over
    loopback alone if that is this host. Returns the interface, or nothing if the user has named one, or none is known.
    """
    if os.environ.get(GLOO):
        return ""
    address = address_towards(meeting)
    if is_loopback(address):
        os.environ |= {GLOO: LOOPBACK, NCCL: os.environ.get(NCCL) or LOOPBACK}
        return LOOPBACK
    if interface := interface_of(address):
        os.environ[GLOO] = interface
    return interface or ""

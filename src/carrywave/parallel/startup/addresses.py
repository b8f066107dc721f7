"""The addresses of this host's network interfaces, and by which of them other hosts reach it. Torch-free."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"  # which interface gloo and NCCL use; the user's own choice counts
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def is_loopback(address: str) -> bool:
    """True for 127.0.0.1 and its like."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return False


def addresses() -> dict[str, tuple[str, ...]]:
    """The addresses of each interface, as far as the system reports them without further libraries."""
    by_interface: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            for name in by_interface:
                with contextlib.suppress(OSError):
                    answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                    by_interface[name].append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/net/if_inet6").read_text("ascii").splitlines():
            digits, *_, scope, _, name = line.split()
            if name in by_interface and scope in ("00", "10"):  # global and loopback; link-local addresses need an interface to be of use
                by_interface[name].append(str(ipaddress.IPv6Address(int(digits, 16))))
    return {name: tuple(each) for name, each in by_interface.items()}


def interface_of(host: str) -> str | None:
    """The network interface with this address, or that of this name; None if there is none, or it is loopback."""
    try:
        address = socket.gethostbyname(host)
        return None if is_loopback(address) else next((name for name, assigned in addresses().items() if address in assigned), None)
    except (OSError, UnicodeError):
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

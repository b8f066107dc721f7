"""What identifies a process, across hosts and after its id is used again, and whether it is gone. Torch-free.

Linux shows it in /proc; elsewhere less is known, and no process is said to be gone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BOOT = Path("/proc/sys/kernel/random/boot_id")
EXITING = 0x4  # Linux's PF_EXITING, in the flags of a process


def identity(pid: int) -> dict[str, str | int]:
    """Host, id and start time of a process of this host, the kernel's current boot, and the namespaces of its ids and its network."""
    host = socket.gethostname()
    try:
        born, boot = stat_fields(pid)[19], BOOT.read_text(encoding="utf-8").strip()
        space, net = (os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("pid", "net"))
    except (OSError, IndexError):
        return {"host": host, "pid": pid, "born": "", "boot": "", "space": "", "net": host}
    return {"host": host, "pid": pid, "born": born, "boot": boot, "space": space, "net": net}


def is_gone(process: Mapping[str, Any]) -> bool:
    """True if the process with this identity ran on this host and has ended, or is about to."""
    current = identity(os.getpid())
    if not current["boot"] or any(current[name] != process.get(name) for name in ("boot", "space")):
        return False
    try:
        words = stat_fields(process["pid"])
    except FileNotFoundError:
        return True
    except OSError:
        return False  # another user's process, hidden from us
    # A process that is exiting may take seconds to let go of its GPU; it is not coming back.
    return words[0] in "ZX" or bool(int(words[6]) & EXITING) or words[19] != process["born"]


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat, from the process state on."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()

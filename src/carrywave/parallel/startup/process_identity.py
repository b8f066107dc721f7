"""What identifies a process, across hosts and after its id is used again, and whether it is gone. Torch-free.

Linux shows it in /proc; elsewhere less is known.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

UNKNOWN = "unknown to"  # a start time that the system does not report: no two processes have the same
EXITING = 0x4  # Linux's PF_EXITING, in the flags of a process


def identity(pid: int) -> dict[str, str | int]:
    """Host, id and start time of a process of this host, the kernel's current boot, and the namespaces of its ids and its network."""
    host = socket.gethostname()
    try:
        born, boot = stat_fields(pid)[19], boot_id()
        space, net = (os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("pid", "net"))
    except (OSError, IndexError):
        return {"host": host, "pid": pid, "born": f"{UNKNOWN} {os.getpid()}", "boot": "", "space": "", "net": host}
    return {"host": host, "pid": pid, "born": born, "boot": boot, "space": space, "net": net}


def is_gone(process: Mapping[str, Any]) -> bool:
    """True if the process with this identity ran on this host and has ended, or is about to."""
    current = identity(os.getpid())
    here = current["boot"] and all(current[name] == process.get(name) for name in ("boot", "space"))
    return bool(here and has_ended(process["pid"], process["born"]))


def has_ended(pid: int, born: str) -> bool | None:
    """True if the process of this host with this id and start time has ended, or is about to; None if that cannot be seen."""
    with suppress(OSError, IndexError, ValueError):
        words = stat_fields(pid)
        # A process that is exiting may take seconds to let go of its GPU; it is not coming back.
        if words[0] in "ZX" or int(words[6]) & EXITING:
            return True
        if not born.startswith(UNKNOWN):
            return words[19] != born
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return None  # another user's process, hidden from us
    return False if pid == os.getpid() else None


def boot_id() -> str:
    """The id of the kernel's current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat, from the process state on."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def processor_ticks(pid: int) -> int:
    """CPU time of a process in Linux clock ticks; 0 on other systems."""
    try:
        words = stat_fields(pid)
        return int(words[11]) + int(words[12])
    except (OSError, IndexError, ValueError):
        return 0

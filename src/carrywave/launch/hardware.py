"""Detects the CPU cores and GPUs that this process may use. Torch-free."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import lru_cache

from carrywave.parallel.startup.environment import shares_of_a_gpu
from carrywave.spec.defaults import BF16_CAPABILITY


def cores() -> int:
    """The number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> list[str]:
    """The names of the GPUs this process may use, as restricted by CUDA_VISIBLE_DEVICES; of shares, if workers share them."""
    names = nvidia_smi("name")
    # An index selects its GPU; any other entry (a UUID) counts as one GPU, with the name of the first.
    found = [names[entry if isinstance(entry, int) else 0] for entry in visible()]
    count = shares_of_a_gpu()
    return found if count == 1 else [f"1/{count} of {name}" for name in found * count]


def made_for_bf16(device: str) -> bool:
    """True if workers on this device (cpu, cuda or auto) would have GPUs that are all made for bf16."""
    capabilities = () if device == "cpu" else nvidia_smi("compute_cap")
    used: set[str] = set()
    for entry in visible() if capabilities else ():
        used |= {capabilities[entry]} if isinstance(entry, int) else set(capabilities)  # a UUID may be that of any of them
    return bool(used) and all(_capability(each) >= BF16_CAPABILITY for each in used)


def _capability(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def visible() -> list[int | str]:
    """The GPUs this process may use, each by its index or, as CUDA_VISIBLE_DEVICES may have it, by its UUID."""
    count = len(nvidia_smi("name"))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(range(count))
    found: list[int | str] = []
    for entry in (each.strip() for each in listed.split(",")):
        # CUDA ignores everything from the first invalid entry on.
        if not count or entry in ("", "-1") or (entry.isdecimal() and int(entry) >= count):
            break
        found.append(int(entry) if entry.isdecimal() else entry)
    return found


@lru_cache(maxsize=8)
def nvidia_smi(field: str) -> tuple[str, ...]:
    """One field of nvidia-smi's report for each GPU; empty if there is no GPU, or nvidia-smi fails or times out."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(line.strip() for line in asked.stdout.splitlines() if line.strip()) if asked.returncode == 0 else ()

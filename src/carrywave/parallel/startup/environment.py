"""Rejects invalid environment variables with a one-line message before any library reads them and responds with warnings or tracebacks.

Variables that identify a worker (RANK and the like) are read and checked where it joins the others. Torch-free.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable
from typing import NamedTuple

from carrywave.errors import ResourceError, WorkerError
from carrywave.parallel.startup import launcher_env

MOST_THREADS = 4096
SHARE_GPU = "CARRYWAVE_SHARE_GPU"  # 1: several workers may take turns on a GPU; N: each GPU is divided among N workers; 0: neither
TRANSPORT = "CARRYWAVE_TRANSPORT"  # what carries messages and sums: device, nccl or gloo; auto: the best that there is
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # 1: torch lets several workers share memory of one GPU
OWN_FILES, FILES_OF_PEER = 40, 4  # descriptors that a worker needs for itself, and for each other worker
MOST_SHARES = 48  # clients of MPS on one GPU


class _Rule(NamedTuple):
    names: tuple[str, ...]
    holds: Callable[[str], bool]
    what: str
    remedy: str


def _threads(text: str) -> bool:
    # OMP_NUM_THREADS may list one number per nesting level.
    return all(_whole(part.strip()) and 0 < int(part) <= MOST_THREADS for part in text.split(","))


def _whole(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


SHARES = _Rule(
    (SHARE_GPU,),
    lambda text: _whole(text) and int(text) <= MOST_SHARES,
    f"a number of workers from 0 to {MOST_SHARES}",
    "use 1 to let workers take turns on a GPU, N to divide it among N of them, or unset it",
)
RULES = (
    _Rule(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), _threads, f"a number of threads from 1 to {MOST_THREADS}", "correct or unset it"),
    _Rule(
        ("TORCH_CPP_LOG_LEVEL",),
        lambda text: text in ("INFO", "WARNING", "ERROR", "FATAL", "0", "1", "2", "3"),
        "one of INFO, WARNING, ERROR or FATAL",
        "correct or unset it",
    ),
    _Rule(
        ("TORCH_DISTRIBUTED_DEBUG",),
        lambda text: text.upper() in ("OFF", "INFO", "DETAIL"),
        "one of OFF, INFO or DETAIL",
        "correct or unset it",
    ),
    SHARES,
)


def check(*rules: _Rule) -> None:
    """Refuse values that break these rules, by default any of them. An empty variable counts as unset."""
    if not rules:
        launcher_env.worker_file()
    for rule in rules or RULES:
        for name in rule.names:
            text = os.environ.get(name, "")
            if text and not rule.holds(text):
                shown = text if len(text) <= 60 else f"{text[:57]}…"
                raise WorkerError(f"{name}={shown} is not {rule.what}; {rule.remedy}")


def may_share_gpu() -> bool:
    """True if several workers may use one GPU."""
    return os.environ.get(SHARE_GPU, "") not in ("", "0")


def shares_of_a_gpu() -> int:
    """Among how many workers each GPU is divided; 1 if it is not."""
    check(SHARES)
    return max(1, int(os.environ.get(SHARE_GPU) or 1))


def shares_run_at_once() -> bool:
    """True if workers have shares of a GPU under MPS. Without it they take turns, and one that waits on the device would hold up the one
    it waits for. Our launcher starts MPS and allows torch to share the GPU's memory; under another launcher, whoever provides MPS sets
    this too.
    """
    return shares_of_a_gpu() > 1 and os.environ.get(OVERLAPPING) == "1"


def seconds_of(name: str, usual: float, *, or_off: bool = False) -> float:
    """A number of seconds that the user may set; with `or_off`, 0 means that there is no limit."""
    text = os.environ.get(name) or f"{usual}"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if or_off and seconds == 0:
        return math.inf
    if not 0 < seconds < 1e9:
        off = ", or 0 to turn this check off" if or_off else ""
        raise WorkerError(f"{name}={text} is not a number of seconds; use for example {usual:g}{off}")
    return seconds


def check_descriptors(workers: int) -> None:
    """Raise the limit of open files as far as this process may, and refuse one that is too low: gloo would abort, or wait for ever."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OWN_FILES + FILES_OF_PEER * workers
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    most = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < needed:
        fact = f"a process may have {most} open files, but one of {workers} workers needs {needed}"
        raise ResourceError(f"{fact}; raise the limit (ulimit -n {max(1024, needed)})")

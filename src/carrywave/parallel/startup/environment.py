"""What the environment says about how workers share GPUs, how they communicate and how long they wait. Torch-free."""

from __future__ import annotations

import math
import os

from carrywave.errors import WorkerError, short

SHARE_GPU = "CARRYWAVE_SHARE_GPU"  # 1: several workers may take turns on a GPU; N: each GPU is divided among N workers; 0: neither
TRANSPORT = "CARRYWAVE_TRANSPORT"  # what carries messages and sums: device, nccl or gloo; auto: the best that there is
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # 1: torch lets several workers share memory of one GPU
MOST_SHARES = 48  # clients of MPS on one GPU


def shares_of_a_gpu() -> int:
    """Among how many workers each GPU is divided; 1 if it is not."""
    text = os.environ.get(SHARE_GPU) or "0"
    if not text.isdecimal() or not text.isascii() or int(text[:9]) > MOST_SHARES:
        remedy = "use 1 to let workers take turns on a GPU, N to divide it among N of them, or unset it"
        raise WorkerError(f"{SHARE_GPU}={short(text)} is not a number of workers from 0 to {MOST_SHARES}; {remedy}")
    return max(1, int(text))


def may_share_gpu() -> bool:
    """True if several workers may use one GPU."""
    return os.environ.get(SHARE_GPU, "") not in ("", "0")


def shares_run_at_once() -> bool:
    """True if workers have shares of a GPU under MPS. Without it they take turns, and one that waits on the device would hold up the one
    it waits for. Whoever provides MPS also allows torch to share the GPU's memory.
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

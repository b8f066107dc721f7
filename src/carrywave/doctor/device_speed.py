"""How fast a device is now, in a second: a matrix product and a small LSTM step, timed on all workers at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from carrywave.train.start.machine import CallToTime
from carrywave.train.start.timing import call_of, call_seconds

ROUNDS = 9
PRODUCT_SIZE = {"cpu": 384, "cuda": 4096}
STEP = {
    "cpu": (CallToTime("layer", "lstm", 128, 128, 16, 32), "fp32"),
    "cuda": (CallToTime("layer", "lstm", 1024, 1024, 64, 64), "bf16"),
}


@dataclass(frozen=True)
class DeviceSpeed:
    """What a worker's device took, in the median."""

    product_seconds: float
    product_flops: float  # multiplications and additions per second
    step_seconds: float  # forward and backward of one small layer


def time_device(device: torch.device, together: Callable[[], None]) -> DeviceSpeed:
    """Time a device. `together` is a barrier, so that all workers work at the same time, as in training."""
    size = PRODUCT_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    _, step = call_of(*STEP[device.type], device)
    calls: tuple[Callable[[], object], ...] = (lambda: torch.mm(a, b), step)
    rounds: list[list[float]] = []
    for _ in range(ROUNDS):
        together()
        rounds.append([call_seconds(call, device) for call in calls])
    product_seconds, step_seconds = (statistics.median(each) for each in zip(*rounds[1:], strict=True))
    return DeviceSpeed(product_seconds, 2 * size**3 / product_seconds, step_seconds)

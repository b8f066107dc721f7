"""How fast a device is now, in a second: a matrix product and a small LSTM step, timed on all workers at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from carrywave.measure.rig import Rig
from carrywave.measure.timing import Call, call_seconds, take_turns
from carrywave.plan.cost.sample_requests import Ask

ROUNDS = 9
ROUND_SECONDS = 0.03
PRODUCT_SIZE = {"cpu": 384, "cuda": 4096}
STEP = {
    "cpu": Ask("lstm", 128, 128, 16, 32, precision="fp32"),
    "cuda": Ask("lstm", 1024, 1024, 64, 64, precision="bf16"),
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
    rig = Rig(STEP[device.type], device)

    def block(call: Call) -> Callable[[], float]:
        call_seconds(call, 2, device)  # warm-up
        repeats = max(1, round(ROUND_SECONDS / max(1e-6, call_seconds(call, 1, device))))

        def run() -> float:
            together()
            return call_seconds(call, repeats, device)

        return run

    rounds = take_turns({"product": block(lambda: torch.mm(a, b)), "step": block(lambda: rig.run(1, None))}, ROUNDS)
    product, step = (statistics.median(rounds[name]) for name in ("product", "step"))
    return DeviceSpeed(product, 2 * size**3 / product, step)

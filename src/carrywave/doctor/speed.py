"""The speed of each device: a matrix product and a small LSTM step, timed on all workers at once; and who is slow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from carrywave.doctor.finding import Finding
from carrywave.measure.rig import Rig
from carrywave.plan.cost.sample_requests import Ask
from carrywave.plan.show.text import seconds_text

ROUNDS = 9
ROUND_SECONDS = 0.03
SLOW, VERY_SLOW = 1.25, 2.0  # times as long as the others take: worth a word; and twice as long makes half of a cluster useless
REMEDY = "look for other programs, heat, a lower clock or fewer cores there, or leave it out"
PRODUCT_SIZE = {"cpu": 384, "cuda": 4096}
STEP = {
    "cpu": Ask("lstm", 128, 128, 16, 32, precision="fp32"),
    "cuda": Ask("lstm", 1024, 1024, 64, 64, precision="bf16"),
}


@dataclass(frozen=True)
class Speed:
    """What a worker's device took, in the median."""

    product_seconds: float
    product_flops: float  # multiplications and additions per second
    step_seconds: float  # forward and backward of one small layer

    def to_json(self) -> dict[str, Any]:
        """The speed as a dict that JSON can represent."""
        return asdict(self)


def time_device(device: torch.device, together: Callable[[], None]) -> Speed:
    """Time a device. `together` is a barrier, so that all workers work at the same time, as in training."""
    size = PRODUCT_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    rig = Rig(STEP[device.type], device)
    product, step = _medians((lambda: torch.mm(a, b), lambda: rig.run(1, None)), device, together)
    return Speed(product, 2 * size**3 / product, step)


def _medians(works: Sequence[Callable[[], object]], device: torch.device, together: Callable[[], None]) -> list[float]:
    """Median seconds of each call, over rounds that begin together; the calls take turns, so that a disturbance meets all of them."""
    times = []
    for work in works:
        _run(work, 2, device)
        times.append(max(1, round(ROUND_SECONDS / max(1e-6, _run(work, 1, device)))))
    found: list[list[float]] = [[] for _ in works]
    for _ in range(ROUNDS):
        for work, count, seconds in zip(works, times, found, strict=True):
            together()
            seconds.append(_run(work, count, device) / count)
    return [statistics.median(seconds) for seconds in found]


def _run(work: Callable[[], object], times: int, device: torch.device) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def check_speeds(speeds: Mapping[int, Speed], names: Mapping[int, str]) -> list[Finding]:
    """Who is slow: each worker beside the median of the others. `names`: how to call each rank. Pure."""
    if not speeds:
        return []
    found: list[Finding] = []
    for rank, speed in speeds.items():
        others = [other for each, other in speeds.items() if each != rank]
        if not others:
            break
        product = speed.product_seconds / statistics.median(other.product_seconds for other in others)
        step = speed.step_seconds / statistics.median(other.step_seconds for other in others)
        # A slow device is slow in all that it does; if only one of the two takes long, something came in between.
        factor = min(product, step)
        if factor >= SLOW:
            fact = (
                f"{names[rank]} takes {step:.2g} times as long as the other workers for an LSTM step and {product:.2g} times for a matrix "
                "product; all of them wait for it at every step"
            )
            found.append(Finding("wrong" if factor >= VERY_SLOW else "warning", "slow worker", fact, REMEDY, names[rank]))
    steps = [speed.step_seconds for speed in speeds.values()]
    flops = statistics.median(speed.product_flops for speed in speeds.values())
    span = seconds_text(min(steps)) if max(steps) < 1.005 * min(steps) else f"{seconds_text(min(steps))} to {seconds_text(max(steps))}"
    many = f" of {len(speeds)} workers at once" if len(speeds) > 1 else ""
    summary = Finding("fine", "speed", f"LSTM step{many} {span}, matrix product {flops / 1e9:,.3g} GFLOP/s (median)")
    return [summary, *sorted(found, key=lambda finding: finding.level != "wrong")]

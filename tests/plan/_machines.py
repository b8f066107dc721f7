"""Profiles of machines that do not exist, whose times follow a formula: what a fit should find is known."""

from __future__ import annotations

from typing import Any

from carrywave.plan.cost.interpolation import Size
from carrywave.plan.cost.profile import Contention, Link, Overheads, Profile, Sample

GIB = 1 << 30


def lstm_seconds(size: Size, speed: float = 1.0) -> tuple[float, float, float]:
    """Forward, backward and what of it is put off: a call, a latency for each step, and products."""
    products = size.lanes * size.steps * size.outputs
    forward = 20e-6 + size.steps * 5e-6 + products * (size.outputs + size.inputs) * 1e-11
    put_off = 10e-6 + products * (size.outputs + size.inputs) * 1e-11
    return forward / speed, (1.2 * forward + put_off) / speed, put_off / speed


def product_seconds(size: Size, speed: float = 1.0) -> tuple[float, float, float]:
    one = 10e-6 + size.lanes * size.steps * size.inputs * size.outputs * 4e-12
    return one / speed, 2 * one / speed, one / speed


def samples(speed: float = 1.0, precision: Any = "fp32") -> tuple[Sample, ...]:
    found = []
    for hidden in (128, 512, 1024):
        for lanes in (4, 32, 128):
            for steps in (4, 32, 128):
                size = Size(hidden, hidden, lanes, steps)
                found.append(Sample("lstm", precision, *size[:4], *lstm_seconds(size, speed)))
    for inputs, hidden in ((128, 1024), (1024, 256)):
        size = Size(inputs, hidden, 32, 32)
        found.append(Sample("lstm", precision, *size[:4], *lstm_seconds(size, speed)))
    for kind in ("softmax", "linear"):
        for outputs in (64, 4096, 32768):
            for lanes, steps in ((8, 8), (32, 64)):
                size = Size(512, outputs, lanes, steps)
                found.append(Sample(kind, precision, *size[:4], *product_seconds(size, speed)))
    found += [Sample("embedding", precision, 10000, 512, 32, steps, 1e-5 + steps * 1e-6, 2e-5 + steps * 1e-6, 1e-5) for steps in (8, 64)]
    found += [Sample("optimizer", "fp32", 0, size, 1, 1, 1e-5 + size * 1e-10 / speed, name="adam") for size in (10**5, 10**8)]
    return tuple(found)


def machine(**changes: Any) -> Profile:
    """A fast one, eight devices to a host."""
    speed = changes.pop("speed", 1.0)
    given: dict[str, Any] = {
        "name": "made up",
        "hardware": "none",
        "source": "published",
        "memory_bytes": 80 * GIB,
        "samples": samples(speed),
        "within": Link(5e-6, 200e9),
        "between": Link(20e-6, 40e9),
        "devices_per_host": 8,
        "contention": (Contention(8, 1.1),),
        "overheads": Overheads(20e-6, 5e-6, 200e-6, 1.0),
    }
    return Profile(**{**given, **changes})

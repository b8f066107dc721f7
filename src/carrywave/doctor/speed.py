"""Who is slow: the speeds of the devices, as measured at once, beside each other."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from carrywave.doctor.device_speed import DeviceSpeed
from carrywave.doctor.finding import Finding
from carrywave.plan.show.text import seconds_text

SLOW, VERY_SLOW = 1.25, 2.0  # times as long as the others take: worth a word; and twice as long makes half of a cluster useless
REMEDY = "look for other programs, heat, a lower clock or fewer cores there, or leave it out"


def check_speeds(speeds: Mapping[int, DeviceSpeed], names: Mapping[int, str]) -> list[Finding]:
    """Who is slow: each worker beside the median of the others. `names`: how to call each rank. Pure."""
    if not speeds:
        return []
    slow: list[Finding] = []
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
            slow.append(Finding("wrong" if factor >= VERY_SLOW else "warning", "slow worker", fact, REMEDY, names[rank]))
    steps = [speed.step_seconds for speed in speeds.values()]
    flops = statistics.median(speed.product_flops for speed in speeds.values())
    span = seconds_text(min(steps)) if max(steps) < 1.005 * min(steps) else f"{seconds_text(min(steps))} to {seconds_text(max(steps))}"
    many = f" of {len(speeds)} workers at once" if len(speeds) > 1 else ""
    summary = Finding("fine", "speed", f"LSTM step{many} {span}, matrix product {flops / 1e9:,.3g} GFLOP/s (median)")
    return [summary, *sorted(slow, key=lambda finding: finding.level != "wrong")]

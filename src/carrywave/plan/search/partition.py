"""Cuts a sequence of units into contiguous stages that minimize the slowest stage's time, each within its device's memory.

Exact, by dynamic programming: the best split of the first units over some devices follows from the best splits of fewer units over one
device less. Devices are in a fixed order and may differ in speed and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations

from carrywave.errors import PlanError

SecondsOf = Callable[[int, int, int], float]  # (stage, first unit, last unit + 1) -> seconds
BytesOf = Callable[[int, int, int], int]


class NoFit(PlanError):
    """No cuts fit in memory. `missing_bytes` is what the best cuts lack on their fullest device; `lack` says so in words."""

    def __init__(self, fact: str, remedy: str, *, lack: str, missing_bytes: int) -> None:
        super().__init__(f"{fact}; {remedy}")
        self.lack, self.missing_bytes = lack, missing_bytes


def partition(units: int, stages: int, seconds: SecondsOf, num_bytes: BytesOf | None = None, limits: Sequence[int] = ()) -> tuple[int, ...]:
    """The first unit of every stage but the first. Seconds and bytes must not decrease with more units.

    `limits` are the bytes of each stage's device; without `num_bytes`, memory is not checked.
    """
    check_stages(units, stages)
    best, slowest = _solve(units, stages, lambda s, a, b: seconds(s, a, b) if _fits(num_bytes, limits, s, a, b) else math.inf)
    if math.isinf(slowest):
        assert num_bytes is not None
        raise no_fit(units, stages, num_bytes, limits)
    return best


def check_stages(units: int, stages: int) -> None:
    """Reject more stages than units."""
    if not 1 <= stages <= units:
        raise PlanError(
            f"{units} units (encoder, {units - 2} layer{'s' * (units > 3)}, head) cannot fill {stages} stages; use 1 to {units} stages"
        )


def all_cuts(units: int, stages: int) -> list[tuple[int, ...]]:
    """All possible cuts."""
    return list(combinations(range(1, units), stages - 1))


def no_fit(units: int, stages: int, num_bytes: BytesOf, limits: Sequence[int]) -> NoFit:
    """The error that says which stage lacks how much memory, for the cuts that come closest to fitting."""
    cuts, missing = _solve(units, stages, lambda s, a, b: max(0.0, float(num_bytes(s, a, b) - limits[s])))
    edges = (0, *cuts, units)
    lacks = [num_bytes(stage, edges[stage], edges[stage + 1]) - limits[stage] for stage in range(stages)]
    stage = lacks.index(max(lacks))
    first, last = edges[stage], edges[stage + 1]
    alone = f"{_unit(first, units)} alone exceeds" if last - first == 1 else f"stage {stage} ({units_text(first, last, units)}) exceeds"
    lack = f"{alone} the {say(limits[stage])} of its device by {say(int(missing))}"
    remedy = (
        "use a device with more memory, or a smaller model"
        if last - first == 1
        else f"use more stages (up to {units}), plan.recompute or plan.micro_batches, or devices with more memory"
    )
    return NoFit(
        f"no way to cut {units} units into {stages} stage{'s' if stages > 1 else ''} fits in memory: at best, {lack}",
        remedy,
        lack=lack,
        missing_bytes=int(missing),
    )


def _fits(num_bytes: BytesOf | None, limits: Sequence[int], stage: int, first: int, last: int) -> bool:
    return num_bytes is None or num_bytes(stage, first, last) <= limits[stage]


def balanced(units: int, most: int, seconds: Callable[[int, int], float]) -> list[tuple[int, ...]]:
    """The cuts that `partition` would find for 1, 2, … `most` stages, all at once, on devices of one kind and ignoring memory."""
    table = _table(units, most, lambda stage, first, last: seconds(first, last), all_ends=True)
    return [_trace(units, table[: stages + 1])[0] for stages in range(1, most + 1)]


def _solve(units: int, stages: int, cost: SecondsOf) -> tuple[tuple[int, ...], float]:
    """The cuts that minimize the largest cost, and that cost."""
    return _trace(units, _table(units, stages, cost))


BestCuts = tuple[
    list[float], list[int]
]  # by number of units on the stages so far: the minimal largest cost, and the start of the last stage


def _table(units: int, stages: int, cost: SecondsOf, *, all_ends: bool = False) -> list[BestCuts]:
    """One row per number of stages, from zero. Unless `all_ends`, every row leaves at least one unit for each remaining stage."""
    least = [math.inf] * (units + 1)
    least[0] = 0.0
    rows: list[BestCuts] = [(least, [])]
    for stage in range(stages):
        after = [math.inf] * (units + 1)
        back = [stage] * (units + 1)
        last_end = units if all_ends else units - (stages - stage - 1)
        for end in range(stage + 1, last_end + 1):
            for begin in range(end - 1, stage - 1, -1):
                alone = cost(stage, begin, end)
                if alone >= after[end]:
                    break  # costs do not decrease with more units
                worst = max(least[begin], alone)
                if worst < after[end]:
                    after[end], back[end] = worst, begin
        rows.append((after, back))
        least = after
    return rows


def _trace(units: int, rows: list[BestCuts]) -> tuple[tuple[int, ...], float]:
    edges = [units]
    for _, back in reversed(rows[1:]):
        edges.append(back[edges[-1]])
    return tuple(edges[-2:0:-1]), rows[-1][0][units]


def units_text(first: int, last: int, units: int) -> str:
    """Describe units [first, last)."""
    names = [_unit(first, units)] if last - first == 1 else [_unit(first, units), _unit(last - 1, units)]
    return " to ".join(names)


def _unit(unit: int, units: int) -> str:
    return "the encoder" if unit == 0 else "the head" if unit == units - 1 else f"layer {unit}"


def say(num_bytes: int) -> str:
    """Format bytes with a unit, to three digits."""
    for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {name}" if num_bytes < 1000 * size else f"{num_bytes / size:.0f} {name}"
    return f"{num_bytes} bytes"

"""A case on its own plan against one device: one that is drawn or given, on workers of any kind."""

from __future__ import annotations

from typing import Any

import torch
from _cases import Case, Run, changed, errors, plan_of, serial, train
from _crew import Crew
from _draw import cases
from _fixed import FLOOR, LIMIT
from hypothesis import given, settings

from carrywave.parallel.mesh import Mesh

MAGNIFIED = 1e-8  # the most that rounding may be magnified to; mistakes are far above it


def run(case: Case, crew: Crew) -> Run:
    """The case on its own plan: a plan of one worker needs no other process."""
    plan = plan_of(case)
    return crew.run(case) if plan.workers > 1 else train(case, Mesh.alone(torch.device("cpu"), plan))


def check(case: Case, crew: Crew, *, limit: float = LIMIT, floor: float = FLOOR) -> float:
    """The largest error, which is under the limit.

    A case may magnify rounding, such as one with a norm over units that hardly differ. It may be off by as much as one device is whose
    weights differ in their last bits, but no further than MAGNIFIED.
    """
    adam = case["train"]["lr"] if case["train"]["optimizer"].startswith("adam") else 0.0
    answer = serial(case)
    found = errors(run(case, crew), answer, floor=floor, adam=adam)
    worst = max(found, key=found.__getitem__)
    if limit <= found[worst] < MAGNIFIED:
        limit = max(errors(serial(changed(case, disturbed=True)), answer, floor=floor).values())
    assert found[worst] < limit, f"{worst} is off by {found[worst]:.2g}"
    return found[worst]


def check_drawn(
    workers: int, examples: int, crew: Crew, *, where: str = "", limit: float = LIMIT, floor: float = FLOOR, **kind: Any
) -> None:
    """So many cases for so many workers; says the largest error."""
    largest = [0.0]

    @settings(max_examples=examples)
    @given(case=cases(workers, **kind))
    def each(case: Case) -> None:
        largest.append(check(case, crew, limit=limit, floor=floor))

    each()
    print(f"{workers} workers{where}, {len(largest) - 1} cases: the largest relative error is {max(largest):.2g}")

"""Claim: on the CPU, steps are faster if freed memory stays in the process (`carrywave.heap`) than if the allocators return it.

The peer is the same program with default allocator settings. One process cannot run both, so processes alternate and the median over them
counts. A single worker trains on all cores; `faults` are minor page faults per step.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from carrywave.benchmarks.harness.workers import spread
from carrywave.benchmarks.plan import CASES, QUICK, WARM_UP, PlannedShape, loop_of
from carrywave.measure.profiles import threads
from carrywave.parallel import worker_pool
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan

ROUNDS, SECONDS = 3, 3.0
# mimalloc's default; and a glibc tunable that has no effect itself, but makes `carrywave.heap` leave glibc alone.
AS_THEY_ARE = {"MIMALLOC_PURGE_DELAY": "10", "GLIBC_TUNABLES": "glibc.malloc.perturb=0"}
KEPT = {"MIMALLOC_PURGE_DELAY": "-1"}


def run(*, quick: bool = False) -> list[Row]:
    """One row per case."""
    rows = []
    for case in QUICK if quick else CASES:
        measured: dict[str, list[Row]] = {"kept": [], "given_back": []}
        job = {"case": asdict(case), "seconds": 0.1 if quick else SECONDS}
        for _ in range(2 if quick else ROUNDS):
            for name, environment in (("given_back", AS_THEY_ARE), ("kept", KEPT)):
                measured[name] += worker_pool.start(__name__, job, 1, threads=threads(1), environment=environment, name="bench heap")[0]
        rows.append(_row(case, measured))
    return rows


def _row(case: PlannedShape, measured: dict[str, list[Row]]) -> Row:
    kept, given_back = ([each["step_ms"] for each in measured[name]] for name in ("kept", "given_back"))
    faults = {name: round(statistics.median(each["faults"] for each in several)) for name, several in measured.items()}
    return {
        "case": case.name,
        "threads": threads(1),
        "given_back_ms": round(statistics.median(given_back), 2),
        "kept_ms": round(statistics.median(kept), 2),
        "ratio": round(statistics.median(given_back) / statistics.median(kept), 3),
        "spread": f"{max(spread(kept), spread(given_back)):.1%}",
        "faults_given_back": faults["given_back"],
        "faults_kept": faults["kept"],
    }


def work(world: World, job: dict[str, Any]) -> Iterator[Row]:
    """Train for the given number of seconds, in the worker process."""
    step = loop_of(world, PlannedShape(**job["case"]), asdict(Plan.serial()))
    for number in range(WARM_UP + 1):
        step(number)
    before, begin, number = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter(), 0
    while time.perf_counter() - begin < job["seconds"]:
        step(WARM_UP + 1 + number)
        number += 1
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    yield {"step_ms": 1e3 * seconds / number, "faults": (after - before) / number}

"""Claim: with a vocabulary of 1,000,000 split over 4 workers, a worker needs at most 1.3 times a quarter of the memory of one worker alone.

A language model, untied, trains with Adam on whole batches: on one worker, and on workers that share the vocabulary
(`plan.split_vocabulary`). Memory is the peak of a worker, from before the model was built to the end of the last step; with several, that
of the one that needs the most. A small model is trained before, so that what libraries load does not count. `share` is relative to one
worker, `loss_off` the relative difference of the last loss. Workers have one thread each, so `step_seconds` compares on machines with at
least as many cores as workers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from carrywave.benchmarks.harness.shapes import LanguageShape
from carrywave.benchmarks.harness.workers import TimedWorkers, memory_mib, reset_peak, start
from carrywave.data.batch import Batch
from carrywave.model.initialization import initialize
from carrywave.model.vocabulary.rows import Rows
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan
from carrywave.step.trainer import Trainer

WORKERS = 4
TARGET = 1.3 / WORKERS
BATCHES = 3  # one optimizer step each; the first allocates
FULL = LanguageShape(1, 256, 8, 16, 1_000_000)
QUICK = LanguageShape(1, 64, 4, 4, 100_000)
WARM_UP = LanguageShape(1, 8, 4, 4, 64)


def run(*, quick: bool = False) -> list[dict[str, object]]:
    """A row for one worker, and one for those that share the vocabulary."""
    case = QUICK if quick else FULL
    alone, split = (start(__name__, asdict(case), workers, exact_memory=True) for workers in (1, WORKERS))
    return [row_of(case, workers, alone) for workers in (alone, split)]


def row_of(case: LanguageShape, workers: list[list[Row]], alone: list[list[Row]]) -> dict[str, object]:
    """Compare the workers of a run with the one that ran alone."""
    peaks = [rows[-1]["peak_mib"] for rows in workers]
    loss, wanted = workers[0][-1]["loss"], alone[0][-1]["loss"]
    return {
        "case": case.long_name,
        "workers": len(workers),
        "peak_mib": round(max(peaks)),
        "share": round(max(peaks) / alone[0][-1]["peak_mib"], 3),
        "peak_mib_each": " ".join(f"{peak:.0f}" for peak in peaks),
        "step_seconds": round(workers[0][-1]["step_seconds"], 2),
        "loss_off": float(f"{abs(loss - wanted) / wanted:.1e}"),
        "target": "" if len(workers) == 1 else f"share <= {TARGET:.3f}",
    }


# In a worker


def work(world: World, job: dict[str, Any]) -> Iterator[Row]:
    """Entry point of every worker: build the model, or its rows, and train for a few steps."""
    crew, case = TimedWorkers(world), LanguageShape(**job)
    plan = Plan(replicas=crew.size, split_vocabulary=crew.size > 1)
    mesh = Mesh(world, plan)
    _train(crew, WARM_UP, mesh)
    before = memory_mib()
    reset_peak()
    loss, seconds = _train(crew, case, mesh)
    yield {"peak_mib": memory_mib("VmHWM") - before, "loss": loss, "step_seconds": seconds}
    crew.barrier()


def _train(crew: TimedWorkers, case: LanguageShape, mesh: Mesh) -> tuple[float, float]:
    """The loss and the seconds of the last of a few steps."""
    rows = Rows.of_worker(case.vocabulary, crew.rank, crew.size) if mesh.plan.splits_vocabulary else None
    model = case.model(rows)
    initialize(model, 1)
    trainer = Trainer(model, {"optimizer": "adam", "lr": 1e-3, "precision": "fp32"}, mesh=mesh)
    loss, seconds = 0.0, 0.0
    for number, (x_TB, target_TB) in enumerate(case.batches(BATCHES)):
        crew.barrier()
        began = time.perf_counter()
        loss = float(trainer.step(Batch.of(x_TB, target_TB, step=number)))
        seconds = crew.most(time.perf_counter() - began)
    return loss, seconds

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
from dataclasses import asdict, dataclass
from typing import Any

import torch

from carrywave.benchmarks._workers import TimedWorkers, memory_mib, reset_peak, start
from carrywave.data.batch import Batch
from carrywave.model.encoders import Embedding
from carrywave.model.heads import Softmax
from carrywave.model.initialization import initialize
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.model.vocabulary.rows import Rows
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan
from carrywave.step.trainer import Trainer

title = "a vocabulary split over workers"
COLUMNS = ("case", "workers", "peak_mib", "share", "peak_mib_each", "step_seconds", "loss_off", "target")

WORKERS = 4
TARGET = 1.3 / WORKERS
BATCHES = 3  # one optimizer step each; the first allocates


@dataclass(frozen=True)
class Case:
    """A language model and its batch shape."""

    words: int = 1_000_000
    hidden: int = 256
    lanes: int = 8
    steps: int = 16

    @property
    def name(self) -> str:
        """The name shown in the table."""
        return f"1x{self.hidden} vocabulary {self.words} adam, {self.lanes} lanes x {self.steps} steps"


QUICK = Case(words=100_000, hidden=64, lanes=4, steps=4)


def run(*, quick: bool = False) -> list[dict[str, object]]:
    """A row for one worker, and one for those that share the vocabulary."""
    case = QUICK if quick else Case()
    alone, split = (start("vocabulary", asdict(case), workers, exact_memory=True) for workers in (1, WORKERS))
    return [row_of(case, told, alone) for told in (alone, split)]


def row_of(case: Case, told: list[list[Row]], alone: list[list[Row]]) -> dict[str, object]:
    """Compare the workers of a run with the one that ran alone."""
    peaks = [rows[-1]["peak_mib"] for rows in told]
    loss, wanted = told[0][-1]["loss"], alone[0][-1]["loss"]
    return {
        "case": case.name,
        "workers": len(told),
        "peak_mib": round(max(peaks)),
        "share": round(max(peaks) / alone[0][-1]["peak_mib"], 3),
        "peak_mib_each": " ".join(f"{peak:.0f}" for peak in peaks),
        "step_seconds": round(told[0][-1]["step_seconds"], 2),
        "loss_off": float(f"{abs(loss - wanted) / wanted:.1e}"),
        "target": "" if len(told) == 1 else f"share <= {TARGET:.3f}",
    }


# In a worker


def work(world: World, job: dict[str, Any]) -> Iterator[Row]:
    """Entry point of every worker: build the model, or its rows, and train for a few steps."""
    crew, case = TimedWorkers(world), Case(**job)
    plan = Plan(replicas=crew.size, split_vocabulary=crew.size > 1)
    mesh = Mesh(world, plan)
    _train(crew, Case(words=64, hidden=8, lanes=4, steps=4), mesh)
    before = memory_mib()
    reset_peak()
    loss, seconds = _train(crew, case, mesh)
    yield {"peak_mib": memory_mib("VmHWM") - before, "loss": loss, "step_seconds": seconds}
    crew.barrier()


def _train(crew: TimedWorkers, case: Case, mesh: Mesh) -> tuple[float, float]:
    """The loss and the seconds of the last of a few steps."""
    rows = Rows.of_worker(case.words, crew.rank, crew.size) if mesh.plan.splits_vocabulary else None
    model = Model(
        Embedding(case.words, case.hidden, rows=rows), LSTM(case.hidden, case.hidden), Softmax(case.hidden, case.words, rows=rows)
    )
    initialize(model, 1)
    trainer = Trainer(model, {"optimizer": "adam", "lr": 1e-3, "precision": "fp32"}, mesh=mesh)
    tokens_KTB = torch.randint(case.words, (BATCHES, case.steps + 1, case.lanes), generator=torch.Generator().manual_seed(0))
    loss, seconds = 0.0, 0.0
    for number, tokens_TB in enumerate(tokens_KTB):
        crew.barrier()
        began = time.perf_counter()
        loss = float(trainer.step(Batch.of(tokens_TB[:-1], tokens_TB[1:], step=number)))
        seconds = crew.most(time.perf_counter() - began)
    return loss, seconds

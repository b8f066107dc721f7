"""Claim: full back-propagation through a sequence of 100,000 steps fits in 2 GB, with the gradient of not recomputing.

A language model with 2 x 512 units and 64 words takes one optimizer step over one lane, in a process of its own with one thread, or on the
GPU if there is one: without recomputation, with recomputation chunk by chunk, and at two levels. `peak_mb` is the most memory that the
process has held, libraries included (on a GPU, the most that torch has allocated); `step_mb` is what the step added to it; `planned_mb` is
what the planner counts for the whole of training. `ratio` is the time against not recomputing. `error` is the largest error of a gradient,
‖a − b‖ / ‖b‖ over a parameter, against float64 without recomputation, at the shorter length, in float32 and in float64.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from carrywave.benchmarks.harness.workers import memory_bytes, printed
from carrywave.data.batch import Batch
from carrywave.measure.timing import settle
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.model.initialization import initialize
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.parallel import worker_pool
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World
from carrywave.plan.memory import largest_stage
from carrywave.plan.plan import Plan
from carrywave.plan.units import Units
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.step.trainer import Trainer

COLUMNS = ("steps", "recompute", "chunk_steps", "peak_mb", "step_mb", "planned_mb", "seconds", "ratio", "error", "error_fp64", "bound_mb")

MB = 10**6
BOUND_MB = 2_000
WORDS, LAYERS, HIDDEN = 64, 2, 512
QUICK_HIDDEN = 32
CHUNK_STEPS = 128
LENGTHS, QUICK_LENGTHS = (10_000, 100_000), (500, 2_000)
LEVELS: tuple[bool | str, ...] = (False, True, "twice")


def run(*, quick: bool = False) -> list[Row]:
    """One row for each length and level of recomputation; the errors are those of the shorter length."""
    hidden = QUICK_HIDDEN if quick else HIDDEN
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = QUICK_LENGTHS if quick else LENGTHS
    rows: list[Row] = []
    for steps in lengths:
        plain = 0.0
        for level in LEVELS:
            job = {"steps": steps, "hidden": hidden, "recompute": level, "device": device, "errors": level and steps == lengths[0]}
            [[row]] = worker_pool.start(__name__, job, 1, name="bench long")
            plain = plain or row["seconds"]
            row |= {"seconds": round(row["seconds"], 2), "ratio": round(row["seconds"] / plain, 2), "bound_mb": BOUND_MB}
            rows += printed([{name: row[name] for name in COLUMNS}])
    return rows


def work(world: World, job: dict[str, Any]) -> Iterator[Row]:
    """Take one step, in the worker process; then, if asked, compare its gradients with those of other precisions."""
    plan = Plan(chunk_steps=CHUNK_STEPS, recompute=job["recompute"]) if job["recompute"] else Plan.serial()
    steps, hidden = job["steps"], job["hidden"]
    trainer, batch = _trainer(world, hidden, plan, "fp32"), _batch(steps)
    trainer.update(_batch(2 * CHUNK_STEPS))  # what is loaded and allocated once is no part of the step
    before = _peak(world, reset=True)
    begin = time.perf_counter()
    trainer.update(batch)
    settle(world.device)
    seconds = time.perf_counter() - begin
    peak = _peak(world)
    spec = parse({"model": {"hidden": hidden, "layers": LAYERS}, "batch": {"lanes": 1, "steps": steps}, "train": {"precision": "fp32"}})
    planned = largest_stage(Units.of(spec, DataFacts(vocabulary=WORDS)), plan).total
    row: Row = {"steps": steps, "recompute": str(job["recompute"]).lower(), "chunk_steps": plan.chunk_steps or steps}
    row |= {"peak_mb": round(peak / MB), "step_mb": round((peak - before) / MB), "planned_mb": round(planned / MB), "seconds": seconds}
    if job["errors"]:
        exact = _gradients(world, hidden, Plan.serial(), "fp64", batch)
        row |= {
            name: f"{_error(_gradients(world, hidden, plan, precision, batch), exact):.1e}"
            for name, precision in (("error", "fp32"), ("error_fp64", "fp64"))
        }
    yield {**dict.fromkeys(("error", "error_fp64"), ""), **row}


def _trainer(world: World, hidden: int, plan: Plan, precision: str) -> Trainer:
    model = Model(Embedding(WORDS, hidden), LSTM(hidden, hidden, LAYERS, dropout=0.2), Softmax(hidden, WORDS))
    initialize(model, seed=1)
    return Trainer(model, {"optimizer": "adam", "precision": precision}, mesh=Mesh(world, plan), keep_state=False)


def _batch(steps: int) -> Batch:
    draw = torch.Generator().manual_seed(steps)
    words = torch.randint(WORDS, (steps + 1, 1), generator=draw)
    return Batch.of(words[:-1], words[1:], step=0)


def _gradients(world: World, hidden: int, plan: Plan, precision: str, batch: Batch) -> dict[str, Tensor]:
    trainer = _trainer(world, hidden, plan, precision)
    trainer.update(batch)
    return {name: p.grad.double().cpu() for name, p in trainer.named if p.grad is not None}


def _error(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    return max(float((gradients[name] - wanted).norm() / wanted.norm().clamp(min=1e-30)) for name, wanted in exact.items())


def _peak(world: World, *, reset: bool = False) -> int:
    """The most memory, in bytes, that was held at once; since the last reset on a GPU, where there is one."""
    if world.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(world.device)
        if reset:
            torch.cuda.reset_peak_memory_stats(world.device)
        return peak
    return memory_bytes("VmHWM")

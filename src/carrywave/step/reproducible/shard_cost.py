"""Measures the cost of shards: times forward and backward of one batch with and without them. Changes nothing that a step reads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.data.loader import Loader
from carrywave.data.order import Cursor
from carrywave.errors import UserError
from carrywave.kernels import random
from carrywave.parallel.world import all_gather_text
from carrywave.plan.canonical_shards import SHARDS
from carrywave.step.engine import Engine
from carrywave.step.gradients import Gradients
from carrywave.step.graphs.capture import Capture
from carrywave.step.passes.micro_batches import FlatCarry
from carrywave.step.trainer import Trainer

REPETITIONS = 4  # the first warms up, the second may be captured as a CUDA graph; the fastest of the rest counts


def cost_line(trainer: Trainer, loader: Loader) -> str:
    """The cost in one line, for the first batch of an epoch and the slowest worker. Collective: every rank must call it."""
    batches = loader.batches(Cursor(0, 0))
    batch = next(batches)
    batches.close()
    costs = [json.loads(text) for text in all_gather_text(trainer.mesh.world, json.dumps(cost(trainer, batch)))]
    shards, whole = (max(times) for times in zip(*costs, strict=True))
    lanes = batch.cells[1] // batch.steps
    return (
        f"reproducible: {lanes} lanes in {SHARDS} shards; forward and backward of a batch take {1000 * shards:.3g} ms instead of "
        f"{1000 * whole:.3g} ms ({shards / max(whole, 1e-9):.2g} times as long)"
    )


def cost(trainer: Trainer, batch: Batch) -> tuple[float, float]:
    """Seconds for forward and backward of this worker's lanes of a batch, with and without shards; no replica communication is included."""
    engine = trainer.engine
    if engine.shards is None:
        raise UserError("there are no shards to time; set train.reproducible=true")
    local_batch = trainer.local_part(batch)
    whole = Engine(engine.compute, Gradients(engine.gradients.trained, engine.gradients.held), engine.update)
    key = random.key(trainer.spec.seed, 0, 0)
    state = trainer.compute.start(local_batch.lanes.shape[0]) if trainer.keep_state else None
    try:
        trainer.modes.resume()  # as a step does
        in_shards = _seconds(trainer.device, lambda: _backward(engine, local_batch, key, state, trainer.capture))
        without = _seconds(trainer.device, lambda: _backward(whole, local_batch, key, state, trainer.capture))
    finally:
        trainer.restart_recordings()
        for _, parameter in trainer.named:
            parameter.grad = None
    return in_shards, without


def _backward(engine: Engine, batch: Batch, key: Tensor, carry: FlatCarry, graphs: Capture | None) -> None:
    engine.gradients.begin_step()
    engine.forward_backward([batch], [key], carry, graphs)


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(REPETITIONS):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - started)
    return min(times[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

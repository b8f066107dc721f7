"""A short self-test of workers that have just met: a tiny model takes a few steps as replicas and as stages, and has to show the losses of
one device, in float64 and, on GPUs, in float32 as training runs it: recorded as CUDA graphs.

It takes a second or two, and says of these devices and links what the test suite says of others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.model.encoders import Numbers
from carrywave.model.heads.forecast import Forecast
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan
from carrywave.step.trainer import Trainer

STEPS = 4  # the first runs as it is, the second is recorded
LIMITS = {"fp64": 1e-10, "fp32": 1e-4}  # relative errors: sums in another order, and a few updates from them
FEATURES, HIDDEN, LENGTH = 3, 8, 6
MOST_STAGES = 8


def run(world: World) -> list[Row]:
    """A row for each plan and precision: the plan in words, its transport, and the largest relative error. Collective."""
    rows: list[Row] = []
    for precision in LIMITS if world.device.type == "cuda" else ("fp64",):
        alone = _losses(Mesh.alone(world.device), world.size, precision)
        for plan in plans_for(world.size):
            mesh = Mesh(world, plan)
            found = _losses(mesh, world.size, precision)
            error = float(((found - alone).abs() / alone.abs()).max())
            over = mesh.messages or mesh.sums
            named = f"{plan.stages} stages" if plan.stages > 1 else f"{plan.replicas} replicas"
            rows.append({"plan": named, "over": over, "precision": precision, "error": error, "limit": LIMITS[precision]})
    return rows


def plans_for(workers: int) -> list[Plan]:
    """The plans that are tried: all workers as replicas, and as stages if there are not too many of them."""
    return [Plan(workers), *([Plan(1, workers, chunk_steps=2)] if workers <= MOST_STAGES else [])]


def _losses(mesh: Mesh, workers: int, precision: str) -> Tensor:
    """The loss of each step, the same on every worker."""
    numbers = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Model(Numbers(FEATURES), LSTM(FEATURES, HIDDEN, max(2, min(workers, MOST_STAGES) - 2)), Forecast(HIDDEN, 1, 1))
    trainer = Trainer(model, {"precision": precision, "lr": 0.01, "clip": 1.0}, plan=mesh.plan, mesh=mesh)
    lanes = 2 * workers
    x = torch.randn(LENGTH, lanes, FEATURES, generator=numbers)
    batch = Batch.of(x, torch.randn(LENGTH, lanes, 1, 1, generator=numbers))
    return torch.stack([trainer.step(batch).double().cpu() for _ in range(STEPS)])

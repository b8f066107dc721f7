"""Times whole training steps of recipes on one device, and predicts them: from a profile, and from samples of the calls they make.

A step is what the loop of `carrywave train` does with a batch: it sets the learning rate, runs forward, backward, clipping and update,
captured as a CUDA graph where that is possible, and adds to the running sums. Batches come from our loader, in the order of training, and
wait on the device.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from carrywave.benchmarks.harness.gpu_timing import one_line
from carrywave.benchmarks.harness.workers import spread
from carrywave.benchmarks.plan_runs.recipes import Recipe, recipes
from carrywave.data.batch import Batch
from carrywave.data.loader import Loader
from carrywave.data.order import Cursor
from carrywave.errors import UserError
from carrywave.launch.hardware import made_for_bf16
from carrywave.measure.profiles import Wanted, empty, extended, threads
from carrywave.measure.timing import call_seconds
from carrywave.parallel import worker_pool
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World
from carrywave.plan.cost.cluster import Cluster
from carrywave.plan.cost.profile import Profile
from carrywave.plan.cost.sample_requests import Ask, asks_of
from carrywave.plan.cost.units import Units
from carrywave.plan.plan import Plan
from carrywave.plan.search.predictor import Predictor
from carrywave.prediction.evaluation import order_for
from carrywave.step.trainer import Trainer
from carrywave.step.worker_setup import holding_of

BATCHES = 24  # cycled through: as many shapes as most recipes have, all of them captured
DRAWN = 10 * BATCHES  # of an epoch, of which those stand for all
CAPTURED = 3  # times that a batch is trained on before it is timed: once as it is, once captured, once replayed
ROUNDS, BLOCK_SECONDS = 5, 0.15


def chosen(rows: Sequence[str], *, quick: bool, made_for_bf16: bool) -> list[Recipe]:
    """The recipes whose names are among `rows`, or all; small ones if `quick`."""
    found = [recipe.suited(made_for_bf16=made_for_bf16) for recipe in recipes() if not rows or recipe.name in rows]
    return [recipe.small for recipe in found] if quick else found


def measured(names: Sequence[str], kind: str, *, quick: bool) -> dict[str, Row]:
    """What a step of each recipe takes, timed in a process of its own: `step_ms` and `spread`, or a `note` if it failed."""
    job = {"device": kind, "names": list(names), "quick": quick}
    rows = worker_pool.start(__name__, job, 1, threads=threads(1), name="bench plan")[0]
    return {row["recipe"]: row for row in rows}


def work(world: World, job: dict[str, Any]) -> Iterator[Row]:
    """Entry point of the worker: time the recipes, one after the other."""
    on_gpu = world.device.type == "cuda"
    for recipe in chosen(job["names"], quick=job["quick"], made_for_bf16=on_gpu):
        try:
            yield {"recipe": recipe.name, **timed(TrainedRecipe(recipe, world.device), quick=job["quick"])}
        except Exception as error:
            yield {"recipe": recipe.name, "note": one_line(error)}
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()  # graphs hold private memory pools


class TrainedRecipe:
    """A recipe in training: calling it takes the next step."""

    def __init__(self, recipe: Recipe, device: torch.device, batches: int = BATCHES) -> None:
        task, data = recipe.task()
        spec, mesh, view = task.spec, Mesh.alone(device), task.part("train", data).view
        self.trainer = Trainer(task.model(data, holding_of(mesh, spec.model.layers + 2)), spec.train, mesh=mesh, keep_state=spec.streams)
        read = Loader(view, order_for(spec, view, training=True), device=device).batches(Cursor(0, 0))
        self.batches = spread_out(itertools.islice(itertools.takewhile(lambda batch: batch.epoch == 0, read), DRAWN), batches)
        read.close()
        self.device, self.lr = device, spec.train.lr
        self.sums: torch.Tensor | float = 0.0
        self._next = itertools.cycle(self.batches)
        for batch in self.batches:
            for _ in range(CAPTURED):
                self.trainer.update(batch)

    def __call__(self) -> None:
        self.trainer.set_lr(self.lr)
        self.sums = self.sums + self.trainer.update(next(self._next)).counted()


def spread_out(drawn: Iterable[Batch], few: int) -> list[Batch]:
    """So few of these batches, from the shortest to the longest: their mean length is about that of all, which no first few would have."""
    lined_up = sorted(drawn, key=lambda batch: batch.steps)
    few = min(few, len(lined_up))
    return [lined_up[(2 * number + 1) * len(lined_up) // (2 * few)] for number in range(few)]


def timed(step: TrainedRecipe, *, quick: bool = False) -> Row:
    """Milliseconds of a step, over blocks of whole cycles through the batches, and how far the blocks differ."""
    cycle = len(step.batches)
    once = call_seconds(step, cycle, step.device)
    cycles = 1 if quick else max(1, round(BLOCK_SECONDS / (once * cycle)))
    each_ms = [1e3 * call_seconds(step, cycles * cycle, step.device) for _ in range(2 if quick else ROUNDS)]
    return {"step_ms": statistics.median(each_ms), "spread": spread(each_ms)}


def units_of(recipe: Recipe) -> Units:
    """The units of a recipe."""
    task, _ = recipe.task()
    return Units.of(task.spec, task.facts)


def predicted_ms(units: Units, profile: Profile) -> float:
    """Milliseconds that a step of one device is predicted to take."""
    return 1e3 * Predictor(units, Cluster.uniform(replace(profile, devices_per_host=1), 1)).predict(Plan.serial()).seconds


def own_profile(several: Sequence[Units], kind: str) -> Profile:
    """A profile with what `carrywave plan` would time on this machine for these models, as far as one device alone makes such calls."""
    found = empty(kind)
    optimizers = sorted({units.optimizer for units in several})
    for precision in sorted({units.precision for units in several}):
        asks: dict[tuple[object, ...], Ask] = {}
        for units in several:
            if units.precision == precision:
                asks |= {ask.size: ask for ask in asks_of(units, 1, kind) if ask.whole}
        wanted, optimizers = Wanted(list(asks.values()), optimizers, links=False), []
        found = extended(found, kind, precision, wanted, 1, launched=False, environment={}, name="bench plan")
    return found


def compare(rows: Sequence[str], profile: Profile | None, kind: str, *, quick: bool) -> list[Row]:
    """One row per recipe, measured and predicted: from `profile`, and from samples of the calls that the recipes make on this machine."""
    several = chosen(rows, quick=quick, made_for_bf16=made_for_bf16(kind))
    if not several:
        raise UserError(f"bench plan has no recipe {' or '.join(rows)}; use some of {', '.join(recipe.name for recipe in recipes())}")
    units = {recipe.name: units_of(recipe) for recipe in several}
    took = measured(list(units), kind, quick=quick)
    own = own_profile(list(units.values()), kind)
    return [_row(name, each, took[name], {"": profile, "own_": own}) for name, each in units.items()]


def _row(name: str, units: Units, took: Row, profiles: Mapping[str, Profile | None]) -> Row:
    shapes = ", ".join(f"{shape.lanes} x {shape.steps}" for shape in units.shapes)
    row: Row = {"recipe": name, "precision": units.precision, "batch": shapes}
    row |= {"measured_ms": took.get("step_ms"), "spread": took.get("spread")}
    for column, profile in profiles.items():
        ms = None if profile is None else predicted_ms(units, profile)
        row[f"{column}predicted_ms"] = ms
        row[f"{column}error"] = None if ms is None or row["measured_ms"] is None else ms / row["measured_ms"] - 1
    return {**row, "note": took.get("note", "")}

"""Claim: the planner's predictions are close to the measured step times, and the plan it chooses is close to the best.

For each model this machine is profiled from scratch, every plan is predicted, and then each plan is trained for real, taking turns in the
same processes: serial with all cores in one process, the others with the cores divided among the workers, as `carrywave train --devices N`
does. The planner's choice is timed among them, which shows how far it is from the best.

Where there is a GPU, whole steps of ten recipes are trained on it instead, and compared with what is predicted from a shared profile and
from the machine's own. With `shares`, the devices are shares of one GPU, and the plans are the recorded wavefronts and replicas of
`bench gpu-pipeline`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from carrywave.benchmarks import gpu_pipeline
from carrywave.benchmarks.harness.shapes import LanguageShape
from carrywave.benchmarks.harness.workers import Loop, TimedWorkers, crew_sizes, environment, printed, spread, time_loops
from carrywave.benchmarks.plan_runs import recipe_steps
from carrywave.data.batch import Batch
from carrywave.errors import UserError
from carrywave.launch.hardware import gpus
from carrywave.measure.profiles import profile_for, threads
from carrywave.parallel import worker_pool
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.worker_pool import Row
from carrywave.parallel.world import World
from carrywave.plan.cluster import Cluster
from carrywave.plan.plan import Plan, even_cuts
from carrywave.plan.predict import Predictor
from carrywave.plan.profile import PROFILE, find_profile
from carrywave.plan.search import describe, search
from carrywave.plan.units import Units
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.step.trainer import Trainer


@dataclass(frozen=True)
class PlannedShape(LanguageShape):
    """A language model that is planned."""

    @property
    def name(self) -> str:
        """The name shown in the table."""
        return f"{self.layers} x {self.hidden}, {self.lanes} lanes x {self.steps}, {self.vocabulary:,} words"

    @property
    def spec(self) -> Spec:
        """The model as a spec."""
        model = {"hidden": self.hidden, "layers": self.layers, "dropout": self.dropout}
        train = {"clip": 1.0, "precision": "fp32"}
        return parse({"task": "language", "model": model, "batch": {"lanes": self.lanes, "steps": self.steps}, "train": train})

    @property
    def planned_units(self) -> Units:
        """The units that plans divide into stages."""
        return Units.of(self.spec, DataFacts(vocabulary=self.vocabulary, sequences=1, steps=10**6, longest=10**6))


CASES = (
    PlannedShape(2, 200, 20, 35, 10000, 0.2),
    PlannedShape(4, 512, 16, 64, 2000),
    PlannedShape(8, 128, 32, 64, 2000, 0.2),
    PlannedShape(8, 256, 16, 64, 20000),
    PlannedShape(2, 650, 20, 35, 10000, 0.5),
)
QUICK = (PlannedShape(2, 32, 8, 16, 50),)
PRICED = ("wavefront recorded", "replicas recorded")  # the rows of bench gpu-pipeline that the planner predicts, besides one share
ROUNDS, SECONDS = 5, 0.4
WARM_UP = 2
SHIPPED = "h200"  # the profile that recipes on a GPU are predicted from, unless another is named


def plans(case: PlannedShape, workers: int, predictor: Predictor) -> list[Plan]:
    """The plans to compare with the chosen one: replicas; and even cuts with various chunks, with a shared head, and balanced cuts."""
    if workers == 1:
        return [Plan.serial()]
    found = [Plan(replicas=workers)]
    units = case.units
    for stages in sorted({min(workers, units), 2}):
        if workers % stages:
            continue
        cuts = even_cuts(units, stages)
        for chunks in (2, 4, 8, 16):
            steps = -(-case.steps // chunks)
            if steps >= 2:
                found.append(Plan(workers // stages, stages, cuts, steps))
        eighth = Plan(workers // stages, stages, cuts, -(-case.steps // 8))
        found.append(replace(eighth, share_head=True))
        balanced = predictor.balanced(eighth)
        if balanced is not None and balanced != cuts:
            found.append(replace(eighth, cuts=balanced))
    return found


def run(*, quick: bool = False, shares: bool = False, rows: Sequence[str] = (), profile: str | None = None) -> list[Row]:
    """Rows for every case and number of workers, and a final row that summarises the errors. `shares`: on shares of one GPU. `rows` and
    `profile`: on a GPU, names of recipes, and the profile to predict them from.
    """
    if shares:
        return gpu_pipeline.run(quick=quick, rows=PRICED, predict=True, whole_step=True)
    if gpus():
        return of_recipes(rows, profile or os.environ.get(PROFILE) or SHIPPED, quick=quick)
    if rows or profile:
        raise UserError("bench plan has --rows and --profile for recipes on a GPU, but found none; remove them")
    return _of_plans(quick=quick)


def of_recipes(names: Sequence[str], profile: str, *, kind: str = "cuda", quick: bool = False) -> list[Row]:
    """A row for each recipe on one device, and a final row that summarises the errors of both predictions."""
    rows = printed(recipe_steps.compare(names, find_profile(profile), kind, quick=quick))
    columns = ("error", "own_error")
    found = {column: [abs(row[column]) for row in rows if row[column] is not None] for column in columns}
    summary = dict.fromkeys(rows[0], "") | {"recipe": "all", "note": "target: median 10%, worst 25%"}
    summary |= {column: f"median {statistics.median(errors):.1%}, worst {max(errors):.1%}" for column, errors in found.items() if errors}
    return [*({name: _shown(name, value) for name, value in row.items()} for row in rows), summary]


def _of_plans(*, quick: bool) -> list[Row]:
    """The plans of several workers on cores of this machine."""
    rows: list[Row] = []
    # An empty cache, so that earlier profiles of this machine are ignored.
    with tempfile.TemporaryDirectory(prefix="carrywave-bench-") as folder, environment(CARRYWAVE_CACHE=folder):
        for case in QUICK if quick else CASES:
            rows += printed(_of_case(case, [2] if quick else crew_sizes(), quick=quick))
    errors = [abs(row["error"]) for row in rows]
    lost = [row["over_best"] for row in rows if row["chosen"]]
    summary = dict.fromkeys(rows[0], "") | {
        "case": "all",
        "plan": f"{len(rows)} plans",
        "error": f"median {statistics.median(errors):.1%}, worst {max(errors):.1%}",
        "over_best": f"chosen: worst {max(lost):.3f}",
        "target": "median 10%, worst 25%, chosen 1.05",
    }
    return [*({name: _shown(name, value) for name, value in row.items()} for row in rows), summary]


def _of_case(case: PlannedShape, sizes: list[int], *, quick: bool) -> list[Row]:
    alone: list[Row] = []
    rows: list[Row] = []
    for workers in (1, *sizes):
        profile = profile_for(case.planned_units, device="cpu", devices=workers)
        cluster = Cluster.uniform(replace(profile, devices_per_host=max(workers, 1)), workers)
        predictor = Predictor(case.planned_units, cluster)
        chosen = search(case.planned_units, cluster).best.plan  # may use fewer workers
        wanted = plans(case, workers, predictor)
        wanted += [chosen] if chosen.workers == workers and all(_bare(chosen) != _bare(plan) for plan in wanted) else []
        found = _timed(case, wanted, workers, quick)
        if 1 < chosen.workers < workers:
            wanted, found = [*wanted, chosen], [*found, *_timed(case, [chosen], chosen.workers, quick)]
        measured = [
            {
                "case": case.name,
                "workers": plan.workers,
                "plan": describe(plan) + (f", cuts {list(plan.cuts)}" if plan.cuts else ""),
                "predicted_ms": 1e3 * predictor.predict(plan).seconds,
                "measured_ms": row["step_ms"],
                "spread": row["spread"],
                "bare": _bare(plan),
            }
            for plan, row in zip(wanted, found, strict=True)
        ]
        alone = alone or measured
        best = min(row["measured_ms"] for row in alone + measured)
        for row in measured if workers > 1 else []:
            row["chosen"] = row["bare"] == _bare(chosen)
        if workers > 1:
            of_one = {**alone[0], "chosen": chosen.workers == 1}
            for row in (of_one, *measured):
                row |= {"error": row["predicted_ms"] / row["measured_ms"] - 1, "over_best": row["measured_ms"] / best, "target": ""}
                row["workers"] = f"{row['workers']} of {workers}"
                row.pop("bare")
                rows.append(row)
    return rows


def _timed(case: PlannedShape, wanted: list[Plan], workers: int, quick: bool) -> list[Row]:
    job = {"case": asdict(case), "plans": [asdict(plan) for plan in wanted], "rounds": 2 if quick else ROUNDS, "seconds": SECONDS}
    return worker_pool.start(__name__, job, workers, threads=threads(workers), name="bench plan")[0]


def _bare(plan: Plan) -> tuple[object, ...]:
    """The fields that determine the work; equal for equivalent plans."""
    return plan.replicas, plan.stages, plan.chunk_steps, plan.micro_batches, plan.recompute, plan.shares_head, plan.cuts


def _shown(name: str, value: object) -> object:
    if isinstance(value, float):
        if name.endswith("error"):
            return f"{value:+.1%}"
        return f"{value:.1%}" if name == "spread" else round(value, 3 if name == "over_best" else 2)
    return ("chosen" if value else "") if name == "chosen" else value


def work(world: World, job: dict[str, Any]) -> Iterator[Row]:
    """Entry point of every worker: time all plans in turn."""
    case = PlannedShape(**job["case"])
    loops = {str(number): loop_of(world, case, given) for number, given in enumerate(job["plans"])}
    for loop in loops.values():
        for number in range(WARM_UP):
            loop(number)
    for timing in time_loops(TimedWorkers(world), loops, rounds=job["rounds"], seconds=job["seconds"], first=WARM_UP).values():
        yield {"step_ms": statistics.median(timing.step_ms), "spread": spread(timing.step_ms)}


def loop_of(world: World, case: PlannedShape, given: Mapping[str, Any]) -> Loop:
    """A function that runs step i of a case and returns its tokens; `given` holds the fields of the plan."""
    mesh = Mesh(world, Plan(**{**given, "cuts": tuple(given["cuts"])}))
    trainer = Trainer(case.model(), case.spec.train, mesh=mesh, keep_state=True)
    batch = Batch.of(*case.batches()[0], fresh=False)

    def step(number: int) -> int:
        trainer.step(replace(batch, step=number))
        return case.lanes * case.steps

    return step

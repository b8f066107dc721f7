"""Predicted and measured step times side by side: what is said, and that the culprit is named."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
from _machines import machine

import carrywave as cw
from carrywave.plan.cluster import Cluster
from carrywave.plan.plan import Plan
from carrywave.plan.predict import Prediction, Predictor
from carrywave.plan.simulation import TaskSpan
from carrywave.plan.units import Units
from carrywave.runs.watcher import Silent
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.train.plan_check import FIRST, STEPS, TASKS, Spent, cause, line


def predicted(plan: Plan) -> Prediction:
    spec = parse({"task": "language", "model": {"hidden": 64, "layers": 4}, "batch": {"lanes": 8, "steps": 32}})
    units = Units.of(spec, DataFacts(vocabulary=100, sequences=1, steps=1000, longest=1000))
    return Predictor(units, Cluster.uniform(machine(), plan.workers)).predict(plan)


def spent_as(prediction: Prediction) -> list[Spent]:
    """What each worker would spend if all were as predicted."""

    def of(row: tuple[TaskSpan, ...]) -> Spent:
        tasks = [span for span in row if span.label in TASKS]
        work = sum(span.end - span.start for span in tasks)
        return Spent(work, tasks[-1].end - work, sum(span.end - span.start for span in row) - work)

    return [of(row) for row in prediction.timeline.rows] * prediction.plan.replicas


PIPELINE, ALONE = predicted(Plan(2, 2, (3,), 8)), predicted(Plan())


def test_near_each_other_no_cause_is_named() -> None:
    text = line(ALONE, 1.1 * ALONE.seconds, spent_as(ALONE))
    assert text == f"a step takes {1100 * ALONE.seconds:.3g} ms, predicted {1000 * ALONE.seconds:.3g} ms (+10%)"
    assert "computes" in line(ALONE, 2 * ALONE.seconds, [Spent(2 * ALONE.seconds, 0.0, 0.0)])


@pytest.mark.parametrize("rank", range(4))
def test_a_stage_that_computes_too_long_is_named(rank: int) -> None:
    spent = spent_as(PIPELINE)
    spent[rank] = replace(spent[rank], work=3 * spent[rank].work)
    other = spent[1 - rank % 2]  # the neighbour waits for it, as long as it takes longer
    spent[1 - rank % 2] = replace(other, wait=other.wait + spent[rank].work / 2)
    assert f"stage {rank % 2} ({('encoder, layers 1-2', 'layers 3-4, head')[rank % 2]}) computes" in cause(PIPELINE, spent)


@pytest.mark.parametrize(("waits", "link"), [(0, "0 and 1"), (1, "0 and 1"), (2, "1 and 2"), (3, "2 and 3")])
def test_a_link_that_is_slow_is_named(waits: int, link: str) -> None:
    plan = predicted(Plan(1, 4, (2, 3, 4), 8))
    spent = spent_as(plan)
    more = 2 * max(each.work for each in spent)  # another stage may wait longer still, as it was to
    spent = [replace(each, wait=each.wait + more) if rank == waits else each for rank, each in enumerate(spent)]
    assert f"stage {waits} waits" in cause(plan, spent)
    assert f"check the link between stages {link}" in cause(plan, spent)


def test_sums_and_update_are_named() -> None:
    spent = [replace(each, rest=each.rest + 1.0) for each in spent_as(PIPELINE)]
    assert cause(PIPELINE, spent).startswith("sums over workers and the update take 1e+03 ms")
    assert cause(ALONE, [replace(spent_as(ALONE)[0], rest=1.0)]).startswith("the update takes 1e+03 ms")


class Lines(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)


@pytest.mark.parametrize("evaluate_every", [None, 20])
def test_a_run_says_it_once_and_keeps_it(evaluate_every: int | None, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the carry is passed along. " * 400)
    watch = Lines()
    data = {"train": str(tmp_path / "text.txt"), "valid": str(tmp_path / "text.txt"), "tokens": "char"}
    train = {"max_steps": 60, "epochs": 9, "evaluate_every": evaluate_every}
    cw.fit({"hidden": 8}, None, data=data, batch={"lanes": 4, "steps": 8}, train=train, run=tmp_path / "run", watch=watch, device="cpu")
    found = [line for line in watch.said if line.startswith("a step takes")]
    rows = [json.loads(line) for line in (tmp_path / "run" / "timing.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "predicted_step_seconds" in row]
    assert len(found) == 1
    assert steps == [FIRST + STEPS + 1]
    assert all(row["step_seconds"] > 0 for row in rows if "step_seconds" in row)


@pytest.mark.parametrize(("steps", "timed"), [(40, FIRST + STEPS + 1), (10, 10), (FIRST + 1, None)])
def test_one_step_is_kept_task_by_task(steps: int, timed: int | None, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the carry is passed along. " * 100)
    data = {"train": str(tmp_path / "text.txt"), "tokens": "char"}
    batch, plan = {"lanes": 4, "steps": 8}, {"chunk_steps": 4}
    train = {"max_steps": steps, "epochs": 9}
    watch = Lines()
    cw.fit({"hidden": 8}, None, data=data, batch=batch, train=train, plan=plan, run=tmp_path / "run", watch=watch, device="cpu")
    path = tmp_path / "run" / "timeline.json"
    assert path.exists() == (timed is not None)
    # A mean over fewer steps is no fair comparison with the prediction.
    assert any(line.startswith("a step takes") for line in watch.said) == (timed == FIRST + STEPS + 1)
    if timed is None:
        return
    found = json.loads(path.read_text())
    [worker] = found["workers"]
    assert found["step"] == timed
    assert [(span[0], span[3]) for span in worker["spans"]] == [("F", 0), ("F", 1), ("B", 1), ("B", 0), ("W", 0)]
    times = [moment for span in worker["spans"] for moment in span[1:3]]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] <= worker["seconds"]
    assert worker["seconds"] == pytest.approx(sum(worker[part] for part in ("compute", "messages", "wait", "rest")))

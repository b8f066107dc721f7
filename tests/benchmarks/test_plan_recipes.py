"""Recipes on one device: their specs are those of examples/, and each is trained on data made up for it and predicted."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from carrywave.benchmarks import plan
from carrywave.benchmarks.plan_runs import recipe_steps
from carrywave.benchmarks.plan_runs.recipes import Recipe, recipes
from carrywave.data.batch import Batch
from carrywave.errors import UserError
from carrywave.measure import profiles
from carrywave.plan.cost.profile import Sample
from carrywave.plan.cost.shipped_profiles import shipped
from carrywave.spec.load import load
from carrywave.spec.spec import Spec

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = {recipe.name: recipe for recipe in recipes()}


def without_files(spec: Spec) -> Spec:
    return spec.model_copy(update={"data": spec.data.model_copy(update={"train": None, "valid": None, "test": None})})


@pytest.mark.parametrize("name", RECIPES)
def test_specs_are_those_of_the_examples(name: str) -> None:
    assert without_files(RECIPES[name].spec) == without_files(load(EXAMPLES / f"{name}.yaml", []))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name.startswith("awd-lstm") else name for name in RECIPES])
def test_every_recipe_trains_on_data_that_is_made_up(name: str) -> None:
    recipe = RECIPES[name].suited(made_for_bf16=False).small
    step = recipe_steps.TrainedRecipe(recipe, torch.device("cpu"), batches=2)
    before = [parameter.clone() for parameter in step.trainer.model.parameters()]
    step()
    assert torch.isfinite(torch.as_tensor(step.sums)).all()
    after = step.trainer.model.parameters()
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_shapes_of_batches_are_what_the_planner_expects(name: str) -> None:
    recipe = RECIPES[name].suited(made_for_bf16=True)
    units = recipe_steps.units_of(recipe)
    assert units.precision == ("fp32" if recipe.spec.train.precision == "fp32" else "bf16")
    assert recipe_steps.predicted_ms(units, shipped("h200")) > 0


def test_a_few_batches_stand_for_an_epoch() -> None:
    drawn = [Batch.of(torch.zeros(steps, 2, 1), torch.zeros(steps, 2, 1, 1)) for steps in (9, 1, 5, 4, 8, 7, 3, 2, 6)]
    assert [batch.steps for batch in recipe_steps.spread_out(drawn, 3)] == [2, 5, 8]
    assert [batch.steps for batch in recipe_steps.spread_out(drawn[:2], 3)] == [1, 9]


def test_data_is_the_same_whenever_it_is_made_up() -> None:
    first, second = (RECIPES["atis-slots"].small.task()[1] for _ in range(2))
    assert (first.inputs == second.inputs).all()
    assert first.inputs.shape == (first.lengths.sum(), 1 + 4)


def test_both_predictions_stand_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(names: list[str], kind: str, *, quick: bool) -> dict[str, dict[str, Any]]:
        return {name: {"recipe": name, "step_ms": 2.0, "spread": 0.01} for name in names[:-1]} | {names[-1]: {"note": "failed"}}

    monkeypatch.setattr(recipe_steps, "measured", measured)
    monkeypatch.setattr(recipe_steps, "own_profile", lambda units, kind: shipped("h200"))
    monkeypatch.setattr(plan, "gpus", lambda: ["NVIDIA H200"])
    *rows, summary = plan.run(rows=["wikitext-2-650", "characters", "etth1"], profile="h200")
    assert [row["recipe"] for row in rows] == ["wikitext-2-650", "characters", "etth1"]
    assert rows[2]["note"] == "failed"
    assert rows[2]["error"] is None
    errors = [abs(float(row["error"].rstrip("%"))) for row in rows[:2]]
    assert errors[0] == pytest.approx(abs(100 * (rows[0]["predicted_ms"] / 2.0 - 1)), abs=0.5)
    median, worst = (float(part.split()[1].rstrip("%")) for part in summary["own_error"].split(", "))
    assert median == pytest.approx(statistics.median(errors), abs=0.1)
    assert worst == pytest.approx(max(errors), abs=0.1)
    with pytest.raises(UserError, match="no recipe nothing; use some of awd-lstm, "):
        plan.run(rows=["nothing"])


def test_recipes_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "gpus", list)
    with pytest.raises(UserError, match="found none; remove them"):
        plan.run(rows=["etth1"])


def test_own_samples_are_those_of_the_calls_that_one_device_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[dict[str, Any]] = []

    def start(module: str, job: dict[str, Any], workers: int, **how: Any) -> list[list[dict[str, Any]]]:
        jobs.append(job)
        return [[{"sample": vars(Sample("optimizer", "fp32", 0, 10**6, 1, 1, 1e-3, name=name))} for name in job["optimizers"]]]

    monkeypatch.setattr(profiles.worker_pool, "start", start)
    some: list[Recipe] = [RECIPES[name].suited(made_for_bf16=True) for name in ("etth1", "characters", "nottingham")]
    found = recipe_steps.own_profile([recipe_steps.units_of(recipe) for recipe in some], "cpu")
    assert [job["precision"] for job in jobs] == ["bf16", "fp32"]
    assert [job["optimizers"] for job in jobs] == [["adam", "adamw"], []]
    assert {ask["chunks"] for job in jobs for ask in job["asks"]} == {1}
    assert {sample.name for sample in found.samples} == {"adam", "adamw"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_recipes_are_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    names = ["etth1", "nottingham"]
    small = recipe_steps.chosen(names, quick=True, made_for_bf16=False)
    file = tmp_path / "machine.json"
    recipe_steps.own_profile([recipe_steps.units_of(recipe) for recipe in small], "cpu").write(file)
    *rows, summary = plan.of_recipes(names, str(file), kind="cpu", quick=True)
    assert [row["recipe"] for row in rows] == names
    assert all(row["measured_ms"] > 0 and row["predicted_ms"] > 0 and row["own_predicted_ms"] > 0 for row in rows)
    assert "median" in summary["error"]

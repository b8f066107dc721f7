"""`plan: auto`: chosen by a profile, kept when a run goes on, and left alone where the user has said what to do."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
from _machines import machine

from carrywave.errors import PlanError
from carrywave.parallel.world import World
from carrywave.plan.plan import Plan
from carrywave.plan.profile import Link, Profile
from carrywave.plan.rates import Rate
from carrywave.plan.units import Units
from carrywave.runs.run import Run
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.spec.plan_spec import PlanSpec
from carrywave.train.from_python import _check_workers
from carrywave.train.start import planning
from carrywave.train.start.planning import Planned, PlanRequest, best_number, plan_before, plan_run

ALONE = World.alone(torch.device("cpu"))


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def by(profile: Profile) -> None:
        profile.write(tmp_path / "profile.json")
        monkeypatch.setenv("CARRYWAVE_PROFILE", str(tmp_path / "profile.json"))

    return by


def given(workers: int, plan: Any = "auto", before: Plan | None = None, own: bool = False, lanes: int = 8) -> PlanRequest:
    spec = parse({"task": "language", "model": {"hidden": 256, "layers": 4}, "batch": {"lanes": lanes, "steps": 64}, "plan": plan})
    units = None if own else Units.of(spec, DataFacts(vocabulary=500, sequences=1, steps=10**5, longest=10**5))
    return PlanRequest(spec, units, 4, False, workers, before)


def planned(*args: Any, **options: Any) -> Planned:
    return plan_run(ALONE, given(*args, **options), lambda line: None)


SLOW_LINK = machine(within=Link(1.0, 1e6), between=None)  # sums take long, and so do messages
NO_SUMS = machine(within=Link(1e-6, 2e8), between=None)  # whole gradients take long, single messages do not


def test_all_workers_are_used_and_the_choice_is_said(use: Any) -> None:
    use(NO_SUMS)
    found = planned(2)
    assert found.plan.workers == 2
    assert found.plan.stages == 2
    assert found.reasons[0].startswith("chosen: 2 stages")


def test_where_one_device_is_faster_that_is_said(use: Any) -> None:
    use(SLOW_LINK)
    found = planned(2)
    assert found.plan.workers == 2
    assert "one device would be faster than" in found.reasons[1]
    assert "use devices=1" in found.reasons[1]


def test_one_worker_has_nothing_to_choose(use: Any) -> None:
    use(NO_SUMS)
    found = planned(1)
    assert found.plan == Plan(cuts=())
    assert found.reasons == ()


def test_few_lanes_are_not_shared_out(use: Any) -> None:
    use(machine())
    assert planned(2, lanes=1).plan.stages == 2


def test_what_the_spec_asks_for_is_done_and_predicted(use: Any) -> None:
    use(NO_SUMS)
    found = planned(2, {"replicas": 2})
    assert (found.plan.replicas, found.plan.stages) == (2, 1)
    assert found.reasons == ()


def test_a_run_that_goes_on_keeps_its_plan(use: Any) -> None:
    use(NO_SUMS)
    before = Plan(2, 1, (), None)
    assert planned(2, before=before).plan == before
    assert planned(4, before=before).plan.workers == 4  # there are more now: planned anew
    assert planned(2, {"stages": 2}, before=before).plan.stages == 2  # the user says otherwise


def test_of_modules_of_the_users_own_nothing_is_predicted(use: Any) -> None:
    use(NO_SUMS)
    found = planned(2, own=True)
    assert found.plan.replicas == 2


def test_a_profile_without_this_kind_of_work_predicts_nothing(use: Any) -> None:
    use(machine(rates=()))
    said: list[str] = []
    found = plan_run(ALONE, given(2), said.append)
    assert found.plan == Plan(2)  # it trains all the same
    assert said[0].startswith("no plan could be chosen, so every worker is a replica: ")
    assert "has no figures" in said[0]


def test_without_a_profile_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARRYWAVE_PROFILE")
    asked: list[dict[str, Any]] = []

    def measured(units: Units, **how: Any) -> Profile:
        asked.append(how)
        return NO_SUMS

    monkeypatch.setattr(planning, "profile_for", measured)
    assert planned(2).plan.stages == 2
    assert [(how["device"], how["devices"]) for how in asked] == [("cpu", 2)]
    assert len(asked) == 1


def test_the_plan_of_a_run_is_read_back(tmp_path: Path) -> None:
    folder = Run.create(tmp_path / "run", "language")
    assert plan_before(folder) is None
    plan = Plan(2, 2, (3,), 8, 1, True, "aten", True)
    with folder:
        folder.write_json("plan.json", asdict(plan) | {"backends": ["aten"]})
    assert plan_before(folder) == plan


DAMAGED = [json.dumps({**asdict(Plan()), **wrong}) for wrong in ({"stages": -1}, {"cuts": "x"}, {"replicas": 1.5})]


@pytest.mark.parametrize("text", ["", "[]", "{}", *DAMAGED])
def test_a_damaged_plan_is_made_anew(text: str, tmp_path: Path) -> None:
    folder = Run.create(tmp_path / "run", "language")
    folder.make()
    (folder.path / "plan.json").write_text(text)
    assert plan_before(folder) is None


def test_workers_that_do_not_fit_the_plan_are_refused() -> None:
    _check_workers(PlanSpec(stages=2), 4)
    with pytest.raises(PlanError, match=r"devices=3 does not match plan.replicas x plan.stages \(any number x 2\)"):
        _check_workers(PlanSpec(stages=2), 3)


def test_overheads_of_a_machine_count(use: Any) -> None:
    use(machine(task_seconds=10.0))
    assert planned(2).plan.stages == 1


def test_without_a_number_the_gpus_that_pay_are_taken(use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("the carry is passed along. " * 400)
    data = {"train": str(tmp_path / "text.txt"), "tokens": "char"}
    spec = parse({"data": data, "model": {"hidden": 64}, "batch": {"lanes": 8, "steps": 16}})
    said: list[str] = []
    assert best_number(spec, "auto", said.append) is None  # there are no GPUs here
    monkeypatch.setattr(planning, "gpus", lambda: ["a"] * 4)
    use(SLOW_LINK)
    assert best_number(spec, "cpu", said.append) is None
    assert best_number(spec, "auto", said.append) == 1
    assert said[-1].startswith("1 device: uses 1 of 4 devices, as each doubling must save 5%")
    assert said[-1].endswith("; pass devices=4 to use all of them")
    use(machine(within=Link(1e-9, 1e15), task_seconds=0.0, step_seconds=0.0, rates=as_long_as_wide(), devices_per_host=4))
    assert best_number(spec, "auto", said.append) == 4
    folder = Run.create(tmp_path / "run", "language")
    with folder:
        folder.write_spec(spec)
        folder.write_json("plan.json", asdict(Plan(2)))
    monkeypatch.setenv("RANK", "0")
    assert best_number(spec, "auto", said.append) is None


def as_long_as_wide() -> tuple[Rate, ...]:
    return tuple(Rate(kind, "fp32", 0.0, element_seconds=1e-5) for kind in ("layer", "embedding", "head", "plain", "update"))  # type: ignore[arg-type]


def test_a_kernel_alone_leaves_the_split_to_the_planner(use: Any) -> None:
    use(NO_SUMS)
    found = planned(2, {"kernel": "aten"})
    assert (found.plan.stages, found.plan.kernel) == (2, "aten")


def test_with_a_worker_broken_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARRYWAVE_PROFILE")
    monkeypatch.setattr(planning.launch_record, "with_fewer", lambda: True)
    monkeypatch.setattr(planning, "profile_for", lambda *args, **how: pytest.fail("it measured"))
    assert planned(2).plan == Plan(2)


def test_a_measurement_that_fails_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **how: Any) -> Profile:
        raise PlanError("worker 1 of the measurement exited with code -9: no output; set plan.replicas")

    monkeypatch.delenv("CARRYWAVE_PROFILE")
    monkeypatch.setattr(planning, "profile_for", fails)
    assert planned(2).plan == Plan(2)

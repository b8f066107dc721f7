from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _machines import GIB, machine, units_of

from carrywave.plan.cluster import Cluster
from carrywave.plan.plan import Plan, resolve
from carrywave.plan.schedule.schedule import wavefront
from carrywave.plan.search import search
from carrywave.plan.show.report import choice_object, section, yaml_line
from carrywave.plan.show.text import figures_text, seconds_text, timeline_text
from carrywave.plan.simulation import Timeline, simulate
from carrywave.plan.units import unit_names
from carrywave.spec.plan_spec import PlanSpec
from carrywave.spec.yaml_text import parse_yaml

DEEP = {"hidden": 512, "layers": 4}


def timeline(stages: int, chunks: int, *, micro_batches: int = 1, late: float = 0.0) -> Timeline:
    """A forward takes a second, a backward two, weight gradients `late` seconds if they are deferred; then a second of update."""
    schedule = wavefront(stages, chunks, micro_batches, defer_weights=late > 0)
    found = simulate(schedule, lambda task: {"F": 1.0, "B": 2.0, "H": 2.0, "W": late}[task.phase], lambda task: 0.0)
    return found.then("update", [(found.seconds, found.seconds + 1)] * stages)


def test_a_step_is_a_picture() -> None:
    step = timeline(2, 3, late=1.0)
    *rows, moments, legend = timeline_text(step, columns=14).splitlines()
    assert rows == ["stage 0 FfF...BBbbBBwu", "stage 1 .FfFBBbbBBw..u"]
    assert legend == "F f forward of a chunk, B b backward of a chunk, w W deferred weight gradients, u update, . waiting"
    assert moments == "        0 s       14 s"


def test_seconds_in_words() -> None:
    assert [seconds_text(each) for each in (0.0, 2e-7, 1.5e-5, 0.01234, 0.9999, 1.0, 12345.0)] == [
        "0 s", "0.2 us", "15 us", "12.3 ms", "1 s", "1 s", "12,345 s",
    ]  # fmt: skip


def test_units_in_words() -> None:
    assert [unit_names(6, *span) for span in ((0, 1), (0, 3), (1, 2), (3, 6), (5, 6), (0, 6))] == [
        "encoder", "encoder, layers 1-2", "layer 1", "layers 3-4, head", "head", "encoder, layers 1-4, head",
    ]  # fmt: skip


def test_a_model_that_one_device_cannot_hold_has_no_efficiency() -> None:
    units = units_of(model={"hidden": 2048, "layers": 4}, batch={"lanes": 64, "steps": 128})
    choice = search(units, Cluster.uniform(machine(memory_bytes=GIB), 4))
    assert choice.serial is None
    assert "one device cannot hold the model" in figures_text(units, choice)
    assert choice_object(units, choice)["efficiency"] is None


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(4),
        Plan(2, 2, (2,), 8, 2, True, share_head=True),
        Plan(1, 3, (2, 4), None, 2),
        Plan(1, 2, (5,), 32),
        Plan(1, 1, (), 8, recompute=True),
    ],
)
def test_a_plan_is_pasted_into_a_spec_and_is_the_same(plan: Plan) -> None:
    units = units_of(model=DEEP)
    known = parse_yaml(yaml_line(plan, units), "line")["plan"]
    assert known == section(plan, units)
    again = resolve(PlanSpec.model_validate(known), layers=units.layers, workers=plan.workers, lanes=units.lanes)
    assert again == plan

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from _machines import GIB, machine, units_of

from carrywave.plan.cluster import Cluster
from carrywave.plan.plan import Plan, resolve
from carrywave.plan.predict import Predictor
from carrywave.plan.scaling import scale
from carrywave.plan.schedule.schedule import wavefront
from carrywave.plan.search import search
from carrywave.plan.show.report import choice_object, section, yaml_line
from carrywave.plan.show.text import MOST_ROWS, figures_text, rivals_text, scale_text, seconds_text, stages_text, ticks, timeline_text
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
    *rows, _, _, legend = timeline_text(step, columns=14).splitlines()
    assert rows == ["stage 0 FfF...BBbbBBwu", "stage 1 .FfFBBbbBBw..u"]
    assert legend == "F f forward of a chunk, B b backward of a chunk, w W deferred weight gradients, u update, . waiting"
    assert timeline_text(step, columns=56).splitlines()[2:4] == [
        "        |       |       |       |       |       |       |       |",
        "        0 s     2 s     4 s     6 s     8 s     10 s    12 s    14 s",
    ]


def test_weight_gradients_of_neighbouring_micro_batches_are_told_apart() -> None:
    rows = timeline_text(timeline(2, 2, micro_batches=2, late=1.0), columns=17).splitlines()
    assert rows[:2] == ["stage 0 FffF.bbBBw.BBbbWu", "stage 1 .FfbbBBfFBBbbwW.u"]


def test_a_column_shows_what_takes_most_of_it() -> None:
    rows = timeline_text(timeline(2, 3, late=1.0), columns=7).splitlines()
    assert rows[:2] == ["stage 0 FF.BbBw", "stage 1 FfBbBwu"]


def test_of_many_stages_the_first_and_last_are_drawn() -> None:
    lines = timeline_text(timeline(MOST_ROWS + 6, 2)).splitlines()
    assert len(lines) == MOST_ROWS + 4
    assert lines[MOST_ROWS // 2] == "… 6 more stages"


def test_an_axis_has_round_moments() -> None:
    assert ticks(0.0, 0.0123, 8) == pytest.approx([0, 2e-3, 4e-3, 6e-3, 8e-3, 1e-2, 1.2e-2])
    assert ticks(0.0, 8, 8) == pytest.approx(range(9))
    assert [seconds_text(each) for each in (0.0, 2e-7, 1.5e-5, 0.01234, 0.9999, 1.0, 12345.0)] == [
        "0 s", "0.2 us", "15 us", "12.3 ms", "1 s", "1 s", "12,345 s",
    ]  # fmt: skip


def test_units_in_words() -> None:
    assert [unit_names(6, *span) for span in ((0, 1), (0, 3), (1, 2), (3, 6), (5, 6), (0, 6))] == [
        "encoder", "encoder, layers 1-2", "layer 1", "layers 3-4, head", "head", "encoder, layers 1-4, head",
    ]  # fmt: skip


def test_stages_are_told_with_work_memory_and_a_shared_head() -> None:
    predictor = Predictor(units_of(32768, model=DEEP), Cluster.uniform(machine(), 2))
    found = predictor.predict(Plan(1, 2, (3,), 8))
    lines = stages_text(predictor.units, found).splitlines()
    assert lines[0].split()[:4] == ["stage", "units", "work", "per"]
    assert "encoder, layers 1-2" in lines[1]
    assert seconds_text(found.stages[1].seconds) in lines[2]
    assert "80 GiB" in lines[2]
    assert "shared head" not in lines[0]
    shared = stages_text(predictor.units, predictor.predict(Plan(1, 2, (3,), 8, share_head=True)))
    assert "shared head" in shared.splitlines()[0]


def test_figures_and_alternatives_of_a_choice() -> None:
    choice = search(units_of(batch={"lanes": 64, "steps": 64}), Cluster.uniform(machine(), 4))
    said = figures_text(choice)
    assert f"{choice.best.tokens_per_second:,.0f} tokens/s" in said
    assert choice.serial is not None
    assert f"{choice.serial.seconds / choice.best.seconds:.2f} times as fast as one" in said
    rows = rivals_text(choice).splitlines()
    assert len(rows) == 1 + len(choice.rivals)
    assert all(rival.why in row for rival, row in zip(choice.rivals, rows[1:], strict=True))


def test_a_model_that_one_device_cannot_hold_has_no_efficiency() -> None:
    units = units_of(model={"hidden": 2048, "layers": 4}, batch={"lanes": 64, "steps": 128})
    choice = search(units, Cluster.uniform(machine(memory_bytes=GIB), 4))
    assert choice.serial is None
    assert "one device cannot hold the model" in figures_text(choice)
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


def test_a_window_that_is_not_cut_stays_so_in_a_spec() -> None:
    units = units_of(model=DEEP)
    known = section(Plan(1, 2, (2,)), units)
    again = resolve(PlanSpec.model_validate(known), layers=units.layers, workers=2, lanes=units.lanes)
    assert again.chunks(units.shapes[0].steps) == 1


def test_growth_is_told_with_where_it_stops_to_pay() -> None:
    found = scale(units_of(batch={"lanes": 4, "steps": 16}), machine(), most=256)
    lines = scale_text(found).splitlines()
    assert len(lines) == len(found.points) + 2
    assert lines[-1].startswith(f"More than {found.pays_up_to} device")
    paying = scale(units_of(batch={"lanes": 512, "steps": 64}), machine(), most=2)
    assert scale_text(paying).splitlines()[-1] == "More devices pay off throughout this table, up to 2 devices."

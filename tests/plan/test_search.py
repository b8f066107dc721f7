"""The plan that a search chooses: never slower than one device, within memory, and with a reason."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from _machines import GIB, machine, units_of

from carrywave.errors import PlanError
from carrywave.plan.cluster import Cluster
from carrywave.plan.plan import Plan, resolve
from carrywave.plan.predict import Predictor
from carrywave.plan.profile import Link
from carrywave.plan.search import NoFit, asked_for, search
from carrywave.plan.units import Units
from carrywave.spec.facts import DataFacts
from carrywave.spec.plan_spec import PlanSpec
from carrywave.spec.spec import Spec

FAST, SLOW = Link(1e-7, 1e13), Link(5e-3, 1e6)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Units, Cluster]:
    units = units_of(
        draw(st.sampled_from([50, 20000])),
        model={"hidden": draw(st.sampled_from([128, 512])), "layers": draw(st.integers(1, 3)), "tie": draw(st.booleans())},
        batch={"lanes": draw(st.sampled_from([2, 9, 64])), "steps": draw(st.sampled_from([5, 35]))},
        train={"accumulate": draw(st.integers(1, 2))},
    )
    link = Link(draw(st.sampled_from([1e-6, 1e-3])), draw(st.sampled_from([1e8, 1e11])))
    return units, Cluster.uniform(machine(within=link), draw(st.integers(1, 6)))


@settings(max_examples=15)
@given(cases())
def test_the_choice_is_never_slower_than_one_device_and_can_be_carried_out(case: tuple[Units, Cluster]) -> None:
    units, cluster = case
    choice = search(units, cluster)
    assert choice.serial is not None
    assert choice.best.seconds <= choice.serial.seconds
    plan = choice.best.plan
    asked = PlanSpec(**{name: getattr(plan, name) or None for name in ("replicas", "stages", "cuts", "chunk_steps", "micro_batches")})
    found = resolve(asked, layers=units.layers, workers=plan.workers, lanes=units.lanes)
    assert (found.cuts, found.replicas, found.stages) == (plan.cuts, plan.replicas, plan.stages)
    assert all(rival.plan != plan for rival in choice.rivals)


@pytest.mark.parametrize(
    ("parts", "changes", "devices", "kind"),
    [
        ({"batch": {"lanes": 512, "steps": 32}}, {"within": FAST}, 4, (4, 1)),  # many lanes are shared out
        ({"batch": {"lanes": 1, "steps": 256}, "model": {"hidden": 512, "layers": 4}}, {"within": FAST}, 4, (1, 4)),  # one lane is not
        ({}, {"within": SLOW}, 4, (1, 1)),  # slow links keep everything on one device
        ({"batch": {"lanes": 64, "steps": 64}}, {"within": FAST, "task_seconds": 1.0}, 2, (2, 1)),  # tasks that cost much are few
    ],
)
def test_kinds_of_plans(parts: dict[str, Any], changes: dict[str, Any], devices: int, kind: tuple[int, int]) -> None:
    best = search(units_of(**parts), Cluster.uniform(machine(**changes), devices), use_all=kind != (1, 1)).best.plan
    assert (best.replicas, best.stages) == kind


def test_where_one_device_is_best_it_says_so() -> None:
    choice = search(units_of(), Cluster.uniform(machine(within=SLOW), 2))
    assert choice.why.startswith("1 device: uses 1 of 2 devices, as each doubling must save 5%; on 2, 2 ")
    assert all(choice.beside(rival).startswith("slower by ") for rival in choice.rivals)
    assert search(units_of(), Cluster.uniform(machine(within=SLOW), 2), use_all=True).best.plan.workers == 2
    with pytest.raises(PlanError, match=r"4 lanes and 4 units .* cannot use all 64 devices"):
        search(units_of(batch={"lanes": 4, "steps": 6}), Cluster.uniform(machine(), 64), use_all=True)


def test_real_steps_decide_among_different_kinds() -> None:
    choice = search(units_of(), Cluster.uniform(machine(), 4), use_all=True)
    plans = choice.to_try
    assert plans[0] == choice.best.plan
    assert len({(plan.replicas > 1, plan.stages > 1) for plan in plans}) == len(plans) == 3
    assert {plan.workers for plan in plans} == {4}
    few = search(units_of(batch={"lanes": 1, "steps": 256}), Cluster.uniform(machine(within=FAST), 2), use_all=True).to_try
    # One lane leaves stages alone; one of them has much longer chunks, should messages take longer than is known.
    assert (few[1].chunk_steps or 256) >= 4 * (few[0].chunk_steps or 256) or few[0].chunk_steps is None


def test_layers_that_read_both_ways_and_a_crf_are_not_cut_in_time_and_their_heads_not_shared() -> None:
    for task, model in (("classification", {"bidirectional": True}), ("tagging", {"crf": True})):
        spec = {"task": task, "model": {"hidden": 512, "layers": 6, **model}, "batch": {"tokens": 64 * 32}}
        units = Units.of(Spec.model_validate(spec), DataFacts(features=12, labels=("a", "b"), longest=32))
        choice = search(units, Cluster.uniform(machine(), 4), use_all=True)
        plans = [choice.best.plan, *(rival.plan for rival in choice.rivals)]
        assert all(plan.chunk_steps is None and not plan.share_head for plan in plans)


def test_more_memory_is_never_slower_and_less_ends_in_a_refusal() -> None:
    units = units_of(model={"hidden": 2048, "layers": 2}, batch={"lanes": 64, "steps": 128})
    before, refused = 0.0, ""
    for memory in (16.0, 2.0, 1.0, 0.5, 0.2):
        try:
            found = search(units, Cluster.uniform(machine(memory_bytes=int(memory * GIB)), 6)).best
        except NoFit as error:
            refused = str(error)
            continue
        assert not refused
        assert found.seconds >= before
        assert all(memory.total <= found.limit_bytes for memory in found.memory)
        before = found.seconds
    assert re.match(
        r"the model does not fit on 6 devices: at best, .* exceeds the 205 MiB of its device by .*; use a smaller batch.lanes, ", refused
    )


def test_memory_that_is_short_is_saved_by_recomputation_or_micro_batches() -> None:
    units = units_of(batch={"lanes": 64, "steps": 512})
    plain = Predictor(units, Cluster.uniform(machine(), 1)).memory(Plan(), 0, 0, len(units))
    short = machine(memory_bytes=plain.total - plain.activations // 3)
    best = search(units, Cluster.uniform(short, 1)).best
    assert best.plan.recompute or best.plan.micro_batches > 1
    assert best.memory[0].total <= short.memory_bytes


def test_a_plan_that_is_asked_for_is_compared_with_the_choice() -> None:
    units, cluster = units_of(batch={"lanes": 64, "steps": 64}), Cluster.uniform(machine(), 4)
    choice = search(units, cluster)
    found = asked_for(Plan(1, 4, (), 16), units, cluster, choice)
    assert (found.best.plan.stages, found.rivals[0].plan) == (4, choice.best.plan)
    assert "requested; the planner would choose" in found.why
    assert asked_for(choice.best.plan, units, cluster, choice).why.endswith("requested, and also the planner's choice")
    with pytest.raises(PlanError, match=r"stage 0 of the requested plan \(encoder, layers 1-2, head\) exceeds the 4 MiB of its device by"):
        asked_for(Plan(), units, Cluster.uniform(machine(memory_bytes=1 << 22), 4), choice)

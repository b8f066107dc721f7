"""What a plan takes: tasks by the constants, messages and sums by the links, memory by what is held."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from _machines import CONSTANTS, machine, units_of

from carrywave.plan.cluster import Cluster
from carrywave.plan.plan import Plan
from carrywave.plan.predict import Predictor, balanced
from carrywave.plan.profile import Link
from carrywave.plan.schedule.schedule import StageTask, durations, wavefront
from carrywave.plan.simulation import simulate

FREE = Link(0.0, 1e18)


def predictor(devices: int = 4, units: Any = None, **changes: Any) -> Predictor:
    return Predictor(units or units_of(), Cluster.uniform(machine(**changes), devices))


def test_messages_delay_the_stage_that_reads_them() -> None:
    schedule = wavefront(2, 1)
    seconds = durations(schedule)

    def message(task: StageTask) -> float:
        return 10.0

    assert simulate(schedule, seconds, message).seconds == simulate(schedule, seconds, lambda task: 0.0).seconds + 2 * 10.0


def test_one_device_takes_the_sum_of_its_parts() -> None:
    units = units_of(train={"precision": "fp32"})
    found = predictor(1, units, task_seconds=0.0, step_seconds=0.0).predict(Plan())
    rows, wide, vocabulary = 16 * 32, 512, 4096
    layer = CONSTANTS["layer"]
    layers = 2 * (layer["call_seconds"] + 32 * layer["step_seconds"] + rows * 8 * wide * wide * layer["product_seconds"])
    head = CONSTANTS["head"]["call_seconds"] + rows * wide * vocabulary * CONSTANTS["head"]["product_seconds"]
    embedding = CONSTANTS["embedding"]["call_seconds"] + rows * wide * CONSTANTS["embedding"]["element_seconds"]
    update = 1e-5 + units.parameters(0, len(units)) * 1e-10
    assert found.seconds == pytest.approx(layers + head + embedding + update)
    assert found.tokens_per_second == pytest.approx(rows / found.seconds)


def test_replicas_add_what_their_sums_take_and_stages_what_their_messages_take() -> None:
    slow = {plan: predictor(within=Link(1e-3, 1e9)).predict(plan) for plan in (Plan(2), Plan(1, 2, (), 8))}
    fast = {plan: predictor(within=FREE).predict(plan) for plan in slow}
    replicas, stages = slow
    assert slow[replicas].reduced_bytes == 4 * units_of().parameters(0, 4)
    assert slow[replicas].seconds - fast[replicas].seconds > slow[replicas].reduced_bytes / 1e9  # a ring over two sends everything once
    assert slow[stages].sent_bytes == 2 * 16 * 32 * 512 * 4
    assert slow[stages].seconds - fast[stages].seconds > slow[stages].sent_bytes / 2 / 1e9


@given(st.lists(st.floats(0.1, 9.0), min_size=2, max_size=7), st.data())
def test_cuts_balance_the_stages(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    edges = (0, *balanced(len(costs), stages, lambda stage, first, last: sum(costs[first:last])), len(costs))
    assert len(edges) == stages + 1
    slowest = max(sum(costs[a:b]) for a, b in pairwise(edges))
    # No cut can be better than an even share, nor than the largest unit; and this one is no worse than both together.
    assert max(sum(costs) / stages, max(costs)) - 1e-6 <= slowest <= sum(costs) / stages + max(costs) + 1e-6


def test_a_heavy_head_moves_the_cuts_or_is_shared() -> None:
    of = predictor(2, units_of(32768, model={"hidden": 512, "layers": 8}, batch={"lanes": 8, "steps": 128}))
    even = of.predict(Plan(1, 2, (), 8))
    assert of.cut(Plan(1, 2, (), 8)).cuts > even.plan.cuts
    assert of.predict(of.cut(Plan(1, 2, (), 8))).seconds < even.seconds
    assert of.predict(of.cut(Plan(1, 2, (), 8, share_head=True))).seconds < even.seconds


def test_memory_grows_with_what_is_held() -> None:
    units = units_of(batch={"lanes": 64, "steps": 512})
    of = predictor(4, units)

    def held(plan: Plan) -> Any:
        return of.memory(plan, 0, *plan.span(0, len(units)))

    plain = held(Plan())
    assert held(Plan(1, 1, (), 32, recompute=True)).activations < plain.activations / 4
    assert held(Plan(micro_batches=4)).activations == pytest.approx(plain.activations / 4, rel=0.01)
    assert held(Plan(2)).gradients == 2 * plain.gradients  # summed in buffers of their own
    assert held(Plan(1, 2, (2,))).parameters < plain.parameters

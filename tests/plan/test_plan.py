"""A plan is checked against model, workers and lanes before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from carrywave.errors import PlanError
from carrywave.plan.plan import Plan, even_cuts, fewer, resolve
from carrywave.spec.plan_spec import PlanSpec


def test_what_is_left_out_is_filled_in() -> None:
    assert resolve(PlanSpec(), layers=2, workers=1, lanes=20) == Plan.serial()
    assert resolve(PlanSpec(stages=2), layers=4, workers=6, lanes=None) == Plan(replicas=3, stages=2, cuts=(3,), chunk_steps=16)
    assert resolve(PlanSpec(stages=2, micro_batches=2), layers=4, workers=2, lanes=None).chunk_steps is None
    assert [Plan(chunk_steps=8).chunks(steps) for steps in (1, 8, 9, 35)] == [1, 1, 2, 5]


def test_even_cuts_share_the_layers() -> None:
    assert even_cuts(6, 1) == ()
    assert even_cuts(6, 2) == (3,)  # encoder and two layers; two layers and the head
    assert even_cuts(10, 5) == (3, 5, 7, 8)
    assert even_cuts(10, 8) == (2, 3, 4, 5, 6, 7, 8)
    assert even_cuts(4, 3) == (2, 3)  # more stages than layers: the head stands alone
    assert even_cuts(4, 4) == (1, 2, 3)


def test_a_head_is_shared_by_several_stages_alone() -> None:
    assert resolve(PlanSpec(stages=2, share_head=True), layers=4, workers=2, lanes=None).shares_head
    assert not resolve(PlanSpec(share_head=True), layers=4, workers=2, lanes=None, pooled=True).shares_head
    with pytest.raises(PlanError, match=r"share_head=true .* scores whole sequences; remove plan.share_head"):
        resolve(PlanSpec(stages=2, share_head=True), layers=4, workers=2, lanes=None, pooled=True)


def test_a_plan_made_by_hand_is_cut_evenly() -> None:
    assert Plan(stages=2).edges(6) == (0, 3, 6)
    assert Plan(stages=3, cuts=(1, 5)).edges(6) == (0, 1, 5, 6)
    with pytest.raises(PlanError, match=r"plan.cuts=\[1, 1\] must increase, from 1 \(layer 1\) to at most 5 \(the head\)"):
        Plan(stages=3, cuts=(1, 1)).edges(6)


@pytest.mark.parametrize(
    ("asked", "workers", "lanes", "message"),
    [
        (PlanSpec(replicas=2), 1, None, "needs 2 workers, got 1"),
        (PlanSpec(stages=5), 5, None, "the model has 4 units"),
        (PlanSpec(micro_batches=4), 1, 3, "batch.lanes=3 cannot be divided among plan.replicas=1 x plan.micro_batches=4"),
        (PlanSpec(stages=2, cuts=(9,)), 2, None, r"plan.cuts=\[9\] must increase, from 1 \(layer 1\) to at most 3"),
    ],
)
def test_impossible_plans_are_refused(asked: PlanSpec, workers: int, lanes: int | None, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        resolve(asked, layers=2, workers=workers, lanes=lanes)


@pytest.mark.parametrize(
    ("asked", "workers", "found"),
    [
        ({"replicas": 4}, 3, (3, 1)),
        ({"replicas": 2, "stages": 2}, 2, (1, 2)),
        ({"stages": 2, "cuts": [2]}, 1, (1, 1)),
        ({"stages": 4}, 6, (2, 3)),
        ({"stages": 2}, 3, (3, 1)),
    ],
)
def test_with_fewer_workers_stages_divide_them(asked: dict[str, Any], workers: int, found: tuple[int, int]) -> None:
    plan = resolve(fewer(PlanSpec(**asked), workers), layers=4, workers=workers, lanes=8)
    assert (plan.replicas, plan.stages) == found

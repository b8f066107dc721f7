"""The rule by which lanes are cut into shards, who holds which, and the order in which they are summed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.loader import Share
from carrywave.errors import PlanError
from carrywave.plan.canonical_shards import REPLICAS, SHARDS, bounds, check, partners, shards_of, tree
from carrywave.plan.plan import Plan


def shown(left: str, right: str) -> str:
    return f"({left}+{right})"


def test_the_tree() -> None:
    assert tree([str(number) for number in range(8)], shown) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert tree(["a"], shown) == "a"


@pytest.mark.parametrize("lanes", [*range(20), 1000])
def test_the_shards_are_all_lanes_once_and_nearly_equal(lanes: int) -> None:
    parts = [range(*bounds(lanes, shard)) for shard in range(SHARDS)]
    assert [lane for part in parts for lane in part] == list(range(lanes))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(lanes=st.integers(0, 10_000), replicas=st.sampled_from(REPLICAS))
def test_the_shards_of_a_replica_are_its_lanes(lanes: int, replicas: int) -> None:
    for replica in range(replicas):
        own = shards_of(replica, replicas)
        assert (bounds(lanes, own[0])[0], bounds(lanes, own[-1])[1]) == Share(replica, replicas).bounds(lanes)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_replicas_that_add_up_in_pairs_come_to_the_tree(replicas: int) -> None:
    sums = [tree([str(shard) for shard in shards_of(replica, replicas)], shown) for replica in range(replicas)]
    for level in range(len(partners(0, replicas))):
        others = [partners(replica, replicas)[level] for replica in range(replicas)]
        assert [others[other] for other in others] == list(range(replicas))  # both of a pair know of each other
        # Of two summands the order does not matter; the lower one is written first.
        sums = [shown(sums[min(pair)], sums[max(pair)]) for pair in zip(range(replicas), others, strict=True)]
    assert set(sums) == {tree([str(shard) for shard in range(SHARDS)], shown)}


@pytest.mark.parametrize("replicas", [3, 5, 6, 7, 16])
def test_other_numbers_of_replicas_are_refused(replicas: int) -> None:
    with pytest.raises(PlanError, match=rf"train\.reproducible=true .*{replicas} replicas .*; use 1, 2, 4 or 8 replicas$"):
        check(Plan(replicas=replicas))


def test_micro_batches_are_refused() -> None:
    with pytest.raises(PlanError, match=r"train\.reproducible=true .*plan\.micro_batches=2 .*; remove plan\.micro_batches$"):
        check(Plan(micro_batches=2))


@pytest.mark.parametrize("replicas", REPLICAS)
def test_what_is_served(replicas: int) -> None:
    check(Plan(replicas=replicas, stages=2, cuts=(1,), chunk_steps=4, recompute=True))

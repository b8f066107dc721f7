"""Who does what on which host: pipelines stay together where they can, and the launcher's order is kept where it is as good."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.plan.placement import Seat, arrange, crossings, describe, seats
from carrywave.plan.plan import Plan


@pytest.mark.parametrize(
    ("hosts", "stages", "ranks"),
    [
        ("aaaa", 2, (0, 1, 2, 3)),
        ("aabb", 2, (0, 1, 2, 3)),
        ("aabb", 1, (0, 1, 2, 3)),
        ("abab", 2, (0, 2, 1, 3)),  # dealt out in turn
        ("abab", 4, (0, 1, 2, 3)),  # one pipeline over both hosts: nothing to choose
        ("abbc", 2, (0, 3, 1, 2)),  # b has room for a whole one
        ("aaabbb", 2, (0, 1, 2, 3, 4, 5)),  # one of three has to cross either way
        ("aabbbbaa", 4, (0, 1, 6, 7, 2, 3, 4, 5)),
        ("abcabcabc", 3, (0, 3, 6, 1, 4, 7, 2, 5, 8)),
    ],
)
def test_pipelines_stay_on_a_host(hosts: str, stages: int, ranks: tuple[int, ...]) -> None:
    assert arrange(hosts, stages) == ranks


@given(hosts=st.text("abcd", min_size=1, max_size=24), stages=st.integers(1, 6))
def test_every_rank_has_one_position_and_nothing_gets_worse(hosts: str, stages: int) -> None:
    hosts = hosts[: len(hosts) - len(hosts) % stages]
    if not hosts:
        return
    found = arrange(hosts, stages)
    assert sorted(found) == list(range(len(hosts)))
    assert found[0] == 0  # rank 0 writes, and reads inputs
    assert crossings(hosts, found, stages) <= crossings(hosts, range(len(hosts)), stages)
    for first in range(0, len(found), stages):
        assert list(found[first : first + stages]) == sorted(found[first : first + stages])


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=5), stages=st.integers(1, 4))
def test_pipelines_that_fit_on_their_hosts_cross_nothing(counts: list[int], stages: int) -> None:
    hosts = "".join("abcde"[node] * (count * stages) for node, count in enumerate(counts))
    dealt = "".join(hosts[at::3] for at in range(3))
    assert crossings(dealt, arrange(dealt, stages), stages) == 0


def test_who_sits_where() -> None:
    found = seats(["a", "b", "a", "b"], [0, 0, 1, 1], Plan(replicas=2, stages=2))
    assert found == [Seat(0, "a", 0, 0, 0), Seat(1, "b", 0, 1, 0), Seat(2, "a", 1, 0, 1), Seat(3, "b", 1, 1, 1)]
    assert describe(found) == ["a: replica 0: stages 0-1 on ranks 0, 2", "b: replica 1: stages 0-1 on ranks 1, 3"]
    assert describe(seats("aaab", [0, 1, 2, 0], Plan(stages=4))) == [
        "a: replica 0: stages 0-2 on ranks 0-2",
        "b: replica 0: stage 3 on rank 3",
    ]
    lines = describe(seats([f"h{host}" for host in range(20)], [0] * 20, Plan(replicas=20)))
    assert (len(lines), lines[-1]) == (17, "and 4 more hosts")

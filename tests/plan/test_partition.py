from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.errors import PlanError
from carrywave.plan.search.partition import NoFit, all_cuts, balanced, partition, say

NUMBERS = st.integers(0, 20)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int]]:
    """Seconds and bytes of each unit; slowness and memory of each device."""
    units, stages = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    stages = min(units, stages)
    each = [draw(st.lists(NUMBERS, min_size=size, max_size=size)) for size in (units, units, stages, stages)]
    return each[0], each[1], [slow + 1 for slow in each[2]], [3 * limit for limit in each[3]]


@given(rows())
def test_it_finds_what_trying_all_cuts_finds(row: tuple[list[int], list[int], list[int], list[int]]) -> None:
    seconds, sizes, slow, limits = row
    units, stages = len(seconds), len(slow)

    def took(stage: int, first: int, last: int) -> float:
        return float(slow[stage] * sum(seconds[first:last]))

    def num_bytes(stage: int, first: int, last: int) -> int:
        return sum(sizes[first:last])

    def worst(cuts: tuple[int, ...]) -> float:
        edges = (0, *cuts, units)
        return max(took(stage, edges[stage], edges[stage + 1]) for stage in range(stages))

    def over(cuts: tuple[int, ...]) -> int:
        edges = (0, *cuts, units)
        return max(num_bytes(stage, edges[stage], edges[stage + 1]) - limits[stage] for stage in range(stages))

    fitting = [cuts for cuts in all_cuts(units, stages) if over(cuts) <= 0]
    if fitting:
        found = partition(units, stages, took, num_bytes, limits)
        assert over(found) <= 0
        assert worst(found) == min(map(worst, fitting))
    else:
        with pytest.raises(NoFit) as error:
            partition(units, stages, took, num_bytes, limits)
        assert error.value.missing_bytes == min(map(over, all_cuts(units, stages)))
    assert worst(partition(units, stages, took)) == min(map(worst, all_cuts(units, stages)))


@given(st.lists(NUMBERS, min_size=1, max_size=8))
def test_all_numbers_of_stages_at_once_are_as_good_as_each_by_itself(seconds: list[int]) -> None:
    units = len(seconds)

    def worst(cuts: tuple[int, ...]) -> int:
        edges = (0, *cuts, units)
        return max(sum(seconds[a:b]) for a, b in pairwise(edges))

    for stages, cuts in enumerate(balanced(units, units, lambda a, b: float(sum(seconds[a:b]))), start=1):
        assert len(cuts) == stages - 1
        assert worst(cuts) == min(map(worst, all_cuts(units, stages)))


def test_a_cut_that_does_not_fit_names_the_stage_and_what_it_lacks() -> None:
    sizes = [1 << 30, 6 << 30, 6 << 30, 1 << 30]
    with pytest.raises(NoFit) as error:
        partition(4, 2, lambda s, a, b: 1.0, lambda s, a, b: sum(sizes[a:b]), [6 << 30, 6 << 30])
    assert str(error.value) == (
        "no way to cut 4 units into 2 stages fits in memory: at best, stage 0 (the encoder to layer 1) exceeds the 6 GiB of its device "
        "by 1 GiB; "
        "use more stages (up to 4), plan.recompute or plan.micro_batches, or devices with more memory"
    )


def test_a_unit_too_large_for_any_device_is_named() -> None:
    sizes = [1, 1, 900, 1]
    with pytest.raises(NoFit, match="layer 2 alone exceeds the 100 bytes of its device by 800 bytes; use a device with more memory, or a"):
        partition(4, 4, lambda s, a, b: 1.0, lambda s, a, b: sum(sizes[a:b]), [100] * 4)


@pytest.mark.parametrize("stages", [0, 5])
def test_more_stages_than_units_are_refused(stages: int) -> None:
    with pytest.raises(PlanError, match=f"4 units .* cannot fill {stages} stages; use 1 to 4 stages"):
        partition(4, stages, lambda s, a, b: 1.0)


def test_bytes_in_words() -> None:
    assert [say(size) for size in (3, 1536, 5 << 20, 80 << 30, 5000 << 30)] == ["3 bytes", "1.5 KiB", "5 MiB", "80 GiB", "5000 GiB"]

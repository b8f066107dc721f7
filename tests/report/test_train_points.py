"""Points of the train curve: each over about as many steps, and the mean over all rows is what it was."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.report.train_points import groups, train_points


def rows_of(sizes: list[int], values: list[float] | None = None) -> list[dict[str, Any]]:
    """Rows over so many steps each."""
    values = [float(at) for at in range(len(sizes))] if values is None else values
    return [
        {"step": sum(sizes[: at + 1]), "steps": size, "targets": 3 * size, "loss": values[at], "seconds": 0.1 * size}
        for at, size in enumerate(sizes)
    ]


def test_the_row_before_an_evaluation_is_no_spike() -> None:
    # Epochs of 52 steps, logged every 50: a row over 2 steps, whose loss is far off, then one over 48, and so on.
    rows = rows_of([50, 2, 48, 4, 46, 6], [1.0, 9.0, 1.0, 9.0, 1.0, 9.0])
    points = train_points(rows, "loss", "targets")
    assert [step for step, _ in points] == [50, 100, 156]
    assert max(value for _, value in points) < 2.5
    assert points[1][1] == pytest.approx((2 * 9.0 + 48) / 50)


def test_equal_rows_are_points_of_their_own() -> None:
    assert train_points(rows_of([10, 10, 10]), "loss", "targets") == [(10, 0), (20, 1), (30, 2)]
    assert train_points(rows_of([2]), "loss", "targets") == [(2, 0)]
    assert train_points([], "loss", "targets") == []
    old = [{"step": 5, "loss": 1.0}, {"step": 10, "loss": 2.0}]  # of a version that did not count steps
    assert train_points(old, "loss", "targets") == [(5, 1), (10, 2)]


def test_what_is_not_finite_is_left_out() -> None:
    rows = rows_of([50, 2, 48])
    rows[1]["loss"] = None
    assert train_points(rows, "loss", "targets") == [(50, 0), (100, 2)]
    assert train_points(rows, "norm", "steps") == []


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_no_row_is_lost_and_no_point_is_over_few_steps(sizes: list[int]) -> None:
    rows = rows_of(sizes)
    found = groups(rows)
    assert [row for group in found for row in group] == rows
    steps = [sum(row["steps"] for row in group) for group in found]
    usual = next(size for size in sorted(sizes, reverse=True) if 2 * sum(each for each in sizes if each >= size) >= sum(sizes))
    assert len(steps) == 1 or 2 * min(steps) >= usual
    assert max(steps) < 1.5 * usual + max(sizes)
    points = train_points(rows, "loss", "targets")
    mean = sum(row["loss"] * row["targets"] for row in rows) / sum(row["targets"] for row in rows)
    assert sum(value * many for (_, value), many in zip(points, steps, strict=True)) / sum(steps) == pytest.approx(mean)

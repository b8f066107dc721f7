"""Times that come next."""

from __future__ import annotations

import datetime as dt

import pytest

from carrywave.data.ahead import times_ahead


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ((1, 3, 5), [7, 9]),
        ((dt.datetime(2024, 2, 28, 22), dt.datetime(2024, 2, 28, 23)), ["2024-02-29 00:00:00", "2024-02-29 01:00:00"]),
        ((dt.date(2024, 1, 1), dt.date(2024, 1, 8), dt.date(2024, 1, 15)), ["2024-01-22", "2024-01-29"]),
        ((dt.date(2023, 11, 15), dt.date(2023, 12, 15), dt.date(2024, 1, 15)), ["2024-02-15", "2024-03-15"]),
        ((dt.date(2023, 11, 30), dt.date(2023, 12, 31), dt.date(2024, 1, 31)), ["2024-02-29", "2024-03-31"]),
        ((dt.date(2022, 2, 28), dt.date(2023, 2, 28), dt.date(2024, 2, 29)), ["2025-02-28", "2026-02-28"]),
        ((dt.date(2023, 7, 1), dt.date(2023, 10, 1), dt.date(2024, 1, 1)), ["2024-04-01", "2024-07-01"]),
    ],
)
def test_what_follows(last: tuple[object, ...], expected: list[object]) -> None:
    assert times_ahead(last, 2) == expected


@pytest.mark.parametrize("last", [(), (1,), ("a", "b"), (dt.date(2024, 1, 1), dt.date(2024, 1, 4), dt.date(2024, 1, 5)), (1, 2, 4)])
def test_what_cannot_be_told_is_not_guessed(last: tuple[object, ...]) -> None:
    assert times_ahead(last, 2) is None

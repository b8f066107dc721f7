"""The times that come next in a series: equal steps, or equal months, go on; anything else is not guessed."""

from __future__ import annotations

import calendar
import datetime as dt
from itertools import pairwise
from typing import Any

Time = dt.datetime | dt.date | int | float


def times_ahead(last: tuple[Any, ...], count: int) -> list[str | int | float] | None:
    """The next `count` times after the last few of a series (dates as ISO text); None where there is no telling."""
    if len(last) < 2 or any(isinstance(time, bool) or not isinstance(time, dt.date | int | float) for time in last):
        return None
    # Months first: three of them may be equally long by chance.
    found = _months_ahead(list(last), count) if all(isinstance(time, dt.date) for time in last) else None
    if found is None:
        steps = {after - before for before, after in pairwise(last)}
        found = [_plain(last[-1] + step * number) for step in steps for number in range(1, count + 1)] if len(steps) == 1 else None
    return found


def _months_ahead(last: list[dt.date], count: int) -> list[str | int | float] | None:
    """Months, quarters and years are not equally long; they go on from the same day, or from the month's end."""
    months = [time.year * 12 + time.month - 1 for time in last]
    steps = {after - before for before, after in pairwise(months)}
    at_end = all(time.day == _length(month) for time, month in zip(last, months, strict=True))
    if len(steps) != 1 or steps == {0} or not (at_end or len({time.day for time in last}) == 1):
        return None
    step, day = steps.pop(), last[-1].day
    found: list[str | int | float] = []
    for number in range(1, count + 1):
        month = months[-1] + step * number
        length = _length(month)
        found.append(_plain(last[-1].replace(year=month // 12, month=month % 12 + 1, day=length if at_end else min(day, length))))
    return found


def _length(month: int) -> int:
    return calendar.monthrange(month // 12, month % 12 + 1)[1]


def _plain(time: Time) -> str | int | float:
    if isinstance(time, dt.datetime):
        return time.isoformat(sep=" ")
    return time.isoformat() if isinstance(time, dt.date) else time

"""The spacing of a series' times: fixed steps, months, or certain weekdays. Inferred from all times, never from a sample.

Times are numbers, or datetime64[us] without a time zone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from carrywave.errors import DataError, SpecError
from carrywave.spec.data_spec import FREQUENCY, WEEKDAYS

Keys = NDArray[Any]
Counts = NDArray[np.int64]

SECOND = 1_000_000
DAY = 86_400 * SECOND
SIZES = {"W": 7 * DAY, "D": DAY, "h": 3600 * SECOND, "min": 60 * SECOND, "s": SECOND, "ms": 1000, "us": 1}
SAME = {"H": "h", "T": "min", "S": "s", "sec": "s", "d": "D", "w": "W", "b": "B"}
MONTHS = {"M": 1, "Q": 3, "Y": 12, "A": 12}
BUSINESS = "1111100"
MOST = 0.5  # more than this fraction of gaps must be single steps; otherwise times are irregular rather than regular with gaps
RECURRING = 3  # this many gaps at the same time of day or week are not a coincidence; one of several series at once counts as one
DIGITS = 9  # significant digits of a fractional step
ROUNDING = 1e-6  # tolerance for inexact decimal fractions, relative to the step
SHORTEST, LONGEST = 28, 31  # months, in days


class Frequency(Protocol):
    """A regular spacing of times."""

    @property
    def text(self) -> str:
        """As written in `data.frequency`."""

    def count(self, before: Keys, after: Keys) -> Counts:
        """Return the number of steps from `before` to `after`; 0 if it is not a whole number."""

    def ahead(self, times: Keys, count: int) -> Keys:
        """Return the next `count` times of a series whose times so far are `times`."""


@dataclass(frozen=True)
class FixedStep:
    """Equal steps, in microseconds or in plain numbers."""

    size: float
    timed: bool

    @property
    def text(self) -> str:
        """As written in `data.frequency`."""
        if not self.timed:
            return f"{self.size:g}" if float(f"{self.size:g}") == self.size else repr(self.size)
        unit = next(unit for unit, size in SIZES.items() if self.size % size == 0)
        times = int(self.size // SIZES[unit])
        return unit if times == 1 else f"{times}{unit}"

    def count(self, before: Keys, after: Keys) -> Counts:
        """Return the number of steps from `before` to `after`; 0 if it is not a whole number."""
        gap = (after - before).astype(np.int64) if self.timed else after - before
        units = np.rint(gap / self.size)
        return np.where(np.abs(gap - units * self.size) <= ROUNDING * self.size, units, 0).astype(np.int64)

    def ahead(self, times: Keys, count: int) -> Keys:
        """Return the times that follow the last one."""
        steps = np.arange(1, count + 1) * (int(self.size) if float(self.size).is_integer() else self.size)
        following: Keys = times[-1] + (steps.astype("timedelta64[us]") if self.timed else steps)
        return following


@dataclass(frozen=True)
class Months:
    """Months, quarters or years: the same day of each, or the last day of a shorter month; `anchor` S or E requires first or last days.

    `days` are those on which series are known to be, 31 for the last of every month: a few times, all of them last days, do not show which.
    """

    size: int
    anchor: str = ""
    days: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """As written in `data.frequency`."""
        unit, months = next((unit, months) for unit, months in (("Y", 12), ("Q", 3), ("M", 1)) if self.size % months == 0)
        times = self.size // months
        return f"{'' if times == 1 else times}{unit}{self.anchor}"

    def count(self, before: Keys, after: Keys) -> Counts:
        """Return the number of steps from `before` to `after`; 0 if it is not a whole number."""
        day_a, end_a, clock_a = _in_month(before)
        day_b, end_b, clock_b = _in_month(after)
        # The 30th of January is followed by the 28th of February, and that by the 30th of March.
        alike = (day_a == day_b) | (end_a & end_b) | (end_b & (day_b < day_a)) | (end_a & (day_a < day_b))
        alike &= clock_a == clock_b
        if self.anchor:
            alike &= ((day_a == 1) & (day_b == 1)) if self.anchor == "S" else (end_a & end_b)
        months = (after.astype("datetime64[M]") - before.astype("datetime64[M]")).astype(np.int64)
        return np.where(alike & (months % self.size == 0), months // self.size, 0)

    def ahead(self, times: Keys, count: int) -> Keys:
        """Return the times that follow the last one."""
        day, end, clock = _in_month(times)
        months = times[-1].astype("datetime64[M]") + (np.arange(1, count + 1) * self.size).astype("timedelta64[M]")
        lengths = _lengths(months)
        choice = [int(day.max())]
        if end.all():
            fitting = [each for each in self.days if (np.minimum(each, _lengths(times.astype("datetime64[M]"))) == day).all()]
            choice = fitting or [LONGEST]
        days = np.minimum(choice[0], lengths)
        if any((np.minimum(other, lengths) != days).any() for other in choice[1:]):
            shown = " and ".join("the last day" if each == LONGEST else f"day {each}" for each in choice[:2])
            fact = f"{times[-1].astype('datetime64[D]')} is the last day of its month, and the training data has series on {shown} of each"
            raise DataError(f"{fact}; give more rows of the series, so that its day is known")
        following: Keys = months.astype("datetime64[us]") + (days - 1) * np.timedelta64(DAY, "us") + clock[-1]
        return following


def month_days(keys: Keys, codes: Counts) -> tuple[int, ...]:
    """Return the days of the month that series are on, 31 for the last; none if each row tells its own: no series is on 28, 29 or 30."""
    day, end, _ = _in_month(keys)
    starts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(np.diff(codes)) + 1])
    all_days = np.unique(np.where(np.logical_and.reduceat(end, starts), LONGEST, np.maximum.reduceat(day, starts)))
    late = tuple(int(each) for each in all_days if each >= SHORTEST)
    return () if late == (LONGEST,) else late


@dataclass(frozen=True)
class Weekdays:
    """Certain days of every week, Monday first: `1111100` is business days. `size` 2 or 3 takes every second or third of them."""

    mask: str
    size: int = 1

    @property
    def text(self) -> str:
        """As written in `data.frequency`."""
        if self.mask == BUSINESS:
            return "B" if self.size == 1 else f"{self.size}B"
        return " ".join(name for name, on in zip(WEEKDAYS, self.mask, strict=True) if on == "1")

    def count(self, before: Keys, after: Keys) -> Counts:
        """Return the number of steps from `before` to `after`; 0 if a time is on another day, or it is not a whole number."""
        (days_a, clock_a), (days_b, clock_b) = _days(before), _days(after)
        fits = (clock_a == clock_b) & np.is_busday(days_a, self.mask) & np.is_busday(days_b, self.mask)
        days = np.busday_count(days_a, days_b, self.mask)
        return np.where(fits & (days % self.size == 0), days // self.size, 0)

    def ahead(self, times: Keys, count: int) -> Keys:
        """Return the times that follow the last one."""
        days, clock = _days(times[-1:])
        return np.busday_offset(days, np.arange(1, count + 1) * self.size, weekmask=self.mask).astype("datetime64[us]") + clock


def parse(text: str) -> Frequency:
    """Parse a `data.frequency`."""
    match = FREQUENCY.fullmatch(text.strip())
    if match is None:
        raise SpecError(f"data.frequency={text} is not a known frequency; use for example 15min, h, D, B, W, MS, a number, or none")
    if match["number"]:
        return FixedStep(float(match["number"]), timed=False)
    if match["days"]:
        names = match["days"].split()
        return Weekdays("".join("1" if name in names else "0" for name in WEEKDAYS))
    times, unit = int(match["times"] or 1), SAME.get(match["unit"], match["unit"])
    if unit == "B":
        return Weekdays(BUSINESS, times)
    if unit[0] in MONTHS and unit not in SIZES:
        return Months(times * MONTHS[unit[0]], unit[1:])
    return FixedStep(times * SIZES[unit], timed=True)


def infer(keys: Keys, inside: NDArray[np.bool_]) -> Frequency | None:
    """Infer the frequency of sorted times; `inside` is True where a time and the next belong to one series. None if irregular.

    Gaps are allowed if most steps are single ones and the gaps do not recur at the same time of every day or week: business hours
    are not an hourly frequency with gaps. None also if no series has two times, or if a time does not increase.
    """
    before, after = keys[:-1][inside], keys[1:][inside]
    if not len(before):
        return None
    timed = keys.dtype.kind == "M"
    gaps = (after - before).astype(np.int64) if timed else after - before
    shortest = gaps.min()
    if not shortest > 0:
        return None
    if timed:
        # Try months first: a few of them may be equally long by coincidence.
        months = Months(1).count(before, after)
        if (months > 0).all() and _steady(monthly := Months(int(months.min())), before, after):
            return monthly
    # The median of the steps close to the shortest, rounded to the digits people write: decimal fractions are not exact.
    alike = gaps[gaps <= shortest * (1 + ROUNDING)]
    step = FixedStep(float(shortest) if timed or keys.dtype.kind in "iu" else float(f"{np.median(alike):.{DIGITS}g}"), timed)
    if (step.count(before, after) == 1).all():
        return step
    if timed and (days := _weekdays(keys, before, after)) is not None:
        return days
    return step if _steady(step, before, after) and not (timed and _recurring(step, keys, before, after)) else None


def _steady(frequency: Frequency, before: Keys, after: Keys) -> bool:
    units = frequency.count(before, after)
    return bool((units > 0).all() and (units == 1).mean() > MOST)


def _weekdays(keys: Keys, before: Keys, after: Keys) -> Weekdays | None:
    """Return the weekdays that occur, if the others were skipped often enough."""
    present = set(((keys.astype("datetime64[D]").astype(np.int64) + 3) % 7).tolist())  # 1970-01-01 was a Thursday
    mask = "".join("1" if day in present else "0" for day in range(7))
    if len(present) == 7:
        return None
    frequency = Weekdays(mask)
    if mask == BUSINESS and (units := frequency.count(before, after)).all():
        frequency = Weekdays(mask, int(units.min()))
    if not _steady(frequency, before, after):
        return None
    # One skipped weekend establishes business days; any other day off must be skipped three times, whatever the number of series.
    days_a, days_b = before.astype("datetime64[D]"), after.astype("datetime64[D]")
    lengths = (days_b - days_a).astype(np.int64)
    first = np.unique(days_a.astype(np.int64) * (lengths.max() + 1) + lengths, return_index=True)[1]
    days_a, days_b = days_a[first], days_b[first]
    needed = 1 if mask == BUSINESS else 3
    for day in set(range(7)) - present:
        only = "".join("1" if day == other else "0" for other in range(7))
        if int(np.busday_count(days_a, days_b, only).sum()) < needed:
            return None
    return frequency


def _recurring(step: FixedStep, keys: Keys, before: Keys, after: Keys) -> bool:
    """True if most gaps start at a time of day or week that never occurs in the data: nights, weekends."""
    size = int(step.size)
    starts = np.unique(before[step.count(before, after) > 1].astype(np.int64)) + size
    for cycle in (DAY, 7 * DAY):
        if size >= cycle or cycle % size:
            continue
        present = np.unique(keys.astype(np.int64) % cycle)
        nexts, counts = np.unique(starts % cycle, return_counts=True)
        again = counts[~np.isin(nexts, present) & (counts >= RECURRING)]
        if int(again.sum()) > MOST * len(starts):
            return True
    return False


def _in_month(times: Keys) -> tuple[Counts, NDArray[np.bool_], Keys]:
    """Return the day of the month, whether it is the last, and the time of day."""
    months = times.astype("datetime64[M]")
    days, clock = _days(times)
    day = (days - months.astype("datetime64[D]")).astype(np.int64) + 1
    return day, day == _lengths(months), clock


def _lengths(months: Keys) -> Counts:
    lengths: Counts = ((months + np.timedelta64(1, "M")).astype("datetime64[D]") - months.astype("datetime64[D]")).astype(np.int64)
    return lengths


def _days(times: Keys) -> tuple[Keys, Keys]:
    """Return the days and the times of day."""
    days = times.astype("datetime64[D]")
    return days, times - days

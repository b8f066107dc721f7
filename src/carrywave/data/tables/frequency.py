"""The grid on which times lie: equal steps, or those of a pandas frequency such as month ends and business days.

Times are numbers, or datetime64[us].
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from carrywave.errors import SpecError

Keys = NDArray[Any]
Places = NDArray[np.int64]

OLD = {"H": "h", "T": "min", "S": "s", "d": "D", "w": "W", "b": "B", "M": "MS", "Q": "QS", "Y": "YS", "A": "YS"}
WEEKS = [f"W-{day}" for day in ("MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN")]
ANCHORED = ["YS", "YE", "BYS", "BYE", "QS", "QE", "BQS", "BQE", "MS", "ME", "BMS", "BME", "SMS", "SME", *WEEKS, "B"]
MONTHLY = ("YS", "QS", "MS")  # whose day of the month may be another than the first
ENDS = {"MS": "ME", "QS": "QE", "YS": "YE"}
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
LEAST_FULL = 0.3  # of the grid from the first time to the last is there; otherwise the times are irregular
LEAST_ON = 0.99  # of the steps are multiples of the usual one
LOOKED_AT = 500
ROUNDING = 1e-6  # of a step of numbers, which may be inexact decimal fractions


@dataclass(frozen=True)
class Frequency:
    """Steps of a grid: equal ones have a size, others go by a pandas offset, each series at its own constant distance from it."""

    text: str  # as in `data.frequency`
    size: float | None = None  # of equal steps: microseconds, or plain numbers
    timed: bool = True

    def places(self, keys: Keys, codes: Places) -> Places:
        """Return which step of its series' grid each time is, -1 for a time beside it; rows are sorted by series and time."""
        begins = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(np.diff(codes)) + 1])[: len(keys)]
        counts = np.diff(np.append(begins, len(keys)))
        if self.size is not None:
            first = np.repeat(keys[begins], counts)
            gaps = (keys - first).astype(np.int64) if self.timed else keys - first
            units = np.rint(gaps / self.size)
            return np.where(np.abs(gaps - units * self.size) <= ROUNDING * self.size, units, -1).astype(np.int64)
        shifts = np.array([self._shift(key) for key in keys[begins]], "timedelta64[us]")
        days = pd.DatetimeIndex(keys - np.repeat(shifts, counts))
        grid = pd.date_range(days.min(), days.max(), freq=offset_of(self.text))
        return np.asarray(grid.get_indexer(days), np.int64)

    def ahead(self, last: Any, count: int) -> Keys:
        """Return the `count` times after a time."""
        if self.size is not None:
            steps = np.arange(1, count + 1) * (int(self.size) if float(self.size).is_integer() else self.size)
            following: Keys = last + (steps.astype("timedelta64[us]") if self.timed else steps)
            return following
        shift = self._shift(last)
        grid = pd.date_range(pd.Timestamp(last - shift), periods=count + 1, freq=offset_of(self.text))
        return np.asarray(grid[1:].to_numpy("datetime64[us]") + shift)

    def _shift(self, key: Any) -> Any:
        """How long after a step of the pandas offset a time is: a time of day, or days of a month."""
        day = pd.Timestamp(key).normalize()
        return np.timedelta64(key - offset_of(self.text).rollback(day).to_datetime64(), "us")


def offset_of(text: str) -> Any:
    """The pandas offset of a frequency, or of names of weekdays."""
    if text.startswith(WEEKDAYS):
        return pd.offsets.CustomBusinessDay(weekmask=text)
    return pd.tseries.frequencies.to_offset(text)


def told(text: str, keys: Keys) -> Frequency:
    """The frequency that a user, or the training data, gives for sorted times of one series."""
    try:
        if keys.dtype.kind != "M":
            return Frequency(text, float(text), timed=False)
        digits = len(text) - len(text.lstrip("0123456789"))
        offset = offset_of(text[:digits] + OLD.get(text[digits:], text[digits:]))
    except ValueError:
        what = "numbers" if keys.dtype.kind != "M" else "dates"
        remedy = "use a frequency of pandas such as 15min, h, D, B, W-MON, MS, a number for numbered steps, or none"
        raise SpecError(f"data.frequency={text} does not fit times that are {what}; {remedy}") from None
    if isinstance(offset, pd.offsets.Tick):
        return _equal(pd.Timedelta(offset))
    if isinstance(offset, pd.offsets.Day) or text[digits:] in ("W", "w"):
        return _equal(pd.Timedelta(days=offset.n * (1 if isinstance(offset, pd.offsets.Day) else 7)))
    name = text if text.startswith(WEEKDAYS) else offset.freqstr
    family = name.split("-")[0].lstrip("0123456789")
    end = f"{name[: name.index(family)]}{ENDS[family]}" if family in ENDS else name
    none = np.zeros(len(keys), np.int64)
    return next((way for way in map(Frequency, (name, end)) if (way.places(keys, none) >= 0).all()), Frequency(name))


def _equal(step: Any) -> Frequency:
    """Equal steps of time."""
    name = "D" if step == pd.Timedelta(days=1) else pd.tseries.frequencies.to_offset(step).freqstr
    return Frequency(name, int(step / pd.Timedelta(1, unit="us")))


def _on(name: str, keys: Keys) -> tuple[Frequency, float] | None:
    """The frequency and how much of its grid is there, if the times of a series lie on it: on its days, or on one day of its months."""
    offset, days = offset_of(name), pd.DatetimeIndex(keys).normalize()
    one_day = name in MONTHLY and bool((days.day == days.day[0]).all())
    if not one_day and not all(offset.is_on_offset(day) for day in days[:LOOKED_AT]):
        return None
    found = Frequency(offset.freqstr)
    places = found.places(keys, np.zeros(len(keys), np.int64))
    return (found, len(keys) / (int(places[-1] - places[0]) + 1)) if (places >= 0).all() else None


def infer(keys: Keys) -> tuple[Frequency | None, float]:
    """Return the frequency of the times of one series, and the part of its grid that they fill; none if they are irregular."""
    gaps = np.diff(keys)
    keys = keys if (gaps > gaps[:0].sum()).all() else np.sort(pd.unique(keys))
    if len(keys) < 3:
        return None, 0.0
    if keys.dtype.kind != "M":
        gaps = np.diff(keys)
        step = gaps.min()
        on_grid = np.abs(gaps / step - np.rint(gaps / step)) <= ROUNDING
        full = len(keys) / (float((keys[-1] - keys[0]) / step) + 1)
        return (Frequency(f"{step:g}", float(step), timed=False), full) if on_grid.all() and full > LEAST_FULL else (None, 0.0)
    moments = pd.DatetimeIndex(keys)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        name = pd.infer_freq(moments)
    if name is not None:
        return told(name, keys), 1.0
    ways: list[tuple[Frequency, float]] = []
    if ((moments - moments.normalize()) == (moments[0] - moments[0].normalize())).all():
        ways += [found for name in ANCHORED if (found := _on(name, keys)) is not None]
    gaps = np.diff(keys.astype("datetime64[us]").astype(np.int64))
    values, counts = np.unique(gaps, return_counts=True)
    step = int(values[np.argmax(counts)])
    if (gaps % step == 0).mean() >= LEAST_ON:
        span = int((keys[-1] - keys[0]).astype("timedelta64[us]").astype(np.int64))
        ways.append((_equal(pd.Timedelta(step, unit="us")), len(keys) / (span / step + 1)))
    best, full = max(ways, key=lambda way: way[1], default=(None, 0.0))
    return (best, full) if full > LEAST_FULL else (None, 0.0)

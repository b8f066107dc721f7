"""Positions in the calendar as features of a step: where in its cycle a time lies, as a point on a circle, so that 23:00 is next to 0:00.

A forecast's own times follow from that of the row it is made at, so the positions of that row are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[Any]
Positions = NDArray[np.int64]


def _months(keys: Keys) -> Positions:
    months: Positions = keys.astype("datetime64[M]").astype(np.int64) % 12
    return months


def _days_since(keys: Keys, unit: str) -> Positions:
    days: Positions = (keys.astype("datetime64[D]") - keys.astype(f"datetime64[{unit}]").astype("datetime64[D]")).astype(np.int64)
    return days


def _weekday(keys: Keys) -> Positions:
    weekdays: Positions = (keys.astype("datetime64[D]").astype(np.int64) + 3) % 7  # 1970-01-01 was a Thursday
    return weekdays


# The position of local times in a cycle, from 0, and the length of the cycle; None for a feature that is 0 or 1.
FEATURES: dict[str, tuple[Callable[[Keys], Positions], float | None]] = {
    "minute": (lambda keys: keys.astype("datetime64[m]").astype(np.int64) % 60, 60.0),
    "hour": (lambda keys: keys.astype("datetime64[h]").astype(np.int64) % 24, 24.0),
    "weekday": (_weekday, 7.0),
    "weekend": (lambda keys: (_weekday(keys) >= 5).astype(np.int64), None),
    "monthday": (lambda keys: _days_since(keys, "M"), 31.0),
    "yearday": (lambda keys: _days_since(keys, "Y"), 366.0),
    "month": (_months, 12.0),
    "quarter": (lambda keys: _months(keys) // 3, 4.0),
}


def calendar_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the features: `hour_sin` and `hour_cos`, or `weekend`."""
    return tuple(column for name in names for column in ((name,) if FEATURES[name][1] is None else (f"{name}_sin", f"{name}_cos")))


def calendar_features(names: Sequence[str], keys: Keys) -> NDArray[np.float64]:
    """Return the features [rows, columns] of local times, datetime64[us]."""
    parts: list[NDArray[np.float64]] = []
    for name in names:
        position, cycle = FEATURES[name]
        at = position(keys).astype(np.float64)
        parts += [at] if cycle is None else [np.sin(2.0 * np.pi * at / cycle), np.cos(2.0 * np.pi * at / cycle)]
    return np.stack(parts, axis=1) if parts else np.empty((len(keys), 0))

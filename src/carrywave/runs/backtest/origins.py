"""Rolling origins: after how many rows of each series a forecast is made, and the table as it was known then. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from carrywave.data.sequences import Ints
from carrywave.data.tables.table import Table
from carrywave.errors import DataError

SHOWN = 3  # names in a message


@dataclass(frozen=True)
class Rolling:
    """Origins counted from the end of each series: the last one leaves just a horizon, the one before a stride more."""

    horizon: int
    stride: int
    origins: int

    @property
    def span(self) -> int:
        """Rows after the first origin."""
        return self.horizon + (self.origins - 1) * self.stride

    def known(self, length: int) -> Ints:
        """How many rows of a series are known at each origin, the first origin first."""
        return length - self.span + np.arange(self.origins, dtype=np.int64) * self.stride


def long_enough(table: Table, rolling: Rolling, *, before: int) -> tuple[Table, tuple[str, ...]]:
    """The series that have `before` rows ahead of the first origin, and a line about those that are left out."""
    needed = rolling.span + before
    fits = table.lengths >= needed
    if not fits.any():
        longest = int(table.lengths.max())
        raise DataError(
            f"{table.name}: {rolling.origins} origins, {rolling.stride} rows apart, with a horizon of {rolling.horizon} need {needed} "
            f"rows, but the longest series has {longest}; use fewer origins, or a smaller stride or horizon"
        )
    if fits.all():
        return table, ()
    short = [table.names[place] for place in np.flatnonzero(~fits)]
    shown = ", ".join(short[:SHOWN]) + (", …" if len(short) > SHOWN else "")
    line = f"{table.name}: {len(short):,} of {len(table.names):,} series have fewer than {needed} rows and are left out: {shown}"
    return cut(table, np.where(fits, table.lengths, 0)), (line,)


def cut(table: Table, lengths: Ints) -> Table:
    """The first so many rows of each series; series of which nothing is left are not in the table."""
    kept = np.concatenate([np.arange(start, start + length) for start, length in zip(table.starts, lengths, strict=True)])
    there = np.flatnonzero(lengths)
    rows = len(table.values)
    changed: dict[str, Any] = {
        field.name: value[kept]
        for field in fields(table)
        if field.name not in ("starts", "lengths") and isinstance(value := getattr(table, field.name), np.ndarray) and len(value) == rows
    }
    left = np.asarray(lengths, np.int64)[there]
    return replace(
        table,
        **changed,
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(left)[:-1]]),
        lengths=left,
        names=tuple(table.names[place] for place in there),
        times=None if table.times is None else table.times.sorted(kept),
    )


def at_origin(table: Table, rolling: Rolling, number: int) -> Table:
    """What was known at one of the origins."""
    return cut(table, np.array([rolling.known(int(length))[number] for length in table.lengths], np.int64))

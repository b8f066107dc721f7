"""The times of a table's rows: keys to sort and compare, the grid on which they lie, and the times that come next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from carrywave.data.sequences import Ints
from carrywave.data.tables.frequency import Frequency, Keys, infer
from carrywave.data.tables.instants import Instants


@dataclass(frozen=True)
class Times:
    """The times of all rows."""

    keys: Keys  # numbers, or datetime64[us], which are in UTC if there is a zone
    zone: str | None = None
    wall: bool = False  # there is a zone, but keys are the times of its clocks, on which they are regular
    layout: str | None = None  # how they are written; None: as dates, or as dates and times
    day_first: bool | None = None
    frequency: Frequency | None = None

    @staticmethod
    def of(instants: Instants) -> Times:
        """The times of a column, on local clocks if only these are regular: days have 23 hours in spring, and 25 in autumn."""
        keys = instants.times.to_numpy() if instants.counted else instants.times.to_numpy("datetime64[us]")
        made = Times(keys, instants.zone, layout=instants.layout, day_first=instants.day_first)
        if instants.zone is None or "/" not in instants.zone or infer(keys)[0] is not None:
            return made
        wall = made.local
        return replace(made, keys=wall, wall=True) if infer(wall)[0] is not None else made

    def sorted(self, order: Ints) -> Times:
        """Return the times in another order."""
        return replace(self, keys=self.keys[order])

    @property
    def counted(self) -> bool:
        """True for numbers of steps."""
        return self.keys.dtype.kind != "M"

    @property
    def local(self) -> Keys:
        """The times on local clocks."""
        if self.zone is None or self.wall:
            return self.keys
        zoned = pd.DatetimeIndex(self.keys).tz_localize("UTC").tz_convert(self.zone)
        return np.asarray(zoned.tz_localize(None).to_numpy("datetime64[us]"))

    def ahead(self, start: int, length: int, count: int) -> list[str | int | float] | None:
        """Return the times that follow a series of rows; None if the frequency is not known."""
        if self.frequency is None or not length:
            return None
        return self._written(self.frequency.ahead(self.keys[start + length - 1], count))

    def written(self, rows: slice) -> list[str | int | float]:
        """Return the times of rows as those ahead are written."""
        return self._written(self.keys[rows])

    def _written(self, keys: Keys) -> list[str | int | float]:
        if self.counted:
            return [int(key) if float(key).is_integer() else float(f"{key:.12g}") for key in keys.tolist()]
        moments: Any = pd.DatetimeIndex(keys)
        if self.zone is not None:
            shown = moments.tz_localize(self.zone, ambiguous=True, nonexistent="shift_forward") if self.wall else moments.tz_localize("UTC")
            return [moment.isoformat(sep=" ") for moment in shown.tz_convert(self.zone)]
        if self.layout is not None:
            texts = moments.strftime(self.layout).tolist()
            return [int(text) for text in texts] if "-" not in self.layout else texts
        first = self.keys[:1000]
        dates = bool((moments == moments.normalize()).all() and (first == first.astype("datetime64[D]")).all())
        return [moment.date().isoformat() if dates else moment.isoformat(sep=" ") for moment in moments]

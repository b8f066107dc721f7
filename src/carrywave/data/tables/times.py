"""The time column of a table: sortable keys, their spacing, and the times that come next."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from carrywave.data.sequences import Ints
from carrywave.data.tables import frequency as frequencies
from carrywave.data.tables.dates import Order, first_in, is_text, offsets_of, read_dates, texts_of
from carrywave.data.tables.frequency import Frequency, Keys
from carrywave.errors import DataError

NONE = "none"  # rows count as equally spaced, and their times are not used
LAST = np.datetime64("9999-12-30T23:59:59", "us")  # last time that can be written in any time zone
UTC = ("UTC", "Etc/UTC", "+00:00", "Z")  # names of one clock
FARTHEST = 2**62  # differences of times up to here, and times ahead of them, fit in 64 bits
Shape = Literal["number", "date", "month", "datetime", "other"]


@dataclass(frozen=True)
class Times:
    """The times of all rows."""

    keys: Keys  # numbers or datetime64[us] that sort chronologically; for text that is not a date, its ranks
    shape: Shape  # how they are written; "other" can be sorted at most
    zone: str | None = None  # time zone, if any; keys are then in UTC
    wall: Keys | None = None  # the same times on local clocks, if there is a zone
    frequency: Frequency | None = None
    even_by_wall: bool = False  # the frequency is that of the local clock, not of UTC
    in_words: bool = False  # text that is not a date: keys only show which rows are equal
    offsets: tuple[str, ...] = ()  # from UTC, of times written as text; if there are several, the zone is UTC
    order: Order | None = None  # what comes first in dates that have the year last
    untold: str | None = None  # what the times are, if they can be sorted but nothing more

    def sorted(self, order: Ints) -> Times:
        """Return the times in another order."""
        return replace(self, keys=self.keys[order], wall=None if self.wall is None else self.wall[order])

    @property
    def dated(self) -> bool:
        """True if arithmetic on the times is possible."""
        return self.shape != "other"

    def ahead(self, start: int, length: int, count: int) -> list[str | int | float] | None:
        """Return the times that follow a series, whose own times are sorted; None if unknown."""
        if self.frequency is None or not length:
            return None
        rows = slice(int(start), int(start + length))
        # Hours follow each other in UTC, whatever the local clock does.
        hours = isinstance(self.frequency, frequencies.FixedStep) and self.frequency.size < frequencies.DAY
        by_wall = self.even_by_wall and not hours
        keys = self.wall if by_wall and self.wall is not None else self.keys
        following = self.frequency.ahead(keys[rows], count)
        # Times beyond the range of 64 bits wrap around into the past.
        if self.shape != "number" and ((following > LAST) | (following < keys[rows][-1])).any():
            raise DataError(
                f"forecasting {count} steps of {self.frequency.text} goes beyond the year 9999; check the dates, reduce "
                "data.horizon, or train with data.frequency=none to ignore times"
            )
        return [self._written(key, by_wall) for key in following]

    def written(self, rows: slice) -> list[str | int | float] | None:
        """Return the times of rows as those ahead are written; None if they are neither dates nor numbers."""
        return [self._written(key, by_wall=False) for key in self.keys[rows]] if self.dated else None

    @property
    def _even(self) -> Keys:
        """The keys that are evenly spaced."""
        return self.wall if self.even_by_wall and self.wall is not None else self.keys

    @property
    def month_days(self) -> tuple[int, ...]:
        """The days of the month that series are on, where a single time may not show it."""
        return self.frequency.days if isinstance(self.frequency, frequencies.Months) else ()

    @property
    def local(self) -> Keys:
        """The times on local clocks."""
        return self.keys if self.wall is None else self.wall

    def steps_between(self, codes: Ints) -> Ints | None:
        """Return the number of steps from each row to the next, 1 from one series to another; None if the spacing is not known."""
        if self.frequency is None:
            return None
        units: Ints = np.where(np.diff(codes) == 0, self.frequency.count(self._even[:-1], self._even[1:]), 1)
        return units

    def with_missing(self, units: Ints, codes: Ints) -> Times:
        """Return the times with those that are missing where there are several steps from a row to the next."""
        even, frequency = self._even, self.frequency
        assert frequency is not None  # otherwise there are no steps to count
        begins = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(np.diff(codes)) + 1])
        parts: list[Keys] = []
        low = 0
        for at in np.flatnonzero(units > 1):
            first = begins[np.searchsorted(begins, at, side="right") - 1]
            parts += [even[low : at + 1], frequency.ahead(even[first : at + 1], int(units[at]) - 1)]
            low = int(at) + 1
        complete: Keys = np.concatenate([*parts, even[low:]])
        if self.wall is None or self.zone is None:
            return replace(self, keys=complete)
        micros = pa.array(complete.astype(np.int64), pa.int64())
        if self.even_by_wall:
            zoned = pc.assume_timezone(micros.cast(pa.timestamp("us")), self.zone, ambiguous="earliest", nonexistent="latest")
            return replace(self, keys=_micros(zoned), wall=complete)
        return replace(self, keys=complete, wall=_micros(pc.local_timestamp(micros.cast(pa.timestamp("us", self.zone)))))

    def follows(self, start: int, length: int, count: int) -> int | None:
        """Return the first of `count` rows after a series that is not at its time; None if all are, or if the spacing is not known."""
        if self.frequency is None or not length or not count:
            return None
        times = self._even[start : start + length + count]
        wrong = self.frequency.count(times[length - 1 : -1], times[length:]) != 1
        return int(np.argmax(wrong)) if wrong.any() else None

    def on_clocks_of(self, zone: str | None) -> Times:
        """The same moments on the clocks of a zone; times without one stay as they are, as do all if it is None."""
        if self.zone is None or zone in (None, self.zone):
            return self
        moments = pa.array(self.keys.astype(np.int64), pa.int64()).cast(pa.timestamp("us", zone))
        return replace(self, zone=zone, wall=_micros(pc.local_timestamp(moments)))

    @property
    def of_several_offsets(self) -> bool:
        """True if times were written with different offsets from UTC."""
        return len(self.offsets) > 1

    @property
    def one_zone(self) -> str | None:
        """The time zone, or the offset from UTC that all times have; None if they have none, or several offsets."""
        return None if self.of_several_offsets else self.zone

    def clock_remarks(self, label: str, written: str | None, utc: bool, trained: str | None) -> Iterator[str]:
        """Tell by which clock times are read, if not by their own (of the zone `written`), or not by that of the training data: `utc` if
        its times have several offsets, or else of the zone `trained`, if that is known.
        """
        if self.of_several_offsets:
            fact = f"column {label} has times with different offsets from UTC ({' and '.join(self.offsets[:2])})"
            where = "UTC; for local time, use Parquet or a frame with a time zone" if trained is None else f"{trained}, as in training"
            yield f"{fact}: data.calendar and forecasts are in {where}"
        elif self.zone != written:
            yield "data.calendar and forecasts are in UTC, as in training, where times have different offsets from it"
        elif self.zone is None and self.shape == "datetime" and (utc or trained in UTC):
            yield f"column {label} has times without an offset; data.calendar takes them for times in UTC, as those in training are"
        elif None not in (self.zone, trained) and (self.zone in UTC) != (trained in UTC):
            yield f"data.calendar and forecasts are in {self.zone}, as the times in column {label}; those in training are in {trained}"

    def _written(self, key: Any, by_wall: bool) -> str | int | float:
        if self.shape == "number":
            value = key.item()
            whole = isinstance(value, int) or (value.is_integer() and self.keys.dtype.kind in "iu")
            return int(value) if whole else float(f"{value:.12g}")  # sums of decimal fractions are not exact
        if self.shape == "month":
            return str(key.astype("datetime64[M]"))
        moment: dt.datetime = key.astype("datetime64[us]").item()
        if self.shape == "date" and moment.time() == dt.time():
            return moment.date().isoformat()
        if self.zone is None:
            return moment.isoformat(sep=" ")
        micros = pa.scalar(moment, pa.timestamp("us"))
        zoned = (
            pc.assume_timezone(micros, self.zone, ambiguous="earliest", nonexistent="latest")
            if by_wall
            else pc.assume_timezone(micros, "UTC").cast(pa.timestamp("us", self.zone))
        )
        return str(zoned.as_py().isoformat(sep=" "))


def read_times(column: Any, name: str, label: str, order: str | None = None) -> Times:
    """Read the times in a column; missing values are rejected. `order` is that of dates with the year last, where they do not tell it."""
    keys: NDArray[Any]
    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    flat = flat.dictionary_decode() if pa.types.is_dictionary(flat.type) else flat
    if flat.null_count:
        row = int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(f"{name}: row {row + 1}, column {label} is empty; fill in the time of every row")
    if is_text(flat.type):
        return _from_text(texts_of(flat), order)
    if pa.types.is_date(flat.type):
        return Times(_micros(flat.cast(pa.timestamp("us"))), "date")
    if pa.types.is_timestamp(flat.type):
        return _from_timestamps(flat)
    if pa.types.is_temporal(flat.type):
        what = "times of day without dates" if pa.types.is_time(flat.type) else "durations"
        keys = flat.cast(pa.int32() if pa.types.is_time32(flat.type) else pa.int64()).to_numpy(zero_copy_only=False)
        return Times(keys, "other", untold=what)
    if pa.types.is_decimal(flat.type):
        flat = flat.cast(pa.float64())
    keys = flat.to_numpy(zero_copy_only=False)
    if keys.dtype.kind not in "iuf":
        raise DataError(f"{name}: column {label} contains {column.type}, not times; set data.time to the column of dates")
    if keys.dtype.kind == "f" and not np.isfinite(keys).all():
        row = int(np.argmin(np.isfinite(keys)))
        raise DataError(f"{name}: row {row + 1}, column {label} is {keys[row]}; fill in the time of every row")
    if keys.dtype.kind == "f":
        return Times(keys, "number")
    if len(keys) and max(int(keys.max()), -int(keys.min())) > FARTHEST:
        row = int(np.argmax((keys > FARTHEST) | (keys < -FARTHEST if keys.dtype.kind == "i" else False)))
        raise DataError(f"{name}: row {row + 1}, column {label} is {keys[row]}, beyond 2**62; subtract a common offset, or write dates")
    return Times(keys.astype(np.int64), "number")  # in eight bits, sums and differences would not fit


def _from_text(texts: Any, order: str | None) -> Times:
    """Parse dates if all texts are dates; otherwise return ranks, because text cannot be sorted by time and is only used in file order."""
    dates = read_dates(texts, order)
    if dates is None:
        ranks: NDArray[Any] = pc.rank(texts, tiebreaker="dense").to_numpy(zero_copy_only=False).astype(np.int64)
        return Times(ranks, "other", in_words=True)
    first = first_in(texts, order)
    if dates.moments.type.tz is not None:
        offsets = offsets_of(texts)
        zone = "UTC" if len(offsets) > 1 or offsets == ("+00:00",) else offsets[0]
        zoned = dates.moments.cast(pa.timestamp("us", zone))
        return Times(_micros(zoned), dates.shape, zone, _micros(pc.local_timestamp(zoned)), offsets=offsets, order=first)
    return Times(_micros(dates.moments), dates.shape, order=first)


def _from_timestamps(moments: Any) -> Times:
    zone = moments.type.tz
    try:
        exact = moments.cast(pa.timestamp("us", zone))
    except pa.ArrowInvalid:  # significant nanoseconds: sortable, but no arithmetic
        return Times(moments.cast(pa.int64()).to_numpy(zero_copy_only=False), "other", untold="times finer than a microsecond")
    wall = None if zone is None else _micros(pc.local_timestamp(exact))
    return Times(_micros(exact), "datetime", zone, wall)


def _micros(moments: Any) -> Keys:
    keys: Keys = moments.cast(pa.int64()).to_numpy(zero_copy_only=False).astype("datetime64[us]")
    return keys


def with_frequency(
    times: Times, codes: Ints, setting: str | None, *, strict: bool, place: TimeColumn, days: tuple[int, ...] | None = None
) -> tuple[Times, str | None]:
    """Add the frequency to times sorted by series; also return a line about gaps. Irregular times are rejected if `strict`.

    `days` are those of the month in the training data; None if this is it.
    """
    if setting == NONE or not times.dated:
        return times, None
    inside = np.diff(codes) == 0
    parsed = None if setting is None else frequencies.parse(setting)
    if parsed is not None and (times.shape == "number") != (isinstance(parsed, frequencies.FixedStep) and not parsed.timed):
        what = "numbers" if times.shape == "number" else "dates"
        raise DataError(
            f"{place.name}: column {place.label} contains {what}, which data.frequency={setting} does not fit; remove data.frequency"
        )
    best: tuple[int, Times, Ints] | None = None
    for keys in (times.keys,) if times.wall is None else (times.wall, times.keys):
        # With daylight saving time, days are evenly spaced in local time but not in UTC; for hours it is the other way round.
        frequency = parsed or frequencies.infer(keys, inside)
        if frequency is None:
            continue
        units = np.where(inside, frequency.count(keys[:-1], keys[1:]), 1)
        off = int((units < 1).sum())
        score = off * len(keys) + int((units > 1).sum())
        if best is None or score < best[0]:
            best = score, replace(times, frequency=frequency, even_by_wall=keys is times.wall), units
    if best is None:
        if strict and inside.any():
            raise place.irregular(times, inside, None)
        return times, None
    _, timed, units = best
    if (units < 1).any():
        if strict:
            raise place.irregular(times, units > 0, timed.frequency)
        return times, None
    if isinstance(timed.frequency, frequencies.Months):
        days = frequencies.month_days(timed._even, codes) if days is None else days
        timed = replace(timed, frequency=replace(timed.frequency, days=days))
    return timed, place.gaps(times, units, str(timed.frequency.text)) if timed.frequency is not None else None


@dataclass(frozen=True)
class TimeColumn:
    """Locates rows of the file in messages."""

    name: str  # of the file
    label: str  # of the column
    column: Any  # in file order
    order: Ints  # the row in the file of each sorted row
    names: tuple[str, ...]  # of the series
    codes: Ints  # series codes, sorted
    remedy: str  # advice for irregular times

    def _shown(self, at: int) -> str:
        return str(self.column[int(self.order[at])].as_py())

    def _of(self, at: int) -> str:
        return f" in series {self.names[int(self.codes[at])]}" if len(self.names) > 1 else ""

    def irregular(self, times: Times, even: NDArray[np.bool_], frequency: Frequency | None) -> DataError:
        """Return the error for irregular times, with the first one that breaks the pattern."""
        if frequency is not None:
            at = int(np.argmin(even)) + 1
            fact = f"is {self._shown(at)} after {self._shown(at - 1)}{self._of(at)}, which is not a whole number of {frequency.text} steps"
            return DataError(f"{self.name}: row {int(self.order[at]) + 1}, column {self.label} {fact}; {self.remedy}")
        gaps = np.diff(times.keys)
        inner = gaps[even]
        values, counts = np.unique(inner, return_counts=True)
        usual = values[int(np.argmax(counts))]
        at = int(np.argmax(even & (gaps != usual))) + 1
        fact = f"{self._shown(at - 1)} is followed by {self._shown(at)}{self._of(at)}"
        return DataError(
            f"{self.name}: the times in column {self.label} are irregular: {fact} (row {int(self.order[at]) + 1}); {self.remedy}"
        )

    def gaps(self, times: Times, units: Ints, frequency: str) -> str | None:
        """Return a line about missing steps, with the first place."""
        wide = units > 1
        if not wide.any():
            return None
        at = int(np.argmax(wide)) + 1
        missing, places = int((units[wide] - 1).sum()), int(wide.sum())
        where = f"between {self._shown(at - 1)} and {self._shown(at)}{self._of(at)} (row {int(self.order[at]) + 1})"
        first = f"{where}" if places == 1 else f"in {places:,} places, the first {where}"
        rows = "row is" if missing == 1 else "rows are"
        fact = f"{missing:,} {rows} missing in column {self.label} (frequency {frequency})"
        return f"{self.name}: {fact}, {first}; rows on either side of a gap are treated as adjacent, so set data.missing to fill it in"

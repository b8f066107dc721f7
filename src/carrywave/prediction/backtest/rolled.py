"""Forecasts of a trained run from rolling origins, each made with what was known at it alone, and their rows.

Shapes: H horizon, C columns, Q quantiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.files.arrays import MemoryAppender
from carrywave.data.files.rows import Row
from carrywave.data.sequences import Sequences
from carrywave.data.tables import series
from carrywave.data.tables.channels import forward
from carrywave.data.tables.table import Table
from carrywave.prediction.backtest.origins import Origins, at_origin, same_past
from carrywave.prediction.outputs import Outputs
from carrywave.prediction.saved_run import Saved
from carrywave.tasks.forecast_values import ForecastValues
from carrywave.tasks.views import Naive

Reals = NDArray[np.float64]


@dataclass(frozen=True)
class Rolled:
    """One forecast of one series, in the units of the file, beside the truth and the seasonal-naive forecast."""

    series: int
    origin: int  # which one, from 0
    known: int  # rows before it
    forecast_HCQ: Reals  # a single one without quantiles
    truth_HC: Reals
    naive_HC: Reals
    unit_C: Reals  # of a standardised value
    change_C: Reals  # seasonal change within train, in standardised units; 0: unknown
    last_C: Reals  # the values in the last row that was known
    transform: str = "none"  # what was standardised of the values
    counted_HC: NDArray[np.bool_] | None = None  # targets that are there and whose weight is not 0 (`data.weight`); None: all
    banded: bool = False  # what stands for the quantile 0.5 is the forecast, between the ends of its bands

    def standard(self, values_HCX: Reals) -> Reals:
        """Values [H, C, …] in standardised units, up to a constant that is the same for all."""
        beyond = (None,) * (values_HCX.ndim - 2)
        return forward(values_HCX, self.transform, self.last_C[(None, slice(None), *beyond)]) / self.unit_C[(slice(None), *beyond)]


@dataclass(frozen=True)
class Reading:
    """Series as they were known at an origin, and the origins, this and earlier ones, whose forecasts one pass over them makes."""

    table: Table
    numbers: tuple[int, ...]  # of its series in the whole table
    origins: tuple[tuple[int, ...], ...]  # of each series


def readings(table: Table, origins: Origins, wanted: Sequence[int], codec: Codec) -> Iterator[Reading]:
    """As few readings as make the forecasts of all wanted origins.

    The output after a row depends on no later one, so the reading of a series at its last origin makes those of its others as well, unless
    it was known otherwise then: cells were filled with other values, or the scale, in series that train does not contain, was that of
    fewer rows.
    """
    made_SO = origins.made_SO[:, list(wanted)]
    last_S = np.where(made_SO.any(axis=1), np.array(wanted)[np.maximum(made_SO.sum(axis=1) - 1, 0)], -1)
    read = last_S >= 0
    if not read.any():
        return
    latest = at_origin(table, origins, last_S)
    scaled = np.array([codec.knows_scale(name) for name in table.names], np.bool_)
    alike = {origin: (scaled & (origin < last_S)) | (origin == last_S) for origin in wanted}
    for origin in wanted if table.unfilled is not None else ():
        same = np.ones_like(read)
        same[read] = same_past(at_origin(table, origins, np.minimum(origin, last_S)), latest)
        alike[origin] &= same
    numbers = np.flatnonzero(read).tolist()
    yield Reading(latest, tuple(numbers), tuple(tuple(origin for origin in wanted if alike[origin][number]) for number in numbers))
    for origin in wanted:
        rest = (origin < last_S) & ~alike[origin]
        if rest.any():
            again = tuple(np.flatnonzero(rest).tolist())
            yield Reading(at_origin(table, origins, np.where(rest, origin, -1)), again, ((origin,),) * len(again))


def forecast(saved: Saved, table: Table, origins: Origins, wanted: Sequence[int]) -> list[Rolled]:
    """Forecasts from some of the origins, by series and origin. Empty on ranks other than 0. Collective."""
    outputs, made = Outputs(saved), list[Rolled]()
    many = len(saved.task.codec.channels) or 1
    for reading in readings(table, origins, wanted, saved.task.codec):
        data = series.encoded(reading.table, saved.task.codec, MemoryAppender)
        lasts = {
            place * many + channel: origins.known_SO[number, list(chosen)] - 1
            for place, (number, chosen) in enumerate(zip(reading.numbers, reading.origins, strict=True))
            for channel in range(many)
        }
        if forecasts := outputs.after(data, lasts):
            made += _in_units(saved, table, origins, reading, data, forecasts)
    return sorted(made, key=lambda each: (each.series, each.origin))


def _in_units(
    saved: Saved, table: Table, origins: Origins, reading: Reading, data: Sequences, forecasts: dict[int, NDArray[Any]]
) -> Iterator[Rolled]:
    spec, codec, rolling = saved.spec.data, saved.task.codec, origins.rolling
    ahead = np.arange(1, rolling.horizon + 1)
    values = ForecastValues(reading.table, data, codec, spec, saved.task.bands)
    places, many = values.places, values.many
    past = Sequences(reading.table.values, reading.table.starts, reading.table.lengths)
    seasonal = Naive(past, np.array(places), rolling.horizon, spec.season, "season")
    change_SC = saved.task.scale.of_series(data, codec.channels).reshape(-1, len(places))
    for place, (number, chosen) in enumerate(zip(reading.numbers, reading.origins, strict=True)):
        before_O = origins.known_SO[number, list(chosen)]
        made_OHCQ = values(place, before_O, [forecasts[place * many + channel] for channel in range(many)])[:, : rolling.horizon]
        last_season_OHC = seasonal(reading.table.starts[place] + before_O - 1)
        last_OC = values.last(place, before_O)
        for at, origin in enumerate(chosen):
            came = table.starts[number] + before_O[at] - 1 + ahead
            yield Rolled(
                number,
                origin,
                int(before_O[at]),
                made_OHCQ[at],
                table.values[came][:, places],
                last_season_OHC[at],
                values.unit(place),
                change_SC[place],
                last_OC[at],
                codec.transform,
                _counted(table, came, places),
                values.bands is not None,
            )


def _counted(table: Table, rows: NDArray[np.int64], places: Sequence[int]) -> NDArray[np.bool_] | None:
    """Which values of some rows are scored; None: all."""
    missing = table.missing(places)
    if missing is None and table.weights is None:
        return None
    counted = np.ones((len(rows), len(places)), np.bool_) if missing is None else ~missing[rows]
    return counted if table.weights is None else counted & (table.weights[rows] > 0)[:, None]


def times_of(table: Table, each: Rolled) -> tuple[Any, list[Any]]:
    """The time of the origin, the last row that was known, and of each step ahead; without times, numbers of rows, from 1."""
    steps, start = len(each.truth_HC), int(table.starts[each.series])
    times = None if table.times is None else table.times.ahead(start, each.known, steps)
    if times is None or table.times is None or each.known < 2:
        return each.known, [each.known + step + 1 for step in range(steps)]
    origin = table.times.ahead(start, each.known - 1, 1)
    return (each.known if origin is None else origin[0]), times


def rows_of(table: Table, forecasts: Sequence[Rolled], columns: Sequence[str], quantiles: Sequence[float] | None) -> Iterator[Row]:
    """The rows, in the units of the file."""
    several = len(table.names) > 1
    for each in forecasts:
        origin, times = times_of(table, each)
        named: Row = table.fields(each.series) or ({"series": table.names[each.series]} if several else {})
        for step, when in enumerate(times):
            for place, column in enumerate(columns):
                row = {**named, "origin": origin, table.time or "row": when, "step": step + 1, "column": column}
                values = each.forecast_HCQ[step, place].tolist()
                names = ["forecast"] if quantiles is None else ["forecast" if each.banded and q == 0.5 else f"q{q:g}" for q in quantiles]
                made = dict(zip(names, values, strict=True))
                yield row | made | {"truth": float(each.truth_HC[step, place]), "naive": float(each.naive_HC[step, place])}

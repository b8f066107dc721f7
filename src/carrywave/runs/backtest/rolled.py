"""Forecasts of a trained run from rolling origins, each made with what was known at it alone. Shapes: H horizon, C columns, Q quantiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.files.arrays import MemoryAppender
from carrywave.data.sequences import Sequences
from carrywave.data.tables import series
from carrywave.data.tables.table import Table
from carrywave.runs.backtest.origins import Rolling, at_origin, same_past
from carrywave.runs.rows.outputs import Outputs
from carrywave.runs.trained_run import Saved
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


@dataclass(frozen=True)
class Reading:
    """Series as they were known at an origin, and the origins, this and earlier ones, whose forecasts one pass over them makes."""

    table: Table
    numbers: tuple[int, ...]  # of its series in the whole table
    origins: tuple[tuple[int, ...], ...]  # of each series


def readings(table: Table, rolling: Rolling, origins: Sequence[int], codec: Codec) -> Iterator[Reading]:
    """As few readings as make the forecasts of all origins.

    The output after a row depends on no later one, so the reading at the last origin makes those of all others as well, except of series
    that were known otherwise then: cells were filled with other values, or the scale, in series that train does not contain, was that of
    fewer rows.
    """
    last = origins[-1]
    latest = at_origin(table, rolling, last)
    scaled = np.array([not codec.names or name in codec.names for name in table.names], np.bool_)
    alike = {last: np.ones_like(scaled)}
    for origin in origins[:-1]:
        alike[origin] = scaled if table.unfilled is None else scaled & same_past(at_origin(table, rolling, origin), latest)
    served = tuple(tuple(origin for origin in origins if alike[origin][number]) for number in range(len(scaled)))
    yield Reading(latest, tuple(range(len(scaled))), served)
    for origin in origins[:-1]:
        if not alike[origin].all():
            numbers = tuple(np.flatnonzero(~alike[origin]).tolist())
            yield Reading(at_origin(table, rolling, origin, ~alike[origin]), numbers, ((origin,),) * len(numbers))


def forecast(saved: Saved, table: Table, rolling: Rolling, origins: Sequence[int]) -> list[Rolled]:
    """Forecasts from some of the origins, by series and origin. Empty on ranks other than 0. Collective."""
    outputs, made = Outputs(saved), list[Rolled]()
    for reading in readings(table, rolling, origins, saved.task.codec):
        data = series.encoded(reading.table, saved.task.codec, MemoryAppender)
        lasts = {
            place: rolling.known(int(table.lengths[number]))[list(own)] - 1
            for place, (number, own) in enumerate(zip(reading.numbers, reading.origins, strict=True))
        }
        if found := outputs.after(data, lasts):
            made += _in_units(saved, table, rolling, reading, data, found)
    return sorted(made, key=lambda each: (each.series, each.origin))


def _in_units(
    saved: Saved, table: Table, rolling: Rolling, reading: Reading, data: Sequences, found: dict[int, NDArray[Any]]
) -> Iterator[Rolled]:
    spec, codec = saved.spec.data, saved.task.codec
    targets = np.array(codec.targets)
    ahead = np.arange(1, rolling.horizon + 1)
    part_of = Naive(data, targets, spec.horizon, spec.season, spec.residual)
    seasonal = Naive(data, targets, rolling.horizon, spec.season, "season")
    change_SC = saved.task.scale.of_series(data)
    scales = series.scales(reading.table, codec)
    for place, out in found.items():
        number, origins = reading.numbers[place], reading.origins[place]
        mean, std = (np.array(values)[targets] for values in scales[place])
        known = rolling.known(int(table.lengths[number]))[list(origins)]
        rows = data.starts[place] + known - 1
        out_OHCQ = out.reshape(*out.shape[:3], -1)[:, : rolling.horizon] + part_of(rows)[:, : rolling.horizon, :, None]
        last_season_OHC = seasonal(rows)
        for at, origin in enumerate(origins):
            yield Rolled(
                number,
                origin,
                int(known[at]),
                out_OHCQ[at].astype(np.float64) * std[:, None] + mean[:, None],
                table.values[table.starts[number] + known[at] - 1 + ahead][:, targets],
                last_season_OHC[at].astype(np.float64) * std + mean,
                std,
                change_SC[place],
            )

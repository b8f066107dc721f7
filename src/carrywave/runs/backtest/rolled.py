"""Forecasts of a trained run from rolling origins, each made with the rows up to it alone. Shapes: H horizon, C columns, Q quantiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints, Sequences
from carrywave.data.tables.moments import standardise
from carrywave.data.tables.series import scales
from carrywave.data.tables.table import Table
from carrywave.runs.backtest.origins import Rolling, at_origin
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


def encode(table: Table, saved: Saved, rolling: Rolling) -> tuple[Sequences, list[tuple[Reals, Reals]]]:
    """All rows of all series, standardised, and each series' mean and deviation.

    A series that train does not contain has the scale of its rows before the first origin: later ones were not known.
    """
    codec = saved.task.codec
    known = [(np.array(mean), np.array(std)) for mean, std in scales(at_origin(table, rolling, 0), codec)]
    parts = [
        standardise(table.values[start : start + length], tuple(mean), tuple(std), table.name)
        for start, length, (mean, std) in zip(table.starts, table.lengths, known, strict=True)
    ]
    return Sequences(np.concatenate(parts).astype(np.float32), table.starts, table.lengths, names=table.names), known


def forecast(saved: Saved, table: Table, rolling: Rolling, origins: Sequence[int]) -> list[Rolled]:
    """Forecasts from some of the origins, by series and origin. Empty on ranks other than 0. Collective.

    One pass over each series makes them all: the output after a row depends on no later one.
    """
    data, known = encode(table, saved, rolling)
    lasts = {number: rolling.known(int(length))[list(origins)] - 1 for number, length in enumerate(table.lengths)}
    found = Outputs(saved).after(data, lasts)
    return list(_in_units(saved, table, rolling, origins, data, known, lasts, found)) if found else []


def _in_units(
    saved: Saved,
    table: Table,
    rolling: Rolling,
    origins: Sequence[int],
    data: Sequences,
    known: Sequence[tuple[Reals, Reals]],
    lasts: dict[int, Ints],
    found: dict[int, NDArray[Any]],
) -> Iterator[Rolled]:
    spec, targets = saved.spec.data, np.array(saved.task.codec.targets)
    ahead = np.arange(1, rolling.horizon + 1)
    part_of = Naive(data, targets, spec.horizon, spec.season, spec.residual)
    seasonal = Naive(data, targets, rolling.horizon, spec.season, "season")
    change_SC = saved.task.scale.of_series(data)
    for number, out in found.items():
        mean, std = (values[targets] for values in known[number])
        rows = int(table.starts[number]) + lasts[number]
        naive_OHC = part_of(rows)[:, : rolling.horizon]
        out_OHCQ = out.reshape(*out.shape[:3], -1)[:, : rolling.horizon] + naive_OHC[..., None]
        last_season_OHC = seasonal(rows)
        for place, origin in enumerate(origins):
            yield Rolled(
                number,
                origin,
                int(lasts[number][place]) + 1,
                out_OHCQ[place].astype(np.float64) * std[:, None] + mean[:, None],
                table.values[rows[place] + ahead][:, targets],
                last_season_OHC[place].astype(np.float64) * std + mean,
                std,
                change_SC[number],
            )

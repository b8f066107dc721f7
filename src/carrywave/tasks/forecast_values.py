"""Forecasts in the units of the file: what a model puts out and the naive forecast it is relative to, with scale and transform undone.

Independent channels are put together again: a forecast has all columns of the file. Shapes: O origins, H horizon, C columns, Q quantiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.sequences import Ints, Sequences
from carrywave.data.tables.channels import backward
from carrywave.data.tables.series import scales
from carrywave.data.tables.table import Table
from carrywave.data.tables.window_scale import WindowScale
from carrywave.spec.spec import Spec
from carrywave.tasks.metrics.bands import Bands
from carrywave.tasks.metrics.quantile_functions import Quantiles
from carrywave.tasks.views import Naive

Reals = NDArray[np.float64]


class ForecastValues:
    """Makes values of outputs. `data` are the sequences that became of the table: `many` of each of its series."""

    def __init__(self, table: Table, data: Sequences, codec: Codec, spec: Spec, bands: Bands | None = None) -> None:
        self.table, self.data, self.codec, self.bands = table, data, codec, bands
        self.many = len(codec.channels) or 1
        self._scales = scales(table, codec)
        self._targets = np.array(codec.targets)
        self._naive = Naive(data, self._targets, spec.data.horizon, spec.data.season, spec.starts_from)
        self._counts = spec.data.counts
        self._deviation = None if bands is None or not bands.steps else WindowScale(data, self._targets, bands.steps)
        self._quantiles = Quantiles(spec.data.distribution, spec.data.levels or ()) if spec.data.distribution != "none" else None
        self.places = [table.columns.index(column) for column in codec.forecast_columns]  # in the table

    def unit(self, series: int) -> Reals:
        """Return the size of a standardised unit of each column [C] of a series, before the transform is undone."""
        return self._scales[1][series * self.many : (series + 1) * self.many][:, self._targets].ravel()

    def _size(self, series: int, known_O: Ints) -> Reals:
        """Return how large a radius of 1 is [O, C], before the transform is undone."""
        unit_C = self.unit(series)
        if self._deviation is None:
            return np.broadcast_to(unit_C, (len(known_O), len(unit_C)))
        starts = self.data.starts[series * self.many : (series + 1) * self.many]
        size_OC: Reals = np.concatenate([self._deviation(start + known_O - 1)[1] for start in starts], axis=1) * unit_C
        return size_OC

    def last(self, series: int, known_O: Ints) -> Reals:
        """Return the values [O, C] of a series in the last of its first `known_O` rows."""
        values: Reals = self.table.values[self.table.starts[series] + known_O - 1][:, self.places]
        return values

    def __call__(self, series: int, known_O: Ints, outs: Sequence[NDArray[Any]]) -> Reals:
        """Return the forecasts [O, H, C, Q] of a series made after `known_O` of its rows; a single Q if there are no quantiles.
        With bands, Q are their ends and, in the middle, the forecast itself.

        `outs` are the outputs for each sequence of the series, [O, H, …] each. Of a distribution, its quantiles are returned.
        """
        if self._quantiles is not None:
            outs = [self._quantiles(torch.from_numpy(out)).numpy() for out in outs]
        made_OHCQ = self.in_units(series, known_O, outs)
        if self.bands is None or self.codec.transform != "diff":
            return made_OHCQ
        sums_HOC1 = np.moveaxis(made_OHCQ, 0, 1)  # of changes
        return np.moveaxis(self.bands.around(sums_HOC1, self._size(series, known_O)), 1, 0)

    def in_units(self, series: int, known_O: Ints, outs: Sequence[NDArray[Any]]) -> Reals:
        """Return numbers [O, H, C, Q] in the units of a model, quantiles or draws, in those of the file; counts are in them already."""
        parts = []
        for place, out in enumerate(outs):
            number = series * self.many + place
            mean, std = (values[number][self._targets] for values in self._scales)
            if self._counts:
                mean, std = np.zeros_like(mean), np.ones_like(std)
            relative_OHCQ = out.reshape(*out.shape[:3], -1) + self._naive(self.data.starts[number] + known_O - 1)[..., None]
            parts.append(relative_OHCQ.astype(np.float64) * std[:, None] + mean[:, None])
        made_HOCQ = np.moveaxis(np.concatenate(parts, axis=2), 1, 0)
        if self.bands is not None and self.codec.transform != "diff":
            made_HOCQ = self.bands.around(made_HOCQ, self._size(series, known_O))
        return np.moveaxis(backward(made_HOCQ, self.codec.transform, self.last(series, known_O)[None, ..., None]), 0, 1)

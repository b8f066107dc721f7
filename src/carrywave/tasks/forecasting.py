"""Forecasting: from every row of a series, the next `data.horizon` values of its targets: single ones, quantiles or a distribution.

Targets are differences from a naive forecast (`Spec.starts_from`), in standardised units, or counts as they are in the data. A part is
scored beside what simple forecasts come to (`baselines`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from carrywave.data.codec import Codec
from carrywave.data.sequences import History, Ints, Sequences, View
from carrywave.data.tables.channels import LARGEST, LEAST, series_names
from carrywave.data.tables.series import unseen_series
from carrywave.data.tables.window_scale import WindowScale
from carrywave.model.heads.distributions import DistributionForecast
from carrywave.model.heads.forecast import Forecast
from carrywave.spec.spec import Spec
from carrywave.tasks.baselines import LAGS, baselines, without_season
from carrywave.tasks.kind import Kind, Part
from carrywave.tasks.metrics.bands import BandErrors
from carrywave.tasks.metrics.distributions import DistributionErrors
from carrywave.tasks.metrics.errors import Columns, Errors, Metric, Slope
from carrywave.tasks.metrics.kept_forecasts import KeptForecasts
from carrywave.tasks.network import Encoder
from carrywave.tasks.views import FirstRow, Naive, SeriesUnits, weighted


class Forecasting(Kind):
    """Each row whose whole horizon lies inside its part is an origin."""

    by = ("column", "series", "step")

    @property
    def targets(self) -> Ints:
        """The columns that are forecast."""
        return np.array(self.codec.targets)

    def view(self, name: str, data: Sequences) -> View:
        """Rows with what comes after them."""
        return self._with_history(forecasting(data, self.spec, self.targets, Layout.of(self.codec)), data)

    def unlabelled(self, data: Sequences) -> View:
        """Every row of every series."""
        return self._with_history(series(data, self.spec, Layout.of(self.codec)), data)

    def _with_history(self, view: View, data: Sequences) -> View:
        """The view with the past values that the head reads and, of counts, their units."""
        past = self.spec.past_steps
        units = data.units[:, self.targets] if self.spec.data.counts and data.units is not None else None
        return replace(view, history=History(past, self.targets, units, data.firsts)) if past else view

    def part(self, name: str, data: Sequences) -> Part:
        """Beside what simple forecasts come to, unless it is trained on."""
        task, spec, channels = self.task, self.spec.data, self.codec.channels
        part = replace(super().part(name, data), change_SC=task.scale.of_series(data, channels))
        if name == "train" or part.change_SC is None:
            return part
        simple, no_line = baselines(data, spec, self.targets, part.change_SC, task.line)
        point = spec.levels is None or 0.5 in spec.levels
        scores = {metric: value for name, errors in simple.items() for metric, value in errors.metrics(name, point=point).items()}
        if task.line is not None and "ridge" in simple:
            scores[LAGS] = float(task.line.weights_CNK.shape[1])
        notes = [*self._short_of_season(data), *self._without_mase(data, point=point), *([] if no_line is None else [no_line])]
        unseen = unseen_series(name, series_names(data.names or (), channels), self.codec)
        return replace(part, baselines=simple, baseline=scores, notes=(*unseen, *(f"{name}: {note}" for note in notes)))

    def _short_of_season(self, data: Sequences) -> list[str]:
        season, columns = self.spec.data.season, len(self.codec.channels) or 1  # which are forecast together, as far as a person sees
        short, total = without_season(data, self.spec.data)
        if not short or season == 1:
            return []
        many = f"{short // columns:,} of {total // columns:,} forecasts"
        return [f"{many} have less than a season ({season} rows) before them, so their naive forecast is the last value; add earlier rows"]

    def _without_mase(self, data: Sequences, *, point: bool) -> list[str]:
        """A line about series that train does not contain: their seasonal change is unknown."""
        many = len(self.codec.channels) or 1
        total, new = len(data) // many, len(self.task.scale.unknown((data.names or ())[::many], self.codec.channels))
        which = f"{new:,} of {total:,} series" if new < total else "all series"
        return [f"mase leaves out {which}, because train does not contain them; use the series names of train"] if new and point else []

    def head(self, width: int, encoder: Encoder, train: Sequences | None, device: str | None) -> nn.Module:
        """A linear layer for all steps ahead, with a linear function of the last values beside it (`model.linear`)."""
        spec, outputs = self.spec, self.facts.outputs
        how: dict[str, Any] = {"linear": spec.model.linear > 0, "scaled": spec.data.standardize == "window", "past_steps": spec.past_steps}
        if spec.data.distribution != "none":
            return DistributionForecast(width, spec.data.horizon, outputs, spec.data.distribution, **how)
        return Forecast(width, spec.data.horizon, outputs, spec.data.quantiles, loss=spec.train.loss, **how)

    def meter(self, device: torch.device, part: Part, *, by_series: bool, tops: Sequence[int]) -> Metric | None:
        """Errors in standardised units, as they are trained, so that columns with different units weigh the same, and, column by column, in
        those of the data.
        """
        spec, outputs, codec, data = self.spec.data, self.facts.outputs, self.codec, part.data
        if part.kept:
            steps = self.spec.scale_steps
            return KeptForecasts(part.view, spec.horizon, outputs, len(codec.channels), device, self._deviation(data, steps, device))
        change = None if part.change_SC is None else torch.from_numpy(part.change_SC)
        if data.units is None:
            return Errors(spec.horizon, outputs, spec.quantiles, change, device)
        columns = Columns(
            codec.forecast_columns,
            torch.from_numpy(np.ascontiguousarray(data.units[:, list(codec.targets)])),
            series_names(data.names or (), codec.channels) if by_series else (),
            apart=bool(codec.channels),
            summed=codec.transform == "diff",
            whole=self._targets_at(part, device) if codec.transform == "diff" and part.view.weights_at is not None else None,
            slope=self._slope(data, device) if codec.transform in LEAST else None,
        )
        if spec.distribution != "none":
            sizes = self._future(data, device) if codec.transform == "none" else None
            return DistributionErrors(spec, outputs, change, device, columns, sizes)
        bands = self.task.bands
        if bands is not None:
            return BandErrors(spec, outputs, change, device, columns, bands, self._deviation(data, bands.steps, device))
        return Errors(spec.horizon, outputs, spec.quantiles, change, device, columns=columns)

    def _targets_at(self, part: Part, device: torch.device) -> Slope:
        """The targets of rows, whatever their weight."""
        at, starts, last = part.view.targets_at, part.data.starts, len(part.data.inputs) - 1
        assert at is not None

        def targets(at_B: Tensor, first_B: Tensor, steps: int) -> Tensor:
            rows_TB = starts[at_B.cpu().numpy()] + first_B.cpu().numpy() + np.arange(steps)[:, None]
            return torch.from_numpy(at(np.minimum(rows_TB, last))).to(device, torch.float64)

        return targets

    def _slope(self, data: Sequences, device: torch.device) -> Slope:
        """What errors of logarithms are multiplied by in the data itself: its values, for log1p 1 more."""
        future = self._future(data, device)
        return lambda at_B, first_B, steps: future(at_B, first_B, steps).clamp(max=LARGEST).exp()

    def _future(self, data: Sequences, device: torch.device) -> Slope:
        """What comes after each row, in the units of the data or of its logarithms."""
        assert data.units is not None
        assert data.means is not None
        mean_SC, std_SC, targets = data.means[:, self.targets], data.units[:, self.targets], self.targets
        ahead = np.arange(1, self.spec.data.horizon + 1)

        def future(at_B: Tensor, first_B: Tensor, steps: int) -> Tensor:
            at, first = at_B.cpu().numpy(), first_B.cpu().numpy()
            rows_TBH = (data.starts[at] + first + np.arange(steps)[:, None])[..., None] + ahead
            values_TBHC = np.asarray(data.inputs[np.minimum(rows_TBH, len(data.inputs) - 1)][..., targets], np.float64)
            return torch.from_numpy(values_TBHC * std_SC[at][:, None] + mean_SC[at][:, None]).to(device)

        return future

    def _deviation(self, data: Sequences, steps: int, device: torch.device) -> Slope | None:
        """The deviation of the last values at each row, in standardised units, the same for all steps ahead; None without `steps`."""
        if not steps:
            return None
        scale = WindowScale(data, self.targets, steps)

        def deviation(at_B: Tensor, first_B: Tensor, steps: int) -> Tensor:
            at, first = at_B.cpu().numpy(), first_B.cpu().numpy()
            rows_TB = data.starts[at] + np.minimum(first + np.arange(steps)[:, None], data.lengths[at] - 1)
            return torch.from_numpy(scale(rows_TB)[1]).to(device, torch.float64)[:, :, None]

        return deviation


@dataclass(frozen=True)
class Layout:
    """Which columns of a forecaster's rows are read as what; rows hold numbers and then the codes of categories."""

    numbers: Ints
    changing: Ints  # numbers whose change since the last season is read, too
    known: Ints  # numbers that are read for the whole horizon, too
    codes: Ints
    known_codes: Ints
    scaled: Ints  # numbers that a moving window scales: those that change and are not known ahead

    @staticmethod
    def of(codec: Codec) -> Layout:
        """The layout of the rows that a codec writes."""
        count = len(codec.columns)
        changing = [place for place, name in enumerate(codec.columns) if name not in codec.fixed]
        return Layout(
            np.arange(count),
            np.array(changing, np.int64),
            np.array(codec.known_columns, np.int64),
            np.arange(count, count + len(codec.categorical)),
            np.array([count + place for place, name in enumerate(codec.categorical) if name in codec.known], np.int64),
            np.array([place for place in changing if place not in codec.known_columns], np.int64),
        )


def series(data: Sequences, spec: Spec, layout: Layout | None = None) -> View:
    """View every row of every series, without targets, to forecast from.

    With a season, the model also reads each column's change since the last one (`Spec.reads_changes`): an LSTM is slow to learn to recall
    raw values from that long ago. What is known ahead is read for each step of the horizon. The order is that of `StepInputs`. With
    `data.standardize: window`, measured columns and their changes are read in the scale of so many last values (`window_scale`).
    """
    values = data.inputs
    seasonal, scale_steps, season = spec.reads_changes, spec.scale_steps, spec.data.season
    if not seasonal and not scale_steps and (layout is None or not (len(layout.known) or len(layout.known_codes))):
        return View(values, data.starts, data.lengths)
    every = np.arange(values.shape[1])
    at = layout or Layout(every, every, every[:0], every[:0], every[:0], every)
    first = FirstRow(data)
    ahead = np.arange(1, spec.data.horizon + 1)
    scale = WindowScale(data, at.scaled, scale_steps) if scale_steps else None

    def inputs(rows: Ints) -> NDArray[Any]:
        now = np.array(values[rows])
        # The change is zero if there is less than a season of history.
        change = now - values[np.where(rows - season >= first(rows), rows - season, rows)] if seasonal else now
        if scale is not None:
            mean, deviation = scale(rows)
            now[..., at.scaled] = (now[..., at.scaled] - mean) / deviation
            if seasonal:
                change[..., at.scaled] /= deviation
        parts = [now[..., at.numbers]]
        if seasonal:
            parts.append(change[..., at.changing])
        later = (rows[..., None] + ahead)[..., None]
        parts += [values[later, at.known].reshape(*rows.shape, -1)] if len(at.known) else []
        parts += [now[..., at.codes]]
        parts += [values[later, at.known_codes].reshape(*rows.shape, -1)] if len(at.known_codes) else []
        return np.concatenate(parts, axis=-1)

    return View(values, data.starts, data.lengths, inputs_at=inputs)


def forecasting(data: Sequences, spec: Spec, columns: Ints, layout: Layout | None = None) -> View:
    """Each row whose whole horizon lies inside its part is an origin; targets are differences from the naive forecast, or counts as they
    are in the data.
    """
    naive = Naive(data, columns, spec.data.horizon, spec.data.season, spec.starts_from)
    ahead = np.arange(1, spec.data.horizon + 1)
    values, missing = data.inputs, data.missing
    units = SeriesUnits(data, columns) if spec.data.counts else None

    def future(rows: Ints) -> NDArray[Any]:
        # Padding repeats a real row, so only the end of the whole array needs clipping.
        wanted = np.minimum(rows[..., None] + ahead, len(values) - 1)
        if units is not None:
            made = np.asarray(np.rint(values[wanted][..., columns] * units(rows)[..., None, :]), dtype=np.float32)
        else:
            made = np.asarray(values[wanted][..., columns] - naive(rows), dtype=np.float32)
        return made if missing is None else np.where(missing[wanted], np.float32(np.nan), made)

    # The last warm-up row is the origin of the first forecast.
    warm = None if data.warm is None else np.maximum(data.warm - 1, 0)
    read = replace(series(data, spec, layout), lengths=data.lengths - spec.data.horizon, targets_at=future, warm=warm)
    return weighted(read, data, lambda rows: np.minimum(rows[..., None] + ahead, len(values) - 1))

"""One step in the units of the data: the numbers of a row go in as they are in the file, and what comes out is what `predict` says.

A forecaster needs earlier rows of its series: what it reads of them, and what its forecasts are relative to, becomes part of the state.

Shapes: K steps ahead, C columns to forecast, Q quantiles, S rows of a season, N rows of the past.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch

from carrywave.data.codec import Codec
from carrywave.data.tables.channels import LARGEST
from carrywave.errors import UserError
from carrywave.exporting.portable import BATCH, Port, Portable
from carrywave.exporting.single_step.formula import Formula, Value
from carrywave.exporting.single_step.network import deviation, through
from carrywave.model.encoders import Features
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.heads.distributions import DistributionForecast
from carrywave.tasks.task import Task
from carrywave.tasks.views import Layout

VISIBLE = 1e-3  # of a deviation: what float32 may lose of a column's values


def in_units(task: Task, portable: Portable) -> Formula:
    """One step from a row of the data, or a token, to probabilities, values or forecasts."""
    formula, codec, model = Formula(portable.model.lstm.dtype), task.codec, portable.model
    if codec.own_scale and codec.task != "forecasting":
        raise UserError(
            "data.standardize=sequence needs the whole sequence for its scale; train with true or false, or use --to onnx --step"
        )
    if codec.masked or isinstance(model.head, DistributionForecast):
        what = "the parameters of a distribution" if codec.task == "forecasting" else "data.missing=mask"
        raise UserError(f"a C file has no form of {what}; use --to onnx --step, which computes what the model does, in its own units")
    _check(codec)
    if codec.task == "forecasting":
        return _Forecaster(formula, task, portable).build()
    inputs = {}
    if codec.kind is None:
        raw = formula.input(Port("x", formula.dtype, (BATCH, len(codec.columns))))
        inputs["x"] = (raw - _weight(formula, "mean", codec.mean)) / _weight(formula, "std", codec.std)
    else:
        inputs["x"] = formula.input(Port("token", torch.int64, (BATCH,)))
    if isinstance(encoder := model.encoder, Features):
        inputs["codes"] = formula.input(Port("codes", torch.int64, (BATCH, len(encoder.inputs.places))))
    out = through(formula, model, inputs)
    name = "values" if codec.task == "regression" else "probabilities"
    if codec.task == "regression":
        out = out * _weight(formula, "target_std", codec.target_std) + _weight(formula, "target_mean", codec.target_mean)
    elif task.spec.data.multi_label:
        out = out.sigmoid()
    else:
        out = out.exp() if isinstance(model.head, AdaptiveSoftmax) else out.softmax()
    formula.result = Port(name, formula.dtype, (BATCH, out.width)), out
    return formula


def _check(codec: Codec) -> None:
    """Refuse numbers that float32 cannot tell apart: those of a column far from zero, compared with how much they vary."""
    targets = [f"target {place}" for place in range(len(codec.target_mean))] if codec.task == "regression" else []
    scales = [(codec.columns, codec.mean, codec.std), (targets, codec.target_mean[: len(targets)], codec.target_std)]
    scales += [(codec.columns, mean, std) for mean, std in zip(codec.means, codec.stds, strict=True)]
    for names, means, stds in scales:
        for name, mean, std in zip(names, means, stds, strict=False):
            small = np.finfo(np.float32)
            if abs(mean) * small.eps > VISIBLE * std or not small.tiny < std < small.max:
                fact = f"{name} has a mean of {mean:g} and a deviation of {std:g}, which float32 does not resolve"
                raise UserError(f"{fact}; scale it in the data and train again, or export what the model reads with --to onnx --step")


def _weight(formula: Formula, name: str, values: Sequence[float]) -> Value:
    return formula.weight(f"data.{name}", torch.tensor(values, dtype=formula.dtype))


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours among increasing places, as (first, last + 1)."""
    for _, run in groupby(enumerate(places), key=lambda each: each[1] - each[0]):
        neighbours = [place for _, place in run]
        yield neighbours[0], neighbours[-1] + 1


def _picked(value: Value, places: Sequence[int]) -> Value:
    """Some elements of a row."""
    return value.formula.joined([value.part(low, high) for low, high in _runs(places)])


def _replaced(value: Value, places: Sequence[int], by: Value) -> Value:
    """A row with some of its elements replaced."""
    parts, done, used = [], 0, 0
    for low, high in _runs(places):
        parts += [value.part(done, low)] if low > done else []
        parts.append(by.part(used, used + high - low))
        done, used = high, used + high - low
    return value.formula.joined([*parts, *([value.part(done, value.width)] if done < value.width else [])])


def _spread(value: Value, times: int) -> Value:
    """Each element, repeated this many times."""
    return value.repeated(times).turned(times)


class _Forecaster:
    def __init__(self, formula: Formula, task: Task, portable: Portable) -> None:
        self.formula, self.portable, self.spec, self.codec = formula, portable, task.spec, task.codec
        self.at, self.horizon = Layout.of(task.codec), task.spec.data.horizon
        self.targets = list(task.codec.targets)
        self.levels = len(task.spec.data.quantiles or (0.5,))
        self._begun: Value | None = None

    def build(self) -> Formula:
        formula, columns = self.formula, len(self.codec.columns)
        num_ahead = len(self.at.known)
        mean, std = self.scale()
        raw = formula.input(Port("x", formula.dtype, (BATCH, columns + self.horizon * num_ahead)))
        inputs = {}
        if isinstance(encoder := self.portable.model.encoder, Features):
            inputs["codes"] = formula.input(Port("codes", torch.int64, (BATCH, len(encoder.inputs.places))))
        row = raw.part(0, columns)
        last = _picked(row, self.targets)
        now = (_replaced(row, self.targets, self.transformed(last)) - mean) / std
        window = self.window(now)
        numbers, changes, unit = now, self.changes(now), None
        scaled = self.at.scaled.tolist()
        if self.spec.scale_steps and scaled:
            middle, unit = deviation(window[1], len(scaled))
            numbers = _replaced(now, scaled, (_picked(now, scaled) - middle) / unit)
        x = [numbers]
        if changes is not None:
            changing = self.at.changing.tolist()
            moved, among = _picked(changes, changing), [changing.index(place) for place in scaled]
            x.append(moved if unit is None else _replaced(moved, among, _picked(moved, among) / unit))
        if num_ahead:
            later, places = raw.part(columns, raw.width), self.at.known.tolist()
            x.append((later - _picked(mean, places).repeated(self.horizon)) / _picked(std, places).repeated(self.horizon))
        inputs["x"] = formula.joined(x)
        if self.spec.past_steps:
            inputs["past"] = window[0]
        out = through(formula, self.portable.model, inputs)
        base = self.base(now)
        out = out if base is None else out + _spread(base, self.levels)
        of_std, of_mean = (_spread(_picked(each, self.targets).repeated(self.horizon), self.levels) for each in (std, mean))
        sizes = (self.horizon, len(self.targets), *(() if self.spec.data.quantiles is None else (self.levels,)))
        formula.result = Port("forecast", formula.dtype, (BATCH, *sizes)), self.restored(out * of_std + of_mean, last)
        return formula

    def scale(self) -> tuple[Value, Value]:
        """Mean and deviation of each column: those of the series that a step belongs to, if each has its own."""
        formula, codec = self.formula, self.codec
        if not codec.names:
            return _weight(formula, "mean", codec.mean), _weight(formula, "std", codec.std)
        series = formula.input(Port("series", torch.int64, (BATCH,)))
        tables = (torch.tensor(values, dtype=formula.dtype) for values in (codec.means, codec.stds))
        mean, std = (formula.row(f"data.{name}", table, series) for name, table in zip(("means", "stds"), tables, strict=True))
        return mean, std

    def begun(self) -> Value:
        """0 at the first step, 1 at all others."""
        if self._begun is None:
            self._begun = self.formula.begin("begun", torch.zeros(1))
            self.formula.end("begun", self._begun.maximum(1.0))
        return self._begun

    def transformed(self, last: Value) -> Value:
        match self.codec.transform:
            case "log":
                return last.log()
            case "log1p":
                return last.log1p()
            case "diff":
                before = self.formula.begin("last_row", torch.zeros(last.width))
                self.formula.end("last_row", last)
                return (last - before) * self.begun()
        return last

    def restored(self, made: Value, last: Value) -> Value:
        """Forecasts [K · C · Q] with the transform undone."""
        match self.codec.transform:
            case "log":
                return made.minimum(LARGEST).exp()
            case "log1p":
                return made.minimum(LARGEST).expm1()
            case "diff":
                ahead = [last]  # there are no quantiles of changes
                for step in made.chunk(self.horizon):
                    ahead.append(ahead[-1] + step)
                return self.formula.joined(ahead[1:])
        return made

    def window(self, now: Value) -> tuple[Value, Value]:
        """The last N values of the columns to forecast, [C · N], and of those that a window scales; before the first row, its own."""
        steps = self.spec.past_steps
        if not steps:
            return now, now
        scaled = self.at.scaled.tolist() if self.spec.scale_steps else []
        kept = sorted({*self.targets, *scaled})
        row = _picked(now, kept)
        whole = row
        if steps > 1:
            before, begun = self.formula.begin("window", torch.zeros((steps - 1) * row.width)), self.begun()
            whole = self.formula.joined([before * begun + row.repeated(steps - 1) * (1.0 - begun), row])
            self.formula.end("window", whole.part(row.width, whole.width))
        of_columns = whole.turned(steps).chunk(len(kept))
        windows = [self.formula.joined([of_columns[kept.index(place)] for place in wanted]) for wanted in (self.targets, scaled) if wanted]
        return windows[0], windows[-1]

    def changes(self, now: Value) -> Value | None:
        """How each column has changed since the last season; 0 where there is less than one. Keeps the last season."""
        self._season = self._valid = None
        seasonal = self.spec.data.residual == "season"
        if not self.spec.reads_changes and not seasonal:
            return None
        formula, season, width = self.formula, self.spec.data.season, now.width
        before, valid = formula.begin("season", torch.zeros(season * width)), formula.begin("season_rows", torch.zeros(season))
        first = valid.part(0, 1)
        rows, marks = [now], [first.maximum(1.0)]
        if season > 1:
            rows, marks = [before.part(width, before.width), now], [valid.part(1, season), *marks]
        self._season, self._valid = formula.joined(rows), formula.joined(marks)
        formula.end("season", self._season)
        formula.end("season_rows", self._valid)
        return (now - before.part(0, width)) * first if self.spec.reads_changes else None

    def base(self, now: Value) -> Value | None:
        """The naive forecast [K · C] that outputs are relative to; without a whole season, the last value."""
        last, count = _picked(now, self.targets), len(self.targets)
        match self.spec.data.residual:
            case "last":
                return last.repeated(self.horizon)
            case "season":
                assert self._season is not None
                assert self._valid is not None
                season = self.spec.data.season
                of_columns = self._season.turned(season).chunk(now.width)
                values = self.formula.joined([of_columns[place] for place in self.targets]).turned(count)  # [S, C]
                valid = _spread(self._valid, count)
                filled = values * valid + last.repeated(season) * (1.0 - valid)
                return filled.repeated(-(-self.horizon // season)).part(0, self.horizon * count)
        return None

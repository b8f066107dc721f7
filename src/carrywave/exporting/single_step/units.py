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
from carrywave.data.tables.moments import VISIBLE
from carrywave.data.tables.transform import LARGEST
from carrywave.errors import UserError
from carrywave.exporting.portable import BATCH, Port, Portable
from carrywave.exporting.single_step.network import deviation, through
from carrywave.exporting.single_step.program import Program, Value
from carrywave.model.encoders import Features
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.tasks.task import Task
from carrywave.tasks.views import Layout


def in_units(task: Task, portable: Portable) -> Program:
    """One step from a row of the data, or a token, to probabilities, values or forecasts."""
    program, codec, model = Program(portable.model.lstm.dtype), task.codec, portable.model
    if codec.own_scale and codec.task != "forecasting":
        raise UserError("data.standardize=sequence needs the whole sequence for its scale; train with true or false, or export without it")
    _check(codec)
    if codec.task == "forecasting":
        return _Forecaster(program, task, portable).build()
    if codec.kind is None:
        raw = program.input(Port("x", program.dtype, (BATCH, len(codec.columns))))
        x = (raw - _weight(program, "mean", codec.mean)) / _weight(program, "std", codec.std)
    else:
        x = program.input(Port("token", torch.int64, (BATCH,)))
    out = through(program, model, {"x": x})
    name = "values" if codec.task == "regression" else "probabilities"
    if codec.task == "regression":
        out = out * _weight(program, "target_std", codec.target_std) + _weight(program, "target_mean", codec.target_mean)
    elif task.spec.data.multi_label:
        out = out.sigmoid()
    else:
        out = out.exp() if isinstance(model.head, AdaptiveSoftmax) else out.softmax()
    program.result = Port(name, program.dtype, (BATCH, out.width)), out
    return program


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


def _weight(program: Program, name: str, values: Sequence[float]) -> Value:
    return program.weight(f"data.{name}", torch.tensor(values, dtype=program.dtype))


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours among increasing places, as (first, last + 1)."""
    for _, run in groupby(enumerate(places), key=lambda each: each[1] - each[0]):
        found = [place for _, place in run]
        yield found[0], found[-1] + 1


def _picked(value: Value, places: Sequence[int]) -> Value:
    """Some elements of a row."""
    return value.program.joined([value.part(low, high) for low, high in _runs(places)])


def _replaced(value: Value, places: Sequence[int], by: Value) -> Value:
    """A row with some of its elements replaced."""
    parts, done, used = [], 0, 0
    for low, high in _runs(places):
        parts += [value.part(done, low)] if low > done else []
        parts.append(by.part(used, used + high - low))
        done, used = high, used + high - low
    return value.program.joined([*parts, *([value.part(done, value.width)] if done < value.width else [])])


def _spread(value: Value, times: int) -> Value:
    """Each element so many times."""
    return value.repeated(times).turned(times)


class _Forecaster:
    def __init__(self, program: Program, task: Task, portable: Portable) -> None:
        self.program, self.portable, self.spec, self.codec = program, portable, task.spec, task.codec
        self.at, self.horizon = Layout.of(task.codec), task.spec.data.horizon
        self.targets = list(task.codec.targets)
        self.levels = len(task.spec.data.quantiles or (0.5,))
        self._begun: Value | None = None

    def build(self) -> Program:
        program, columns = self.program, len(self.codec.columns)
        known = len(self.at.known)
        mean, std = self.scale()
        raw = program.input(Port("x", program.dtype, (BATCH, columns + self.horizon * known)))
        inputs = {}
        if isinstance(encoder := self.portable.model.encoder, Features):
            inputs["codes"] = program.input(Port("codes", torch.int64, (BATCH, len(encoder.inputs.places))))
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
        if known:
            later, places = raw.part(columns, raw.width), self.at.known.tolist()
            x.append((later - _picked(mean, places).repeated(self.horizon)) / _picked(std, places).repeated(self.horizon))
        inputs["x"] = program.joined(x)
        if self.spec.past_steps:
            inputs["past"] = window[0]
        out = through(program, self.portable.model, inputs)
        base = self.base(now)
        out = out if base is None else out + _spread(base, self.levels)
        of_std, of_mean = (_spread(_picked(each, self.targets).repeated(self.horizon), self.levels) for each in (std, mean))
        sizes = (self.horizon, len(self.targets), *(() if self.spec.data.quantiles is None else (self.levels,)))
        program.result = Port("forecast", program.dtype, (BATCH, *sizes)), self.restored(out * of_std + of_mean, last)
        return program

    def scale(self) -> tuple[Value, Value]:
        """Mean and deviation of each column: those of the series that a step belongs to, if each has its own."""
        program, codec = self.program, self.codec
        if not codec.names:
            return _weight(program, "mean", codec.mean), _weight(program, "std", codec.std)
        series = program.input(Port("series", torch.int64, (BATCH,)))
        tables = (torch.tensor(values, dtype=program.dtype) for values in (codec.means, codec.stds))
        mean, std = (program.row(f"data.{name}", table, series) for name, table in zip(("means", "stds"), tables, strict=True))
        return mean, std

    def begun(self) -> Value:
        """0 at the first step, 1 at all others."""
        if self._begun is None:
            self._begun = self.program.begin("begun", torch.zeros(1))
            self.program.end("begun", self._begun.maximum(1.0))
        return self._begun

    def transformed(self, last: Value) -> Value:
        match self.codec.transform:
            case "log":
                return last.log()
            case "log1p":
                return last.log1p()
            case "diff":
                before = self.program.begin("last_row", torch.zeros(last.width))
                self.program.end("last_row", last)
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
                return self.program.joined(ahead[1:])
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
            before, begun = self.program.begin("window", torch.zeros((steps - 1) * row.width)), self.begun()
            whole = self.program.joined([before * begun + row.repeated(steps - 1) * (1.0 - begun), row])
            self.program.end("window", whole.part(row.width, whole.width))
        of_columns = whole.turned(steps).chunk(len(kept))
        found = [self.program.joined([of_columns[kept.index(place)] for place in wanted]) for wanted in (self.targets, scaled) if wanted]
        return found[0], found[-1]

    def changes(self, now: Value) -> Value | None:
        """How each column has changed since the last season; 0 where there is less than one. Keeps the last season."""
        self._season = self._valid = None
        seasonal = self.spec.data.residual == "season"
        if not self.spec.reads_changes and not seasonal:
            return None
        program, season, width = self.program, self.spec.data.season, now.width
        before, valid = program.begin("season", torch.zeros(season * width)), program.begin("season_rows", torch.zeros(season))
        first = valid.part(0, 1)
        rows, marks = [now], [first.maximum(1.0)]
        if season > 1:
            rows, marks = [before.part(width, before.width), now], [valid.part(1, season), *marks]
        self._season, self._valid = program.joined(rows), program.joined(marks)
        program.end("season", self._season)
        program.end("season_rows", self._valid)
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
                values = self.program.joined([of_columns[place] for place in self.targets]).turned(count)  # [S, C]
                valid = _spread(self._valid, count)
                filled = values * valid + last.repeated(season) * (1.0 - valid)
                return filled.repeated(-(-self.horizon // season)).part(0, self.horizon * count)
        return None

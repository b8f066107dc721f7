"""What every forecast is compared with: the last value, the value a season before, and a straight line through the last values (ridge).

Errors are over the origins that a forecaster is scored on, in the model's units. NumPy only. Shapes: R rows, N lags, H horizon, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.sequences import Ints, Sequences
from carrywave.spec.data_spec import DataSpec
from carrywave.tasks.ridge import Ridge, fit_line
from carrywave.tasks.views import FirstRow, Naive, counted

# By the prefix of their metrics, with what they are called; naive is the one of `data.season`, which is the last value if that is 1.
BASELINES = {"naive": "seasonal naive", "last": "last value", "ridge": "ridge", "linear": "linear part"}
PREFIXES = tuple(f"{name}_" for name in BASELINES)
LINEAR_METRICS = ("accuracy", "micro_f1", "mae", "rmse")  # of the linear part of a model, beside those of the whole
LAGS = "ridge_lags"  # beside the metrics: how many last values the line reads
MOST_PRODUCTS = 1e11  # multiplications of a line's forecasts for a part; for more there are none
BLOCK_VALUES = 1 << 22  # what is read of a part at once
ROUNDING = 1e-4  # a forecast that is worse by less is not called worse

Forecast = Callable[[Ints], NDArray[Any]]  # from rows [R] of one series, one after another, to [R, H, C]
Reals = NDArray[np.float64]


@dataclass(frozen=True)
class BaselineErrors:
    """Errors of one baseline: means by step ahead and column, NaN where there are no targets."""

    absolute_HC: Reals
    square_HC: Reals
    targets_HC: Reals  # how many there are
    scaled: float | None  # MASE, over all series and columns with a known change
    pinball: float | None  # averaged over quantiles, with the forecast used for each of them

    def metrics(self, name: str, *, point: bool) -> dict[str, float]:
        """Return the metrics under the model's names after the baseline's; `point`: the model has a point forecast."""
        values: dict[str, float] = {}
        if point:
            real = self.targets_HC > 0
            mean, square = (
                float(np.average(each[real], weights=self.targets_HC[real])) if real.any() else math.nan
                for each in (self.absolute_HC, self.square_HC)
            )
            values = {f"{name}_mae": mean, f"{name}_rmse": float(np.sqrt(square))}
            values |= {} if self.scaled is None else {f"{name}_mase": self.scaled}
        return values if self.pinball is None else values | {f"{name}_pinball": self.pinball}


def errors_of(forecast: Forecast, data: Sequences, spec: DataSpec, columns: Ints, change_SC: Reals, *, block: int = 1024) -> BaselineErrors:
    """Compute the errors of a forecast; `change_SC` is the denominator of MASE per series and column, 0 to exclude it. As in the metrics of
    a model, targets that are missing or of weight 0 are left out, and all others count as one.
    """
    ahead = np.arange(1, spec.horizon + 1)
    absolute_HC, square_HC = (np.zeros((spec.horizon, len(columns))) for _ in range(2))
    share_Q = np.array(spec.levels or ())
    targets_HC, scaled_count = np.zeros((spec.horizon, len(columns))), 0
    scaled = pinball = 0.0
    for number, rows in origins_of(data, spec.horizon, block):
        gap_RHC = np.asarray(data.inputs[rows[:, None] + ahead][..., columns], dtype=np.float64) - forecast(rows)
        real_RHC = counted(data, rows[:, None] + ahead)
        gap_RHC = gap_RHC if real_RHC is None else np.where(real_RHC, gap_RHC, 0.0)
        real_RHC = np.ones(gap_RHC.shape, np.bool_) if real_RHC is None else np.broadcast_to(real_RHC, gap_RHC.shape)
        absolute_HC += (sums_HC := np.abs(gap_RHC).sum(axis=0))
        square_HC += (gap_RHC**2).sum(axis=0)
        changing = change_SC[number] > 0
        scaled += float((sums_HC[:, changing] / change_SC[number][changing]).sum())
        scaled_count += int(real_RHC[..., changing].sum())
        for share in share_Q:
            pinball += float(np.maximum(share * gap_RHC, (share - 1.0) * gap_RHC).sum()) / len(share_Q)
        targets_HC += real_RHC.sum(0)
    each_HC, total = np.where(targets_HC > 0, targets_HC, np.nan), float(targets_HC.sum())
    return BaselineErrors(
        absolute_HC / each_HC,
        square_HC / each_HC,
        targets_HC,
        scaled / scaled_count if scaled_count else None,
        (pinball / total if total else math.nan) if len(share_Q) else None,
    )


def origins_of(data: Sequences, horizon: int, block: int = 1024) -> Iterator[tuple[int, Ints]]:
    """Yield a sequence's index and rows of it that are origins, one after another, in blocks to keep memory flat."""
    warm = np.zeros(len(data), dtype=np.int64) if data.warm is None else np.maximum(data.warm - 1, 0)
    for number, (start, length, skip) in enumerate(zip(data.starts, data.lengths, warm, strict=True)):
        rows = np.arange(start + skip, start + length - horizon, dtype=np.int64)
        for first in range(0, len(rows), block):
            yield number, rows[first : first + block]


def without_season(data: Sequences, spec: DataSpec) -> tuple[int, int]:
    """Return how many origins have less than a season of history, where the last value is the naive forecast, and how many there are."""
    first, short, total = FirstRow(data), 0, 0
    for _, rows in origins_of(data, spec.horizon, BLOCK_VALUES):
        short += int((rows - first(rows) + 1 < spec.season).sum())
        total += len(rows)
    return short, total


def line_of(train: Sequences, columns: Ints, lags: int, horizon: int) -> Ridge:
    """Fit the straight line to the training rows; of short series it reads fewer values, so that half of the rows of most are origins."""
    room = (int(np.median(train.lengths)) - horizon) // 2
    return fit_line(train, columns, max(1, min(lags, room)), horizon)


def baselines(
    data: Sequences, spec: DataSpec, columns: Ints, change_SC: Reals, line: Ridge | None
) -> tuple[Mapping[str, BaselineErrors], str | None]:
    """Return the errors of each baseline, by name, and why there is no line, if that would take too long."""
    kinds = {"naive": "season", "last": "last"}
    errors = {
        name: errors_of(Naive(data, columns, spec.horizon, spec.season, kind), data, spec, columns, change_SC)
        for name, kind in kinds.items()
        if name == "naive" or spec.season > 1
    }
    errors.setdefault("last", errors["naive"])
    if line is None:
        return errors, None
    lags = line.weights_CNK.shape[1]
    products = float(np.maximum(data.lengths - spec.horizon, 0).sum()) * len(columns) * lags * spec.horizon
    if products > MOST_PRODUCTS:
        return errors, f"no ridge forecasts to compare with: they would take {products:.0e} multiplications"
    block = max(1, BLOCK_VALUES // (len(columns) * max(lags, spec.horizon)))
    errors["ridge"] = errors_of(LineForecast(line, data, columns), data, spec, columns, change_SC, block=block)
    return errors, None


class LineForecast:
    """The forecasts of a line; values before the first of a series count as that one."""

    def __init__(self, line: Ridge, data: Sequences, columns: Ints) -> None:
        self.line, self.values, self.columns = line, data.inputs, columns
        self._first = FirstRow(data)

    def __call__(self, rows: Ints) -> Reals:
        """Return forecasts [R, H, C] made at rows of one series that follow each other."""
        lags = self.line.weights_CNK.shape[1]
        read = np.maximum(np.arange(int(rows[0]) - lags + 1, int(rows[-1]) + 1), self._first(rows[:1])[0])
        values_VC = np.asarray(self.values[read][:, self.columns], np.float64)
        windows_RNC = np.moveaxis(np.lib.stride_tricks.sliding_window_view(values_VC, lags, axis=0), 2, 1)
        return windows_RNC[:, -1][:, None] + self.line(windows_RNC)


def beside(values: Mapping[str, object]) -> str | None:
    """Return one line with the error of a forecast and those of the baselines; None if there are none."""
    metric = next((name for name in ("accuracy", "micro_f1", "mae", "pinball") if isinstance(values.get(name), float)), "")
    shown = [(what, values.get(f"{name}_{metric}")) for name, what in BASELINES.items()]
    numbers = {what: value for what, value in shown if isinstance(value, float)}
    if not metric or not numbers:
        return None
    if "naive_mae" in values and numbers.get(BASELINES["naive"]) == numbers.get(BASELINES["last"]):
        numbers.pop(BASELINES["naive"], None)  # a season is one row
    return f"{metric} {values[metric]:.4g}; " + ", ".join(f"{what} {value:.4g}" for what, value in numbers.items())


def verdicts(values: Mapping[str, object]) -> list[str]:
    """Return a line for each baseline that a forecast is worse than, with the metrics that say so."""
    lags = values.get(LAGS)
    read = f" (ridge on the last {lags:.0f} values)" if isinstance(lags, float) else ""
    lines = []
    # The line has the smallest squares, so a model that is trained on anything else need not have smaller ones.
    for name, what, metrics, beyond in (
        ("naive", "the naive forecast", ("mae", "rmse", "mase", "pinball"), ""),
        ("ridge", "a straight line", ("mae", "pinball"), read),
        ("linear", "its linear part alone", ("mae", "rmse"), ""),
    ):
        pairs = [(metric, values.get(metric), values.get(f"{name}_{metric}")) for metric in metrics]
        worse = [
            f"{metric} {ours:.4g} against {theirs:.4g}"
            for metric, ours, theirs in pairs
            if isinstance(ours, float) and isinstance(theirs, float) and ours > theirs * (1.0 + ROUNDING)
        ]
        if worse:
            lines.append(f"worse than {what}: {', '.join(worse)}{beyond}")
    return lines

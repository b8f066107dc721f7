"""Backtests a forecaster: trains it on what was known at the first of several origins, or at each, forecasts from all of them, and scores
the forecasts against what came.

Scores are over everything, and for each origin, step ahead and column: in standardised units, in which columns and series weigh the same,
and for a single column also in the units of the file. Shapes: N forecasts, H horizon, C columns, Q quantiles, E targets that count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.files.rows import Row
from carrywave.data.prepare import digests_of, series_of
from carrywave.data.sequences import Sequences
from carrywave.data.tables import series
from carrywave.data.tables.channels import forward
from carrywave.data.tables.parts import PARTS, spans
from carrywave.data.tables.table import Table
from carrywave.errors import DataError, SpecError, UserError, option
from carrywave.parallel.world import all_gather_text, join, leave, raise_on_all
from carrywave.prediction.outputs import HeadOutputs
from carrywave.prediction.saved_run import Saved, check_bands, codec_of, files_of, open_run
from carrywave.runs.run import Run
from carrywave.runs.watcher import Watcher
from carrywave.spec.load import load_own
from carrywave.spec.spec import Spec
from carrywave.tasks.forecast_values import ForecastValues
from carrywave.tasks.views import Naive
from carrywave.tasks.warnings import short_of_season
from carrywave.train.from_python import fit
from carrywave.train.loop_state import ASKED, Ending
from carrywave.train.origins import Origins, Rolling, at_origin, long_enough

ORIGINS = 5

Reals = NDArray[np.float64]
Score = dict[str, object]


@dataclass(frozen=True)
class OriginForecast:
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
class Backtest:
    """What came of a backtest. Forecasts and scores are known to rank 0 alone."""

    folder: Path  # of the run, or of the runs of all origins
    table: Table
    columns: tuple[str, ...]
    quantiles: tuple[float, ...] | None  # 0.5 among those of bands is the forecast itself
    rolling: Rolling
    forecasts: list[OriginForecast]
    scores: list[Score]
    ending: Ending | None = None  # that of a training that was asked to stop


@dataclass(frozen=True)
class RollingOptions:
    """How origins roll; None leaves the default: the model's horizon, a stride of one horizon, five origins."""

    horizon: int | None = None
    stride: int | None = None
    origins: int | None = None

    def rolling(self, horizon: int, *, reads_ahead: bool) -> Rolling:
        """The origins for a model with this horizon; `reads_ahead`: it reads columns that are known for all of it."""
        steps = self.horizon or horizon
        if steps > horizon:
            raise UserError(
                f"{option('horizon')} {steps} is more than the {horizon} steps that the model forecasts; use {horizon} or less, or train "
                f"with data.horizon={steps}"
            )
        return Rolling(steps, self.stride or steps, self.origins or ORIGINS, reach=horizon if reads_ahead else 0)


def backtest_run(path: Path | str, data: Any, options: RollingOptions, device: str, note: Callable[[str], None]) -> Backtest:
    """Forecast with a trained run, from origins in its own training file, or in `data`: a file or a frame."""
    world = join(device)
    with raise_on_all(world, no_timeout=True):
        saved = open_run(path, device, world=world)
        check_bands(saved)
        spec, codec = saved.spec, saved.task.codec
        _check(spec, str(path))
        source = spec.data.train if data is None else data
        if source is None:
            raise DataError(f"{path} was trained on data from Python, which is not stored in the run; pass a file with {option('data')}")
        rolling = options.rolling(spec.data.horizon, reads_ahead=bool(codec.known))
        whole = series_of(source, codec, spec, labelled=True)
        table, placed, left_out = long_enough(whole, rolling, before=1)
        seen = (*_changed(saved), *_seen(whole, table, placed, spec)) if data is None else ()
    if world.rank == 0:
        unseen = (*series.unseen_series(table.name, table.names, codec), *series.unseen_values(table.name, table, codec))
        short = short_of_season(spec, placed.known_SO[placed.made_SO])
        for line in (*whole.notes[1:], *left_out, *seen, *unseen, *([] if short is None else [short])):
            note(line)
    made = forecast(saved, table, placed, range(rolling.origins))
    leave(world)
    return _result(saved.run.path, saved, table, rolling, made)


def backtest_spec(
    spec: Spec,
    data: str | None,
    options: RollingOptions,
    *,
    retrain: bool,
    run: Path | None,
    device: str,
    watch: Watcher | None,
    note: Callable[[str], None],
) -> Backtest:
    """Train on the rows before the first origin and forecast from all of them; with `retrain`, train anew for every origin.

    Series are scored on the rows after the first origin, which training does not see; a part of those before it is held out to choose the
    best weights.
    """
    world = join(device)
    with raise_on_all(world, no_timeout=True):
        _check(spec, "the spec")
        file = data or spec.data.train
        if file is None:
            raise SpecError("data.train is not set; set it to the file to backtest on")
        if options.horizon is not None:
            spec = spec.model_copy(update={"data": spec.data.model_copy(update={"horizon": options.horizon})})
        rolling = options.rolling(spec.data.horizon, reads_ahead=bool(spec.data.known))
        whole = series_of(file, None, spec, labelled=True)
        # Train needs a horizon and a row, and valid another horizon.
        table, placed, left_out = long_enough(whole, rolling, before=2 * spec.data.horizon + 1)
        alone = _alone(spec)
        base = _folder(run) if world.rank == 0 else Path()
    base = Path(all_gather_text(world, str(base))[0])
    if world.rank == 0:
        for line in left_out:
            note(line)
    leave(world)
    made: list[OriginForecast] = []
    saved: Saved | None = None
    trained_at = [number for number in range(rolling.origins) if placed.made_SO[:, number].any()] if retrain else [0]
    for number in trained_at:
        folder = base / f"origin-{number + 1}" if retrain else base
        past = at_origin(table, placed, number)
        if watch is not None and retrain:
            watch.say(f"origin {number + 1} of {rolling.origins}: {int(past.lengths.sum()):,} rows are known")
        result = fit(None, past, spec=alone, run=folder, device=device, watch=watch)
        if result.ending in ASKED:
            return Backtest(base, table, (), None, rolling, [], [], result.ending)
        world = join(device)
        with raise_on_all(world):
            saved = open_run(folder, device, world=world)
        if world.rank == 0 and number == trained_at[0]:
            for line in series.unseen_values(table.name, table, saved.task.codec):
                note(line)
        made += forecast(saved, table, placed, [number] if retrain else range(rolling.origins))
        leave(world)
    assert saved is not None
    return _result(base, saved, table, rolling, made)


def forecast(saved: Saved, table: Table, origins: Origins, wanted: Sequence[int]) -> list[OriginForecast]:
    """Forecasts from some of the origins, each made with what was known at it alone. Empty on ranks other than 0. Collective."""
    outputs, made = HeadOutputs(saved), list[OriginForecast]()
    spec, codec = saved.spec.data, saved.task.codec
    for origin in wanted:
        numbers = np.flatnonzero(origins.made_SO[:, origin])
        if not len(numbers):
            continue
        past = at_origin(table, origins, origin, forecast=True)
        data = series.encoded(past, codec)
        outs = outputs.of(data)
        if not outs:
            continue
        values = ForecastValues(past, data, codec, saved.spec, saved.task.bands)
        places, many = values.places, values.many
        seasonal = Naive(
            Sequences(past.values, past.starts, past.lengths), np.array(places), origins.rolling.horizon, spec.season, "season"
        )
        change_SC = saved.task.scale.of_series(data, codec.channels).reshape(-1, len(places))
        for place, number in enumerate(numbers.tolist()):
            known_1 = past.lengths[place : place + 1]
            made_HCQ = values(place, known_1, [out[None] for out in outs[place * many : (place + 1) * many]])[0]
            came = table.starts[number] + known_1[0] + np.arange(origins.rolling.horizon)
            made.append(
                OriginForecast(
                    number,
                    origin,
                    int(known_1[0]),
                    made_HCQ[: origins.rolling.horizon],
                    table.values[came][:, places],
                    seasonal(past.starts[place] + known_1 - 1)[0],
                    values.unit(place),
                    change_SC[place],
                    values.last(place, known_1)[0],
                    codec.transform,
                    _counted(table, came, places),
                    values.bands is not None,
                )
            )
    return sorted(made, key=lambda each: (each.series, each.origin))


def _counted(table: Table, rows: NDArray[np.int64], places: Sequence[int]) -> NDArray[np.bool_] | None:
    """Which values of some rows are scored; None: all."""
    missing = table.missing(places)
    if missing is None and table.weights is None:
        return None
    counted = np.ones((len(rows), len(places)), np.bool_) if missing is None else ~missing[rows]
    return counted if table.weights is None else counted & (table.weights[rows] > 0)[:, None]


def times_of(table: Table, each: OriginForecast) -> tuple[Any, list[Any]]:
    """The time of the origin, the last row that was known, and of each step ahead; without times, numbers of rows, from 1."""
    steps, start = len(each.truth_HC), int(table.starts[each.series])
    times = None if table.times is None else table.times.ahead(start, each.known, steps)
    if times is None or table.times is None or each.known < 2:
        return each.known, [each.known + step + 1 for step in range(steps)]
    origin = table.times.ahead(start, each.known - 1, 1)
    return (each.known if origin is None else origin[0]), times


def rows_of(found: Backtest) -> Iterator[Row]:
    """A row for each step and column of each forecast, in the units of the file."""
    table = found.table
    for each in found.forecasts:
        origin, times = times_of(table, each)
        named: Row = table.fields(each.series) or ({"series": table.names[each.series]} if len(table.names) > 1 else {})
        quantiles = found.quantiles
        names = ["forecast"] if quantiles is None else ["forecast" if each.banded and q == 0.5 else f"q{q:g}" for q in quantiles]
        for step, when in enumerate(times):
            for place, column in enumerate(found.columns):
                row = {**named, "origin": origin, table.time or "row": when, "step": step + 1, "column": column}
                made = dict(zip(names, each.forecast_HCQ[step, place].tolist(), strict=True))
                yield row | made | {"truth": float(each.truth_HC[step, place]), "naive": float(each.naive_HC[step, place])}


def scores(forecasts: Sequence[OriginForecast], columns: Sequence[str], quantiles: Sequence[float] | None) -> list[Score]:
    """A row for each group: `origin`, `step` and `column` are those of the group, or None for all of them."""
    if not forecasts:
        return []
    steps, several = range(len(forecasts[0].truth_HC)), len(columns) > 1  # of one column, its rows would repeat the others
    places: list[int | None] = [None, *range(len(columns))] if several else [None]
    groups: list[tuple[int | None, int | None]] = [(None, None)]
    groups += [(origin, None) for origin in sorted({each.origin for each in forecasts})] + [(None, step) for step in steps]
    rows: list[Score] = []
    for origin, step in groups:
        some = [each for each in forecasts if origin in (None, each.origin)]
        for place in places:
            when, which = (slice(None) if at is None else slice(at, at + 1) for at in (step, place))
            name = None if place is None else columns[place]
            named: Score = {"origin": None if origin is None else origin + 1, "step": None if step is None else step + 1, "column": name}
            rows.append(named | _score(some, (when, which), quantiles, single=place is not None or not several))
    return rows


def _score(
    group: Sequence[OriginForecast], part: tuple[slice, slice], quantiles: Sequence[float] | None, *, single: bool
) -> dict[str, float]:
    def of(values: Callable[[OriginForecast], Any]) -> Any:
        """Values of each forecast [H, C, …], one after the other where the truth counts."""
        return np.stack([values(each)[part] for each in group])[real_NHC]

    real_NHC = np.stack([(np.ones(each.truth_HC.shape, np.bool_) if each.counted_HC is None else each.counted_HC)[part] for each in group])
    figures: dict[str, float] = {"forecasts": len(group)}
    if not real_NHC.any():
        return figures
    # Differences are taken before steps are picked, so numbers are standardised whole.
    truth_E, naive_E, forecast_EQ = of(lambda each: each.truth_HC), of(lambda each: each.naive_HC), of(lambda each: each.forecast_HCQ)
    standard_E, season_E = of(lambda each: each.standard(each.truth_HC)), of(lambda each: each.standard(each.naive_HC))
    made_EQ = of(lambda each: each.standard(each.forecast_HCQ))
    change_E = of(lambda each: np.broadcast_to(each.change_C, each.truth_HC.shape))
    size, changing_E = float(np.abs(truth_E).mean()), change_E > 0
    middle = 0 if quantiles is None else list(quantiles).index(0.5) if 0.5 in quantiles else None
    ours = [] if middle is None else [("", forecast_EQ[:, middle], made_EQ[:, middle])]
    for prefix, point_E, point_standard_E in (*ours, ("naive_", naive_E, season_E)):
        error_E, scaled_E = point_E - truth_E, np.abs(point_standard_E - standard_E)
        figures |= {f"{prefix}mae": float(scaled_E.mean()), f"{prefix}rmse": math.sqrt(float((scaled_E**2).mean()))}
        if changing_E.any():
            figures[f"{prefix}mase"] = float((scaled_E[changing_E] / change_E[changing_E]).mean())
        if single:
            in_units = float(np.abs(error_E).mean())
            figures |= {f"{prefix}mae_in_units": in_units, f"{prefix}rmse_in_units": math.sqrt(float((error_E**2).mean()))}
            if size:  # of a forecast without spread, half of its error is the loss at every level
                figures[f"{prefix}weighted_quantile_loss"] = in_units / size
    if quantiles is not None:
        share_Q = np.array(quantiles)
        if single and size:
            figures["weighted_quantile_loss"] = 2.0 * _pinball(truth_E, forecast_EQ, share_Q) / size
        levels = {round(1.0 - quantile, 10): place for place, quantile in enumerate(quantiles) if quantile > 0.5}
        for low, quantile in enumerate(quantiles):
            if (high := levels.get(quantile)) is not None:
                within_E = (forecast_EQ[:, low] <= truth_E) & (truth_E <= forecast_EQ[:, high])
                figures[f"within_{100 * (quantiles[high] - quantile):.6g}"] = float(within_E.mean())
        figures["pinball"] = _pinball(standard_E, made_EQ, share_Q)
        figures |= {f"coverage_{q:g}": float((truth_E <= forecast_EQ[:, place]).mean()) for place, q in enumerate(quantiles)}
    return figures


def _pinball(truth_E: Reals, forecast_EQ: Reals, share_Q: Reals) -> float:
    gap_EQ = truth_E[:, None] - forecast_EQ
    return float(np.maximum(share_Q * gap_EQ, (share_Q - 1.0) * gap_EQ).mean())


def spec_of_run(path: Path | str) -> Spec:
    """The spec of a run that is to be trained anew."""
    run = Run.open(Path(path))
    spec = load_own(run.path / "spec.yaml")
    codec_of(run, spec)
    return spec


def _result(folder: Path, saved: Saved, table: Table, rolling: Rolling, made: list[OriginForecast]) -> Backtest:
    made.sort(key=lambda each: (each.series, each.origin))
    read = saved.task.codec.forecast_columns, saved.task.levels
    return Backtest(folder, table, *read, rolling, made, scores(made, *read))


def _check(spec: Spec, what: str) -> None:
    if spec.task != "forecasting":
        raise UserError(f"a backtest is for forecasts, but {what} has task {spec.task}; use carrywave evaluate")


def _alone(spec: Spec) -> Spec:
    """The spec without files and without a split of its own: all rows but the held-out share are trained on."""
    share = spec.data.share if spec.data.split is None else min(0.5, spec.data.split[1] / sum(spec.data.split[:2]))
    update = {"train": None, "valid": None, "test": None, "split": None, "share": share}
    return spec.model_copy(update={"data": spec.data.model_copy(update=update)})


def _folder(run: Path | None) -> Path:
    if run is not None:
        if run.exists() and not run.is_dir():
            raise UserError(f"{run} is a file, but a backtest needs a folder; pass another {option('run')}")
        if run.exists() and any(run.iterdir()):
            raise UserError(f"{run} already exists and is not empty; pass another {option('run')}")
        return run
    number = 1
    while (folder := Path("runs") / f"backtest-{number}").exists():
        number += 1
    return folder


def _changed(saved: Saved) -> tuple[str, ...]:
    """A line if the training file is no longer that of training."""
    name, digest = digests_of(saved.spec)["data.train"]
    if files_of(saved.run).get("train", digest) == digest:
        return ()
    return (f"{name} has changed since {saved.run.path} was trained, so which of its rows were trained on is a guess",)


def _seen(whole: Table, table: Table, origins: Origins, spec: Spec) -> tuple[str, ...]:
    """A line if some origins lie within the rows that the run was trained on, of any series."""
    train = spans(whole, spec, [part for part in PARTS if getattr(spec.data, part) is not None])["train"]
    if origins.last_O is None or whole.times is None:
        ends = dict(zip(whole.names, train.lengths.tolist(), strict=True))
        inside_SO = origins.known_SO < np.array([ends[name] for name in table.names])[:, None]
    else:
        trained = train.lengths > 0
        trained_until = whole.times.keys[(train.starts + train.lengths - 1)[trained]].max() if trained.any() else origins.last_O[0]
        inside_SO = np.broadcast_to(origins.last_O < trained_until, origins.made_SO.shape)
    inside, total = int((inside_SO & origins.made_SO).sum()), int(origins.made_SO.sum())
    if not inside:
        return ()
    return (
        f"{inside} of {total} forecasts start within the rows that the run was trained on, so they look better than they are; use fewer "
        "origins or later data, or backtest the SPEC, which trains on the rows before the first origin alone",
    )

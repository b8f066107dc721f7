"""Backtests a forecaster: trains it on what was known at the first of several origins, or at each, forecasts from all of them, and scores
the forecasts against what came (`backtest_scores`).

Origins are the same times for all series, so that nothing that is known at one, of any series, is later than it.

Shapes: S series, O origins, H horizon, C columns, Q quantiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carrywave.data.files.rows import Row
from carrywave.data.prepare import digests_of, series_of
from carrywave.data.sequences import Ints, Sequences
from carrywave.data.tables import series
from carrywave.data.tables.calendar import calendar_columns
from carrywave.data.tables.frequency import Keys
from carrywave.data.tables.parts import PARTS, spans
from carrywave.data.tables.table import Table, filled_cells, unread_cells
from carrywave.errors import DataError, SpecError, UserError, option
from carrywave.parallel.world import from_rank_0, join, leave, raise_on_all
from carrywave.prediction.outputs import HeadOutputs
from carrywave.prediction.saved_run import Saved, check_bands, codec_of, files_of, open_run
from carrywave.runs.run import Run
from carrywave.runs.run_place import free_place
from carrywave.runs.watcher import Watcher
from carrywave.spec.load import load_own
from carrywave.spec.spec import Spec
from carrywave.tasks.forecast_values import ForecastValues
from carrywave.tasks.views import Naive
from carrywave.tasks.warnings import short_of_season
from carrywave.train.backtest_scores import OriginForecast, Score, scores
from carrywave.train.from_python import fit
from carrywave.train.loop_state import ASKED, Ending

ORIGINS = 5
SHOWN = 3  # names in a line

Mask = NDArray[np.bool_]
Note = Callable[[str], None]


@dataclass(frozen=True)
class Rolling:
    """Origins counted from the end: the last one leaves just a horizon, the one before a stride more."""

    horizon: int | None = None  # None: the model's
    stride: int | None = None  # None: a horizon
    origins: int = ORIGINS
    reach: int = 0  # rows ahead of which a model reads what is known, if these are more than the horizon

    def of_model(self, horizon: int, *, reads_ahead: bool) -> Rolling:
        """The same for a model with this horizon; `reads_ahead`: it reads columns that are known for all of it."""
        steps = self.horizon or horizon
        if steps > horizon:
            fact = f"{option('horizon')} {steps} is more than the {horizon} steps that the model forecasts"
            raise UserError(f"{fact}; use {horizon} or less, or train with data.horizon={steps}")
        return Rolling(steps, self.stride or steps, self.origins, horizon if reads_ahead else 0)

    @property
    def steps(self) -> int:
        """The horizon, which is known."""
        assert self.horizon is not None
        return self.horizon

    @property
    def beyond(self) -> int:
        """Rows after the last origin."""
        return max(self.steps, self.reach)

    def before(self, length: int) -> Ints:
        """How many of this many rows, or times, come before each origin, the first origin first; 0 or less if there are too few."""
        stride = self.stride or self.steps
        return length - self.beyond - np.arange(self.origins - 1, -1, -1, dtype=np.int64) * stride


@dataclass(frozen=True)
class Origins:
    """Where origins lie in each series of a table."""

    rolling: Rolling
    known_SO: Ints  # rows before each origin
    made_SO: Mask  # from which of them a series is forecast: it has enough rows before the first, and after this one
    last_O: Keys | None = None  # the last time before each origin; None: there are none in common, and rows are counted from each one's end


@dataclass(frozen=True)
class Backtest:
    """What came of a backtest. Forecasts and scores are known to rank 0 alone."""

    folder: Path  # of the run, or of the runs of all origins
    table: Table
    rolling: Rolling
    columns: tuple[str, ...] = ()
    quantiles: tuple[float, ...] | None = None  # 0.5 among those of bands is the forecast itself
    forecasts: list[OriginForecast] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    ending: Ending | None = None  # that of a training that was asked to stop


def backtest_run(path: Path | str, data: Any, asked: Rolling, device: str, note: Note) -> Backtest:
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
        rolling = asked.of_model(spec.data.horizon, reads_ahead=bool(codec.known))
        whole = series_of(source, codec, spec, labelled=True)
        table, origins, left_out = long_enough(whole, rolling, before=1)
    if world.rank == 0:
        short = short_of_season(spec, origins.known_SO[origins.made_SO])
        seen = _seen(saved, whole, table, origins) if data is None else ()
        unseen = (*series.unseen_series(table.name, table.names, codec), *series.unseen_values(table.name, table, codec))
        for line in (*whole.notes[1:], *left_out, *seen, *unseen, *([] if short is None else [short])):
            note(line)
    made = forecast(saved, table, origins, range(rolling.origins))
    leave(world)
    return _result(saved.run.path, saved, table, rolling, made)


def backtest_spec(
    spec: Spec, data: str | None, asked: Rolling, *, retrain: bool, run: Path | None, device: str, watch: Watcher | None, note: Note
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
        if asked.horizon is not None:
            spec = _with_data(spec, horizon=asked.horizon)
        rolling = asked.of_model(spec.data.horizon, reads_ahead=bool(spec.data.known))
        # Train needs a horizon and a row, and valid another horizon.
        table, origins, left_out = long_enough(series_of(file, None, spec, labelled=True), rolling, before=2 * spec.data.horizon + 1)
    base = Path(from_rank_0(world, lambda: str(_folder(run))))
    for line in left_out if world.rank == 0 else ():
        note(line)
    leave(world)
    made: list[OriginForecast] = []
    saved: Saved | None = None
    for number in [number for number in range(rolling.origins) if origins.made_SO[:, number].any()] if retrain else [0]:
        folder, past = base / f"origin-{number + 1}" if retrain else base, at_origin(table, origins, number)
        if watch is not None and retrain:
            watch.say(f"origin {number + 1} of {rolling.origins}: {int(past.lengths.sum()):,} rows are known")
        result = fit(None, past, spec=_alone(spec), run=folder, device=device, watch=watch)
        if result.ending in ASKED:
            return Backtest(base, table, rolling, ending=result.ending)
        world = join(device)
        with raise_on_all(world):
            saved = open_run(folder, device, world=world)
        for line in series.unseen_values(table.name, table, saved.task.codec) if world.rank == 0 and not made else ():
            note(line)
        made += forecast(saved, table, origins, [number] if retrain else range(rolling.origins))
        leave(world)
    assert saved is not None
    return _result(base, saved, table, rolling, made)


def spec_of_run(path: Path | str) -> Spec:
    """The spec of a run that is to be trained anew."""
    run = Run.open(Path(path))
    spec = load_own(run.path / "spec.yaml")
    codec_of(run, spec)
    return spec


def _check(spec: Spec, what: str) -> None:
    if spec.task != "forecasting":
        raise UserError(f"a backtest is for forecasts, but {what} has task {spec.task}; use carrywave evaluate")


def _with_data(spec: Spec, **changes: Any) -> Spec:
    return spec.model_copy(update={"data": spec.data.model_copy(update=changes)})


def _alone(spec: Spec) -> Spec:
    """The spec without files and without a split of its own: all rows but the held-out share are trained on."""
    share = spec.data.share if spec.data.split is None else min(0.5, spec.data.split[1] / sum(spec.data.split[:2]))
    return _with_data(spec, train=None, valid=None, test=None, split=None, share=share)


def _folder(run: Path | None) -> Path:
    if run is not None and run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file, but a backtest needs a folder; pass another {option('run')}")
    if run is not None and run.exists() and any(run.iterdir()):
        raise UserError(f"{run} already exists and is not empty; pass another {option('run')}")
    return free_place("backtest") if run is None else run


def _result(folder: Path, saved: Saved, table: Table, rolling: Rolling, made: list[OriginForecast]) -> Backtest:
    made.sort(key=lambda each: (each.series, each.origin))
    read = saved.task.codec.forecast_columns, saved.task.levels
    return Backtest(folder, table, rolling, *read, made, scores(made, *read))


def long_enough(table: Table, rolling: Rolling, *, before: int) -> tuple[Table, Origins, tuple[str, ...]]:
    """The series that have `before` rows ahead of the first origin, where origins lie in them, and a line about the others."""
    origins = place_origins(table, rolling)
    fits = origins.known_SO[:, 0] >= before
    made_SO = origins.made_SO & fits[:, None]
    if not made_SO.any():
        needed, longest = before + int(-rolling.before(0)[0]), int(table.lengths.max())
        raise DataError(
            f"{table.name}: {rolling.origins} origins, {rolling.stride} rows apart, with a horizon of {rolling.beyond} need {needed} rows "
            f"up to the last time of all series, but the longest has {longest}; use fewer origins, or a smaller stride or horizon"
        )
    partly = ~made_SO.all(axis=1)
    lines = []
    if partly.any():
        names = [table.names[place] for place in np.flatnonzero(partly)]
        shown = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
        fact = f"{table.name}: {len(names):,} of {len(table.names):,} series lack rows before the first origin or after later ones"
        lines.append(f"{fact}, so they are not forecast from all of them: {shown}")
    if not fits.all():
        table = cut(table, np.where(fits, table.lengths, 0), np.where(fits, table.totals - table.lengths, 0))
    return table, replace(origins, known_SO=origins.known_SO[fits], made_SO=made_SO[fits]), tuple(lines)


def place_origins(table: Table, rolling: Rolling) -> Origins:
    """The origins of a table: counted back over all of its times, or else over the rows of each series."""
    if table.times is None or table.times.frequency is None:
        known_SO = np.array([rolling.before(int(length)) for length in table.lengths], np.int64)
        return Origins(rolling, known_SO, table.lengths[:, None] - known_SO >= rolling.beyond)
    keys_S = [table.times.keys[start : start + length] for start, length in zip(table.starts, table.lengths, strict=True)]
    times: Keys = np.unique(np.concatenate(keys_S))
    at_O = rolling.before(len(times))
    last_O = times[np.maximum(at_O - 1, 0)]
    known_SO = np.stack([np.searchsorted(keys, last_O, side="right") for keys in keys_S]).astype(np.int64)
    known_SO = np.where(at_O > 0, known_SO, 0)
    return Origins(rolling, known_SO, table.lengths[:, None] - known_SO >= rolling.beyond, last_O)


def cut(table: Table, lengths: Ints, ahead: Ints) -> Table:
    """The first `lengths` rows of each series, and the next `ahead` as rows ahead; series without rows are left out."""
    counts = np.where(lengths > 0, lengths + ahead, 0)
    kept = np.concatenate([np.arange(start, start + count) for start, count in zip(table.starts, counts, strict=True)])
    nonempty = np.flatnonzero(lengths)
    return replace(
        table,
        values=table.values[kept],
        codes=table.codes[kept],
        unfilled=None if table.unfilled is None else table.unfilled[kept],
        labels=tuple(table.labels[place] for place in nonempty) if table.series else (),
        weights=None if table.weights is None else table.weights[kept],
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[nonempty])[:-1]]),
        lengths=np.asarray(lengths, np.int64)[nonempty],
        ahead_rows=np.asarray(ahead, np.int64)[nonempty] if ahead[nonempty].any() else None,
        names=tuple(table.names[place] for place in nonempty),
        times=None if table.times is None else table.times.sorted(kept),
    )


def at_origin(table: Table, origins: Origins, number: int, *, forecast: bool = False) -> Table:
    """What was known at one of the origins: the rows before it and, where columns are known ahead, these for the horizon after it.

    With `forecast`, only series that are forecast from it are there. Empty cells are filled from what was known alone, so those at the
    end of the past are filled from the values before them.
    """
    lengths = np.where(origins.made_SO[:, number] | (not forecast), origins.known_SO[:, number], 0)
    ahead = np.minimum(table.totals - lengths, origins.rolling.beyond if table.choice.known else 0)
    past = cut(table, lengths, ahead)
    measured = len(table.columns) - len(calendar_columns(table.choice.calendar))
    columns = (*table.columns[:measured], *table.categorical)
    unread = unread_cells(columns, table.choice, _is_ahead(past))
    if past.unfilled is None:
        values, codes = past.values.copy(), np.where(unread[:, measured:], -1, past.codes)
        values[:, :measured][unread[:, :measured]] = np.nan
        return replace(past, values=values, codes=codes)
    of_row = np.repeat(np.arange(len(past.names)), past.totals)
    cells = filled_cells(past.unfilled, of_row, unread, measured, table.choice.missing)
    empty = np.isnan(cells) & ~unread
    empty[:, measured:] = False
    cells[empty] = 0.0  # nothing is known of it yet
    values = np.concatenate([cells[:, :measured], past.values[:, measured:]], axis=1)
    codes = np.where(np.isnan(cells[:, measured:]), -1, cells[:, measured:]).astype(np.int64)
    return replace(past, unfilled=None, values=values, codes=codes)


def _is_ahead(table: Table) -> Mask:
    """A mask of the rows ahead."""
    mask = np.zeros(len(table.values), np.bool_)
    for start, length, total in zip(table.starts, table.lengths, table.totals, strict=True):
        mask[start + length : start + total] = True
    return mask


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
        seasonal = Naive(Sequences(past.values, past.starts, past.lengths), np.array(places), origins.rolling.steps, spec.season, "season")
        change_SC = saved.task.scale.of_series(data, codec.channels).reshape(-1, len(places))
        for place, number in enumerate(numbers.tolist()):
            known_1 = past.lengths[place : place + 1]
            made_HCQ = values(place, known_1, [out[None] for out in outs[place * many : (place + 1) * many]])[0]
            came = table.starts[number] + known_1[0] + np.arange(origins.rolling.steps)
            made.append(
                OriginForecast(
                    number,
                    origin,
                    int(known_1[0]),
                    made_HCQ[: origins.rolling.steps],
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
    ahead = None if table.times is None else table.times.ahead(start, each.known, steps)
    if ahead is None or table.times is None:
        return each.known, [each.known + step + 1 for step in range(steps)]
    last = start + each.known - 1
    return table.times.written(slice(last, last + 1))[0], ahead


def rows_of(found: Backtest) -> Iterator[Row]:
    """A row for each step and column of each forecast, in the units of the file."""
    table, quantiles = found.table, found.quantiles
    for each in found.forecasts:
        origin, times = times_of(table, each)
        named: Row = table.fields(each.series) or ({"series": table.names[each.series]} if len(table.names) > 1 else {})
        names = ["forecast"] if quantiles is None else ["forecast" if each.banded and q == 0.5 else f"q{q:g}" for q in quantiles]
        for (step, when), (place, column) in product(enumerate(times), enumerate(found.columns)):
            row = {**named, "origin": origin, table.time or "row": when, "step": step + 1, "column": column}
            made = dict(zip(names, each.forecast_HCQ[step, place].tolist(), strict=True))
            yield row | made | {"truth": float(each.truth_HC[step, place]), "naive": float(each.naive_HC[step, place])}


def _seen(saved: Saved, whole: Table, table: Table, origins: Origins) -> Iterator[str]:
    """Lines if the training file has changed, and if some origins lie within the rows that the run was trained on, of any series."""
    spec = saved.spec
    name, digest = digests_of(spec)["data.train"]
    if files_of(saved.run).get("train", digest) != digest:
        yield f"{name} has changed since {saved.run.path} was trained, so which of its rows were trained on is a guess"
    train = spans(whole, spec, [part for part in PARTS if getattr(spec.data, part) is not None])["train"]
    if origins.last_O is None or whole.times is None:
        ends = dict(zip(whole.names, train.lengths.tolist(), strict=True))
        inside_SO = origins.known_SO < np.array([ends[name] for name in table.names])[:, None]
    else:
        trained = train.lengths > 0
        trained_until = whole.times.keys[(train.starts + train.lengths - 1)[trained]].max() if trained.any() else origins.last_O[0]
        inside_SO = np.broadcast_to(origins.last_O < trained_until, origins.made_SO.shape)
    if inside := int((inside_SO & origins.made_SO).sum()):
        fact = f"{inside} of {int(origins.made_SO.sum())} forecasts start within the rows that the run was trained on"
        remedy = "use fewer origins or later data, or backtest the SPEC, which trains on the rows before the first origin alone"
        yield f"{fact}, so they look better than they are; {remedy}"

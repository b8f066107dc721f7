"""Backtests a forecaster: trains it on what was known at the first of several origins, or at each, and forecasts from all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from carrywave.data.prepare import digests_of
from carrywave.data.python_inputs import series_of
from carrywave.data.tables import series
from carrywave.data.tables.parts import PARTS, spans
from carrywave.data.tables.table import Table
from carrywave.errors import DataError, SpecError, UserError, option
from carrywave.parallel.world import all_gather_text, join, leave, raise_on_all
from carrywave.prediction.backtest.origins import Origins, Rolling, at_origin, long_enough
from carrywave.prediction.backtest.rolled import Rolled, forecast
from carrywave.prediction.backtest.scores import Score, scores
from carrywave.prediction.saved_run import Saved, check_bands, codec_of, files_of, open_run
from carrywave.runs.run import Run
from carrywave.runs.watcher import Watcher
from carrywave.spec.load import load_own
from carrywave.spec.spec import Spec
from carrywave.tasks.doubts import short_of_season
from carrywave.train.from_python import fit
from carrywave.train.loop_state import ASKED, Ending

ORIGINS = 5


@dataclass(frozen=True)
class Request:
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


@dataclass(frozen=True)
class Backtest:
    """What came of a backtest. Forecasts and scores are known to rank 0 alone."""

    folder: Path  # of the run, or of the runs of all origins
    table: Table
    columns: tuple[str, ...]
    quantiles: tuple[float, ...] | None  # 0.5 among those of bands is the forecast itself
    rolling: Rolling
    forecasts: list[Rolled]
    scores: list[Score]
    ending: Ending | None = None  # that of a training that was asked to stop


def backtest_run(path: Path | str, data: Any, request: Request, device: str, note: Callable[[str], None]) -> Backtest:
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
        rolling = request.rolling(spec.data.horizon, reads_ahead=bool(codec.known))
        whole = series_of(source, codec, spec, labelled=True)
        table, placed, left_out = long_enough(whole, rolling, before=1)
        seen = (*_changed(saved), *_seen(whole, table, placed, spec)) if data is None else ()
    if world.rank == 0:
        unseen = (*series.unseen_series(table.name, table.names, codec), *series.unseen_values(table.name, table, codec))
        short = short_of_season(spec.data, placed.known_SO[placed.made_SO])
        for line in (*whole.notes[1:], *left_out, *seen, *unseen, *([] if short is None else [short])):
            note(line)
    made = forecast(saved, table, placed, range(rolling.origins))
    leave(world)
    return _result(saved, table, rolling, made)


def backtest_spec(
    spec: Spec,
    data: str | None,
    request: Request,
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
        if request.horizon is not None:
            spec = spec.model_copy(update={"data": spec.data.model_copy(update={"horizon": request.horizon})})
        rolling = request.rolling(spec.data.horizon, reads_ahead=bool(spec.data.known))
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
    made: list[Rolled] = []
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
    made.sort(key=lambda each: (each.series, each.origin))
    return Backtest(base, table, *_read(saved), rolling, made, scores(made, *_read(saved)))


def spec_of_run(path: Path | str) -> Spec:
    """The spec of a run that is to be trained anew."""
    run = Run.open(Path(path))
    spec = load_own(run.path / "spec.yaml")
    codec_of(run, spec)
    return spec


def _read(saved: Saved) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    return saved.task.codec.forecast_columns, saved.task.levels


def _result(saved: Saved, table: Table, rolling: Rolling, made: list[Rolled]) -> Backtest:
    return Backtest(saved.run.path, table, *_read(saved), rolling, made, scores(made, *_read(saved)))


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

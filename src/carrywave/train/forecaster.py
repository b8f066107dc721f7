"""An estimator for forecasts: fit, predict and score on frames with one row for each series and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from carrywave.data.files.frames import columns_of, is_frame
from carrywave.data.files.same_kind import appended, frame_like, kind_of
from carrywave.errors import DataError, RunError, UserError
from carrywave.prediction.evaluate import evaluate_run
from carrywave.prediction.predict import predict
from carrywave.prediction.saved_run import codec_of
from carrywave.runs.run import Run
from carrywave.runs.watcher import Logged
from carrywave.spec.load import load_own
from carrywave.train.backtest import ORIGINS, Rolling, backtest_run, rows_of
from carrywave.train.from_python import fit
from carrywave.train.result import Result

SERIES, TIME, TARGET = "unique_id", "ds", "y"  # the names that Nixtla's libraries use
# Keys of a spec's data section that are arguments of a forecaster.
ARGUMENTS = {name: name for name in ("horizon", "quantiles", "season", "series", "time")} | {"targets": "target"}
# Further keys of a spec that are about the files of a run; another fit is given frames.
OF_FILES = ("train", "valid", "test", "format", "encoding", "decimal")
ERRORS = ("pinball", "mae")  # by which a score compares a forecast with the naive one: quantiles are judged as such


class Forecaster:
    """Forecasts the next values of many series, from a frame (pandas, polars or Arrow) in long format.

    Rows have the columns `unique_id`, `ds` and `y`; other names are given as `series`, `time` and `target` (or several). A frame without
    `unique_id` is a single series; other numeric columns are read too, up to the last row. `quantiles` asks for a column for each of them
    instead of one. `model`, `data`, `batch` and `train` are sections of a spec; covariates are in `data`, as in
    `data={"known": ["price"], "calendar": ["weekday"]}`.

    A fitted forecaster is a run folder, `run`: `Forecaster.load(folder)` opens it again, in any process.

    >>> import pandas as pd
    >>> import carrywave as cw
    >>> days = pd.date_range("2026-01-01", periods=60)
    >>> frame = pd.concat([pd.DataFrame({"unique_id": name, "ds": days, "y": [float(day % 7) for day in range(60)]}) for name in "ab"])
    >>> forecaster = cw.Forecaster(
    ...     horizon=3, season=7, quantiles=[0.1, 0.5, 0.9], model={"hidden": 8, "layers": 1}, train={"epochs": 2}, run="runs/days"
    ... )
    >>> forecaster.fit(frame)
    Forecaster(horizon=3, run='runs/days')
    >>> ahead = forecaster.predict()
    >>> list(ahead.columns)
    ['unique_id', 'ds', 'y-q0.1', 'y-q0.5', 'y-q0.9']
    >>> ahead.ds.dt.strftime("%m-%d").tolist()
    ['03-02', '03-03', '03-04', '03-02', '03-03', '03-04']
    >>> cw.Forecaster.load("runs/days").predict(frame).equals(ahead)
    True
    """

    def __init__(
        self,
        horizon: int = 24,
        *,
        quantiles: Sequence[float] | None = None,
        season: int = 1,
        series: str | Sequence[str] = SERIES,
        time: str = TIME,
        target: str | Sequence[str] = TARGET,
        model: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        batch: Mapping[str, Any] | None = None,
        train: Mapping[str, Any] | None = None,
        run: str | Path | None = None,
        device: str = "auto",
    ) -> None:
        for key in data or {}:
            if (argument := ARGUMENTS.get(key)) is not None:
                raise UserError(
                    f"data has {key}, which is an argument of its own; pass {argument}=... to the Forecaster, and take it out of data"
                )
        # As they were given, to the very object: scikit-learn's `clone` compares them so.
        self._parameters: dict[str, Any] = {
            **{"horizon": horizon, "quantiles": quantiles, "season": season, "series": series, "time": time, "target": target},
            **{"model": model, "data": data, "batch": batch, "train": train, "run": run, "device": device},
        }
        self.horizon, self.quantiles, self.season = horizon, None if quantiles is None else tuple(quantiles), season
        self.series, self.time = series, time
        self.targets = (target,) if isinstance(target, str) else tuple(target)
        self.model, self.data, self.batch, self.train = (dict(section or {}) for section in (model, data, batch, train))
        self._asked: Path | str | None = run  # the folder for the next fit; None: a new one
        self.device = device
        self.result: Result | None = None  # of `fit`: metrics, ending, the model
        self._fitted: Path | str | None = None
        self._fits = 0  # so far, in folders named after `run`
        self._known: tuple[str, ...] = ()  # the columns that are read ahead
        self._frames: dict[str, Any] = {}  # what the last fit was given: train and, if they were, valid and test

    def __repr__(self) -> str:
        return f"Forecaster(horizon={self.horizon}, run={None if self.run is None else str(self.run)!r})"

    @property
    def run(self) -> Path | str | None:
        """The folder of the run: of the last fit, or the one that the next fit will use; None if that will choose one."""
        return self._folder(resume=False) if self._fitted is None else self._fitted

    @classmethod
    def load(cls, run: str | Path, *, device: str = "auto") -> Self:
        """Open a run that was trained before, by a forecaster or by any other means. A further fit has its settings.

        >>> import carrywave as cw
        >>> wave = [float(step % 4) for step in range(80)]
        >>> how = {"task": "forecasting", "data": {"horizon": 2}, "batch": {"lanes": 2, "steps": 8}, "train": {"epochs": 1}}
        >>> result = cw.fit({"hidden": 4, "layers": 1}, wave, **how, run="runs/wave")
        >>> cw.Forecaster.load("runs/wave").horizon
        2
        """
        opened = Run.open(Path(run))
        spec = load_own(opened.path / "spec.yaml")
        if spec.task != "forecasting":
            raise RunError(f"{run} is a {spec.task} model, not a forecaster; use cw.predict")
        codec, data = codec_of(opened, spec), spec.data
        sections = {name: getattr(spec, name).model_dump(mode="json") for name in ("model", "data", "batch", "train")}
        sections["data"] = {key: value for key, value in sections["data"].items() if key not in (*ARGUMENTS, *OF_FILES)}
        forecaster = cls(
            data.horizon,
            quantiles=data.quantiles,
            season=data.season,
            series=codec.series[0] if len(codec.series) == 1 else codec.series or SERIES,
            time=codec.time or TIME,
            target=list(codec.forecast_columns),
            **sections,
            run=run,
            device=device,
        )
        forecaster._fitted, forecaster._known, forecaster._fits = opened.path, codec.known, 1
        return forecaster

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor, by name, as estimators of scikit-learn give them; its `clone` copies a forecaster by them."""
        return dict(self._parameters)

    def set_params(self, **parameters: Any) -> Self:
        """Change arguments of the constructor. A forecaster that was fitted with others is then no longer fitted; its run stays.

        >>> import carrywave as cw
        >>> cw.Forecaster(horizon=7, season=7).set_params(horizon=14).get_params()["horizon"]
        14
        """
        for name in parameters:
            if name not in self._parameters:
                raise UserError(f"a Forecaster has no parameter {name}; use one of {', '.join(self._parameters)}")
        others = {name for name, value in parameters.items() if value is not self._parameters[name]}
        if others - {"device"}:
            fresh = type(self)(**self._parameters | parameters)  # refuses what cannot be
            fresh._fits = 0 if "run" in others else self._fits
            self.__dict__.update(fresh.__dict__)
        elif others:
            self.device = self._parameters["device"] = parameters["device"]
        return self

    def fit(self, frame: Any, *, valid: Any = None, test: Any = None, **how: Any) -> Self:
        """Train on a frame. Without `valid`, its last rows are held out for validation; `how` are further arguments of `cw.fit`.

        Each fit is a run of its own: a second one trains anew, in the folder RUN-2. With `resume=True` the last one is continued.

        >>> import polars as pl
        >>> import carrywave as cw
        >>> frame = pl.DataFrame({"ds": range(80), "sales": [float(step % 4) for step in range(80)]})
        >>> forecaster = cw.Forecaster(2, target="sales", model={"hidden": 4, "layers": 1}, train={"epochs": 1})
        >>> forecaster.fit(frame, progress=False).predict()["ds"].to_list()
        [80, 81]
        """
        frames = {name: part for name, part in (("train", frame), ("valid", valid), ("test", test)) if part is not None}
        for name, part in frames.items():
            self._check(part, name)
        sections = {"data": self._columns(frame) | self.data, "batch": self.batch, "train": self.train}
        how = {"run": self._folder(resume=bool(how.get("resume"))), "device": self.device, "task": "forecasting", **sections, **how}
        self.result = fit(self.model or None, frames, **how)
        self._fitted = self.result.run
        self._fits += not how.get("resume")
        self._known = self.result.task.codec.known
        self._frames = frames
        return self

    def predict(self, frame: Any = None, *, future: Any = None, samples: int | None = None, steps: int | None = None, seed: int = 1) -> Any:
        """Forecast what follows the last row of each series: a frame of the same kind, with a row for each series and future time.

        Without a frame, it is what follows all rows that `fit` was given: train, then valid, then test. Series that the forecaster was not
        trained on are forecast too.
        With known covariates, `future` is a frame of the same kind with their values: a row for each series and time ahead. They may also
        be rows at the end of `frame`, with nothing in the columns to forecast.
        Of a forecaster with a distribution, `samples` asks for so many sample paths: a row for each series, path and time, with the number
        of the path in `sample`; `steps` and `seed` as in `cw.predict`.

        >>> import pyarrow as pa
        >>> import carrywave as cw
        >>> table = pa.table({"unique_id": ["a"] * 60, "ds": list(range(60)), "y": [float(step % 4) for step in range(60)]})
        >>> forecaster = cw.Forecaster(2, model={"hidden": 4, "layers": 1}, train={"epochs": 1}).fit(table)
        >>> ahead = forecaster.predict(table.slice(0, 50))
        >>> ahead.column_names, ahead["ds"].to_pylist()
        (['unique_id', 'ds', 'y'], [50, 51])
        """
        run = self._opened("predict")
        if frame is None and not self._frames:
            raise UserError("this forecaster was loaded from its run, which holds no data; pass predict a frame that ends where it begins")
        frames = self._frames if frame is None else {"the frame": frame}
        first, *_ = frames.values()
        self._check(first, "the frame")
        if future is not None:
            self._check(future, "future")
            self._check_ahead(future)
        whole = first
        for name, more in (*list(frames.items())[1:], ("future", future)):
            whole = whole if more is None else appended(whole, more, name)
        rows = predict(run, whole, samples=samples, steps=steps, seed=seed, device=self.device, note=Logged().say)
        return frame_like(first, [{name: value for name, value in row.items() if name != "step"} for row in rows])

    def backtest(self, frame: Any, *, origins: int = ORIGINS, stride: int | None = None) -> Any:
        """Forecast from several origins within a frame, as if nothing after them were known: a frame of forecasts beside what came.

        The last origin lies a horizon before the last time in the frame, the one before it a `stride` earlier (by default a horizon), and
        so on; they are the same for all series. Forecasts from origins within the rows that were trained on look better than they are: fit
        on the rows before, as here.

        >>> import carrywave as cw
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"ds": range(80), "y": [float(step % 4) for step in range(80)]})
        >>> forecaster = cw.Forecaster(2, model={"hidden": 4, "layers": 1}, train={"epochs": 1}).fit(frame[:-6])
        >>> found = forecaster.backtest(frame, origins=3)
        >>> found[["origin", "ds", "step", "truth"]].values.tolist()[-2:]
        [[77.0, 78.0, 1.0, 2.0], [77.0, 79.0, 2.0, 3.0]]
        >>> list(found.columns)
        ['origin', 'ds', 'step', 'column', 'forecast', 'truth', 'naive']
        """
        run = self._opened("backtest")
        self._check(frame, "the frame")
        result = backtest_run(run, frame, Rolling(stride=stride, origins=origins), self.device, Logged().say)
        rows = list(rows_of(result))
        return frame_like(frame, rows, alike={"origin": result.table.time} if result.table.time is not None else None)

    def score(self, frame: Any) -> float:
        """How much better than the seasonal-naive forecast, over all rows of a frame: 1 is perfect, 0 as good as naive, below 0 worse.

        It is 1 − error ÷ naive error, where the error is the MAE or, for quantiles, the pinball loss over all of them, with the naive
        forecast as each quantile. `cw.evaluate(run, frame)` has all metrics.

        >>> import carrywave as cw
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"ds": range(80), "y": [float(step % 4) for step in range(80)]})
        >>> forecaster = cw.Forecaster(2, model={"hidden": 4, "layers": 1}, train={"epochs": 1}).fit(frame)
        >>> forecaster.score(frame) < 1.0
        True
        """
        run = self._opened("score")
        self._check(frame, "the frame")
        values = evaluate_run(run, frame, self.device, note=Logged().say)
        error = next(name for name in ERRORS if name in values)
        ours, naive = (float(str(values[name])) for name in (error, f"naive_{error}"))
        if not naive:
            raise DataError("the naive forecast of this frame is without error, so there is nothing to compare with; use cw.evaluate")
        return 1.0 - ours / naive

    def _folder(self, *, resume: bool) -> Path | str | None:
        """The folder for a fit. It follows from earlier fits, not from what is on disk, so that workers started again find theirs."""
        if resume and self._fitted is not None:
            return self._fitted
        number = self._fits + (not resume)
        if self._asked is None or number <= 1:
            return self._asked
        named = f"{str(self._asked).rstrip('/')}-{number}"
        return named if isinstance(self._asked, str) else Path(named)

    def _opened(self, what: str) -> Path | str:
        if self._fitted is None:
            raise UserError(f"{what} needs a forecaster that is trained; call fit first, or open a run with cw.Forecaster.load")
        return self._fitted

    def _check(self, frame: Any, name: str) -> None:
        if kind_of(frame) is None:
            raise DataError(f"{name} is a {type(frame).__name__}; pass a DataFrame of pandas or polars, or an Arrow table")

    def _check_ahead(self, future: Any) -> None:
        """Refuse rows ahead that would be taken for the past: the forecast would begin after them."""
        if not self._known:
            raise DataError("future is given, but this forecaster reads no column ahead; leave it out, or name such columns in data.known")
        for name, column in columns_of(future):
            values = pa.array(column) if not isinstance(column, pa.ChunkedArray) else column
            if name in self.targets and not pc.all(pc.is_null(values, nan_is_null=True), min_count=0).as_py():
                raise DataError(
                    f"future has values in column {name}, which is to be forecast; remove the column, or add the rows to the frame"
                )

    def _columns(self, frame: Any) -> dict[str, Any]:
        """The part of the data section that follows from the frame and the forecaster's own settings."""
        assert is_frame(frame)
        index = getattr(frame, "index", None)
        names = {name for name, _ in columns_of(frame)} | {str(name) for name in getattr(index, "names", ()) if name is not None}
        for target in self.targets:
            if target not in names:
                raise DataError(f"the frame has no column {target!r} to forecast; it has {', '.join(sorted(names))}; set target=...")
        data: dict[str, Any] = {"horizon": self.horizon, "season": self.season, "targets": list(self.targets)}
        if self.quantiles is not None:
            data["quantiles"] = list(self.quantiles)
        # Names that are not the usual ones must be there; a usual one may be missing.
        for key, column, usual in (("series", self.series, SERIES), ("time", self.time, TIME)):
            if column in names or column != usual:
                data[key] = column if isinstance(column, str) else list(column)
        return data

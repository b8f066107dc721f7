"""The estimator: frames in, frames of the same kind out, with the types that their columns had."""

from __future__ import annotations

import inspect
from copy import deepcopy
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import carrywave as cw
from carrywave.errors import DataError, RunError, UserError
from carrywave.spec.load import load_own

DAYS = pd.date_range("2026-01-01", periods=40)
FRAME = pd.DataFrame(
    {"unique_id": ["a"] * 40 + ["b"] * 40, "ds": [*DAYS, *DAYS], "y": [float(day % 5) for day in range(80)], "price": range(80)}
)
SMALL: dict[str, Any] = {"model": {"hidden": 4, "layers": 1}, "batch": {"lanes": 2, "steps": 16}, "train": {"epochs": 1}}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> cw.Forecaster:
    run = tmp_path_factory.mktemp("runs") / "days"
    return cw.Forecaster(3, season=5, quantiles=[0.1, 0.5], run=run, **SMALL).fit(FRAME, progress=False)


def test_a_frame_of_the_same_kind_with_future_dates(fitted: cw.Forecaster) -> None:
    ahead = fitted.predict()
    assert list(ahead.columns) == ["unique_id", "ds", "y-q0.1", "y-q0.5"]
    assert ahead.dtypes["ds"] == FRAME.dtypes["ds"]
    assert ahead.dtypes["unique_id"] == FRAME.dtypes["unique_id"]
    assert ahead["unique_id"].tolist() == ["a"] * 3 + ["b"] * 3
    assert ahead["ds"].tolist() == [*pd.date_range("2026-02-10", periods=3)] * 2
    rows = cw.predict(fitted.run or "", FRAME)
    assert ahead["y-q0.1"].tolist() == [row["y-q0.1"] for row in rows]


def test_every_kind_of_frame_gives_the_same_forecast(fitted: cw.Forecaster) -> None:
    ahead = fitted.predict()
    of_polars, of_arrow = fitted.predict(pl.from_pandas(FRAME)), fitted.predict(pa.Table.from_pandas(FRAME, preserve_index=False))
    assert isinstance(of_polars, pl.DataFrame)
    assert isinstance(of_arrow, pa.Table)
    assert of_polars.schema["ds"] == pl.from_pandas(FRAME).schema["ds"]
    for other in (of_polars.to_pandas(), of_arrow.to_pandas()):
        assert other["ds"].tolist() == ahead["ds"].tolist()
        assert other["y-q0.5"].tolist() == ahead["y-q0.5"].tolist()


@pytest.mark.parametrize("kind", [pl.Categorical, pl.Enum(["a", "b"])])
def test_categories_of_polars_name_series(kind: Any, fitted: cw.Forecaster) -> None:
    given = pl.from_pandas(FRAME).with_columns(pl.col("unique_id").cast(kind))
    ahead = fitted.predict(given)
    assert ahead.schema["unique_id"] == given.schema["unique_id"]
    assert ahead["y-q0.5"].to_list() == fitted.predict()["y-q0.5"].tolist()


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("unique_id", FRAME["unique_id"].astype("category")),
        ("ds", FRAME["ds"].dt.tz_localize("Europe/Paris")),
        ("ds", FRAME["ds"].dt.date),
        ("ds", FRAME["ds"].astype("datetime64[ns]")),
        ("ds", FRAME["ds"].astype(str)),
    ],
)
def test_columns_keep_their_types(column: str, values: pd.Series[Any], fitted: cw.Forecaster) -> None:
    given = FRAME.assign(**{column: values})
    ahead = fitted.predict(given)
    assert ahead.dtypes[column] == given.dtypes[column]
    assert type(ahead[column][0]) is type(given[column][0])
    assert [str(each)[:10] for each in ahead["ds"]] == ["2026-02-10", "2026-02-11", "2026-02-12"] * 2


def test_a_run_opened_again_forecasts_the_same(fitted: cw.Forecaster) -> None:
    again = cw.Forecaster.load(fitted.run or "")
    assert (again.horizon, again.season, again.quantiles, again.targets) == (3, 5, (0.1, 0.5), ("y",))
    pd.testing.assert_frame_equal(again.predict(FRAME), fitted.predict())
    with pytest.raises(UserError, match="holds no data; pass predict a frame"):
        again.predict()


def test_the_score_is_the_share_of_the_naive_error_that_is_avoided(fitted: cw.Forecaster) -> None:
    late = FRAME[FRAME["ds"] > "2026-01-05"]
    with pytest.warns(UserWarning, match="less than a season"):
        values = cw.evaluate(fitted.run or "", late)
    # Quantiles are judged as such, even if the median is among them.
    assert fitted.score(late) == pytest.approx(1 - values["pinball"] / values["naive_pinball"])  # type: ignore[operator]
    assert values["mae"] / values["naive_mae"] != pytest.approx(values["pinball"] / values["naive_pinball"])  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["pandas", "polars", "index"])
def test_a_forecast_follows_all_rows_that_fit_was_given(kind: str, tmp_path: Path) -> None:
    frame = FRAME.drop(columns="price") if kind != "index" else FRAME[FRAME["unique_id"] == "a"].set_index("ds")[["y"]]
    days = frame["ds"] if kind != "index" else frame.index.to_series()
    parts = [frame[days < "2026-01-26"], frame[(days >= "2026-01-26") & (days < "2026-02-02")], frame[days >= "2026-02-02"]]
    parts = [pl.from_pandas(part) for part in parts] if kind == "polars" else parts
    forecaster = cw.Forecaster(2, run=tmp_path / "run", **SMALL).fit(parts[0], valid=parts[1], test=parts[2], progress=False)
    ahead = forecaster.predict()
    assert isinstance(ahead, type(parts[0]))
    assert [str(day)[:10] for day in ahead["ds"]] == ["2026-02-10", "2026-02-11"] * (1 if kind == "index" else 2)
    whole = pl.from_pandas(frame) if kind == "polars" else frame
    assert ahead["y"].to_list() == forecaster.predict(whole)["y"].to_list()


def test_other_names_and_a_single_series(tmp_path: Path) -> None:
    frame = pd.DataFrame({"shop": ["x"] * 40, "day": DAYS, "sold": [float(day % 5) for day in range(40)], "rain": 1.5})
    shops = cw.Forecaster(2, series="shop", time="day", target="sold", run=tmp_path / "shops", **SMALL).fit(frame)
    assert list(shops.predict().columns) == ["shop", "day", "sold"]
    alone = cw.Forecaster(2, time="day", target="sold", run=tmp_path / "alone", **SMALL).fit(frame.drop(columns="shop"))
    assert list(alone.predict().columns) == ["day", "sold"]
    assert alone.run == tmp_path / "alone"


def test_mistakes_are_said_in_one_line(tmp_path: Path, fitted: cw.Forecaster) -> None:
    forecaster = cw.Forecaster(2, run=tmp_path / "run", **SMALL)
    for call, said in (
        (lambda: forecaster.predict(FRAME), "predict needs a forecaster that is trained; call fit first"),
        (lambda: forecaster.fit([1.0, 2.0]), "train is a list; pass a DataFrame of pandas or polars"),
        (lambda: forecaster.fit(FRAME, valid=3), "valid is a int; pass a DataFrame"),
        (
            lambda: forecaster.fit(FRAME.rename(columns={"y": "z"})),
            "no column 'y' to forecast; it has ds, price, unique_id, z; set target=",
        ),
        (lambda: cw.Forecaster(2, series="shop", **SMALL).fit(FRAME), "no column 'shop'"),
    ):
        with pytest.raises((UserError, DataError), match=said):
            call()
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunError, match="already exists"):
        cw.Forecaster(3, run=fitted.run, **SMALL).fit(FRAME)


def test_what_is_known_ahead_is_a_frame_of_its_own_or_rows_at_the_end(tmp_path: Path) -> None:
    data = {"known": ["promo"], "categorical": ["promo"]}
    frame = FRAME.assign(promo=["none", "flyer"] * 40)
    forecaster = cw.Forecaster(2, data=data, run=tmp_path / "run", **SMALL).fit(frame, progress=False)
    days = pd.date_range(DAYS[-1], periods=3)[1:]
    future = pd.DataFrame({"unique_id": ["a", "a", "b", "b"], "ds": [*days, *days], "promo": ["flyer", "none", "none", "none"]})
    ahead = forecaster.predict(future=future)
    assert list(ahead.ds) == list(future.ds)
    pd.testing.assert_frame_equal(ahead, forecaster.predict(pd.concat([frame, future])))
    same = cw.Forecaster.load(tmp_path / "run").predict(pl.from_pandas(frame), future=pl.from_pandas(future))
    assert same["y"].to_list() == ahead.y.tolist()
    # Text is text, whichever library it comes from, and also as a category.
    pd.testing.assert_frame_equal(ahead, forecaster.predict(future=pl.from_pandas(future)))
    names = forecaster.predict(frame.assign(unique_id=frame.unique_id.astype("category")), future=future)
    assert names.y.tolist() == ahead.y.tolist()
    for wrong, said in (
        (future.assign(y=1.0), "future has values in column y, which is to be forecast; remove the column, or add the rows to the frame"),
        (
            future.assign(ds=future.ds - pd.Timedelta(days=1)),
            "row 81, column ds repeats 2026-02-09 00:00:00 in series a; set data.repeats=mean, first or last",
        ),
        (future[:1], "must be known for 2 steps after the last values of series a, but 1 are given"),
        ([1], "future is a list; pass a DataFrame"),
    ):
        with pytest.raises(DataError, match=said):
            forecaster.predict(future=wrong)
    for also in (future.assign(y=None), future.assign(ds=future.ds.astype(str))):
        pd.testing.assert_frame_equal(ahead, forecaster.predict(future=also))


def test_rows_ahead_that_nothing_reads_are_refused_instead_of_being_taken_for_the_past(tmp_path: Path) -> None:
    frame = FRAME[["unique_id", "ds", "y"]][:40]
    forecaster = cw.Forecaster(1, data={"missing": "forward"}, run=tmp_path / "run", **SMALL).fit(frame, progress=False)
    future = pd.DataFrame({"unique_id": ["a"], "ds": [DAYS[-1] + pd.Timedelta(days=1)]})
    for each in (forecaster, cw.Forecaster.load(tmp_path / "run")):
        with pytest.raises(DataError, match=r"reads no column ahead; leave it out, or name such columns in data\.known"):
            each.predict(frame, future=future)


def test_a_backtest_forecasts_as_predict_does_from_each_origin(fitted: cw.Forecaster) -> None:
    found = fitted.backtest(FRAME, origins=2, stride=4)
    assert list(found.columns) == ["unique_id", "origin", "ds", "step", "column", "q0.1", "q0.5", "truth", "naive"]
    assert found.origin.dtype == FRAME.ds.dtype
    for series, origin in (("a", DAYS[32]), ("b", DAYS[36])):
        known = FRAME[(FRAME.unique_id == series) & (FRAME.ds <= origin)]
        part = found[(found.unique_id == series) & (found.origin == origin)]
        ahead = fitted.predict(known)
        assert part.ds.tolist() == ahead.ds.tolist()
        assert part["q0.5"].tolist() == pytest.approx(ahead["y-q0.5"].tolist(), rel=1e-5)  # float32, in other batches
        came = FRAME[(FRAME.unique_id == series) & FRAME.ds.isin(part.ds)]
        assert part.truth.tolist() == pytest.approx(came.y.tolist(), abs=1e-5)
    assert isinstance(fitted.backtest(pl.from_pandas(FRAME), origins=1), pl.DataFrame)
    with pytest.raises(DataError, match="the frame is a int"):
        fitted.backtest(3)


@pytest.mark.parametrize(("key", "argument"), [("horizon", "horizon"), ("season", "season"), ("targets", "target")])
def test_an_argument_is_not_taken_from_the_data_section_too(key: str, argument: str) -> None:
    with pytest.raises(UserError, match=rf"data has {key}, which is an argument of its own; pass {argument}=..."):
        cw.Forecaster(4, data={key: 2})


def cloned(forecaster: cw.Forecaster) -> cw.Forecaster:
    """As scikit-learn's `clone` does it: copies of the parameters, which the constructor must keep as they are."""
    parameters = {name: deepcopy(value) for name, value in forecaster.get_params(deep=False).items()}
    again = type(forecaster)(**parameters)
    assert all(again.get_params(deep=False)[name] is value for name, value in parameters.items())
    return again


def test_parameters_as_estimators_have_them() -> None:
    model, quantiles = {"hidden": 4}, [0.1, 0.9]
    forecaster = cw.Forecaster(3, model=model, quantiles=quantiles, target=["a", "b"], data={"known": ["price"]})
    given = forecaster.get_params()
    assert given.keys() == inspect.signature(cw.Forecaster).parameters.keys()
    assert (given["horizon"], given["model"], given["quantiles"], given["run"]) == (3, model, quantiles, None)
    again = cloned(forecaster)
    assert again.get_params() == given
    assert (again.horizon, again.targets, again.quantiles) == (3, ("a", "b"), (0.1, 0.9))
    assert again.set_params(horizon=5, target="a") is again
    assert (again.horizon, again.targets, again.get_params()["target"]) == (5, ("a",), "a")
    assert forecaster.horizon == 3
    with pytest.raises(UserError, match="a Forecaster has no parameter horizont; use one of horizon, quantiles"):
        again.set_params(horizont=4)
    with pytest.raises(UserError, match=r"data has horizon, which is an argument of its own"):
        again.set_params(season=7, data={"horizon": 4})
    assert again.season == 1  # nothing is half set


def test_a_second_fit_is_a_run_of_its_own(tmp_path: Path) -> None:
    frame = pd.DataFrame({"ds": range(60), "y": [float(step % 4) for step in range(60)]})
    how = {"model": {"hidden": 4, "layers": 1}, "train": {"epochs": 1}, "device": "cpu"}
    forecaster = cw.Forecaster(2, **how, run=tmp_path / "run").fit(frame)
    forecaster.set_params(device="auto").predict()  # which is not a parameter of what was trained
    assert forecaster.fit(frame[:50]).run == tmp_path / "run-2"
    assert forecaster.predict().ds.tolist() == [50, 51]
    assert cw.Forecaster.load(tmp_path / "run").fit(frame, run=tmp_path / "else").run == tmp_path / "else"
    forecaster.set_params(horizon=3, run=forecaster.get_params()["run"])
    with pytest.raises(UserError, match="predict needs a forecaster that is trained"):
        forecaster.predict()
    assert forecaster.fit(frame).run == tmp_path / "run-3"
    assert len(forecaster.predict()) == 3
    with pytest.raises(RunError, match="already exists"):  # another forecaster's: neither overwritten nor mixed up
        cloned(forecaster).fit(frame)


def test_a_run_opened_again_is_fitted_with_its_own_settings(tmp_path: Path) -> None:
    data = {"known": ["price"], "calendar": ["weekday"], "distribution": "normal"}
    model, train = {"hidden": 5, "layers": 2, "linear": 0}, {"epochs": 1, "lr": 0.01}
    cw.Forecaster(3, season=5, model=model, data=data, train=train, run=tmp_path / "run").fit(FRAME)
    opened = cw.Forecaster.load(tmp_path / "run")
    assert cloned(opened).get_params() == opened.get_params()
    first, again = (load_own(Path(str(run)) / "spec.yaml") for run in (opened.run, opened.fit(FRAME).run))
    assert again == first
    assert opened.run == tmp_path / "run-2"
    ahead = pd.DataFrame({"unique_id": ["a"] * 3 + ["b"] * 3, "ds": [*pd.date_range("2026-02-10", periods=3)] * 2, "price": 1})
    assert opened.predict(future=ahead).equals(cw.Forecaster.load(tmp_path / "run").predict(FRAME, future=ahead))

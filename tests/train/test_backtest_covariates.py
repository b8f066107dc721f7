"""Backtests with covariates and gaps: a forecast is that of a file cut at its origin, and nothing that was unknown then changes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import carrywave as cw
from carrywave.cli.main import app
from carrywave.data.prepare import series_of
from carrywave.data.tables.table import Table
from carrywave.errors import DataError
from carrywave.spec.load import parse
from carrywave.train import backtest
from carrywave.train.backtest import Backtest, Rolling, at_origin, backtest_run, backtest_spec, long_enough, place_origins

HORIZON, STRIDE, ORIGINS = 3, 2, 3
QUANTILES = (0.1, 0.5, 0.9)
COVARIATES: dict[str, Any] = {
    "targets": ["y"],
    "known": ["price", "promo"],
    "categorical": ["promo", "weather"],
    "static": ["region", "size"],
    "calendar": ["weekday"],
}
ROLLING = Rolling(HORIZON, STRIDE, ORIGINS)
LAST = pd.Timestamp("2024-02-09")  # the last day of every series


def first_day(count: int) -> pd.Timestamp:
    return LAST - pd.Timedelta(days=count - 1)


def known_at(table: Table, origin: int) -> Table:
    return at_origin(table, place_origins(table, ROLLING), origin)


def shops(rows: dict[str, int], *, ahead: int = 0, gaps: bool = False, seed: int = 3) -> pd.DataFrame:
    """Sales with every kind of covariate; `ahead` rows follow in which only what is known is given.

    With `gaps`, cells and a row are missing, also on either side of origins; y is there in the row before each origin, as without it a
    file to predict from would end earlier.
    """
    draw = np.random.default_rng(seed)
    parts = []
    for name, count in rows.items():
        total = count + ahead
        part = pd.DataFrame(
            {"unique_id": name, "ds": pd.date_range(first_day(count), periods=total), "y": 20 + 5 * draw.normal(size=total)}
        )
        part = part.assign(
            price=draw.normal(size=total) + ord(name[0]),
            x=draw.normal(size=total),
            promo=draw.choice(["none", "tv", "web"], total),
            weather=draw.choice(["dry", "wet"], total),
            region="north" if name < "q" else "south",
            size=count,
        )
        if gaps:
            last = count - HORIZON - 1  # the row before the last origin
            part.loc[[0, 5, last - 1], "y"] = np.nan
            part.loc[[last - 4, last - 3, last, last + 1], "x"] = np.nan
            part.loc[[last - 2, last - 1, last + 2], ["price", "promo"]] = np.nan
            part.loc[[0, last - 2], "weather"] = np.nan
            part.loc[3:, ["region", "size"]] = np.nan
            part = part.drop(index=[9])
        part.loc[count:, ["y", "x", "weather"]] = np.nan
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def cut_at(frame: pd.DataFrame, rows: dict[str, int], origin: int) -> pd.DataFrame:
    """The file as it was at an origin: the rows before it, and of the horizon after it only times, names and what is known."""
    parts = []
    for name, count in rows.items():
        part = frame[frame["unique_id"] == name].copy()
        days = part["ds"] - first_day(count)
        known = int(ROLLING.before(count)[origin])
        part = part[days < pd.Timedelta(days=known + HORIZON)]
        part.loc[days[part.index] >= pd.Timedelta(days=known), ["y", "x", "weather", "region", "size"]] = np.nan
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def spec_for(file: Path | None, *, missing: str = "error", quantiles: tuple[float, ...] | None = QUANTILES) -> dict[str, Any]:
    data = {"train": None if file is None else str(file), "horizon": HORIZON, "season": 7, "quantiles": quantiles, "missing": missing}
    return {
        "task": "forecasting",
        "data": {**data, **COVARIATES},
        "model": {"hidden": 5, "layers": 1},
        "batch": {"lanes": 2, "steps": 7},
        "train": {"max_steps": 3, "lr": 0.05, "precision": "fp64"},
    }


def ask(file: Path, run: Path, **how: Any) -> Backtest:
    asked = Rolling(stride=STRIDE, origins=ORIGINS)
    known: dict[str, Any] = {"retrain": False, "run": run, "device": "cpu", "watch": None, "note": lambda line: None}
    return backtest_spec(parse(spec_for(file, **how)), None, asked, **known)


def rows_of(found: Backtest) -> list[dict[str, Any]]:
    return list(backtest.rows_of(found))


def values(rows: list[dict[str, Any]], prefix: str = "") -> list[float]:
    return [row[f"{prefix}q{q}"] for row in rows for q in QUANTILES]


def of_origin(rows: list[dict[str, Any]], origin: int) -> list[dict[str, Any]]:
    return [row for number, row in enumerate(rows) if number // HORIZON % ORIGINS == origin]


ROWS = {"p": 40, "q": 33}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a backtest of a file with gaps and with rows ahead at its end."""
    folder = tmp_path_factory.mktemp("covariates")
    shops(ROWS, ahead=2, gaps=True).to_csv(folder / "sales.csv", index=False)
    found = ask(folder / "sales.csv", folder / "bt", missing="interpolate")
    (folder / "rows.json").write_text(json.dumps(rows_of(found)))
    return folder / "bt"


def read(frame: pd.DataFrame, missing: str) -> Table:
    return series_of(frame, None, parse(spec_for(None, missing=missing)))  # type: ignore[arg-type]


def decoded(table: Table) -> list[list[str]]:
    assert table.codes is not None
    return [[values[code] if code >= 0 else "" for code, values in zip(row, table.categories, strict=True)] for row in table.codes.tolist()]


@pytest.mark.parametrize(("missing", "gaps"), [("none", False), ("none", True), ("forward", True), ("interpolate", True), ("zero", True)])
def test_a_table_at_an_origin_is_that_of_a_file_cut_there(missing: str, gaps: bool) -> None:
    frame = shops(ROWS, ahead=2, gaps=gaps)
    whole = read(frame, missing)
    assert (whole.unfilled is not None) == gaps
    different = []
    for origin in range(ORIGINS):
        found = known_at(whole, origin)
        wanted = read(cut_at(frame, ROWS, origin), missing)
        np.testing.assert_array_equal(found.values, wanted.values)
        assert decoded(found) == decoded(wanted)
        assert (found.starts.tolist(), found.lengths.tolist(), found.totals.tolist(), found.names) == (
            wanted.starts.tolist(),
            wanted.lengths.tolist(),
            wanted.totals.tolist(),
            wanted.names,
        )
        assert found.times is not None
        assert wanted.times is not None
        np.testing.assert_array_equal(found.times.keys, wanted.times.keys)
        different.append(not np.array_equal(found.values[: found.lengths[0]], whole.values[: found.lengths[0]]))
    assert any(different) == (missing == "interpolate")  # the others look back


def test_a_forecast_is_that_of_a_file_that_ends_at_its_origin(run: Path, tmp_path: Path) -> None:
    rows = json.loads((run.parent / "rows.json").read_text())
    assert len(rows) == len(ROWS) * ORIGINS * HORIZON
    frame = pd.read_csv(run.parent / "sales.csv", parse_dates=["ds"])
    for origin in range(ORIGINS):
        cut_at(frame, ROWS, origin).to_csv(tmp_path / "known.csv", index=False)
        wanted = cw.predict(run, tmp_path / "known.csv", device="cpu", note=lambda line: None)
        mine = of_origin(rows, origin)
        names = ("unique_id", "ds", "step")
        assert [[row[name] for name in names] for row in mine] == [[row[name] for name in names] for row in wanted]
        assert values(mine) == pytest.approx(values(wanted, "y-"), rel=1e-6)  # outputs are float32


def test_a_series_that_train_does_not_contain_has_the_scale_of_its_past(run: Path) -> None:
    rows, told = {"p": 30, "new": 28}, list[str]()
    frame = shops(rows, gaps=True, seed=8).assign(promo=lambda given: given["promo"].replace("tv", "radio"))
    frame.to_csv(run.parent / "later.csv", index=False)
    found = backtest_run(run, str(run.parent / "later.csv"), Rolling(stride=STRIDE, origins=ORIGINS), "cpu", told.append)
    for origin in range(ORIGINS):
        lines: list[str] = []
        wanted = cw.predict(run, cut_at(frame, rows, origin), device="cpu", note=lines.append)
        assert values(of_origin(rows_of(found), origin)) == pytest.approx(values(wanted, "y-"), rel=1e-6)
        assert any("column promo has value 'radio' in" in line for line in lines)
    assert any("series new is not in the training data" in line for line in told)
    assert any("column promo has value 'radio' in" in line and "counted as unknown" in line for line in told)


def changed(frame: pd.DataFrame, rows: dict[str, int], origin: int, columns: list[str], *, after: int = 0) -> pd.DataFrame:
    """Other values in some columns, from so many rows after an origin on; some of them empty, if a file may have empty cells there."""
    frame, draw = frame.copy(), np.random.default_rng(9)
    for name, count in rows.items():
        first = first_day(count) + pd.Timedelta(days=int(ROLLING.before(count)[origin]) + after)
        later = frame.index[(frame["unique_id"] == name) & (frame["ds"] >= first) & frame["y"].notna()]
        for column in columns:
            texts = not pd.api.types.is_numeric_dtype(frame[column])
            frame.loc[later, column] = draw.choice(["tv", "wet", "new"], len(later)) if texts else 500 + draw.normal(size=len(later))
        if "x" in columns:
            frame.loc[later[:1], ["x", "weather"]] = np.nan
    return frame


@pytest.mark.parametrize("origin", [0, 1])
def test_what_was_not_known_at_an_origin_changes_no_forecast_of_it(run: Path, tmp_path: Path, origin: int) -> None:
    frame = pd.read_csv(run.parent / "sales.csv", parse_dates=["ds"])

    def forecasts(given: pd.DataFrame) -> list[float]:
        given.to_csv(tmp_path / "given.csv", index=False)
        asked = Rolling(stride=STRIDE, origins=ORIGINS)
        found = backtest_run(run, str(tmp_path / "given.csv"), asked, "cpu", lambda line: None)
        return values(of_origin(rows_of(found), origin))

    wanted = values(of_origin(json.loads((run.parent / "rows.json").read_text()), origin))
    usual = pytest.approx(wanted, rel=1e-6)  # other readings may share a batch, and outputs are float32
    assert forecasts(frame) == usual
    assert forecasts(changed(frame, ROWS, origin, ["y", "x", "weather"])) == usual
    assert forecasts(changed(frame, ROWS, origin, ["price", "promo"], after=HORIZON)) == usual
    assert forecasts(changed(frame, ROWS, origin, ["price"])) != usual
    assert forecasts(changed(frame, ROWS, origin, ["promo"])) != usual


def test_training_knows_nothing_of_what_came_later(run: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(run.parent / "sales.csv", parse_dates=["ds"])
    changed(frame, ROWS, 0, ["y", "x", "weather"]).to_csv(tmp_path / "other.csv", index=False)
    found = ask(tmp_path / "other.csv", tmp_path / "bt", missing="interpolate")
    assert (tmp_path / "bt/weights.safetensors").read_bytes() == (run / "weights.safetensors").read_bytes()
    first = of_origin(json.loads((run.parent / "rows.json").read_text()), 0)
    assert values(of_origin(rows_of(found), 0)) == pytest.approx(values(first), rel=1e-6)  # other readings may share a batch
    assert [row["naive"] for row in of_origin(rows_of(found), 0)] == [row["naive"] for row in first]
    assert [row["truth"] for row in of_origin(rows_of(found), 0)] != [row["truth"] for row in first]


def test_a_shorter_horizon_leaves_room_for_what_the_model_reads_ahead(run: Path) -> None:
    asked = Rolling(horizon=1, stride=STRIDE, origins=ORIGINS)
    found = backtest_run(run, str(run.parent / "sales.csv"), asked, "cpu", lambda line: None)
    wanted = [row for row in json.loads((run.parent / "rows.json").read_text()) if row["step"] == 1]
    assert [(row["origin"], row["ds"], row["step"]) for row in rows_of(found)] == [(row["origin"], row["ds"], 1) for row in wanted]
    assert values(rows_of(found)) == pytest.approx(values(wanted), rel=1e-6)
    with pytest.raises(DataError, match="with a horizon of 3 need 204 rows up to the last time"):
        long_enough(found.table, Rolling(1, 2, 101, reach=3), before=1)


@pytest.mark.slow
def test_the_command_trains_anew_at_each_origin(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    spec = spec_for(run.parent / "sales.csv", missing="interpolate", quantiles=None)
    Path("spec.yaml").write_text(json.dumps(spec))
    words = ["backtest", "spec.yaml", "--retrain", "--origins", "3", "--stride", "2", "--run", "anew", "--json", "scores.json"]
    done = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    rows = pd.read_csv("anew/backtest.csv")
    assert len(rows) == len(ROWS) * ORIGINS * HORIZON
    frame = pd.read_csv("sales.csv", parse_dates=["ds"])
    for origin in range(ORIGINS):
        wanted = cw.predict(Path(f"anew/origin-{origin + 1}"), cut_at(frame, ROWS, origin), device="cpu", note=lambda line: None)
        mine = of_origin(rows.to_dict("records"), origin)
        assert [row["forecast"] for row in mine] == pytest.approx([row["y"] for row in wanted], rel=1e-6)
    assert json.loads(Path("scores.json").read_text())[0]["forecasts"] == len(ROWS) * ORIGINS

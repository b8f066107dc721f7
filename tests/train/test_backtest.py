"""Backtests: forecasts from an origin know nothing of what came later, and their scores are those of a plain reading of them."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import carrywave as cw
from carrywave.cli.main import app
from carrywave.data.prepare import series_of
from carrywave.data.tables.table import Table
from carrywave.errors import DataError, UserError
from carrywave.report.backtest_page import backtest_page
from carrywave.spec.load import parse
from carrywave.train.backtest import Backtest, Rolling, at_origin, backtest_run, backtest_spec, cut, long_enough, rows_of
from carrywave.train.backtest_scores import OriginForecast, scores


def from_matrices(matrices: list[np.ndarray], name: str) -> Table:
    """A table of matrices [rows, columns], one series each."""
    lengths = np.array([len(matrix) for matrix in matrices], np.int64)
    names = tuple(f"{name} item {place}" for place in range(len(matrices)))
    columns = tuple(str(place) for place in range(matrices[0].shape[1]))
    codes = np.empty((int(lengths.sum()), 0), np.int64)
    return Table(name, columns, np.concatenate(matrices), np.cumsum(lengths) - lengths, lengths, names, codes=codes)


def test_a_table_is_cut_series_by_series() -> None:
    table = from_matrices([np.arange(10.0)[:, None], 100 + np.arange(4.0)[:, None], 200 + np.arange(8.0)[:, None]], "x")
    kept, origins, told = long_enough(table, Rolling(2, 2, 2), before=3)
    fact = "1 of 3 series lack rows before the first origin or after later ones, so they are not forecast from all of them"
    assert told == (f"x: {fact}: x item 1",)
    assert (kept.starts.tolist(), kept.lengths.tolist(), kept.names) == ([0, 10], [10, 8], ("x item 0", "x item 2"))
    first = at_origin(kept, origins, 0)
    assert first.values[:, 0].tolist() == [*range(6), *range(200, 204)]
    assert cut(kept, kept.lengths, np.zeros_like(kept.lengths)).values.tolist() == kept.values.tolist()
    with pytest.raises(
        DataError,
        match="9 origins, 2 rows apart, with a horizon of 2 need 21 rows up to the last time",
    ):
        long_enough(table, Rolling(2, 2, 9), before=3)


def some(draw: np.random.Generator, quantiles: tuple[float, ...] | None) -> list[OriginForecast]:
    shape = (3, 2, len(quantiles or (0,)))
    return [
        OriginForecast(
            number,
            origin,
            10,
            np.sort(draw.normal(size=shape)),
            draw.normal(size=(3, 2)),
            draw.normal(size=(3, 2)),
            np.array([2.0, 5.0]) * (number + 1),
            np.array([0.5, 0.0 if number else 0.25]),
            np.zeros(2),
        )
        for number in range(2)
        for origin in range(3)
    ]


@pytest.mark.parametrize("quantiles", [None, (0.1, 0.5, 0.9), (0.2, 0.7)])
def test_scores_are_those_of_a_plain_loop(quantiles: tuple[float, ...] | None) -> None:
    forecasts = some(np.random.default_rng(1), quantiles)
    median = 0 if quantiles is None else quantiles.index(0.5) if 0.5 in quantiles else None
    rows = scores(forecasts, ["a", "b"], quantiles)
    # All, each column, and each origin and step ahead with and without columns.
    assert len(rows) == 1 + 2 + 3 * 3 + 3 * 3
    for row in rows:
        absolute, in_units, scaled, pinball, naive = [], [], [], [], []
        for each in forecasts:
            for step in range(3):
                for column in range(2):
                    if row["origin"] not in (None, each.origin + 1) or row["step"] not in (None, step + 1):
                        continue
                    if row["column"] not in (None, "ab"[column]):
                        continue
                    truth, unit, change = each.truth_HC[step, column], each.unit_C[column], each.change_C[column]
                    naive.append(abs(each.naive_HC[step, column] - truth) / unit)
                    if median is not None:
                        gap = abs(each.forecast_HCQ[step, column, median] - truth)
                        in_units.append(gap)
                        absolute.append(gap / unit)
                        scaled += [gap / unit / change] if change else []
                    for place, share in enumerate(quantiles or ()):
                        below = (truth - each.forecast_HCQ[step, column, place]) / unit
                        pinball.append(max(share * below, (share - 1) * below))
        assert row["naive_mae"] == pytest.approx(np.mean(naive))
        assert ("pinball" in row) == (quantiles is not None)
        assert quantiles is None or row["pinball"] == pytest.approx(np.mean(pinball))
        if median is None:
            assert "mae" not in row
            continue
        assert row["mae"] == pytest.approx(np.mean(absolute))
        assert row["rmse"] == pytest.approx(math.sqrt(np.mean(np.square(absolute))))
        assert row["mase"] == pytest.approx(np.mean(scaled))
        # Units of several columns cannot be mixed.
        assert ("mae_in_units" in row) == (row["column"] is not None)
        assert row["column"] is None or row["mae_in_units"] == pytest.approx(np.mean(in_units))


def table(path: Path, rows: dict[str, int], *, seed: int = 3, later: float = 0.0, end: dict[str, str] | None = None) -> Path:
    """Two columns of each series, with times that end together unless `end` says when; `later` is added to the last 8 rows."""
    draw = np.random.default_rng(seed)
    lines = ["unique_id,ds,y,x"]
    for name, count in rows.items():
        values = 50 + 10 * np.sin(np.arange(count) * np.pi / 3)[:, None] + draw.normal(size=(count, 2))
        values[-8:] += later
        days = np.datetime64((end or {}).get(name, "2024-02-09")) + np.arange(1 - count, 1)
        lines += [f"{name},{day},{a:.4f},{b:.4f}" for day, (a, b) in zip(days, values, strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path


def spec_for(file: Path, quantiles: list[float] | None = None) -> dict[str, Any]:
    return {
        "task": "forecasting",
        "data": {"train": str(file), "horizon": 4, "season": 6, "quantiles": quantiles, "targets": ["y"]},
        "model": {"hidden": 5, "layers": 1},
        "batch": {"lanes": 2, "steps": 7},
        "train": {"max_steps": 3, "precision": "fp64"},
    }


def truncated(file: Path, to: Path, drop: int = 0, after: str = "9999") -> Path:
    """The file without the last rows of each series, or without those after a day."""
    header, *lines = file.read_text().splitlines()
    by_name: dict[str, list[str]] = {}
    for line in (line for line in lines if line.split(",")[1] <= after):
        by_name.setdefault(line.partition(",")[0], []).append(line)
    to.write_text("\n".join([header, *(line for each in by_name.values() for line in each[: len(each) - drop])]) + "\n")
    return to


def ask(file: Path, tmp_path: Path, *, retrain: bool = False, quantiles: list[float] | None = None, **how: Any) -> Backtest:
    asked = Rolling(stride=2, origins=3)
    known: dict[str, Any] = {"run": tmp_path / "bt", "device": "cpu", "watch": None, "note": print}
    return backtest_spec(parse(spec_for(file, quantiles)), None, asked, retrain=retrain, **(known | how))


ENDS = {"b": "2024-02-03", "gone": "2024-01-25"}


def test_origins_are_the_same_times_for_all_series(tmp_path: Path) -> None:
    file = table(tmp_path / "all.csv", {"a": 40, "b": 33, "gone": 20, "new": 9}, end=ENDS)
    whole = series_of(str(file), None, parse(spec_for(file)), labelled=True)
    kept, origins, told = long_enough(whole, Rolling(4, 2, 3), before=9)
    assert kept.names == ("a", "b", "gone")
    assert origins.last_O is not None
    assert origins.last_O.astype("datetime64[D]").astype(str).tolist() == ["2024-02-01", "2024-02-03", "2024-02-05"]
    assert origins.known_SO.tolist() == [[32, 34, 36], [31, 33, 33], [20, 20, 20]]
    assert origins.made_SO.tolist() == [[True] * 3, [False] * 3, [False] * 3]
    assert "3 of 4 series lack rows" in told[0]
    for number in range(3):
        known = at_origin(kept, origins, number)
        assert known.times is not None
        assert known.times.keys.max() == origins.last_O[number]


@pytest.mark.parametrize("retrain", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_forecast_is_made_by_a_model_that_has_seen_later_days_of_another_series(tmp_path: Path, retrain: bool) -> None:
    ends = {"b": "2024-02-06", "gone": "2024-01-25"}
    file = table(tmp_path / "all.csv", {"a": 40, "b": 33, "gone": 20}, end=ends)
    told: list[str] = []
    rows = list(rows_of(ask(file, tmp_path, retrain=retrain, note=told.append)))
    # b ends before the horizon of the second origin does, and of the third; gone before that of the first.
    assert [(row["unique_id"], row["origin"]) for row in rows[::4]] == [
        ("a", "2024-02-01"),
        ("a", "2024-02-03"),
        ("a", "2024-02-05"),
        ("b", "2024-02-01"),
    ]
    assert any("2 of 3 series lack rows" in line for line in told)
    for origin in range(3):
        known = truncated(file, tmp_path / "known.csv", after=f"2024-02-0{1 + 2 * origin}")
        wanted = cw.predict(tmp_path / "bt" / f"origin-{origin + 1}" if retrain else tmp_path / "bt", known, device="cpu")
        mine = [row for row in rows if row["origin"] == f"2024-02-0{1 + 2 * origin}"]
        same = {(row["unique_id"], row["ds"]): row["y"] for row in wanted}
        assert [row["forecast"] for row in mine] == pytest.approx([same[row["unique_id"], row["ds"]] for row in mine], rel=1e-6)
    if not retrain:
        again: list[str] = []
        backtest_run(tmp_path / "bt", str(file), Rolling(stride=2, origins=3), "cpu", again.append)
        assert not any("start within" in line for line in again)


def test_origins_within_the_training_rows_are_told(tmp_path: Path) -> None:
    file = table(tmp_path / "all.csv", {"a": 40, "b": 33})
    cw.fit(None, file, spec=spec_for(file), run=tmp_path / "run", device="cpu")
    told: list[str] = []
    found = backtest_run(tmp_path / "run", None, Rolling(horizon=2, origins=4), "cpu", told.append)
    assert [line for line in told if line.startswith("4 of 8 forecasts start within the rows that the run was trained on")]
    assert {row["step"] for row in rows_of(found)} == {1, 2}
    with pytest.raises(UserError, match=r"horizon=\.\.\. 9 is more than the 4 steps that the model forecasts; use 4 or less"):
        backtest_run(tmp_path / "run", None, Rolling(horizon=9), "cpu", told.append)


def test_a_page_has_charts_and_scores_in_which_names_are_text(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    data = from_matrices([draw.normal(size=(20, 2)) for _ in range(6)], "<script>alert(1)</script>")
    forecasts = [
        OriginForecast(n, k, 12 + k, *(draw.normal(size=s) for s in ((3, 2, 2), (3, 2), (3, 2), 2, 2, 2)))
        for n in range(6)
        for k in range(2)
    ]
    scores: Any = [{"origin": None, "step": None, "column": None, "mae": 0.5}, {"origin": None, "step": 1, "column": None, "mae": 0.25}]
    text = backtest_page(Backtest(tmp_path, data, Rolling(3, 1, 2), ("0", "1"), (0.1, 0.9), forecasts, scores))
    assert "<script" not in text
    assert (text.count("<polygon"), "The first 8 of 12 are drawn" in text, "nan" in text) == (8 * 2, True, False)
    assert (">0.5<" in text, ">0.25<" in text) == (True, False)


def test_the_command_writes_scores_forecasts_and_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = table(tmp_path / "all.csv", {"a": 40, "b": 33, "short": 9})
    Path("spec.yaml").write_text(json.dumps(spec_for(file, [0.1, 0.5, 0.9])))
    words = ["backtest", "spec.yaml", "train.max_steps=2", "--origins", "3", "--device", "cpu", "--json", "scores.json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "1 of 3 series lack rows before the first origin" in done.stderr
    folder = Path("runs/backtest-1")
    with (folder / "backtest.csv").open() as lines:
        assert len(list(csv.DictReader(lines))) == 2 * 3 * 4
    assert "by step ahead" in done.stdout
    assert f"page: {folder / 'backtest.html'}" in done.stdout
    overall = json.loads(Path("scores.json").read_text())[0]
    assert (overall["forecasts"], overall["origin"]) == (6, None)
    assert {"mae", "mae_in_units", "mase", "naive_mae", "pinball", "coverage_0.9"} <= overall.keys()
    # The run that it left can be asked again, and says the same.
    again = CliRunner().invoke(
        app, ["backtest", str(folder), "--data", str(file), "--origins", "3", "--device", "cpu", "--json", "again.json"]
    )
    assert again.exit_code == 0, again.output
    assert json.loads(Path("again.json").read_text())[0] == overall


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "train.lr=1"], "train.lr=1 changes a spec, but run is a trained run; pass its SPEC.yaml instead"),
        (["run", "--run", "x"], "a trained run is not trained again, so there is nothing for --run; add --retrain, or remove it"),
        (
            ["spec.yaml", "task=language", "data.horizon=24"],
            "a backtest is for forecasts, but the spec has task language; use carrywave evaluate",
        ),
        (["spec.yaml", "--run", "spec.yaml"], "spec.yaml is a file, but a backtest needs a folder; pass another --run"),
        (["spec.yaml", "--run", "run"], "run already exists and is not empty; pass another --run"),
        (["spec.yaml", "--origins", "99"], "all.csv: 99 origins, 4 rows apart, with a horizon of 4 need 405 rows up to the last time"),
        (["spec.yaml", "--json", "none/x.json"], "none/x.json cannot be written: folder none not found; create it, or use another path"),
    ],
)
def test_mistakes(words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "all.csv", {"a": 40})
    Path("spec.yaml").write_text(json.dumps({"task": "forecasting", "data": {"train": "all.csv", "horizon": 4}}))
    Path("run").mkdir()
    Path("run/spec.yaml").write_text("task: forecasting\n")
    done = CliRunner().invoke(app, ["backtest", *words, "--device", "cpu"])
    assert (done.exit_code, done.stderr.startswith(f"carrywave: {message}")) == (2, True), done.output
    assert not Path("runs").exists()

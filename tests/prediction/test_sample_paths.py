"""Sample paths: their distribution, how they repeat, and that draws which are fed back are read as rows of the file are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import carrywave as cw
from carrywave.errors import UserError
from carrywave.prediction import sample_paths
from carrywave.prediction.predict import predict


def frame() -> pd.DataFrame:
    draw = np.random.default_rng(1)
    parts = []
    for name, mean, rows in (("a", 0.5, 60), ("b", 30.0, 45)):
        days = pd.date_range("2024-01-01", periods=rows)
        parts.append(pd.DataFrame({"unique_id": name, "ds": days, "y": draw.poisson(draw.gamma(3.0, mean / 3.0, rows))}))
    return pd.concat(parts)


def trained(folder: Path, kind: str, horizon: int, **data: Any) -> Path:
    how = {"task": "forecasting", "batch": {"lanes": 2, "steps": 8}, "train": {"epochs": 1, "precision": "fp64"}, "device": "cpu"}
    data = {"distribution": kind, "horizon": horizon, "season": 7, **data}
    cw.fit({"hidden": 5, "linear": 9}, frame(), data=data, run=folder, progress=False, **how)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("paths")
    return {
        "direct": trained(folder / "direct", "negative_binomial", 3),
        "counts": trained(folder / "counts", "negative_binomial", 1),
        "t": trained(folder / "t", "student_t", 1),
    }


@pytest.mark.parametrize("name", ["direct", "counts", "t"])
def test_paths_have_the_quantiles_of_the_distribution_and_repeat(runs: dict[str, Path], name: str) -> None:
    given = frame()
    wanted = pd.DataFrame(predict(runs[name], given, device="cpu")).query("step == 1").set_index("unique_id")
    for steps in (1, 2):  # of one step ahead, the second are ancestral
        found = pd.DataFrame(predict(runs[name], given, samples=1500, steps=steps, device="cpu"))
        assert len(found) == 2 * 1500 * steps
        first = found.query("step == 1").groupby("unique_id").y
        for level, near in ((0.1, 0.03), (0.5, 0.04), (0.9, 0.03)):  # four deviations of a share of 1500
            for series, value in wanted[f"y-q{level}"].items():
                values = first.get_group(series)
                assert (values <= value).mean() >= level - near
                assert (values < value).mean() <= level + near
    few = [predict(runs[name], given, samples=3, steps=2, seed=seed, device="cpu") for seed in (5, 5, 6)]
    assert few[0] == few[1] != few[2]
    assert list(few[0][0]) == ["unique_id", "ds", "step", "sample", "y"]
    assert [(row["sample"], row["step"]) for row in few[0][:4]] == [(1, 1), (1, 2), (2, 1), (2, 2)]


@pytest.mark.parametrize("name", ["counts", "t"])
def test_draws_that_are_fed_back_are_read_as_rows_of_the_file(runs: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each draw at the middle of its distribution, a path is what predict says, given the path so far as rows of the file."""

    def middle(kind: str, parameters: Any, samples: int, draw: Any) -> Any:
        value = np.floor(parameters[..., :1] + 0.5) if kind == "negative_binomial" else parameters[..., :1]
        return np.repeat(value, samples, axis=-1)

    monkeypatch.setattr(sample_paths, "drawn", middle)
    given = frame()
    given["y"] = given["y"].astype(float)
    path = pd.DataFrame(predict(runs[name], given, samples=2, steps=4, device="cpu"))
    for step in range(1, 5):
        once = predict(runs[name], given, samples=1, steps=1, device="cpu")
        now = path[(path["step"] == step) & (path["sample"] == 2)].set_index("unique_id").y
        for row in once:
            assert now[row["unique_id"]] == pytest.approx(row["y"], rel=1e-6, abs=1e-6)
        more = [{"unique_id": row["unique_id"], "ds": pd.Timestamp(row["ds"]), "y": row["y"]} for row in once]
        given = pd.concat([given, pd.DataFrame(more)]).sort_values(["unique_id", "ds"])


def test_a_forecaster_gives_paths_as_a_frame(runs: dict[str, Path]) -> None:
    ahead = cw.Forecaster.load(runs["direct"], device="cpu").predict(frame(), samples=4)
    assert list(ahead.columns) == ["unique_id", "ds", "sample", "y"]
    assert len(ahead) == 2 * 4 * 3


def test_paths_that_cannot_be_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"steps=\.\.\. is 4, more than the 3 that .* forecasts at once; use fewer, or train with"):
        predict(runs["direct"], frame(), samples=2, steps=4, device="cpu")
    with pytest.raises(UserError, match=r"samples=\.\.\. and steps=\.\.\. are for sample paths of forecasts"):
        predict(runs["direct"], frame(), steps=2, device="cpu")
    with pytest.raises(UserError, match=r"samples=\.\.\. draws from one distribution, and the average of several runs is none"):
        predict([runs["direct"], runs["direct"]], frame(), samples=2, device="cpu")
    how = {"task": "forecasting", "data": {"horizon": 1}, "batch": {"lanes": 2, "steps": 8}, "train": {"epochs": 1}, "device": "cpu"}
    cw.fit({"hidden": 4}, frame(), **how, run=tmp_path / "point", progress=False)
    with pytest.raises(UserError, match=r"samples=\.\.\. needs a run with data\.distribution, and .* has none; remove it, or train one"):
        predict(tmp_path / "point", frame(), samples=2, device="cpu")
    wide = frame().assign(price=lambda rows: np.arange(len(rows)) % 5 / 2)
    how["data"] = {"horizon": 1, "distribution": "normal", "targets": ["y"]}
    cw.fit({"hidden": 4}, wide, **how, run=tmp_path / "beside", progress=False)
    with pytest.raises(UserError, match=r"draws are fed back, but the model reads price too, whose values ahead are not drawn"):
        predict(tmp_path / "beside", wide, samples=2, steps=3, device="cpu")

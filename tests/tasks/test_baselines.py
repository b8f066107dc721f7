"""Simple forecasts beside ours: their errors, and what is said of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import carrywave as cw
from carrywave.data.sequences import Sequences
from carrywave.spec.data_spec import DataSpec
from carrywave.tasks import baselines as simple
from carrywave.tasks.ridge import Ridge


def test_errors_are_those_of_a_plain_loop() -> None:
    draw = np.random.default_rng(1)
    values = draw.normal(size=(80, 3)).astype(np.float32)
    data = Sequences(values, np.array([40, 3]), np.array([30, 20]), warm=np.array([5, 0]))
    spec, columns, change = DataSpec(horizon=3, season=4, quantiles=(0.2, 0.5)), np.array([2, 0]), np.array([[0.5, 0.0], [2.0, 4.0]])
    line = Ridge(draw.normal(size=(2, 6, 3)), draw.normal(size=(2, 3)))
    found, why = simple.baselines(data, spec, columns, change, line)
    assert why is None
    gaps: dict[str, list[Any]] = {"naive": [], "last": [], "ridge": []}
    scales = []
    for number, (start, length, warm) in enumerate(((40, 30, 5), (3, 20, 0))):
        own = values[start : start + length][:, columns].astype(np.float64)
        for row in range(max(warm - 1, 0), length - 3):
            past = np.stack([own[max(row - lag, 0)] for lag in range(5, -1, -1)])
            season = np.stack([own[row + step - 3 if row + step - 3 >= 0 else row] for step in range(3)])
            straight = past[-1] + np.einsum("nc,cnk->kc", past - past[-1], line.weights_CNK) + line.bias_CK.T
            for name, forecast in (("naive", season), ("last", past[-1]), ("ridge", straight)):
                gaps[name].append(own[row + 1 : row + 4] - forecast)
            scales.append(change[number])
    for name, each in gaps.items():
        gap, scale = np.array(each), np.array(scales)[:, None]
        known = np.broadcast_to(scale > 0, gap.shape)
        errors = found[name]
        np.testing.assert_allclose(errors.absolute_HC, np.abs(gap).mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(errors.square_HC, (gap**2).mean(axis=0), rtol=1e-12)
        assert errors.scaled == pytest.approx((np.abs(gap) / np.where(scale > 0, scale, 1))[known].mean(), rel=1e-12)
        assert errors.pinball == pytest.approx(np.mean([np.maximum(q * gap, (q - 1) * gap).mean() for q in (0.2, 0.5)]), rel=1e-12)


def test_a_run_tells_of_them_and_so_does_its_evaluation(tmp_path: Any) -> None:
    table = np.sin(np.arange(300) / 4) + 0.1 * np.random.default_rng(1).normal(size=300)
    (tmp_path / "wave.csv").write_text("y\n" + "\n".join(map(str, table)))
    data = {"train": str(tmp_path / "wave.csv"), "cache": str(tmp_path / "cache"), "horizon": 2, "season": 25, "split": [200, 50, 50]}
    spec = {"task": "forecasting", "data": data, "model": {"hidden": 4, "layers": 1}, "train": {"epochs": 1}}
    found = cw.fit(None, None, spec=spec, run=tmp_path / "run", device="cpu", progress=False).metrics
    test = {name: found["test"][name] for name in ("naive_mae", "last_mae", "ridge_mae", "ridge_mase", "last_mase")}
    assert test["ridge_mae"] < 0.5 * test["last_mae"]
    again = cw.evaluate(tmp_path / "run", device="cpu")
    assert {name: again[name] for name in test} == test
    assert again["ridge_lags"] == 96

"""The linear part of forecasts: what it reads, where it starts, and that training goes on from there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from carrywave.data.loader import build
from carrywave.data.order import Cursor, StreamOrder
from carrywave.data.prepare import Prepared, prepare
from carrywave.data.sequences import History, View
from carrywave.model.heads.forecast import Forecast, deviation
from carrywave.prediction.evaluation import order_for
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.tasks.ridge import fit_line
from carrywave.tasks.task import Task


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("linear") / "waves.csv"
    steps = np.arange(400)
    noise = np.random.default_rng(1).normal(size=(400, 2)) * 0.1
    values = np.stack([np.sin(steps / 3), 5 * np.cos(steps / 5) + steps / 100], axis=1) + noise
    path.write_text("a,b\n" + "\n".join(f"{a:.6f},{b:.6f}" for a, b in values))
    return path


def _spec(table: Path, **more: dict[str, object]) -> Spec:
    data = {"train": str(table), "cache": str(table.parent / "cache"), "horizon": 3, "channels": "joint", "standardize": True}
    sections = {"data": data, "model": {"hidden": 6, "layers": 1, "linear": 12}, "train": {"precision": "fp64", "epochs": 2}}
    return parse({"task": "forecasting", **{name: {**section, **more.get(name, {})} for name, section in sections.items()}})


def _task(spec: Spec) -> tuple[Task, Prepared]:
    prepared = prepare(spec)
    return Task.of(spec, prepared.codec, prepared.facts, prepared.train), prepared


def test_history_holds_the_last_values_up_to_each_step_and_repeats_the_first_before_it():
    values = np.arange(20, dtype=np.float32)[:, None] * np.array([1.0, 10.0], np.float32)
    starts, lengths = np.array([0, 8]), np.array([8, 12])
    view = View(values, starts, lengths, targets_at=lambda rows: values[rows], history=History(4, np.array([1])))
    order = StreamOrder(lengths, lanes=2, steps=5, cut=False)
    for step in range(order.num_steps(0)):
        window = order.window(Cursor(0, step))
        batch = build(view, window, Cursor(0, step))
        assert batch.history is not None
        past_TBCN = batch.history.unfold(0, 4, 1)
        for lane, (sequence, offset, length) in enumerate(zip(window.sequence, window.offset, window.length, strict=True)):
            for at in range(length):
                rows = starts[sequence] + np.maximum(offset + at - np.arange(3, -1, -1), 0)
                assert past_TBCN[at, lane, 0].tolist() == values[rows, 1].tolist()


def test_before_training_the_forecast_is_the_ridge_forecast(table: Path):
    spec = _spec(table)
    task, prepared = _task(spec)
    model = task.model(prepared.train).double().eval()
    part = task.part("valid", prepared.valid)
    batch = build(part.view, order_for(spec, part.view, training=False).window(Cursor(0, 0)), Cursor(0, 0))
    past_TBCN = batch.history.unfold(0, 12, 1).double()
    y, state = model(batch.inputs.double())
    found = model.output(y, state, past=past_TBCN)
    line = fit_line(prepared.train, np.array(task.codec.targets), 12, 3)
    wanted = line(past_TBCN.permute(0, 1, 3, 2).reshape(-1, 12, 2).numpy()).reshape(found.shape)
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=0, atol=1e-6)  # the weights are kept in float32


@pytest.mark.parametrize("quantiles", [None, (0.1, 0.5, 0.9)])
def test_a_scaled_head_follows_the_deviation_of_the_last_values(quantiles: tuple[float, ...] | None):
    head = Forecast(4, 2, 1, quantiles, linear=True, scaled=True, past_steps=5).double()
    torch.nn.init.normal_(head.line.weight)
    y, past = torch.randn(3, 2, 4, dtype=torch.float64), torch.randn(3, 2, 1, 5, dtype=torch.float64)
    once, thrice = head(y, past), head(y, 3 * past + 100.0)
    torch.testing.assert_close(thrice, 3 * once, rtol=1e-9, atol=1e-9)
    assert deviation(torch.ones(1, 1, 1, 5)).item() == pytest.approx(0.1)

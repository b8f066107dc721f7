"""Several runs as one: their averages in the units of the data, metrics of the average, and which runs are refused together."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import carrywave as cw
from _zoo import Zoo, days, write
from carrywave.cli.main import app
from carrywave.errors import DataError, RunError, UserError
from carrywave.prediction.saved_run import open_run


def test_probabilities_and_metrics_are_those_of_the_mean(zoo: Zoo) -> None:
    runs, rows = [zoo("labels"), zoo("labels", 2)], zoo.rows("labels")
    # They hold out different rows, so that they scale what they read differently.
    assert open_run(runs[0], "cpu").task.codec.mean != open_run(runs[1], "cpu").task.codec.mean
    one, two, both = (cw.predict(some, rows, device="cpu", keep="id") for some in (runs[0], runs[1], runs))
    assert [row["id"] for row in both] == [row["id"] for row in rows]
    for first, second, mean in zip(one, two, both, strict=True):
        for label, share in mean["probabilities"].items():
            assert share == pytest.approx((first["probabilities"][label] + second["probabilities"][label]) / 2, abs=2e-6)  # of 6 digits
        assert mean["label"] == max(mean["probabilities"], key=mean["probabilities"].get)
    found: dict[str, Any] = cw.evaluate(runs, rows, "cpu", confusion=True, by="label")
    assert found["accuracy"] == pytest.approx(np.mean([row["label"] == truth["label"] for row, truth in zip(both, rows, strict=True)]))
    logs = [-math.log(row["probabilities"][truth["label"]]) for row, truth in zip(both, rows, strict=True)]
    assert found["loss"] == pytest.approx(np.mean(logs), rel=1e-3)  # rows have 6 digits
    assert sum(map(sum, found["confusion"]["counts"])) == len(rows)
    assert len(found["by_label"]) == 2
    with pytest.raises(DataError, match="have other rows as valid"):
        cw.evaluate(runs, device="cpu")


@pytest.mark.parametrize("kind", ["labels", "tags", "numbers", "several", "text", "series"])
def test_a_run_with_itself_is_that_run(zoo: Zoo, kind: str) -> None:
    alone, twice = (cw.evaluate(runs, device="cpu") for runs in (zoo(kind), [zoo(kind), zoo(kind)]))
    shared = {name: value for name, value in alone.items() if name in twice and not name.startswith("linear")}
    assert {name: twice[name] for name in shared} == {
        name: value if isinstance(value, str) else pytest.approx(value, rel=1e-5, abs=1e-6) for name, value in shared.items()
    }


def test_numbers_are_averaged_in_the_units_of_the_data(zoo: Zoo) -> None:
    runs, rows = [zoo("numbers"), zoo("numbers", 2)], zoo.rows("numbers")
    one, two, both = (np.array([row["label"] for row in cw.predict(some, rows, device="cpu")]) for some in (runs[0], runs[1], runs))
    np.testing.assert_allclose(both, (one + two) / 2, rtol=1e-6)  # outputs travel as float32
    found: dict[str, Any] = cw.evaluate(runs, rows, "cpu", by=["column"])
    truth = np.array([row["label"] for row in rows])
    np.testing.assert_allclose([row["mae"] for row in found["by_column"]], np.abs(both - truth).mean(0), rtol=1e-4)


def test_rows_of_series_are_averaged_each_by_itself(zoo: Zoo, tmp_path: Path) -> None:
    runs, given = [zoo("each step"), zoo("each step", 2)], [{"steps": row["steps"]} for row in zoo.rows("each step", 3)]
    one, two, both = ([row["label"] for row in cw.predict(each, given, device="cpu")] for each in (runs[0], runs[1], runs))
    assert both == pytest.approx(np.mean([one, two], axis=0), rel=1e-9)
    runs, path = [zoo("series"), zoo("series", 2)], days(tmp_path / "b.csv", 60)
    one, two, both = (cw.predict(each, path, device="cpu") for each in (runs[0], runs[1], runs))
    for row, other, mean in zip(one, two, both, strict=True):
        assert [mean[name] for name in ("unique_id", "ds", "step")] == [row[name] for name in ("unique_id", "ds", "step")]
        made = [mean[name] for name in ("y-q0.1", "y-q0.5", "y-q0.9")]
        assert made == sorted(made) == pytest.approx([(row[n] + other[n]) / 2 for n in ("y-q0.1", "y-q0.5", "y-q0.9")], rel=1e-12)


def test_a_text_is_continued_and_scored_by_all_together(zoo: Zoo, tmp_path: Path) -> None:
    runs, text = [zoo("text"), zoo("text", 2)], "abc"
    saved = [open_run(run, "cpu") for run in runs]

    def mean(given: str) -> torch.Tensor:
        ids = torch.from_numpy(np.asarray(saved[0].task.codec.encode(given), dtype=np.int64))[:, None]
        shares = [torch.softmax(member.model.head(member.model(ids)[0])[:, 0], dim=-1) for member in saved]  # type: ignore[operator]
        return (shares[0] + shares[1]) / 2

    for _ in range(6):
        text += saved[0].task.codec.decode([int(mean(text)[-1].argmax())])
    assert cw.predict(runs, prompt="abc", tokens=6, temperature=0.0, device="cpu")[0]["text"] == text
    (tmp_path / "other.txt").write_text("abcdefgh\nhgf")
    ids = torch.from_numpy(np.asarray(saved[0].task.codec.encode("abcdefgh\nhgf"), dtype=np.int64))
    right = mean("abcdefgh\nhg").gather(1, ids[1:, None])[:, 0]
    found = cw.evaluate(runs, tmp_path / "other.txt", "cpu")
    assert found["loss"] == pytest.approx(-right.log().mean().item(), rel=1e-5)  # float32
    assert found["perplexity"] == pytest.approx(math.exp(float(found["loss"])))  # type: ignore[arg-type]


def test_runs_that_do_not_predict_the_same_thing_are_refused(zoo: Zoo) -> None:
    rows = zoo.rows("labels")
    for runs, message in (
        ([zoo("labels"), zoo("text")], "do not predict the same thing: they differ in task"),
        ([zoo("labels"), zoo("texts")], "they differ in"),
        ([zoo("spans"), zoo("spans")], "chooses whole sequences of labels"),
    ):
        with pytest.raises((RunError, UserError), match=message):
            cw.predict(runs, rows, device="cpu")
    with pytest.raises(UserError, match="a list of several"):
        cw.predict([], rows)
    with pytest.raises(UserError, match="pass one run with model"):
        cw.predict([zoo("labels")] * 2, rows, model=torch.nn.Linear(1, 1))


def test_the_commands_take_runs_and_then_the_data(zoo: Zoo, tmp_path: Path) -> None:
    runs, data = [str(zoo("labels")), str(zoo("labels", 2))], str(write(tmp_path / "new.jsonl", zoo.rows("labels")))
    out, figures = tmp_path / "out.jsonl", tmp_path / "figures.json"
    shown = CliRunner().invoke(app, ["predict", *runs, data, "-o", str(out), "--device", "cpu"])
    assert shown.exit_code == 0, shown.output
    assert [json.loads(line) for line in out.read_text().splitlines()] == cw.predict(runs, data, device="cpu")
    for named in ([data], ["--data", data]):
        shown = CliRunner().invoke(app, ["evaluate", *runs, *named, "--device", "cpu", "--json", str(figures)])
        assert shown.exit_code == 0, shown.output
        assert json.loads(figures.read_text())[0]["loss"] == cw.evaluate(runs, data, "cpu")["loss"]
    assert CliRunner().invoke(app, ["evaluate", *runs, data, "--data", data]).exit_code == 2

"""Evaluation of trained runs: metrics besides the usual ones, and data that has changed since training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import carrywave as cw
from _zoo import Zoo, days
from carrywave.errors import DataError, RunError, UserError
from carrywave.report.samples import samples_of
from carrywave.spec.load import parse
from carrywave.train.backtest import Rolling, backtest_run
from carrywave.train.fit import train


def test_what_is_predicted_agrees_with_how_it_is_evaluated(zoo: Zoo) -> None:
    given = zoo.rows("texts", 8)
    rows = cw.predict(zoo("texts"), given, device="cpu")
    found: dict[str, Any] = cw.evaluate(zoo("texts"), given, "cpu", top=(1, 2, 3), confusion=True, by="label")
    hits = [row["label"] == truth["label"] for row, truth in zip(rows, given, strict=True)]
    assert found["top_1_accuracy"] == found["accuracy"] == sum(hits) / 8
    ranked = [sorted(row["probabilities"], key=row["probabilities"].get, reverse=True) for row in rows]
    assert found["top_2_accuracy"] == sum(truth["label"] in names[:2] for names, truth in zip(ranked, given, strict=True)) / 8
    assert found["top_3_accuracy"] == 1.0
    pairs = [(truth["label"], row["label"]) for row, truth in zip(rows, given, strict=True)]
    assert found["confusion"] == {"labels": ["a", "c", "e"], "counts": [[pairs.count((a, b)) for b in "ace"] for a in "ace"]}
    assert [row["label"] for row in found["by_label"]] == ["a", "c", "e"]
    assert cw.evaluate(zoo("texts"), given, "cpu", top=2).keys() == (found | {"top_2_accuracy": 0}).keys() - {
        *("top_1_accuracy", "top_3_accuracy", "confusion", "by_label")
    }


def test_numbers_are_scored_in_their_own_units(zoo: Zoo) -> None:
    given = zoo.rows("numbers")
    rows = cw.predict(zoo("numbers"), given, device="cpu")
    found: dict[str, Any] = cw.evaluate(zoo("numbers"), given, device="cpu", by=["column"])
    for place in range(2):
        own = float(np.mean([abs(got["label"][place] - want["label"][place]) for got, want in zip(rows, given, strict=True)]))
        assert found[f"mae[{place}]"] == found["by_column"][place]["mae"] == pytest.approx(own, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "asked", "message"),
    [
        ("labels", {"top": 4}, r"top=... 4 is not between 1 and 2"),
        ("numbers", {"confusion": True}, "is for one likely label each"),
        ("spans", {"top": 1}, "is for one likely label each"),
        ("labels", {"by": "series"}, "there are no metrics of classification by series .*; use label"),
        ("tags", {"by": "type"}, "there are no metrics of tagging by type"),
    ],
)
def test_metrics_that_a_run_does_not_have(zoo: Zoo, kind: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cw.evaluate(zoo(kind), device="cpu", **asked)


@pytest.mark.parametrize("by", ["series", "step", "column"])
def test_metrics_by_something_need_a_point_forecast(zoo: Zoo, tmp_path: Path, by: str) -> None:
    assert cw.evaluate(zoo("series"), device="cpu", by=by)[f"by_{by}"]
    run = tmp_path / "run"
    shutil.copytree(zoo("series"), run)
    (run / "spec.yaml").write_text((run / "spec.yaml").read_text().replace("- 0.5\n", "- 0.6\n").replace("0.5, 0.9]", "0.6, 0.9]"))
    with pytest.raises(UserError, match=rf"metrics by {by} are of a point forecast, but .*run has no median among its data\.quantiles"):
        cw.evaluate(run, device="cpu", by=[by])


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    for name, text in (("train", "the carry goes on and on\n" * 20), ("test", "on goes the carry\n" * 8)):
        (tmp_path / f"{name}.txt").write_text(text)
    data = {"train": str(tmp_path / "train.txt"), "test": str(tmp_path / "test.txt")}
    spec = {"data": data, "model": {"hidden": 6, "layers": 1}, "batch": {"lanes": 2, "steps": 8}, "train": {"epochs": 1}}
    train(parse(spec), run=tmp_path / "run", device="cpu")
    return tmp_path


def test_a_run_reads_as_it_did_whatever_became_of_its_files(trained: Path) -> None:
    before = cw.evaluate(trained / "run", device="cpu")
    with (trained / "train.txt").open("a") as file:
        file.write("yyyy rrrr oooo\n" * 300)  # the same characters, others the most frequent
    assert cw.evaluate(trained / "run", device="cpu") == before
    (trained / "train.txt").write_text("zzzz aaaa\n" * 100)  # what the run does not know is unknown, not learned anew
    assert cw.evaluate(trained / "run", device="cpu") == before
    (trained / "test.txt").write_text("carry on\n" * 8)
    with pytest.warns(UserWarning, match=r"test\.txt has changed since .*run was trained; these are the figures of what it holds now"):
        cw.evaluate(trained / "run", device="cpu")
    codec = trained / "run" / "codec.json"
    codec.write_text(codec.read_text().replace('"a"', '"@"').replace('"c"', '"a"').replace('"@"', '"c"'))
    with pytest.raises(RunError, match=r"codec\.json does not match the codec that weights\.safetensors was trained with"):
        cw.predict(trained / "run", prompt="the", tokens=3, device="cpu")


def test_a_part_of_a_training_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    """A file that is refreshed every night: rows that were trained on move into its last share."""
    path, run = days(tmp_path / "load.csv", 60), tmp_path / "run"
    how: dict[str, Any] = {"batch": {"lanes": 2, "steps": 8}, "train": {"max_steps": 1}, "run": run, "device": "cpu"}
    cw.fit({"hidden": 4, "layers": 1}, str(path), task="forecasting", data={"horizon": 2, "split": [40, 10, 10]}, **how)
    before = cw.evaluate(run, device="cpu")
    days(path, 75)
    with pytest.raises(DataError, match=r"load\.csv has changed since .* was trained, and test is cut from it, so rows that were trained"):
        cw.evaluate(run, device="cpu")
    told: list[str] = []
    backtest_run(run, None, Rolling(origins=2), "cpu", told.append)
    assert any("load.csv has changed since" in line for line in told)
    assert "load.csv has changed since" in str(samples_of(run, "cpu"))
    days(path, 60)
    assert cw.evaluate(run, device="cpu") == before

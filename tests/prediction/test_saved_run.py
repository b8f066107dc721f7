"""A run that is opened again reads data as it did in training, whatever has become of its files since; what was changed is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import carrywave as cw
from carrywave.errors import DataError, RunError, SpecError, UserError
from carrywave.report.samples import samples_of
from carrywave.runs.run import Run
from carrywave.spec.load import parse
from carrywave.train.backtest import RollingOptions, backtest_run
from carrywave.train.fit import train
from carrywave.train.start.run_source import refuse_python

pandas = pytest.importorskip("pandas")


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    for name, text in (("train", "the carry goes on and on\n" * 20), ("test", "on goes the carry\n" * 8)):
        (tmp_path / f"{name}.txt").write_text(text)
    spec = {
        "data": {"train": str(tmp_path / "train.txt"), "test": str(tmp_path / "test.txt"), "cache": str(tmp_path / "cache")},
        "model": {"hidden": 6, "layers": 1},
        "batch": {"lanes": 2, "steps": 8},
        "train": {"epochs": 1},
    }
    train(parse(spec), run=tmp_path / "run", device="cpu")
    return tmp_path


def test_an_evaluation_reads_as_the_run_did_when_its_training_data_has_changed(trained: Path) -> None:
    before = cw.evaluate(trained / "run", device="cpu")
    with (trained / "train.txt").open("a") as file:
        file.write("yyyy rrrr oooo\n" * 300)  # the same characters, others the most frequent
    assert cw.evaluate(trained / "run", device="cpu") == before
    (trained / "train.txt").write_text("zzzz aaaa\n" * 100)  # what the run does not know is unknown, not learned anew
    assert cw.evaluate(trained / "run", device="cpu") == before


def test_a_test_file_that_has_changed_is_told(trained: Path) -> None:
    (trained / "test.txt").write_text("carry on\n" * 8)
    with pytest.warns(UserWarning, match=r"test\.txt has changed since .*run was trained; these are the figures of what it holds now"):
        cw.evaluate(trained / "run", device="cpu")


def test_a_part_of_a_training_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    """A file that is refreshed every night: rows that were trained on move into its last share."""
    path = tmp_path / "load.csv"
    frame = series("a", 60)
    frame.to_csv(path, index=False)
    run = forecast(str(path), tmp_path, split=[40, 10, 10]).run
    before = cw.evaluate(run, device="cpu")
    series("a", 75).iloc[15:].to_csv(path, index=False)
    with pytest.raises(
        DataError, match=r"load\.csv has changed since .* was trained, and test is cut from it, so rows that were trained on"
    ):
        cw.evaluate(run, device="cpu")
    told: list[str] = []
    backtest_run(run, None, RollingOptions(origins=2), "cpu", told.append)
    assert any("load.csv has changed since" in line for line in told)
    assert "load.csv has changed since" in str(samples_of(run, "cpu"))
    frame.to_csv(path, index=False)
    assert cw.evaluate(run, device="cpu") == before


def test_a_codec_or_spec_that_was_changed_is_refused(trained: Path) -> None:
    codec, spec = trained / "run" / "codec.json", trained / "run" / "spec.yaml"
    kept = codec.read_text()
    codec.write_text(kept.replace('"a"', '"@"').replace('"c"', '"a"').replace('"@"', '"c"'))
    with pytest.raises(RunError, match=r"codec\.json does not match the codec that weights\.safetensors was trained with"):
        cw.predict(trained / "run", prompt="the", tokens=3, device="cpu")
    codec.write_text(kept)
    spec.write_text(spec.read_text().replace("tokens: char", "tokens: byte"))
    with pytest.raises(RunError, match=r"reads text by char, .*data\.tokens=byte"):
        cw.evaluate(trained / "run", device="cpu")


@pytest.mark.parametrize("text", ["null", "[]", "3"])
def test_facts_that_are_none_are_refused(trained: Path, text: str) -> None:
    (trained / "run" / "facts.json").write_text(text)
    with pytest.raises(RunError, match=r"facts\.json is damaged: it is not a JSON object"):
        refuse_python(parse({}), Run.open(trained / "run"))


def test_widths_that_no_machine_holds_are_refused() -> None:
    for keys in ({"hidden": 10**20}, {"hidden": [8, 10**6]}, {"layers": 10**9}, {"embedding": 10**9}):
        with pytest.raises(SpecError, match=f"model.{next(iter(keys))}"):
            parse({"model": keys})


def forecast(data: Any, tmp_path: Path, **options: Any) -> Any:
    return cw.fit(
        {"hidden": 4, "layers": 1},
        data,
        task="forecasting",
        data={"horizon": 2, "cache": str(tmp_path / "cache"), **options},
        batch={"lanes": 2, "steps": 8},
        train={"max_steps": 1},
        run=tmp_path / f"run-{len(list(tmp_path.iterdir()))}",
        device="cpu",
    )


def series(name: Any, rows: int = 40, start: str = "2023-01-01") -> Any:
    return pandas.DataFrame(
        {"unique_id": name, "ds": pandas.date_range(start, periods=rows).strftime("%Y-%m-%d"), "y": np.sin(np.arange(rows) / 3)}
    )


def test_names_of_series_in_a_file_stay_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    pandas.concat([series("01"), series("1", start="2023-02-10"), series("1.0")]).to_csv(path, index=False)
    result = forecast(str(path), tmp_path)
    assert [row["unique_id"] for row in cw.predict(result.run, str(path), device="cpu")] == ["01", "01", "1", "1", "1.0", "1.0"]


def test_whole_numbers_name_the_same_series_as_fractions(tmp_path: Path) -> None:
    frame = pandas.concat([series(7), series(12)])
    result = forecast(frame, tmp_path)
    whole, fractions = (cw.predict(result.run, frame.astype({"unique_id": kind}), device="cpu") for kind in (int, float))
    assert whole == fractions


def test_several_series_are_not_forecast_by_a_run_of_one(tmp_path: Path) -> None:
    result = forecast(series(7).drop(columns="unique_id"), tmp_path)
    with pytest.raises(DataError, match="row 41, column ds repeats 2023-01-01, and no column tells the series apart"):
        cw.predict(result.run, pandas.concat([series(7), series(12)]), device="cpu")


def test_an_empty_label_in_a_file_is_no_class(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("text,label\n" + "".join(f"ab,{'' if number == 3 else 'pq'[number % 2]}\n" for number in range(20)))
    data, train = {"cache": str(tmp_path / "cache")}, {"epochs": 1}
    result = cw.fit({"hidden": 4}, str(path), task="classification", data=data, train=train, run=tmp_path / "run")
    assert result.task.codec.labels == ("p", "q")


def test_what_a_person_should_know_is_logged_from_python_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frame = series(7).drop(columns="unique_id").assign(color="red")
    with caplog.at_level(logging.WARNING, logger="carrywave"):
        forecast(frame.drop(index=[10, 11]), tmp_path)
    said = "\n".join(record.message for record in caplog.records)
    assert "color" in said
    assert "missing" in said


@pytest.mark.parametrize("by", ["series", "step", "column"])
def test_metrics_by_something_need_a_point_forecast(tmp_path: Path, by: str) -> None:
    frame = series("a", 60)
    small = {"model": {"hidden": 4, "layers": 1}, "batch": {"lanes": 1, "steps": 16}, "train": {"max_steps": 1}}
    fitted = cw.Forecaster(3, quantiles=[0.1, 0.9], run=tmp_path / "run", **small).fit(frame, progress=False)
    with pytest.raises(UserError, match=rf"metrics by {by} are of a point forecast, but .*run has no median among its data\.quantiles"):
        cw.evaluate(tmp_path / "run", frame, by=[by])
    assert "pinball" in cw.evaluate(str(fitted.run), frame)

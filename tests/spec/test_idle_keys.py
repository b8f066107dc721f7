"""Keys that are set where they act on nothing are refused, and for every key it is known where it acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import carrywave as cw
from carrywave.data.prepare import prepare
from carrywave.errors import SpecError
from carrywave.spec.describe import keys
from carrywave.spec.idle_keys import ACTS, ALWAYS, idle
from carrywave.spec.load import dump, load_own, parse
from carrywave.spec.spec import Spec
from carrywave.spec.sync_keys import READ_BY
from carrywave.train.fit import train
from carrywave.train.start.settling import check_idle


def test_for_every_key_it_is_known_where_it_acts() -> None:
    known = [*ACTS, *(f"{section}.{name}" for section, names in ALWAYS.items() for name in names), *(f"train.{name}" for name in READ_BY)]
    assert len(known) == len(set(known))
    # Those of a section within a section act where it does.
    assert set(known) == {".".join(name.split(".")[:2]) for name in keys() if "." in name and not name.startswith("plan.")}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"train": {"patience": 3}},
            "train.patience is for train.schedule=plateau, which lowers the learning rate, not for cosine; remove it, or to stop after 3 "
            "evaluations without improvement, set train.early_stop=3 instead",
        ),
        ({"model": {"locked": True}}, "model.locked is for dropout, which is 0 everywhere; remove it, or set model.dropout"),
        ({"train": {"factor": 0.5}}, "train.factor is for train.schedule=plateau or step, not for cosine; remove it"),
        ({"train": {"schedule": "cosine", "every": 3}}, "train.every is for train.schedule=step, not for cosine; remove it"),
        ({"train": {"hold": 3, "schedule": "constant"}}, "train.hold is for train.schedule=cosine or linear, not for constant; remove it"),
        ({"train": {"hold": 3, "schedule": "step"}}, "train.hold is for train.schedule=cosine or linear, not for step; remove it"),
        ({"train": {"hold": 3, "schedule": "plateau"}}, "train.hold is for train.schedule=cosine or linear, not for plateau; remove it"),
        (
            {"train": {"min_lr": 1e-4, "schedule": "constant"}},
            "train.min_lr is the lowest learning rate of a schedule, but train.schedule=constant never lowers it",
        ),
        ({"train": {"nonmono": 3}}, "train.nonmono is for ntasgd, not for adam; remove it, or use train.optimizer=ntasgd"),
        ({"task": "classification", "train": {"loss": "mae"}}, "train.loss is for forecasting and regression; the loss of classification"),
        (
            {"task": "forecasting", "data": {"quantiles": [0.5]}, "train": {"loss": "mae"}},
            "train.loss has no effect beside data.quantiles, whose loss is the pinball loss; remove it",
        ),
        ({"task": "forecasting", "data": {"tokens": "word"}}, "data.tokens is for text and tokens, not for forecasting; remove it"),
        (
            {"task": "forecasting", "model": {"pool": "mean"}},
            "model.pool is for classification and regression, not for forecasting; remove",
        ),
        ({"task": "forecasting", "model": {"embedding": 8}}, "model.embedding is for text and tokens, not for forecasting; remove it"),
        ({"task": "tagging", "data": {"horizon": 3}}, "data.horizon is for forecasting, not for tagging; remove it"),
        ({"data": {"split": [0.8, 0.2]}}, "data.split is for forecasting, not for language; set data.valid and data.test to files, or use"),
        ({"task": "classification", "data": {"columns": ["a"]}}, "data.columns is for forecasting, not for classification; remove it"),
        ({"data": {"label": "x"}}, "data.label is for classification, regression, tagging and transcription, not for language; remove it"),
        ({"data": {"frequency": "D"}}, "data.frequency is for forecasting, not for language; remove it"),
        (
            {"data": {"standardize": False}},
            "data.standardize is for classification, tagging, transcription, forecasting and regression, not for language",
        ),
        (
            {"data": {"valid": "valid.txt", "share": 0.2}},
            "data.share is held out only without data.valid, which says what valid is; remove",
        ),
        (
            {"task": "forecasting", "data": {"valid": "valid.csv", "context": 9}},
            "data.context is for a part that is cut from the training file, and none is; remove it",
        ),
        (
            {"task": "regression", "data": {"each_step": True}, "model": {"characters": "cnn"}},
            "model.characters is for text and tokens, not for",
        ),
        (
            {"task": "transcription", "model": {"init_bias": "zero"}},
            "model.init_bias is for language, classification and tagging, not for transcription; remove it",
        ),
        (
            {"model": {"softmax": "adaptive", "init_bias": "zero"}},
            "model.init_bias is for the bias of a full softmax, but model.softmax=adaptive; remove it",
        ),
        ({"model": {"layers": 1, "dropout_hidden": 0.2}}, "model.dropout_hidden is between layers, but model.layers=1; remove it, or use"),
        (
            {"model": {"dropout": 0.1, "dropout_input": 0.1, "dropout_hidden": 0.1, "dropout_output": 0.1}},
            "model.dropout is the default of dropout_input, dropout_hidden and dropout_output, which are all set; remove it",
        ),
    ],
)
def test_a_key_that_acts_on_nothing_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as no:
        parse(spec)
    assert str(no.value).startswith(message)
    assert "\n" not in str(no.value)


@pytest.mark.parametrize(
    "spec",
    [
        {"train": {"schedule": "plateau", "patience": 3, "factor": 0.5, "min_lr": 1e-4}},
        {"data": {"valid": "valid.txt", "share": 0.0}},
        {"train": {"warmup": 10, "min_lr": 1e-4}},
        {"task": "regression", "model": {"pool": "mean"}, "train": {"loss": "mae"}},
        {"task": "forecasting", "data": {"split": [0.8, 0.2], "context": 9, "horizon": 3, "frequency": "D"}, "train": {"loss": "mae"}},
        {"train": {"patience": 0, "factor": 0.25, "loss": "mse"}},  # a resolved spec lists defaults, too
    ],
)
def test_a_key_that_acts_is_accepted(spec: dict[str, Any]) -> None:
    assert idle(parse(spec), ACTS) == {}


def test_a_run_that_an_older_version_has_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(dump(Spec.model_validate({"train": {"patience": 3}})))
    assert load_own(tmp_path / "spec.yaml").train.patience == 3


NUMBERS = (np.random.default_rng(1).normal(size=(20, 4, 2)), np.arange(20) % 2)
TEXTS = [({"text": "abc"[: number % 3 + 1], "label": number % 2}) for number in range(20)]


@pytest.mark.parametrize(
    ("data", "sections", "message"),
    [
        (NUMBERS, {"data": {"tokens": "byte"}}, "data.tokens is for text, but the data is numbers; remove it"),
        (NUMBERS, {"model": {"dropout_words": 0.1}}, "model.dropout_words is for text and tokens, but the data is numbers; remove it"),
        (
            NUMBERS,
            {"model": {"front_dropout": 0.5}},
            "model.front_dropout is for a front, which such short sequences lack unless it is set",
        ),
        (
            NUMBERS,
            {"task": "regression", "model": {"init_scale": 0.5}},
            "model.init_scale is for embeddings and softmaxes, and this model has none; remove it",
        ),
        (
            np.arange(200.0)[:, None],
            {"task": "forecasting", "data": {"horizon": 2, "scale": "change"}},
            "data.scale=change is the unit of each of several series, but the data is one series, or not standardised; remove it",
        ),
        (TEXTS, {"data": {"standardize": "sequence"}}, "data.standardize is for numbers, but the data is tokens; remove it"),
        (NUMBERS, {"data": {"share": 0.0}, "train": {"early_stop": 2}}, "train.early_stop goes by validation data, but there is none; set"),
        (
            NUMBERS,
            {"data": {"share": 0.0}, "train": {"schedule": "plateau"}},
            "train.schedule=plateau goes by validation data, but there is none; set data.valid to a file, or data.share above 0",
        ),
        (
            NUMBERS,
            {"data": {"share": 0.0}, "train": {"best": "accuracy"}},
            "train.best=accuracy goes by validation data, but there is none",
        ),
    ],
)
def test_a_key_that_acts_on_nothing_with_the_data_is_refused(
    data: Any, sections: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SpecError) as no:
        cw.fit(None, data, spec={"task": "classification", **sections}, run=tmp_path / "run", device="cpu")
    assert str(no.value).startswith(message)
    assert not (tmp_path / "run" / "spec.yaml").exists()


def test_keys_of_the_built_in_model_are_refused_beside_ones_own(tmp_path: Path) -> None:
    def build(facts: Any) -> cw.Model:
        raise AssertionError("refused before it is built")

    for sections, key in (({"model": {"hidden": 8}}, "model.hidden"), ({"train": {"class_weights": "balanced"}}, "train.class_weights")):
        with pytest.raises(SpecError, match=f"{key} is for the model that a spec describes, but you pass a model of your own; remove it"):
            cw.fit(build, NUMBERS, spec={"task": "classification", **sections}, run=tmp_path / "run", device="cpu")


def test_the_command_line_refuses_them_too(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\n" + "abc,x\nbca,y\n" * 9)
    spec = {"task": "classification", "data": {"train": str(tmp_path / "rows.csv"), "share": 0.0, "cache": str(tmp_path)}}
    with pytest.raises(SpecError, match="goes by validation data"):
        train(parse({**spec, "train": {"early_stop": 2}}), run=tmp_path / "run", device="cpu")


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("rows.jsonl", {"separator": ";"}, "data.separator is for CSV, but the data is JSON lines; remove it"),
        ("rows.jsonl", {"decimal": ","}, "data.decimal is for CSV, but the data is JSON lines; remove it"),
        ("rows.txt", {"separator": "tab"}, "data.separator is for CSV, but the data is text; remove it"),
        ("rows.txt", {"tokens": "byte", "encoding": "latin-1"}, "data.encoding is for text, JSON lines and CSV, but the data is raw bytes"),
        ("builtin:python-topics", {"format": "jsonl"}, "data.format is for files, but the data is built-in text; remove it"),
        ("rows.txt", {"text": "review"}, "data.text is for JSON lines, CSV, Parquet and datasets, but the data is text; remove it"),
        ("rows.jsonl", {"tokens": "byte", "encoding": "latin-1"}, None),
        ("rows.jsonl", {"valid": "rows.csv", "separator": ";"}, None),
        ("rows.jsonl", {"valid": "rows.csv", "encoding": "latin-1", "separator": ";"}, None),
    ],
)
def test_keys_about_files_are_refused_where_the_files_are_of_other_formats(
    file: str, data: dict[str, Any], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_bytes('{"text": "añ abca", "label": 1}\n'.encode("latin-1" if "encoding" in data else "utf-8") * 9)
    (tmp_path / "rows.csv").write_text("text;label\n" + "abc;x\nbca;y\n" * 9)
    (tmp_path / "rows.txt").write_text("abc bca\n" * 90)
    spec = parse({"data": {"train": file, "cache": "cache", **data}, "batch": {"lanes": 1, "steps": 4}})
    prepared = prepare(spec)
    if message is None:
        check_idle(spec, prepared, user_model=False)
    else:
        with pytest.raises(SpecError) as no:
            check_idle(spec, prepared, user_model=False)
        assert str(no.value).startswith(message)

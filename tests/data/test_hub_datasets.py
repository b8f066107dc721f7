"""Datasets of Hugging Face's library give the same run as the same rows in a list, however they are given. Everything is local."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import carrywave as cw
from carrywave.data.files import hub_datasets
from carrywave.data.prepare import from_python
from carrywave.errors import DataError
from carrywave.spec.load import parse

os.environ.setdefault("HF_HUB_OFFLINE", "1")
datasets = pytest.importorskip("datasets", reason="needs the package datasets")

NAMES = ["neg", "pos"]
ROWS = [{"text": f"{'good fine' if number % 2 else 'bad poor'} word{number % 5}", "label": number % 2} for number in range(60)]
SPEC = parse({"task": "classification", "data": {"tokens": "word"}, "batch": {"tokens": 256}})


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARRYWAVE_CACHE", str(tmp_path / "cache"))


def dataset(rows: list[dict[str, Any]] = ROWS) -> Any:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=NAMES)})
    return datasets.Dataset.from_list(rows, features=features)


def named(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "label": NAMES[row["label"]]} for row in rows]


def test_an_object_is_read_as_its_rows_are() -> None:
    plain = from_python(named(ROWS), SPEC)
    for given in (dataset(), dataset().with_format("numpy"), dataset().to_iterable_dataset()):
        assert from_python(given, SPEC).fingerprint == plain.fingerprint  # of the arrays, and of the codec


def test_labels_of_steps_have_names_and_a_negative_one_is_missing() -> None:
    features = datasets.Features(
        {"tokens": datasets.Sequence(datasets.Value("string")), "labels": datasets.Sequence(datasets.ClassLabel(names=["O", "X"]))}
    )
    tagged = datasets.Dataset.from_dict({"tokens": [["a", "b"], ["c"]], "labels": [[0, 1], [1]]}, features=features)
    [table] = hub_datasets.tables_of(tagged)
    assert table["labels"].to_pylist() == [["O", "X"], ["X"]]
    [table] = hub_datasets.tables_of(dataset([{"text": "a", "label": -1}, {"text": "b", "label": 1}]))
    assert table["label"].to_pylist() == [None, "pos"]


@pytest.mark.slow
def test_objects_names_and_lists_train_the_same(tmp_path: Path) -> None:
    parts = datasets.DatasetDict(train=dataset(ROWS[:48]), validation=dataset(ROWS[48:]))
    parts.save_to_disk("saved")
    dataset(ROWS[48:]).save_to_disk("alone")
    given = {
        "list": {"train": named(ROWS[:48]), "valid": named(ROWS[48:])},
        "object": parts,
        "streamed": {name: part.to_iterable_dataset() for name, part in parts.items()},
        "names": {"train": "hf:saved", "valid": "hf:saved"},
        "splits": {"train": "hf:saved#train", "valid": "hf:alone"},
    }
    how: dict[str, Any] = {"task": "classification", "data": {"tokens": "word"}, "batch": {"tokens": 64}, "train": {"epochs": 2}}
    for name, data in given.items():
        cw.fit({"hidden": 4, "layers": 1}, data, **how, run=name)
    for name in given:
        assert Path(name, "metrics.jsonl").read_bytes() == Path("list/metrics.jsonl").read_bytes(), name
    assert cw.evaluate("names", "hf:saved#validation") == cw.evaluate("list", named(ROWS[48:])) | {"split": "hf:saved#validation"}
    cw.fit({"hidden": 4, "layers": 1}, given["object"], **{**how, "train": {"epochs": 3}}, run="object", resume=True)  # the same data again


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf:saved#dev", "data.train=hf:saved#dev has no split dev; name one: hf:saved#test"),
        ("hf:saved", "data.train=hf:saved has no split train; name one: hf:saved#test"),
        ("hf:alone#train", "data.train=hf:alone#train has no split train; name one: hf:alone"),
        ("hf:./nowhere", "data.train=hf:./nowhere cannot be loaded"),
    ],
)
def test_mistakes_are_said_in_one_line(name: str, said: str) -> None:
    datasets.DatasetDict(test=dataset()).save_to_disk("saved")
    dataset().save_to_disk("alone")
    with pytest.raises(DataError) as error:
        from_python(name, SPEC)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package datasets; install it with: pip install 'carrywave\[datasets\]'"):
        from_python("hf:saved", SPEC)

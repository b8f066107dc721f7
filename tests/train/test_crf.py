"""`model.crf` from a file to predictions: spans by type, the best weights by span F1, and what it is refused with."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import carrywave as cw
from carrywave.errors import DataError, SpecError, UserError
from carrywave.spec.load import load_own
from carrywave.spec.spec import Spec

NAMES = ("york", "leeds", "bath", "new castle", "old sarum", "st albans")
FRAMES = ("a train to {} tonight", "from {} to {}", "is there a train", "{} please", "to {} from {} today")


def rows() -> list[dict[str, Any]]:
    """Sentences whose places are spans of one or two words; of which kind, the word before says."""
    found = []
    for number in range(60):
        words: list[str] = []
        labels: list[str] = []
        for word in FRAMES[number % len(FRAMES)].split():
            if word != "{}":
                words.append(word)
                labels.append("O")
                continue
            kind = "from" if words and words[-1] == "from" else "to"
            for place, part in enumerate(NAMES[(number * 7 + len(words)) % len(NAMES)].split()):
                words.append(part)
                labels.append(f"{'I' if place else 'B'}-{kind}")
        found.append({"tokens": words, "labels": labels})
    return found


def written(path: Path, given: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


MODEL = {"hidden": 16, "layers": 1, "crf": True, "dropout": 0.0}
TRAIN = {"epochs": 12, "lr": 0.03, "best": "span_f1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crf")
    given = rows()
    written(folder / "train.jsonl", given[:48])
    written(folder / "valid.jsonl", given[48:])
    data = {"train": str(folder / "train.jsonl"), "valid": str(folder / "valid.jsonl")}
    cw.fit(MODEL, None, task="tagging", data=data, batch={"tokens": 64}, train=TRAIN, run=folder / "run")
    return folder / "run"


def test_spans_are_found_and_pick_the_best_weights(run: Path) -> None:
    values = cw.evaluate(run, by=["type", "label"])
    assert values["span_f1"] > 0.9
    assert {"span_precision", "span_recall", "accuracy", "macro_f1"} <= values.keys()
    assert "top_5_accuracy" not in values
    assert [row["type"] for row in values["by_type"]] == ["from", "to"]
    assert {row["label"] for row in values["by_label"]} == {"O", "B-to", "I-to", "B-from", "I-from"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    reached = [line["span_f1"] for line in lines if line.get("split") == "valid"]
    assert len(reached) == 12
    assert values["span_f1"] == pytest.approx(max(reached))


def test_predictions_are_paths(run: Path) -> None:
    given = [{"tokens": ["from", "new", "castle", "to", "bath"]}, {"tokens": ["is", "there"]}]
    found = list(cw.predict(run, given))
    assert [len(row["labels"]) for row in found] == [5, 2]
    assert found[0]["labels"] == ["O", "B-from", "I-from", "O", "B-to"]
    assert found[1]["labels"] == ["O", "O"]


SMALL = {"hidden": 4, "layers": 1, "embedding": 4}
SPELLED = {**SMALL, "characters": 4}  # which acts if the labels write spans
QUICK: dict[str, Any] = {"task": "tagging", "batch": {"tokens": 64}, "train": {"epochs": 1}}


def resolved(result: cw.Result) -> Spec:
    return load_own(result.run / "spec.yaml")


def test_labels_of_words_that_write_spans_have_it_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = cw.fit(SPELLED, rows(), run=tmp_path / "run", progress=True, **QUICK)
    spec = resolved(result)
    assert (spec.model.crf, spec.model.characters, spec.model.word_scores, spec.model.dropout) == (True, 4, 1 << 18, 0.5)
    assert (spec.model.dropout_rare, spec.data.lowercase, spec.train.best) == (0.5, True, "span_f1")
    assert "labels write spans, so they are chosen together (model.crf)" in capsys.readouterr().out
    found = cw.predict(result.run, [{"tokens": ["to", "York"]}, {"tokens": ["is"]}])
    assert [len(row["labels"]) for row in found] == [2, 1]
    again = cw.fit(SPELLED, rows(), run=tmp_path / "run", resume=True, **{**QUICK, "train": {"epochs": 2}})
    assert resolved(again).model == spec.model
    if find_spec("onnxruntime") is not None:
        assert cw.export(result.run, "onnx", tmp_path / "onnx").difference == 0.0


def test_what_is_asked_for_stays(tmp_path: Path) -> None:
    """Each key by itself, and all defaults where labels are chosen one by one."""
    asked = {**SMALL, "characters": 0, "dropout_rare": 0.1}
    spec = resolved(cw.fit(asked, rows(), run=tmp_path / "asked", data={"lowercase": False}, **QUICK))
    assert (spec.model.crf, spec.model.characters, spec.model.word_scores, spec.model.dropout_rare) == (True, 0, 0, 0.1)
    assert not spec.data.lowercase
    spec = resolved(cw.fit({**SMALL, "crf": False}, rows(), run=tmp_path / "softmax", **QUICK))
    assert (spec.model.crf, spec.model.characters, spec.model.word_scores, spec.model.dropout) == (False, 0, 0, 0.3)
    for name, keys in {
        "weights": {"train": {"epochs": 1, "class_weights": "balanced"}},
        "streams": {"batch": {"lanes": 2, "steps": 8}},
    }.items():
        spec = resolved(cw.fit(SMALL, rows(), run=tmp_path / name, **{**QUICK, **keys}))
        assert (spec.model.crf, spec.model.word_scores, spec.model.dropout) == (False, 0, 0.3)


def test_other_labels_have_a_softmax(tmp_path: Path) -> None:
    given = [{"tokens": ["old", "town"], "labels": ["ADJ", "NOUN"]}, {"tokens": ["old"], "labels": ["ADJ"]}] * 5
    spec = resolved(cw.fit(SMALL, given, run=tmp_path / "words", **QUICK))
    assert (spec.model.crf, spec.model.characters, spec.model.word_scores, spec.model.dropout) == (False, 0, 0, 0.3)
    numbers = [{"steps": [[1.0], [2.0]], "labels": ["B-x", "I-x"]}, {"steps": [[3.0]], "labels": ["O"]}] * 5
    spec = resolved(cw.fit({"hidden": 4}, numbers, run=tmp_path / "numbers", **QUICK))
    assert (spec.model.crf, spec.model.characters, spec.train.best) == (False, 0, "loss")


def test_data_that_breaks_its_scheme_is_learned_as_it_is_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*rows()[:2], {"tokens": ["to", "york"], "labels": ["O", "I-to"]}, *rows()[2:8]]
    spec = resolved(cw.fit(SMALL, given, run=tmp_path / "run", data={"share": 0.0}, progress=True, **QUICK))
    assert (spec.model.crf, spec.data.scheme, spec.train.best) == (True, "none", "loss")  # without valid, nothing is counted on it
    assert "train: 'I-to' after 'O' (sequence 3, step 2) is not BIO, so any may follow any" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (
            ["O", "I-to"],
            r"train: 'I-to' after 'O' \(sequence 3, step 2\) is not BIO, by which model.crf rules transitions out",
        ),
        (["I-to", "O"], r"train: 'I-to' at the beginning \(sequence 3, step 1\) is not BIO, .* or set data.scheme=none, which allows all"),
    ],
)
def test_data_that_breaks_its_scheme_is_refused_unless_nothing_is_ruled_out(labels: list[str], words: str) -> None:
    given = [*rows()[:2], {"tokens": ["to", "york"], "labels": labels}, *rows()[2:8]]
    how: dict[str, Any] = {"task": "tagging", "batch": {"tokens": 64}, "train": {"epochs": 1}}
    with pytest.raises(DataError, match=words):
        cw.fit({**MODEL, "hidden": 2}, given, data={"share": 0.0}, **how)
    cw.fit({**MODEL, "hidden": 2}, given, data={"share": 0.0, "scheme": "none"}, **how)


def test_labels_without_spans_need_no_scheme_and_have_no_spans() -> None:
    given = [{"tokens": ["old", "town"], "labels": ["ADJ", "NOUN"]}, {"tokens": ["old"], "labels": ["ADJ"]}] * 5
    how: dict[str, Any] = {"task": "tagging", "batch": {"tokens": 64}}
    result = cw.fit({**MODEL, "hidden": 2}, given, **how, train={"epochs": 1})
    assert "span_f1" not in cw.evaluate(result.run, given)
    with pytest.raises(UserError, match="by type"):
        cw.evaluate(result.run, given, by=["type"])
    with pytest.raises(SpecError, match=r"train.best=span_f1 needs labels that write spans, such as B-X, I-X and O, not ADJ, NOUN"):
        cw.fit({**MODEL, "hidden": 2}, given, **how, train={"epochs": 1, "best": "span_f1"})
    with pytest.raises(SpecError, match=r"data.scheme=bio, but 'ADJ' is not a label of it"):
        cw.fit({**MODEL, "hidden": 2}, given, **how, train={"epochs": 1}, data={"scheme": "bio"})

"""Characters of words: their codes, in lower case or not, of unknown and of long words; and where there are no words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carrywave.data.codec import Codec
from carrywave.data.prepare import prepare, read_python
from carrywave.data.text.spelling import Spelling, learn
from carrywave.errors import SpecError
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec

ROWS = [
    {"tokens": ["Ann", "saw", "ann"], "labels": ["B", "O", "B"]},
    {"tokens": ["a", "saw"], "labels": ["O", "O"]},
]


@pytest.fixture
def spec_of(tmp_path: Path) -> Any:
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))

    def make(characters: int = 50, **data: Any) -> Spec:
        files = {"train": str(tmp_path / "train.jsonl"), "share": 0.0, "cache": str(tmp_path / "cache")}
        return parse({"task": "tagging", "data": files | data, "model": {"characters": characters, "crf": False}})

    return make


def test_codes_are_padded_and_the_middle_of_long_words_is_left_out() -> None:
    characters, length = learn(["ab", "cabca"], 3)
    assert (characters, length) == (("a", "b", "c"), 3)
    spelling = Spelling(characters, length)
    assert spelling.codes(["ab", "", "x", "cabca", "é\ud800b"]).tolist() == [[2, 3, 0], [0, 0, 0], [1, 0, 0], [4, 2, 2], [1, 1, 3]]
    assert spelling.codes([]).shape == (0, 3)
    assert learn(["abc", ""], 32)[1] == 3


def test_words_and_their_characters_stand_side_by_side(spec_of: Any) -> None:
    prepared = prepare(spec_of())
    assert prepared.codec.vocabulary == ("saw", "Ann", "a", "ann", "<unk>")
    assert prepared.codec.characters == ("A", "a", "n", "s", "w")
    assert prepared.train.inputs.tolist() == [[1, 2, 4, 4], [0, 5, 3, 6], [3, 3, 4, 4], [2, 3, 0, 0], [0, 5, 3, 6]]
    assert prepared.train.tokens.tolist() == [1, 0, 3, 2, 0]
    assert (prepared.facts.vocabulary, prepared.facts.characters, prepared.facts.word_length) == (5, 7, 3)
    assert Codec.from_json(prepared.codec.to_json()) == prepared.codec


def test_text_and_data_that_come_later_are_spelled_as_well(spec_of: Any, tmp_path: Path) -> None:
    spec = spec_of()
    codec = prepare(spec).codec
    (tmp_path / "new.jsonl").write_text(json.dumps({"tokens": ["Was", "swann"]}))
    new = read_python(str(tmp_path / "new.jsonl"), codec, spec, labelled=False)
    assert new.inputs.tolist() == [[4, 1, 3, 5], [4, 5, 6, 4]]  # W is not in train, swann has no middle
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "so is\nthis", "label": "x"}))
    files = {"train": str(tmp_path / "text.jsonl"), "share": 0.0, "tokens": "word", "cache": str(tmp_path / "cache")}
    written = prepare(parse({"task": "classification", "data": files, "model": {"characters": 50}}))
    assert written.train.inputs.shape == (3, 5)
    assert np.count_nonzero(written.train.inputs[:, 1:], axis=1).tolist() == [2, 2, 4]


def test_what_has_no_words_is_refused(tmp_path: Path) -> None:
    for row in (
        {"text": "abc", "label": 1},
        {"tokens": [1, 2], "label": 1},
        {"steps": [[1.0]], "label": 1},
    ):
        (tmp_path / "train.jsonl").write_text(json.dumps(row))
        files = {"train": str(tmp_path / "train.jsonl"), "share": 0.0, "tokens": "char", "cache": str(tmp_path / "cache")}
        with pytest.raises(SpecError, match=r"model.characters=50 does not apply to .* tokens; set data.tokens=word"):
            prepare(parse({"task": "classification", "data": files, "model": {"characters": 50}}))
        with pytest.raises(SpecError, match=r"data.lowercase does not apply to .* tokens"):
            prepare(parse({"task": "classification", "data": files | {"lowercase": True}}))

"""From a spec to data: which files, which parts, the cache between them, and one more file by an existing codec."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carrywave.data import prepare as prepare_module
from carrywave.data.holdout import held_out
from carrywave.data.prepare import prepare, read_python
from carrywave.errors import DataError, SpecError
from carrywave.spec.spec import Spec

TEXT = "the cat sat\n\non the mat\n" * 5


def spec(folder: Path, task: str = "language", *, seed: int = 1, lines: bool = False, **data: Any) -> Spec:
    given = {name: str(folder / value) if name in ("train", "valid", "test") else value for name, value in data.items()}
    batch = {"tokens": 64} if lines or task not in ("language", "forecasting") else {}
    return Spec.model_validate({"task": task, "data": {"cache": str(folder / "cache"), **given}, "batch": batch, "train": {"seed": seed}})


def rows(folder: Path, name: str, count: int, **more: Any) -> None:
    (folder / name).write_text(
        "".join(json.dumps({"steps": [number, number + 1], "label": number % 2, **more}) + "\n" for number in range(count))
    )


def test_default_is_text_that_ships_with_python(tmp_path: Path) -> None:
    found = prepare(spec(tmp_path))
    assert found.valid is not None
    total = int(found.train.lengths[0] + found.valid.lengths[0])
    assert total == len(found.train.inputs) > 400_000
    assert found.valid.lengths[0] == round(total / 10)
    assert found.codec.decode(found.train.inputs[:200]).isprintable() is False  # it has line ends
    assert found.facts.vocabulary == len(found.codec.vocabulary) > int(found.train.inputs.max())


def test_reading_needs_no_torch() -> None:
    program = "import sys, carrywave.data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_three_files_of_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("the mat\n")
    with gzip.open(tmp_path / "c.txt.gz", "wb") as file:
        file.write(b"cat\n")
    found = prepare(spec(tmp_path, train="a.txt", valid="b.txt", test="c.txt.gz", tokens="word"))
    assert found.valid is not None
    assert found.test is not None
    assert found.codec.decode(found.train.inputs) == TEXT
    assert found.train.lengths.tolist() == [5 * (3 + 1 + 1 + 3 + 1)]
    assert (found.codec.decode(found.valid.inputs), found.codec.decode(found.test.inputs)) == ("the mat\n", "cat\n")
    assert found.facts.steps == 45


def test_share_of_zero_holds_nothing_out_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    said: list[str] = []
    found = prepare(spec(tmp_path, train="a.txt", share=0), note=said.append)
    assert (found.valid, found.train.lengths.tolist()) == (None, [len(TEXT)])
    assert any("no data is held out for validation" in line for line in said)


def test_lines_as_sequences(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab\r\n\n  \nabc\n")
    found = prepare(spec(tmp_path, train="a.txt", share=0, lines=True))
    assert [found.codec.decode(found.train.inputs[s : s + n]) for s, n in zip(found.train.starts, found.train.lengths, strict=True)] == [
        "ab",
        "abc",
    ]
    (tmp_path / "b.txt").write_text("ab\na\n")
    short = prepare(spec(tmp_path, train="b.txt", share=0, lines=True))
    assert (short.train.lengths.tolist(), short.notes) == ([2], ("train: 1 row without a text or a label is left out",))


def test_keyed_share_of_sequences(tmp_path: Path) -> None:
    rows(tmp_path, "a.jsonl", 20)
    found = prepare(spec(tmp_path, "classification", train="a.jsonl", share=0.25, standardize=False))
    assert found.valid is not None
    held = held_out(20, 0.25, 1)
    assert found.valid.inputs[found.valid.starts, 0].tolist() == np.flatnonzero(held).tolist()
    assert found.train.inputs[found.train.starts, 0].tolist() == np.flatnonzero(~held).tolist()
    other = prepare(spec(tmp_path, "classification", train="a.jsonl", share=0.25, standardize=False, seed=2))
    assert other.valid is not None
    assert other.valid.starts.tolist() != found.valid.starts.tolist()


def test_second_time_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    first = prepare(spec(tmp_path, train="a.txt"))
    monkeypatch.setattr(prepare_module, "build", None)
    again = prepare(spec(tmp_path, train="a.txt"))
    assert (again.codec, again.fingerprint, again.facts) == (first.codec, first.fingerprint, first.facts)
    np.testing.assert_array_equal(again.train.inputs, first.train.inputs)


def test_one_more_file_by_the_same_codec(tmp_path: Path) -> None:
    rows(tmp_path, "a.jsonl", 8)
    asked = spec(tmp_path, "classification", train="a.jsonl", test="a.jsonl")
    found = prepare(asked)
    entries = len(list((tmp_path / "cache").iterdir()))
    more = read_python(str(tmp_path / "a.jsonl"), found.codec, asked)
    assert found.test is not None
    assert more.labels is not None
    assert found.test.labels is not None
    np.testing.assert_array_equal(more.inputs, found.test.inputs)
    np.testing.assert_array_equal(more.labels, found.test.labels)
    assert len(list((tmp_path / "cache").iterdir())) == entries


def test_gaps_of_one_more_table_are_told(tmp_path: Path) -> None:
    days = [f"2024-01-{day:02d},{day}.0\n" for day in range(1, 31)]
    (tmp_path / "a.csv").write_text("ds,y\n" + "".join(days))
    (tmp_path / "b.csv").write_text("ds,y\n" + "".join(days[:9] + days[10:]))
    asked = spec(tmp_path, "forecasting", train="a.csv", horizon=1)
    codec = prepare(asked).codec
    [said] = read_python(str(tmp_path / "b.csv"), codec, asked).notes
    assert said.endswith("1 missing row (every D) counts as empty, the first at 2024-01-10")


@pytest.mark.parametrize(
    ("task", "data", "error", "message"),
    [
        ("language", {"train": "no.txt"}, DataError, r"data\.train=.*no\.txt: file not found; use the path"),
        ("language", {"test": "no.txt"}, DataError, r"data\.test=.*no\.txt: file not found"),
        ("language", {"train": None}, SpecError, "data.train is not set; set it to a file"),
        ("language", {"train": "ids.jsonl", "min_count": 2}, SpecError, r"data\.min_count does not apply to integer tokens"),
        ("classification", {}, DataError, "builtin:python-topics is text, and no labels are found in it"),
        ("language", {"train": "empty.txt"}, DataError, r"empty\.txt is empty"),
        ("language", {"train": "three.txt"}, DataError, r"three\.txt has 3 tokens, too few to hold out validation data"),
        ("language", {"train": "one.txt", "share": 0}, DataError, r"one\.txt has 1 token, but a language model needs 2"),
        ("language", {"train": "one.jsonl", "share": 0}, DataError, r"one\.jsonl has 1 token, but a language model needs 2"),
    ],
)
def test_bad_spec_or_file_is_refused(tmp_path: Path, task: str, data: dict[str, Any], error: type[Exception], message: str) -> None:
    for name, text in (
        ("empty.txt", ""),
        ("three.txt", "abc"),
        ("one.txt", "a"),
        ("one.jsonl", '{"text": "a"}'),
        ("ids.jsonl", '{"tokens": [1, 2]}'),
    ):
        (tmp_path / name).write_text(text)
    given = {name: str(tmp_path / value) if isinstance(value, str) else value for name, value in data.items()}
    batch = {"tokens": 64} if task != "language" else {}
    with pytest.raises(error, match=message):
        prepare(Spec.model_validate({"task": task, "data": {"cache": str(tmp_path / "cache"), **given}, "batch": batch}))

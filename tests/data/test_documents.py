"""What ends a document in a stream, and rows that say at which of their steps the state starts anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from carrywave.data import examples
from carrywave.data.batch import Batch
from carrywave.data.codec import Codec
from carrywave.data.files.rows import Rows
from carrywave.data.loader import Share, build
from carrywave.data.order import Cursor, StreamOrder
from carrywave.data.sequences import Sequences
from carrywave.data.text.documents import DocumentEnds
from carrywave.errors import DataError, SpecError
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec
from carrywave.tasks.task import Task

CHARS = Codec("language", "text", "char", ("\n", "a", "b", "|", "<unk>"), size=5)
WORDS = Codec("language", "text", "word", ("<eos>", "one", "two", "<unk>"), size=4)


def begins(reset: str, codec: Codec, text: str) -> list[int]:
    ends = DocumentEnds.of(reset, codec)
    assert ends is not None
    tokens = codec.encode(text)
    assert ends.any_in(tokens) == bool(ends.begins(tokens, np.arange(len(tokens))).any())
    return np.flatnonzero(ends.begins(tokens, np.arange(len(tokens)))).tolist()


def test_a_token_ends_a_document() -> None:
    assert begins("|", CHARS, "a|bb|a") == [2, 5]
    assert begins("|", CHARS, "a||b|") == [2, 3]
    assert begins("<eos>", WORDS, "one two\ntwo\none") == [3, 5]
    assert begins("x", Codec("language", "text", "byte", size=256), "axbx") == [2]
    assert begins("7", Codec("language", "tokens", "int", size=9), "1 7 2 7 7 3") == [2, 4, 5]


def test_an_empty_line_ends_a_document() -> None:
    assert begins("blank line", CHARS, "a\nb\n\na\n\n\nb") == [5, 9]
    assert begins("blank line", CHARS, "\na\n\n") == []  # a document begins with a token
    assert begins("blank line", WORDS, "one\ntwo\n\ntwo\none") == [5]
    assert begins("blank line", Codec("language", "text", "byte", size=256), "a\n\nb") == [3]


@pytest.mark.parametrize(("reset", "codec"), [("ab", CHARS), ("three", WORDS), ("é", Codec("language", "text", "byte", size=256))])
def test_what_is_not_one_token_is_refused(reset: str, codec: Codec) -> None:
    with pytest.raises(SpecError, match=rf"data.reset='{reset}' is not a token of the vocabulary \(data.tokens={codec.kind}\)"):
        DocumentEnds.of(reset, codec)
    with pytest.raises(SpecError, match=r"data.reset='blank line' is not a token of the vocabulary"):
        DocumentEnds.of("blank line", Codec("language", "tokens", "int", size=9))


@pytest.mark.parametrize("of", [1, 2, 5])
def test_a_batch_knows_where_documents_begin(of: int) -> None:
    """Every worker's lanes, and on every worker how many there are."""
    tokens = CHARS.encode("ab|b|aa|b|ab|a|" * 4)
    data = Sequences(tokens, np.array([0]), np.array([len(tokens)]))
    view = Task(Spec.model_validate({"data": {"reset": "|"}}), CHARS, DataFacts()).part("train", data).view
    order = StreamOrder(view.lengths, lanes=4, steps=6)
    for step in range(order.num_steps(0)):
        window, cursor = order.window(Cursor(0, step)), Cursor(0, step)
        whole = build(view, window, cursor)
        expected = np.zeros((window.steps, 4), np.bool_)
        for lane in range(4):
            for time in range(window.length[lane]):
                row = window.offset[lane] + time
                expected[time, lane] = row > 0 and tokens[row - 1] == 3
        assert whole.resets is not None
        assert np.array_equal(whole.resets.numpy(), expected)
        assert whole.changes == whole.real - int((window.length > 0).sum()) - int(expected[1:].sum())
        parts: list[Batch] = [build(view, window, cursor, share=Share(index, of)) for index in range(of)]
        joined = torch.cat([part.resets for part in parts if not part.idle and part.resets is not None], dim=1)
        assert torch.equal(joined, whole.resets)
        assert {part.changes for part in parts} == {whole.changes}


def encoded(rows: list[dict[str, Any]], codec: Codec, **options: Any) -> Sequences:
    return examples.encode(Rows("train", list(enumerate(rows))), codec, labelled=True, **options)


TAGS = Codec("tagging", "tokens", "int", size=9, labels=("x",))


def test_rows_say_where_the_state_starts_anew() -> None:
    rows: list[dict[str, Any]] = [
        {"tokens": [1, 2], "labels": ["x", "x"]},
        {"tokens": [3, 4, 5], "labels": ["x"] * 3, "resets": [False, False, True]},
        {"tokens": [6], "labels": ["x"], "resets": np.array([True])},
    ]
    found = encoded(rows, TAGS, join=False)
    assert found.resets is not None
    assert found.resets.tolist() == [False, False, False, False, True, True]
    view = Task(Spec(task="tagging"), TAGS, DataFacts()).part("train", found).view
    assert view.resets_at is not None
    assert view.resets_at(np.array([[0, 4], [1, 5]])).tolist() == [[False, True], [False, True]]
    assert encoded(rows[:1], TAGS, join=False).resets is None


def test_rows_that_are_documents() -> None:
    codec = Codec("language", "text", "char", ("a", "b", "<unk>"), size=3)
    rows = [{"text": "ab"}, {"text": ""}, {"text": "bba"}]
    found = encoded(rows, codec, join=True, documents=True)
    assert found.resets is not None
    assert found.resets.tolist() == [True, False, True, False, False]
    assert encoded(rows, codec, join=True).resets is None


@pytest.mark.parametrize(
    ("row", "codec", "wrong"),
    [
        ({"tokens": [1, 2], "labels": ["x", "x"], "resets": [True]}, TAGS, "one for each of the 2 steps"),
        ({"tokens": [1, 2], "labels": ["x", "x"], "resets": [0, 1]}, TAGS, "a list of true and false"),
        (
            {"tokens": [1, 2], "label": "x", "resets": [True, False]},
            Codec("classification", "tokens", "int", size=9, labels=("x",)),
            "here a row is one sequence; write a row for each",
        ),
    ],
)
def test_resets_that_cannot_be_meant_are_refused(row: dict[str, Any], codec: Codec, wrong: str) -> None:
    with pytest.raises(DataError, match=wrong):
        encoded([row], codec, join=False)

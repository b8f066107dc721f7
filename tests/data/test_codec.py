"""The codec: text to tokens and back, labels, facts; and through JSON unchanged."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

from carrywave.data.codec import Codec
from carrywave.data.sequences import Sequences
from carrywave.data.text.tokenizers import tokenizers_library
from carrywave.errors import DataError, UserError

CHARS = Codec("language", "text", "char", ("a", "é", "\n", "<unk>"), size=4)
WORDS = Codec("language", "text", "word", ("<eos>", "the", "cat", "<unk>"), size=4)
BYTES = Codec("language", "text", "byte", size=256)
NUMBERS = Codec("language", "tokens", "int", size=5)
FULL = Codec(
    "forecasting",
    "columns",
    columns=("a", "b"),
    targets=(1,),
    mean=(0.1, 1 / 3),
    std=(1.0, 2.0),
    target_mean=(1 / 3,),
    target_std=(2.0,),
    time="ds",
    series=("unique_id",),
)


@pytest.mark.parametrize("codec", [CHARS, WORDS, BYTES, NUMBERS, FULL])
def test_json_changes_nothing(codec: Codec) -> None:
    assert Codec.from_json(codec.to_json()) == codec


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"task": "language", "field": "text", "other": 1}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"the codec is damaged \(.*\), or of another version; prepare the data again"):
        Codec.from_json(text)


def test_encode_and_decode() -> None:
    assert CHARS.encode("é\na").tolist() == [1, 2, 0]
    assert CHARS.decode([1, 2, 0]) == "é\na"
    assert WORDS.encode("the cat\n  the").tolist() == [1, 2, 0, 1]  # no <eos> for an unfinished line: a prompt goes on
    assert WORDS.decode(np.array([1, 2, 0, 1, 0])) == "the cat\nthe\n"
    assert BYTES.encode("é").tolist() == [0xC3, 0xA9]
    assert BYTES.decode([0xC3, 0xA9, 0xFF]) == "é\ufffd"
    assert NUMBERS.encode("3 0").tolist() == [3, 0]
    assert NUMBERS.decode([3, 0]) == "3 0"
    assert CHARS.encode("").tolist() == []


@pytest.mark.parametrize(
    ("codec", "text", "ids"),
    [(CHARS, "aa😀", [0, 0, 3]), (WORDS, "the dog", [1, 3]), (NUMBERS, "1 3 4", [1, 3, 4]), (NUMBERS, "1 88586 x", [1, 4, 4])],
)
def test_what_train_does_not_have_is_unknown(codec: Codec, text: str, ids: list[int]) -> None:
    """The numbers are as in Keras' reviews of films, of which test has larger ones than train."""
    assert codec.encode(text).tolist() == ids
    assert codec.decode(ids).endswith("<unk>")


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(DataError, match="not valid Unicode at character 1"):
        CHARS.encode("a\ud800")


def test_facts() -> None:
    facts = Codec("classification", "steps", labels=("a", "b"), columns=("0", "1", "2")).facts(
        Sequences(np.zeros((6, 3)), np.array([0, 2, 4]), np.array([2, 2, 5]))
    )
    assert (facts.features, facts.vocabulary, facts.labels, facts.sequences, facts.steps, facts.longest) == (3, 0, ("a", "b"), 3, 9, 5)
    assert facts.histogram == ((2, 2), (5, 1))
    assert FULL.facts(Sequences(np.zeros((2, 2)), np.array([0]), np.array([2]))).outputs == 1


def test_missing_tokenizers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any, **named: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UserError, match=r"pip install 'carrywave\[bpe\]'"):
        tokenizers_library()

"""Text as a stream of tokens: wherever it is cut into pieces, the tokens are those of the naive reading of the whole."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.codec import Codec
from carrywave.data.files.source import Source
from carrywave.data.text import token_stream
from carrywave.data.text.tally import Tally
from carrywave.data.text.token_stream import encode_stream, learn_stream, pieces
from carrywave.errors import DataError
from carrywave.spec.data_spec import DataSpec

TEXTS = st.text(alphabet="ab \n\t.é€𝄞", min_size=1, max_size=50)


def source(folder: Path, content: bytes) -> Source:
    (folder / "t.txt").write_bytes(content)
    return Source("t.txt", folder / "t.txt", "text")


def spec(**values: object) -> DataSpec:
    return DataSpec.model_validate(values)


def by_frequency(tokens: list[str]) -> list[str]:
    counts = Counter(tokens)
    return sorted(counts, key=lambda token: (-counts[token], token))


def naive_words(text: str) -> list[str]:
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [word for line in lines for word in [*line.split(), "<eos>"]]


@given(text=TEXTS)
def test_chars_equal_the_naive_reading(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = source(tmp_path_factory.getbasetemp(), text.encode())
    codec = learn_stream(file, spec(), "language")
    vocabulary = by_frequency(list(text))
    assert list(codec.vocabulary) == [*vocabulary, "<unk>"]
    tokens = encode_stream(file, codec, Tally())
    assert tokens.dtype == np.uint8
    assert tokens.tolist() == [vocabulary.index(character) for character in text]
    assert codec.decode(tokens) == text


@given(text=TEXTS, size=st.integers(0, 9))
def test_words_equal_the_naive_reading(text: str, size: int) -> None:
    cut = list(pieces(text, "word", size))
    assert "".join(cut).removesuffix("\n") == text.removesuffix("\n")
    assert [word for piece in cut for word in piece.replace("\n", " <eos> ").split()] == naive_words(text)


def test_bytes_are_themselves(tmp_path: Path) -> None:
    content = bytes(range(256)) * 2
    (tmp_path / "t.txt").write_bytes(content)
    file = Source("t.txt", tmp_path / "t.txt", "text", raw=True)
    codec = learn_stream(file, spec(tokens="byte"), "language")
    tokens = encode_stream(file, codec, Tally())
    assert (codec.size, tokens.dtype, tokens.tobytes()) == (256, np.uint8, content)


def test_bpe_does_not_depend_on_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    text = "the cat sat on the mat\n\n  the  dog näht the €\n" * 20 + "no line end"
    assert len(list(pieces(text, "bpe", 7))) > 10
    file = source(tmp_path, text.encode())
    codec = learn_stream(file, spec(tokens="bpe", vocabulary=280), "language")
    tokens = encode_stream(file, codec, Tally())
    monkeypatch.setattr(token_stream.pieces, "__defaults__", (7,))
    assert encode_stream(file, codec, Tally()).tolist() == tokens.tolist()
    assert 256 < codec.size <= 280
    assert len(tokens) < len(text.encode()) // 2
    assert codec.decode(tokens) == text
    assert Codec.from_json(codec.to_json()).encode(text).tolist() == tokens.tolist()


@pytest.mark.parametrize("tokens", ["char", "word", "byte", "bpe"])
def test_empty_file_is_refused(tmp_path: Path, tokens: str) -> None:
    file = source(tmp_path, b"")
    codec = learn_stream(file, spec(tokens=tokens), "language")
    with pytest.raises(DataError, match=r"t\.txt is empty; use a file that contains text"):
        encode_stream(file, codec, Tally())


@pytest.mark.parametrize(
    ("kind", "expected"), [("char", ["a", "\n", "\n", "a", " ", "<unk>"]), ("word", ["a", "<eos>", "<eos>", "a", "<unk>"])]
)
def test_a_token_that_train_does_not_have_is_unk(tmp_path: Path, kind: str, expected: list[str]) -> None:
    """An emoji of valid that train does not have, as tweets have them."""
    codec = learn_stream(source(tmp_path, b"a b\na ab\n"), spec(tokens=kind), "language")
    tally = Tally()
    tokens = encode_stream(source(tmp_path, "a\n\na 😀".encode()), codec, tally)
    assert [codec.vocabulary[token] for token in tokens][: len(expected)] == expected
    assert list(tally.lines("valid")) == [f"valid: 1 of {len(tokens)} tokens is unknown to the vocabulary, and read as <unk>"]


@pytest.mark.parametrize("kind", ["char", "word"])
def test_unk_is_learned_from_half_of_the_tokens_that_occur_once(tmp_path: Path, kind: str) -> None:
    once, often = "bcde", "a" * 600
    text = " ".join(often + once) + "\n"
    codec = learn_stream(source(tmp_path, text.encode()), spec(tokens=kind), "language")
    assert set(codec.vocabulary) == {"a", "b", "d", "<unk>"} | ({" ", "\n"} if kind == "char" else {"<eos>"})
    assert encode_stream(source(tmp_path, text.encode()), codec, Tally()).tolist().count(codec.tokens.unknown) == 2
    kept = learn_stream(source(tmp_path, text.encode()), spec(tokens=kind), "language", keep_rare=True)
    assert set(kept.vocabulary) > set(once)


def test_little_data_keeps_its_tokens(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(250)]  # each once: of 251 tokens, with the line end, no more than two become <unk>
    codec = learn_stream(source(tmp_path, " ".join(words).encode()), spec(tokens="word"), "language")
    assert set(words) - set(codec.vocabulary) == {"w1", "w100"}
    assert set("abc") < set(learn_stream(source(tmp_path, b"abc"), spec(), "language").vocabulary)


def test_a_text_that_has_unk_keeps_its_vocabulary(tmp_path: Path) -> None:
    """WikiText-2, whose words are all those that its authors kept."""
    text = " ".join(["<unk>", *(f"w{number}" for number in range(500))]) + "\n"
    codec = learn_stream(source(tmp_path, text.encode()), spec(tokens="word"), "language")
    assert set(codec.vocabulary) == {*text.split(), "<eos>"}
    tally = Tally()
    encode_stream(source(tmp_path, b"w1 <unk> <unk> w2 <unk>s\n"), codec, tally)
    assert (tally.unknown, tally.tokens) == (1, 6)  # <unk>s; the others are written so


def test_limited_vocabulary_has_unk(tmp_path: Path) -> None:
    train = source(tmp_path, b"a a a b b c\n")
    by_size = learn_stream(train, spec(tokens="word", vocabulary=2), "language")
    assert by_size.vocabulary == ("a", "b", "<unk>")
    by_count = learn_stream(train, spec(tokens="word", min_count=2), "language")
    assert by_count.vocabulary == ("a", "b", "<unk>")
    assert encode_stream(train, by_count, Tally()).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert learn_stream(train, spec(tokens="char", min_count=3), "language").vocabulary == (" ", "a", "<unk>")

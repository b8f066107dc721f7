"""Text as a stream of tokens: blocks may end anywhere, the tokens are those of the naive reading of the whole."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrywave.data.codec import Codec
from carrywave.data.files.arrays import MemoryAppender
from carrywave.data.files.source import Source
from carrywave.data.text.tally import Tally
from carrywave.data.text.token_stream import cut, encode_stream, finished, learn_stream
from carrywave.errors import DataError, SpecError
from carrywave.spec.data_spec import DataSpec

TEXTS = st.text(alphabet="ab \n\t.é€𝄞", min_size=1, max_size=50)


def source(folder: Path, content: bytes, block_bytes: int = 1 << 20) -> Source:
    (folder / "t.txt").write_bytes(content)
    return Source("t.txt", folder / "t.txt", "text", block_bytes=block_bytes)


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


@given(text=TEXTS, block_bytes=st.integers(1, 9))
def test_chars_equal_the_naive_reading(tmp_path_factory: pytest.TempPathFactory, text: str, block_bytes: int) -> None:
    file = source(tmp_path_factory.getbasetemp(), text.encode(), block_bytes)
    codec = learn_stream(file, spec(), "language")
    vocabulary = by_frequency(list(text))
    assert list(codec.vocabulary) == [*vocabulary, "<unk>"]
    tokens = encode_stream(file, codec, MemoryAppender)
    assert tokens.dtype == np.uint8
    assert tokens.tolist() == [vocabulary.index(character) for character in text]
    assert codec.decode(tokens) == text


@given(text=TEXTS, block_bytes=st.integers(1, 9))
def test_words_equal_the_naive_reading(tmp_path_factory: pytest.TempPathFactory, text: str, block_bytes: int) -> None:
    file = source(tmp_path_factory.getbasetemp(), text.encode(), block_bytes)
    codec = learn_stream(file, spec(tokens="word"), "language")
    words = naive_words(text)
    assert list(codec.vocabulary) == [*by_frequency(words), "<unk>"]
    tokens = encode_stream(file, codec, MemoryAppender)
    assert [codec.vocabulary[token] for token in tokens] == words


@given(content=st.binary(min_size=1, max_size=40), block_bytes=st.integers(1, 9))
def test_bytes_are_themselves(tmp_path_factory: pytest.TempPathFactory, content: bytes, block_bytes: int) -> None:
    file = source(tmp_path_factory.getbasetemp(), content, block_bytes)
    codec = learn_stream(file, spec(tokens="byte"), "language")
    tokens = encode_stream(file, codec, MemoryAppender)
    assert (codec.size, tokens.dtype, tokens.tobytes()) == (256, np.uint8, content)


def test_bpe_does_not_depend_on_blocks(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text = "the cat sat on the mat\n\n  the  dog näht the €\n" * 20 + "no line end"
    codecs, tokens = [], []
    for block_bytes in (1, 7, 1 << 20):
        file = source(tmp_path, text.encode(), block_bytes)
        codecs.append(learn_stream(file, spec(tokens="bpe", vocabulary=280), "language"))
        tokens.append(encode_stream(file, codecs[-1], MemoryAppender))
    assert codecs[0] == codecs[1] == codecs[2]
    assert 256 < codecs[0].size <= 280
    assert tokens[0].tolist() == tokens[1].tolist() == tokens[2].tolist()
    assert len(tokens[0]) < len(text.encode()) // 2
    assert codecs[0].decode(tokens[0]) == text
    assert Codec.from_json(codecs[0].to_json()).encode(text).tolist() == tokens[0].tolist()


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_only_words_are_read_in_lower_case(tmp_path: Path, kind: str) -> None:
    with pytest.raises(SpecError, match=f"data.lowercase does not apply to {kind} tokens; set data.tokens=word"):
        learn_stream(source(tmp_path, b"A b"), spec(tokens=kind, lowercase=True), "language")


def test_text_for_bpe_is_checked(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError, match=r"t\.txt is not text in utf-8 \(byte 2\)"):
        learn_stream(source(tmp_path, b"ab\xff"), spec(tokens="bpe"), "language")


@pytest.mark.parametrize("tokens", ["char", "word", "byte", "bpe"])
def test_empty_file_is_refused(tmp_path: Path, tokens: str) -> None:
    file = source(tmp_path, b"")
    codec = learn_stream(file, spec(tokens=tokens), "language")
    with pytest.raises(DataError, match=r"t\.txt is empty; use a file that contains text"):
        encode_stream(file, codec, MemoryAppender)


@pytest.mark.parametrize("block_bytes", [1, 4, 100])
@pytest.mark.parametrize(
    ("kind", "expected"), [("char", ["a", "\n", "\n", "a", " ", "<unk>"]), ("word", ["a", "<eos>", "<eos>", "a", "<unk>"])]
)
def test_a_token_that_train_does_not_have_is_unk(tmp_path: Path, kind: str, expected: list[str], block_bytes: int) -> None:
    """An emoji of valid that train does not have, as tweets have them."""
    codec = learn_stream(source(tmp_path, b"a b\na ab\n"), spec(tokens=kind), "language")
    tally = Tally()
    tokens = encode_stream(source(tmp_path, "a\n\na 😀".encode(), block_bytes), codec, MemoryAppender, tally)
    assert [codec.vocabulary[token] for token in tokens][: len(expected)] == expected
    assert list(tally.lines("valid")) == [f"valid: 1 of {len(tokens)} tokens is unknown to the vocabulary, and read as <unk>"]


@pytest.mark.parametrize("kind", ["char", "word"])
def test_unk_is_learned_from_half_of_the_tokens_that_occur_once(tmp_path: Path, kind: str) -> None:
    once, often = "bcde", "a" * 600
    text = " ".join(often + once) + "\n"
    codec = learn_stream(source(tmp_path, text.encode()), spec(tokens=kind), "language")
    assert set(codec.vocabulary) == {"a", "b", "d", "<unk>"} | ({" ", "\n"} if kind == "char" else {"<eos>"})
    assert encode_stream(source(tmp_path, text.encode()), codec, MemoryAppender).tolist().count(codec.tokens.unknown) == 2
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
    encode_stream(source(tmp_path, b"w1 <unk> <unk> w2 <unk>s\n"), codec, MemoryAppender, tally)
    assert (tally.unknown, tally.tokens) == (1, 6)  # <unk>s; the others are written so


def test_limited_vocabulary_has_unk(tmp_path: Path) -> None:
    train = source(tmp_path, b"a a a b b c\n")
    by_size = learn_stream(train, spec(tokens="word", vocabulary=2), "language")
    assert by_size.vocabulary == ("a", "b", "<unk>")
    by_count = learn_stream(train, spec(tokens="word", min_count=2), "language")
    assert by_count.vocabulary == ("a", "b", "<unk>")
    assert encode_stream(train, by_count, MemoryAppender).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert learn_stream(train, spec(tokens="char", min_count=3), "language").vocabulary == (" ", "a", "<unk>")


def test_unk_of_the_text_itself_counts(tmp_path: Path) -> None:
    codec = learn_stream(source(tmp_path, b"a <unk> a\n"), spec(tokens="word"), "language")
    assert codec.vocabulary == ("a", "<eos>", "<unk>")
    assert codec.encode("a zebra").tolist() == [0, 2]


def test_equal_counts_are_ordered_by_token(tmp_path: Path) -> None:
    assert learn_stream(source(tmp_path, b"cab"), spec(), "language").vocabulary == ("a", "b", "c", "<unk>")


@pytest.mark.parametrize(("size", "dtype"), [(255, np.uint8), (256, np.uint16), (65536, np.int32)])
def test_dtype_by_vocabulary(tmp_path: Path, size: int, dtype: type) -> None:
    """With <unk>."""
    text = "".join(chr(0x10000 + number) for number in range(size)) * 2
    file = source(tmp_path, text.encode())
    tokens = encode_stream(file, learn_stream(file, spec(), "language"), MemoryAppender)
    assert tokens.dtype == dtype
    assert tokens.tolist() == [*range(size)] * 2


def test_bytes_have_no_vocabulary_to_limit(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"data.min_count does not apply to byte tokens"):
        learn_stream(source(tmp_path, b"a"), spec(tokens="byte", min_count=2), "language")


def test_cut_ends_pieces_at_borders() -> None:
    assert list(cut(["ab c", "d", "e\nf"], " \n")) == ["ab ", "cde\n", "f"]
    assert list(finished(["a", "b"])) == ["a", "b", "\n"]
    assert list(finished(["a\n"])) == ["a\n"]
    assert list(finished([])) == []

"""Tokenizers that map text to token ids and back: characters, words, bytes, byte pairs, or integers that already are ids.

Each kind encodes a text in one call, with <unk> for a token outside the vocabulary. `token_stream` decides where a text may be
cut without changing its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from carrywave.errors import UserError

TokenizerKind = Literal["char", "word", "byte", "bpe", "int"]
Ids = NDArray[np.int32]

UNKNOWN = "<unk>"
END = "<eos>"
CODE_POINTS = 0x110000
WRITTEN_UNKNOWN = re.compile(rf"(?<!\S){UNKNOWN}(?!\S)")  # as a word of a text


class Chars:
    """Unicode code points, looked up in a single table without a Python loop over characters."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.size = len(vocabulary)
        self._vocabulary = list(vocabulary)
        self.unknown = self._vocabulary.index(UNKNOWN)
        self._table = code_table(vocabulary, 0, self.unknown)

    def ids(self, text: str) -> Ids:
        """Return the token ids of a text."""
        ids: Ids = self._table[code_points(text)]
        return ids

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Decode token ids to text."""
        return "".join(self._vocabulary[int(number)] for number in ids)


class Words:
    """Words separated by white space; each line end is the token <eos>. `lowercase`: the vocabulary has words in lower case only."""

    def __init__(self, vocabulary: Sequence[str], *, lowercase: bool = False) -> None:
        self.size = len(vocabulary)
        self._lowercase = lowercase
        self._vocabulary = list(vocabulary)
        self._numbers = {word: number for number, word in enumerate(vocabulary)}
        self.unknown = self._numbers[UNKNOWN]

    def ids(self, text: str) -> Ids:
        """Return the token ids of a text."""
        return self.word_ids(split_words(text))

    def word_ids(self, words: Sequence[str]) -> Ids:
        """Return the token ids of words."""
        looked_up = map(str.lower, words) if self._lowercase else words
        return np.fromiter(map(self._numbers.get, looked_up, repeat(self.unknown)), np.int32, len(words))

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Join words with spaces, with a line end for each <eos>."""
        lines: list[list[str]] = [[]]
        for word in (self._vocabulary[int(number)] for number in ids):
            if word == END:
                lines.append([])
            else:
                lines[-1].append(word)
        return "\n".join(" ".join(line) for line in lines)


class Bytes:
    """The utf-8 bytes of the text: 256 tokens, never unknown."""

    size, unknown = 256, -1

    def ids(self, text: str) -> Ids:
        """Return the bytes of a text."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Decode bytes to text; invalid utf-8 becomes the replacement character."""
        return bytes(int(number) for number in ids).decode("utf-8", "replace")


class BytePairs:
    """Byte-level BPE by the `tokenizers` library; lines are tokenised separately, so cutting at line ends changes nothing."""

    LINES = 4096  # encoded per call; bounds the library's memory use
    unknown = -1

    def __init__(self, json_text: str) -> None:
        self._tokenizer = tokenizers_library().Tokenizer.from_str(json_text)
        self.size = int(self._tokenizer.get_vocab_size())

    def ids(self, text: str) -> Ids:
        """Return the token ids of a text; at byte level nothing is unknown."""
        *whole, last = text.split("\n")
        lines = [line + "\n" for line in whole] + ([last] if last else [])
        parts = [np.empty(0, np.int32)]
        for first in range(0, len(lines), self.LINES):
            encoded = self._tokenizer.encode_batch_fast(lines[first : first + self.LINES], add_special_tokens=False)
            parts += [np.array(one.ids, np.int32) for one in encoded]
        return np.concatenate(parts)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Decode token ids to text."""
        return str(self._tokenizer.decode([int(number) for number in ids], skip_special_tokens=False))


class NumberTokens:
    """Integers that already are token ids; the last one stands for all that are larger than any in train."""

    def __init__(self, size: int) -> None:
        self.size, self.unknown = size, size - 1

    def ids(self, text: str) -> Ids:
        """Parse integers separated by white space."""
        return np.array([min(int(word), self.unknown) if word.isdecimal() else self.unknown for word in text.split()], np.int32)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Join the numbers with spaces."""
        return " ".join(UNKNOWN if number == self.unknown else str(int(number)) for number in ids)


Tokens = Chars | Words | Bytes | BytePairs | NumberTokens
"""Each has a `size`, the number of <unk> or -1 if nothing can be `unknown`, and maps a text to `ids` and back."""


def code_points(text: str) -> NDArray[Any]:
    """Return the code points of a text as an array."""
    return np.frombuffer(text.encode("ascii"), np.uint8) if text.isascii() else np.frombuffer(text.encode("utf-32-le"), "<u4")


def code_table(characters: Sequence[str], first: int, other: int) -> NDArray[np.int32]:
    """By code point: the place of each character, counted from `first`, and `other` for any that is not among them, such as <unk>."""
    table = np.full(CODE_POINTS, other, np.int32)
    for number, character in enumerate(characters, first):
        if character != UNKNOWN:
            table[ord(character)] = number
    return table


def split_words(text: str) -> list[str]:
    """Split a text into words, with <eos> for each line end; an unterminated last line has none."""
    return text.replace("\n", f" {END} ").split()


def tokenizers_library() -> Any:
    """Import the optional `tokenizers` package."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            "data.tokens=bpe needs the package tokenizers, which is not installed; run: pip install 'carrywave[bpe]'"
        ) from error
    return tokenizers


def make(kind: TokenizerKind, vocabulary: Sequence[str], bpe: str | None, size: int, *, lowercase: bool = False) -> Tokens:
    """Create the tokenizer of a kind."""
    if kind == "char":
        return Chars(vocabulary)
    if kind == "word":
        return Words(vocabulary, lowercase=lowercase)
    if kind == "byte":
        return Bytes()
    return NumberTokens(size) if kind == "int" else BytePairs(bpe or "")

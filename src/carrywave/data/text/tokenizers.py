"""How text becomes tokens and back: characters, words, bytes, byte pairs, or numbers that are tokens already.

Each kind maps a text to token numbers at once, with -1 for a token that the vocabulary does not hold. What may be cut
where, so that pieces of a text give the tokens of the whole, is the business of `text`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from carrywave.errors import DataError, UserError

Kind = Literal["char", "word", "byte", "bpe", "int"]
Ids = NDArray[np.int32]

UNKNOWN = "<unk>"
END = "<eos>"
CODE_POINTS = 0x110000


class Tokens(Protocol):
    """A vocabulary at work."""

    size: int

    def ids(self, text: str) -> Ids:
        """Token numbers of a text, -1 where the vocabulary has none."""

    def name(self, text: str, index: int) -> str:
        """The token at a place of the result of `ids`, as it stands in the text."""

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of token numbers."""


class Chars:
    """Unicode code points, looked up in one table: no loop over characters."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.size = len(vocabulary)
        self._vocabulary = list(vocabulary)
        unknown = self._vocabulary.index(UNKNOWN) if UNKNOWN in self._vocabulary else -1
        self._table = np.full(CODE_POINTS, unknown, np.int32)
        for number, token in enumerate(vocabulary):
            if token != UNKNOWN:
                self._table[ord(token)] = number

    def ids(self, text: str) -> Ids:
        """Token numbers of a text, -1 where the vocabulary has none."""
        found: Ids = self._table[code_points(text)]
        return found

    def name(self, text: str, index: int) -> str:
        """The character at a place."""
        return text[index]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of token numbers."""
        return "".join(self._vocabulary[int(number)] for number in ids)


class _WordNumbers(dict[str, int]):
    def __init__(self, vocabulary: Sequence[str]) -> None:
        super().__init__((word, number) for number, word in enumerate(vocabulary))
        self.unknown = self.get(UNKNOWN, -1)

    def __missing__(self, word: str) -> int:
        return self.unknown


class Words:
    """Words between white space; each line end is the token <eos>."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.size = len(vocabulary)
        self._vocabulary = list(vocabulary)
        self._numbers = _WordNumbers(vocabulary)

    def ids(self, text: str) -> Ids:
        """Token numbers of a text, -1 where the vocabulary has none."""
        return self.word_ids(split_words(text))

    def word_ids(self, words: Sequence[str]) -> Ids:
        """Token numbers of words."""
        return np.fromiter(map(self._numbers.__getitem__, words), np.int32, len(words))

    def name(self, text: str, index: int) -> str:
        """The word at a place."""
        return split_words(text)[index]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The words with a space between them and a line end for each <eos>."""
        lines: list[list[str]] = [[]]
        for word in (self._vocabulary[int(number)] for number in ids):
            if word == END:
                lines.append([])
            else:
                lines[-1].append(word)
        return "\n".join(" ".join(line) for line in lines)


class Bytes:
    """The bytes of the text in utf-8: 256 tokens, and none is ever unknown."""

    size = 256

    def ids(self, text: str) -> Ids:
        """The bytes of a text."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def name(self, text: str, index: int) -> str:
        """The byte at a place."""
        return repr(text.encode()[index : index + 1])

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of bytes; what is not utf-8 shows as the replacement character."""
        return bytes(int(number) for number in ids).decode("utf-8", "replace")


class BytePairs:
    """Byte-level byte pairs by the `tokenizers` library; each line is tokenised on its own, so cuts at line ends change nothing."""

    LINES = 4096  # encoded at once; bounds what the library holds in memory

    def __init__(self, json_text: str) -> None:
        try:
            self._tokenizer = tokenizers_library().Tokenizer.from_str(json_text)
        except UserError:
            raise
        except Exception as error:  # the library has no error class of its own
            raise DataError(f"the byte-pair vocabulary cannot be read ({str(error)[:80]}); prepare the data again") from error
        self.size = int(self._tokenizer.get_vocab_size())

    def ids(self, text: str) -> Ids:
        """Token numbers of a text; bytes make every text known."""
        *whole, last = text.split("\n")
        lines = [line + "\n" for line in whole] + ([last] if last else [])
        parts = [np.empty(0, np.int32)]
        for first in range(0, len(lines), self.LINES):
            encoded = self._tokenizer.encode_batch_fast(lines[first : first + self.LINES], add_special_tokens=False)
            parts += [np.array(one.ids, np.int32) for one in encoded]
        return np.concatenate(parts)

    def name(self, text: str, index: int) -> str:
        """The piece at a place."""
        return str(self._tokenizer.id_to_token(int(self.ids(text)[index])))

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of token numbers."""
        return str(self._tokenizer.decode([int(number) for number in ids], skip_special_tokens=False))


class NumberTokens:
    """Whole numbers that are tokens as they stand."""

    def __init__(self, size: int) -> None:
        self.size = size

    def ids(self, text: str) -> Ids:
        """Numbers between white space, -1 for what is no token."""
        found = [int(word) if word.isdecimal() else -1 for word in text.split()]
        return np.array([number if number < self.size else -1 for number in found], np.int32)

    def name(self, text: str, index: int) -> str:
        """The number at a place."""
        return text.split()[index]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The numbers with a space between them."""
        return " ".join(str(int(number)) for number in ids)


def code_points(text: str) -> NDArray[Any]:
    """The code points of a text as an array."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def split_words(text: str) -> list[str]:
    """Words and an <eos> for each line end; an unfinished last line has none."""
    return text.replace("\n", f" {END} ").split()


def tokenizers_library() -> Any:
    """The optional `tokenizers` package."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            "data.tokens=bpe needs the package tokenizers, which is not installed; run: pip install 'carrywave[bpe]'"
        ) from error
    return tokenizers


def make(kind: Kind, vocabulary: Sequence[str], bpe: str | None, size: int) -> Tokens:
    """The tokens of a kind."""
    if kind == "char":
        return Chars(vocabulary)
    if kind == "word":
        return Words(vocabulary)
    if kind == "byte":
        return Bytes()
    if kind == "int":
        return NumberTokens(size)
    if bpe is None:
        raise DataError("a byte-pair vocabulary holds no tokenizer; prepare the data again")
    return BytePairs(bpe)

"""The characters of words, as a model reads them beside a word's own number: a row of codes for each word, 0 after its last character.

Codes come from the spelling in the data, also where words are lower-cased or unknown to the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from carrywave.data.text.tokenizers import code_table

EDGE, OTHER = 0, 1  # codes: no character, but the edge of a word; a character that train does not have
FIRST = 2  # the code of the first known character


def learn(words: Iterable[str], longest: int) -> tuple[tuple[str, ...], int]:
    """The characters of these words in order, and how many of a word are read: all of the longest one, but at most `longest`."""
    characters: set[str] = set()
    length = 1
    for word in words:
        characters.update(word)
        length = max(length, len(word))
    return tuple(sorted(characters)), min(length, longest)


class Spelling:
    """Codes for the characters of words, `length` for each. A longer word is read without its middle."""

    def __init__(self, characters: Sequence[str], length: int) -> None:
        self.length = length
        self._table = code_table(characters, FIRST, OTHER)

    def codes(self, words: Sequence[str]) -> NDArray[np.int32]:
        """The codes [words, length]."""
        head, tail = (self.length + 1) // 2, self.length // 2
        read = [word if len(word) <= self.length else word[:head] + word[len(word) - tail :] for word in words]
        points = np.frombuffer("".join(read).encode("utf-32-le", "surrogatepass"), "<u4")
        lengths = np.fromiter(map(len, read), np.int64, len(read))
        codes = np.full((len(read), self.length), EDGE, np.int32)
        codes[np.arange(self.length) < lengths[:, None]] = self._table[points]
        return codes

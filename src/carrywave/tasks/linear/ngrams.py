"""What stands in texts of words: words, pairs of neighbours and pieces of words, each weighed by how rare it is.

Words and pairs of a text together, and its pieces together, have length 1, as `TfidfVectorizer` of scikit-learn makes them. A piece is
three to five characters of a word, whose ends count as characters; of words that the vocabulary does not have, those that its words have.

Shapes: N text, M token, F feature, V answer, E entry (a feature of a text).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.data.sequences import Sequences
from carrywave.data.text.tokenizers import END, UNKNOWN

KEYS = "keys"
SHORTEST, LONGEST = 3, 5  # of a piece
BLOCK_TOKENS = 1 << 18  # of the texts that are looked at together

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Entries:
    """The features of some texts: those of text n are `places[starts[n] : starts[n + 1]]`, each with how much it counts."""

    starts_N: Tensor
    places_E: Tensor
    values_E: Tensor

    def times(self, weights_FV: Tensor) -> Tensor:
        """[N, V]: the features times the weights."""
        return torch.nn.functional.embedding_bag(
            self.places_E, weights_FV, self.starts_N, mode="sum", per_sample_weights=self.values_E.to(weights_FV.dtype)
        )

    def turned(self, count: int) -> Entries:
        """The same by feature: the texts that have it."""
        many_N = torch.diff(self.starts_N, append=torch.tensor([len(self.places_E)]))
        texts_E = torch.repeat_interleave(many_N)
        order_E = torch.argsort(self.places_E, stable=True)
        starts_F = torch.searchsorted(self.places_E[order_E], torch.arange(count))
        return Entries(starts_F, texts_E[order_E], self.values_E[order_E])


@dataclass(frozen=True)
class NGrams:
    """`keys`: numbers of words, of pairs after them and of pieces after these, in increasing order; `rarity`: what each is worth."""

    vocabulary: Sequence[str]
    keys_F: Ints
    rarity_F: NDArray[np.float32]
    piece_starts: Ints  # of each word among `pieces`
    pieces: Ints
    numbers: Mapping[str, int]  # of pieces

    @classmethod
    def fit(cls, data: Sequences, rows: Ints, vocabulary: Sequence[str], count: int) -> Self:
        """The features that occur in most of these texts, at most so many."""
        known = pieces_of(vocabulary)
        bare = cls(vocabulary, np.zeros(0, np.int64), np.zeros(0, np.float32), *known)
        found = [np.zeros(0, np.int64)]
        for block in _blocks(data, rows):
            texts, keys = bare._keys(data, rows[block])
            order = np.lexsort((texts, keys))
            texts, keys = texts[order], keys[order]
            found.append(keys[np.flatnonzero((np.diff(keys, prepend=-1) != 0) | (np.diff(texts, prepend=-1) != 0))])
        keys_F, texts_F = np.unique(np.concatenate(found), return_counts=True)
        if len(keys_F) > count:
            kept = np.sort(np.lexsort((keys_F, -texts_F))[:count])
            keys_F, texts_F = keys_F[kept], texts_F[kept]
        rarity = np.log((1.0 + len(rows)) / (1.0 + texts_F)) + 1.0
        return cls(vocabulary, keys_F, rarity.astype(np.float32), *known)

    @property
    def count(self) -> int:
        """The number of features."""
        return len(self.keys_F)

    def entries(self, data: Sequences, rows: Ints) -> Entries:
        """The features of some texts."""
        parts = [self._entries(data, rows[block], block[0]) for block in _blocks(data, rows)]
        texts, places, values = (np.concatenate(each) for each in zip(*parts, strict=True))
        return Entries(torch.from_numpy(np.searchsorted(texts, np.arange(len(rows)))), torch.from_numpy(places), torch.from_numpy(values))

    def products(self, data: Sequences, weights_FV: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, block by block, the places [N] of texts and their features times the weights [N, V]."""
        rows = np.arange(len(data))
        for block in _blocks(data, rows):
            yield torch.from_numpy(block), self.entries(data, block).times(weights_FV)

    def _entries(self, data: Sequences, rows: Ints, first: int) -> tuple[Ints, Ints, NDArray[np.float32]]:
        """In the order of texts: the text, the feature and its value."""
        texts, keys = self._keys(data, rows)
        places = np.minimum(np.searchsorted(self.keys_F, keys), max(len(self.keys_F) - 1, 0))
        known = np.flatnonzero(self.keys_F[places] == keys) if len(self.keys_F) else np.zeros(0, np.int64)
        codes, many = np.unique(texts[known] * max(len(self.keys_F), 1) + places[known], return_counts=True)
        texts, places = np.divmod(codes, max(len(self.keys_F), 1))
        values = (1.0 + np.log(many)) * self.rarity_F[places]
        groups = 2 * texts + (self.keys_F[places] >= self._first_piece)
        length = np.sqrt(np.bincount(groups, values**2, minlength=2 * len(rows)))
        return texts + first, places, (values / length[groups]).astype(np.float32)

    @property
    def _first_piece(self) -> int:
        size = len(self.vocabulary)
        return size + size * size

    def _keys(self, data: Sequences, rows: Ints) -> tuple[Ints, Ints]:
        """The number of the text and the key of everything that stands in these texts, as often as it does."""
        lengths, size = data.lengths[rows], len(self.vocabulary)
        texts = np.repeat(np.arange(len(rows)), lengths)
        steps = np.arange(len(texts)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        at = data.starts[rows][texts] + steps
        words = np.asarray(data.tokens[at], np.int64)
        pairs = np.flatnonzero(np.diff(texts) == 0)
        many = self.piece_starts[words + 1] - self.piece_starts[words]
        within = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
        pieces = self.pieces[np.repeat(self.piece_starts[words], many) + within]
        others, pieces_of_others = self._unread(data, at, texts, words)
        keys = [words, size + words[pairs] * size + words[pairs + 1], self._first_piece + pieces, self._first_piece + pieces_of_others]
        return np.concatenate([texts, texts[pairs], np.repeat(texts, many), others]), np.concatenate(keys)

    def _unread(self, data: Sequences, at: Ints, texts: Ints, words: Ints) -> tuple[Ints, Ints]:
        """The text and the number of each piece of words that the vocabulary does not have."""
        found = list[tuple[int, int]]()
        if data.unread is not None and UNKNOWN in self.vocabulary:
            unknown = self.vocabulary.index(UNKNOWN)
            places = np.flatnonzero(words == unknown)
            order = np.searchsorted(np.flatnonzero(data.tokens == unknown), at[places])
            for text, points in zip(texts[places].tolist(), data.unread[order].tolist(), strict=True):
                word = "".join(map(chr, points)).rstrip("\0")
                found += [(text, self.numbers[piece]) for piece in pieces_in(word) if piece in self.numbers]
        return tuple(np.array(found, np.int64).reshape(-1, 2).T)  # type: ignore[return-value]

    def tensors(self) -> dict[str, Tensor]:
        """What a file holds of it."""
        return {KEYS: torch.from_numpy(self.keys_F), "rarity": torch.from_numpy(self.rarity_F)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], vocabulary: Sequence[str]) -> Self:
        """What `tensors` gave, for texts of this vocabulary."""
        return cls(vocabulary, tensors[KEYS].numpy(), tensors["rarity"].numpy(), *pieces_of(vocabulary))


def pieces_of(vocabulary: Sequence[str]) -> tuple[Ints, Ints, Mapping[str, int]]:
    """Where the pieces of each word begin, the numbers of the pieces, which count on as they first occur, and all of them."""
    numbers: dict[str, int] = {}
    starts, found = [0], list[int]()
    for word in vocabulary:
        found += [numbers.setdefault(piece, len(numbers)) for piece in pieces_in(word)]
        starts.append(len(found))
    return np.array(starts, np.int64), np.array(found, np.int64), numbers


def pieces_in(word: str) -> list[str]:
    """The pieces of a word, as often as it has them."""
    whole = "" if word in (UNKNOWN, END) else f" {word} "
    return [whole[place : place + length] for length in range(SHORTEST, LONGEST + 1) for place in range(len(whole) - length + 1)]


def _blocks(data: Sequences, rows: Ints) -> list[Ints]:
    """Places in `rows` of texts that are looked at together."""
    ends = np.cumsum(data.lengths[rows]) // BLOCK_TOKENS
    return [block for block in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(ends)) + 1) if len(block)]

"""`WordScores`: a score of each label for every word, from a table into which features of the word and its neighbours are hashed.

It is what a linear tagger reads: the word in lower case and as it is written, its ends, its shape (runs of capitals, small letters, digits
and other characters, each counted up to two), two words on both sides with their shapes, and pairs of neighbours. Features are hashed from
the codes of characters, so that words which the vocabulary lacks have theirs; two that share a row share its scores. In training half of
the features are left out, at random: a word that was seen is known by each of them, and a new one has only some.

All numbers are whole and below 2**63, so that rows are the same on every device.

Shapes: T time, B lane, L characters of a word, F features, V labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from carrywave.data.text.spelling import EDGE, FIRST
from carrywave.kernels.deferred_gradients import embedding
from carrywave.model.dropout import Dropout

PRIME, BASE, FACTOR = (1 << 31) - 1, 16807, 48271  # the powers of the last two take all values below the prime
AFFIX = 4  # characters at each end of a word, at most
LEFT_OUT = 0.5  # share of the features, in training
CAPITAL, SMALL, DIGIT = 2, 3, 4  # kinds of characters; each other one is a kind of its own, from 5 on


class WordScores(nn.Module):
    """Scores in a table of `rows`. `characters` are those that the codes from `FIRST` on stand for, of `codes` in all; of a word, `length`
    are read.
    """

    def __init__(self, rows: int, labels: int, characters: Sequence[str], codes: int, length: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(rows, labels))
        self.dropout = Dropout(LEFT_OUT, name="word_scores")
        known = {character: code for code, character in enumerate(characters, FIRST)}
        small, kind = list(range(codes)), [code and code + DIGIT for code in range(codes)]
        for character, code in known.items():
            small[code] = known.get(character.lower(), code)
            kind[code] = CAPITAL if character.isupper() else SMALL if character.islower() else DIGIT if character.isdigit() else kind[code]
        # Not saved: they follow from the characters.
        self.small: Tensor
        self.kind: Tensor
        self.powers: Tensor
        self.register_buffer("small", torch.tensor(small), persistent=False)
        self.register_buffer("kind", torch.tensor(kind), persistent=False)
        self.register_buffer("powers", torch.tensor([pow(BASE, 1 + power, PRIME) for power in range(length)]), persistent=False)

    def forward(self, codes_TBL: Tensor, lengths_B: Tensor) -> Tensor:
        """[T, B, V], from the codes of characters of each word; whole sequences."""
        rows_TBF = self.rows(codes_TBL, lengths_B)
        kept_TBF = self.dropout(torch.ones_like(rows_TBF, dtype=self.table.dtype))
        scores_TBV: Tensor = (embedding(rows_TBF, self.table) * kept_TBF[..., None]).sum(-2)
        return scores_TBV

    def rows(self, codes_TBL: Tensor, lengths_B: Tensor) -> Tensor:
        """The row of each feature of each word [T, B, F]."""
        steps, length = len(codes_TBL), codes_TBL.shape[-1]
        real_TB = torch.arange(steps, device=codes_TBL.device)[:, None] < lengths_B
        codes_TBL = torch.where(real_TB[..., None], codes_TBL, EDGE)
        small_TBL, kind_TBL = self.small[codes_TBL], self.kind[codes_TBL]
        last_TB1 = (codes_TBL != EDGE).sum(-1, keepdim=True) - 1
        places_TBA = last_TB1 - torch.arange(min(AFFIX, length), device=codes_TBL.device)
        end_TBA = torch.where(places_TBA >= 0, small_TBL.gather(-1, places_TBA.clamp(min=0)), EDGE)
        # Of three or more of a kind in a row, two count.
        before = [pad(kind_TBL, (back, 0))[..., :length] for back in (1, 2)]
        counts_TBL = (kind_TBL != EDGE) & ~((kind_TBL == before[0]) & (kind_TBL == before[1]))
        shape = self._hash(torch.where(counts_TBL, kind_TBL, EDGE), (counts_TBL.cumsum(-1) - 1).clamp(min=0))
        word, endings = self._hash(small_TBL), [self._hash(end_TBA[..., : 1 + more]) for more in range(end_TBA.shape[-1])]
        features = [word, self._hash(codes_TBL), shape, *(self._hash(small_TBL[..., : 1 + more]) for more in range(len(endings))), *endings]
        features += [_later(each, by) for each in (word, shape) for by in (-2, -1, 1, 2)]
        features += [_later(endings[min(2, len(endings) - 1)], by) for by in (-1, 1)]
        shapes = _pair(_later(shape, -1), shape)
        features += [_pair(_later(word, -1), word), _pair(word, _later(word, 1)), _pair(shapes, _later(shape, 1))]
        return torch.stack([_mixed(each, number) for number, each in enumerate(features)], -1) % len(self.table)

    def _hash(self, codes_TBL: Tensor, places_TBL: Tensor | None = None) -> Tensor:
        """A number below the prime for the codes of each word at their places, by default in their order."""
        powers = self.powers[: codes_TBL.shape[-1]] if places_TBL is None else self.powers[places_TBL]
        return (codes_TBL * powers).sum(-1) % PRIME

    def extra_repr(self) -> str:
        return f"rows={len(self.table)}, labels={self.table.shape[1]}"


def _later(values_TB: Tensor, by: int) -> Tensor:
    """The value so many steps later, or earlier if that is below 0; 0 beyond the ends."""
    shift = (0, 0, -by, 0) if by < 0 else (0, 0, 0, by)
    padded = pad(values_TB, shift)
    return padded[: len(values_TB)] if by < 0 else padded[by:]


def _pair(one: Tensor, other: Tensor) -> Tensor:
    return (one * FACTOR + other * BASE) % PRIME


def mixing(number: int) -> tuple[int, int]:
    """What the values of a feature are multiplied with, and what is added to them, so that equal ones of two features have rows apart."""
    return pow(FACTOR, 1 + number, PRIME), pow(BASE, 1000 + number, PRIME)


def _mixed(values: Tensor, number: int) -> Tensor:
    factor, added = mixing(number)
    return (values * factor + added) % PRIME

"""`SpelledWords`: words and their characters [T, B, 1 + L] as vectors: each word's embedding, and beside it what its characters tell.

Characters are read by a convolution (Ma and Hovy 2016), each word by itself. So a word's vector depends on nothing but the word, and time
and lanes can be split anywhere.

Shapes: T time, B lane, L characters of a word, C width of a character's embedding, W width of what characters add.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from carrywave.data.text.spelling import EDGE
from carrywave.errors import UserError
from carrywave.kernels.deferred_gradients import embedding, linear
from carrywave.model.encoders import Embedding
from carrywave.model.over_time.front import Front

REACH = 3  # characters that a filter covers


class SpelledWords(nn.Module):
    """`words` embeds the words, of whose characters there are `codes` different ones, `length` a word."""

    def __init__(self, words: Embedding, codes: int, length: int, embedding_width: int, width: int) -> None:
        super().__init__()
        self.words = words
        self.codes, self.length = codes, length
        self.width = words.width + width
        self.characters = nn.Parameter(torch.empty(codes, embedding_width).uniform_(-(3**0.5), 3**0.5))
        self.reader = nn.Linear(REACH * embedding_width, width)

    def forward(self, x_TBL: Tensor) -> Tensor:
        """[T, B, E + W], from words in the first column and the codes of their characters in the others."""
        if x_TBL.dim() != 3 or x_TBL.shape[-1] != 1 + self.length:
            raise UserError(f"words with their characters have shape {list(x_TBL.shape)}; pass [time, lane, 1 + {self.length}]")
        words_TB, codes_TBL = x_TBL[..., 0], x_TBL[..., 1:]
        return torch.cat([self.words(words_TB), self._convolved(codes_TBL)], dim=-1)

    def _convolved(self, codes_TBL: Tensor) -> Tensor:
        """The maximum of each filter over the characters of a word, with an edge on both sides; 0 for a word without characters."""
        there_TBL = codes_TBL != EDGE
        vectors_TBLC = embedding(functional.pad(codes_TBL, (REACH // 2, REACH // 2), value=EDGE), self.characters)
        windows = torch.cat([vectors_TBLC[:, :, at : at + self.length] for at in range(REACH)], dim=-1)
        y_TBLW = linear(windows, self.reader.weight, self.reader.bias).masked_fill(~there_TBL[..., None], -torch.inf)
        return torch.where(there_TBL[..., :1], y_TBLW.amax(2), 0.0)

    def extra_repr(self) -> str:
        return f"characters={self.codes}, length={self.length}"


def token_embedding(encoder: nn.Module | None) -> Embedding | None:
    """The embedding of tokens in an encoder: behind a front, and beside characters."""
    encoder = encoder.step_encoder if isinstance(encoder, Front) else encoder
    encoder = encoder.words if isinstance(encoder, SpelledWords) else encoder
    return encoder if isinstance(encoder, Embedding) else None

"""Encoders map each step's raw input to the first layer's input, one step at a time, so that time can be split anywhere.

Shapes: T time, B lane, E embedding width, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.kernels import random
from carrywave.kernels.deferred_gradients import embedding
from carrywave.spec.step_inputs import StepInputs


class Embedding(nn.Module):
    """Embeds tokens [T, B] as vectors [T, B, E]. `dropout_words` drops a word at all of its occurrences in a batch.

    `rare`: (first, unknown, share): in training, this share of the tokens from the first on, which occur once, is read as the unknown one.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        dropout_words: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if vocabulary < 1 or width < 1:
            raise UserError(f"an embedding got vocabulary={vocabulary} and width={width}; both must be at least 1")
        if not 0.0 <= dropout_words < 1.0:
            raise UserError(f"dropout_words={dropout_words} must be at least 0 and below 1; 0 switches it off")
        self.vocabulary = vocabulary
        self.width = width
        self.dropout_words = dropout_words
        self.rare: tuple[int, int, float] | None = None
        self.path = "encoder"  # prefix of the names of its random sites
        self.weight = nn.Parameter(torch.empty(vocabulary, width, device=device, dtype=dtype).uniform_(-(3**0.5), 3**0.5))

    def forward(self, tokens_TB: Tensor) -> Tensor:
        weight = self.weight
        if self.training and self.rare is not None:
            first, unknown, share = self.rare
            hidden_TB = (tokens_TB >= first) & (self._kept("rare", share, tokens_TB, weight.dtype) == 0)
            tokens_TB = tokens_TB.masked_fill(hidden_TB, unknown)
        x_TBE = embedding(tokens_TB, weight)
        if not self.training or not self.dropout_words:
            return x_TBE
        return x_TBE * self._kept("words", self.dropout_words, tokens_TB, x_TBE.dtype)[..., None]

    def _kept(self, site: str, share: float, tokens_TB: Tensor, dtype: torch.dtype) -> Tensor:
        """0 where a token is dropped. Keyed by row number, so a mask for the whole matrix is never needed."""
        scope = random.current_scope()
        key = random.draw().to(tokens_TB.device) if scope is None or scope.key is None else scope.key
        return random.keep(random.fold(key, random.site(f"{self.path}.{site}")), share, tokens_TB, dtype=dtype)

    def extra_repr(self) -> str:
        return f"{self.vocabulary}, {self.width}" + (f", dropout_words={self.dropout_words}" if self.dropout_words else "")


class Numbers(nn.Module):
    """Passes numbers [T, B, F] through unchanged: the LSTM casts them to its dtype and masks their padding."""

    def __init__(self, features: int) -> None:
        super().__init__()
        if features < 1:
            raise UserError(f"a numeric input has {features} features; use at least 1")
        self.width = features

    def forward(self, x_TBF: Tensor) -> Tensor:
        if x_TBF.shape[-1] != self.width:
            raise UserError(f"a step has {x_TBF.shape[-1]} features, but the model reads {self.width}; pass the features it was built for")
        return x_TBF

    def extra_repr(self) -> str:
        return str(self.width)


class Tables(nn.ParameterList):
    """The embeddings of categorical columns; the first row of each is that of values that train does not contain."""


class Features(nn.Module):
    """Numbers and categories [T, B, F]: a step's numbers pass through, each of its codes becomes a row of its column's embedding.

    Code 0 stands for a value that train does not contain; its row starts at zero and, as nothing trains it, stays there.
    """

    def __init__(self, inputs: StepInputs) -> None:
        super().__init__()
        self.inputs = inputs
        self.width = inputs.width
        self.tables = Tables(nn.Parameter(torch.empty(values, width).uniform_(-0.1, 0.1)) for values, width in inputs.tables)

    def forward(self, x_TBF: Tensor) -> Tensor:
        numbers, places = self.inputs.numbers, self.inputs.places
        if x_TBF.shape[-1] != numbers + len(places):
            fact = f"a step has {x_TBF.shape[-1]} features, but the model reads {numbers} numbers and {len(places)} categories"
            raise UserError(f"{fact}; pass the features it was built for")
        dtype = torch.promote_types(x_TBF.dtype, self.tables[0].dtype)
        parts = [x_TBF[..., :numbers].to(dtype)]
        codes_TBK = x_TBF[..., numbers:].to(torch.int64)
        parts += [embedding(codes_TBK[..., column], self.tables[table]).to(dtype) for column, table in enumerate(places)]
        return torch.cat(parts, dim=-1)

    def extra_repr(self) -> str:
        tables = ", ".join(f"{values} x {width}" for values, width in self.inputs.tables)
        return f"{self.inputs.numbers}, {tables}"

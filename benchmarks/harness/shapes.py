"""The shapes of what benchmarks time: a stack of equal layers and its batch; and a language model around such a stack.

Our models are imported where they are built, because kernels can be timed where only torch is installed.

Shapes: T time, B lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from carrywave.model.model import Model

BATCHES = 4  # of a language model, cycled through


@dataclass(frozen=True)
class StackShape:
    """A stack of layers as wide as their input, and the lanes and steps of its batch."""

    layers: int
    hidden: int
    lanes: int
    steps: int

    @property
    def name(self) -> str:
        """As shown in tables; short, because rows are long."""
        return f"{self.layers}x{self.hidden} B{self.lanes} T{self.steps}"


@dataclass(frozen=True)
class LanguageShape(StackShape):
    """A language model and the shape of its batches."""

    vocabulary: int
    dropout: float = 0.0
    tied: bool = False

    @property
    def name(self) -> str:
        """As shown in tables, with the vocabulary."""
        return f"{super().name} V{self.vocabulary}"

    @property
    def long_name(self) -> str:
        """As shown in tables that have room."""
        return f"{self.layers}x{self.hidden} vocabulary {self.vocabulary} adam, {self.lanes} lanes x {self.steps} steps"

    @property
    def units(self) -> int:
        """The number of units: encoder, layers and head."""
        return self.layers + 2

    def model(self) -> Model:
        """The model with its initial weights, identical in every process and loop."""
        from carrywave.model.dropout import Dropout
        from carrywave.model.encoders import Embedding
        from carrywave.model.heads.classes import Softmax
        from carrywave.model.lstm import LSTM
        from carrywave.model.model import Model

        between: dict[str, Any] = {name: Dropout(self.dropout, name=name) for name in ("dropout_in", "dropout_out") if self.dropout}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            embedding = Embedding(self.vocabulary, self.hidden)
            lstm = LSTM(self.hidden, self.hidden, self.layers, dropout=self.dropout)
            head = Softmax(self.hidden, self.vocabulary, tied=embedding.weight if self.tied else None)
            return Model(embedding, lstm, head, **between)

    def batches(self, count: int = BATCHES) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets of every batch, both [T, B]."""
        random = torch.Generator().manual_seed(2)
        tokens_TB = torch.randint(self.vocabulary, (count, self.steps + 1, self.lanes), generator=random)
        return [(each[:-1].contiguous(), each[1:].contiguous()) for each in tokens_TB]

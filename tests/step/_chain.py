"""A head that needs whole sequences and their lengths."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Chain(nn.Module):
    """A linear-chain CRF: the probability of a lane's tags is known when all of its steps are."""

    reads_whole = True

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.out, self.drop = nn.Linear(width, classes), nn.Dropout(0.3)
        self.moves = nn.Parameter(torch.linspace(-1.0, 1.0, classes * classes).view(classes, classes))

    def forward(self, y: Tensor, lengths: Tensor) -> Tensor:
        assert lengths.shape == y.shape[1:2]
        out: Tensor = self.out(self.drop(y))
        return out

    def loss(self, y: Tensor, target: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        scores, tags, rows = self(y, lengths), target.clamp(min=0), torch.arange(y.shape[1], device=y.device)
        right, every = scores[0, rows, tags[0]], scores[0]
        for step in range(1, len(y)):
            real = step < lengths
            right = right + real * (self.moves[tags[step - 1], tags[step]] + scores[step, rows, tags[step]])
            every = torch.where(real[:, None], (every[:, :, None] + self.moves).logsumexp(1) + scores[step], every)
        return torch.where(lengths > 0, every.logsumexp(-1) - right, 0.0).sum(), lengths.sum()

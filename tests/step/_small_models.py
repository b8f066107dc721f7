"""A small model with dropout everywhere, and batches for it, of tokens or of whole sequences; some lanes are shorter. float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from carrywave.data.batch import IGNORED, Batch
from carrywave.kernels import random
from carrywave.model.dropout import Dropout
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.pooled import PooledSoftmax
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.model.recurrent import Recurrent

VOCABULARY, WIDTH, CLASSES = 11, 6, 3
KEY = random.key(3, 1, 4)


def build(*, cell: type[Recurrent] = LSTM, pooled: bool = False, layers: int = 2, dropout: float = 0.3, **options: Any) -> Model:
    torch.manual_seed(0)
    lstm = cell(WIDTH, WIDTH, layers, dropout=dropout, **options)
    head: nn.Module = PooledSoftmax(WIDTH, CLASSES, "mean") if pooled else Softmax(WIDTH, VOCABULARY)
    return Model(Embedding(VOCABULARY, WIDTH, 0.1), lstm, head, dropout_in=Dropout(0.2), dropout_out=Dropout(0.2)).double().train()


def batch_of(steps: int, lengths: list[int], *, pooled: bool = False, fresh: list[bool] | None = None) -> Batch:
    generator = torch.Generator().manual_seed(steps + sum(lengths))
    lanes = len(lengths)
    inputs = torch.randint(VOCABULARY, (steps, lanes), generator=generator)
    padded = torch.arange(steps)[:, None] >= torch.tensor(lengths)
    if pooled:
        targets = torch.randint(CLASSES, (lanes,), generator=generator)
        targets[torch.tensor(lengths) == 0] = IGNORED
    else:
        targets = torch.randint(VOCABULARY, (steps, lanes), generator=generator)
        targets[padded] = IGNORED
    inputs[padded] = 0
    return Batch(
        inputs=inputs,
        targets=targets,
        lengths=torch.tensor(lengths),
        fresh=torch.tensor(fresh or [True] * lanes),
        lanes=torch.arange(lanes) + 40,
        sequence=torch.arange(lanes),
        offset=torch.zeros(lanes, dtype=torch.int64),
        real=sum(lengths),
    )

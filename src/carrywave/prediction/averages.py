"""Means of what several runs predict: of probabilities, as logits that give back the mean, and of rows of forecasts.

Quantiles are averaged level by level (Vincent's average: the mean of the quantile functions), so those of the average do not cross, either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from carrywave.data.files.rows import Row


def mean_of_shares(logits: Sequence[Tensor]) -> Tensor:
    """The logarithm of the mean of the probabilities that logits [..., classes] stand for."""
    logs = torch.stack([torch.log_softmax(each.to(torch.promote_types(each.dtype, torch.float32)), dim=-1) for each in logits])
    return torch.logsumexp(logs, dim=0) - math.log(len(logits))


def mean_of_odds(logits: Sequence[Tensor]) -> Tensor:
    """The log odds of the mean of the probabilities that logits stand for, each by itself."""
    wide = torch.stack([each.to(torch.promote_types(each.dtype, torch.float32)) for each in logits])
    return torch.logsumexp(logsigmoid(wide), dim=0) - torch.logsumexp(logsigmoid(-wide), dim=0)


def mean_of_rows(members: Sequence[Iterable[Row]], places: Sequence[str]) -> Iterator[Row]:
    """Rows of numbers, averaged; the fields in `places` say what a row is for, and are the same in all."""
    for together in zip(*members, strict=True):
        first = together[0]
        yield {name: value if name in places else sum(row[name] for row in together) / len(together) for name, value in first.items()}

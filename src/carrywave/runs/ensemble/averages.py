"""What several runs predict, averaged: probabilities of labels and tokens; numbers, forecasts and quantiles in the units of the data.

Quantiles are averaged level by level (Vincent's average: the mean of the quantile functions), so those of the average do not cross, either.
Averages of probabilities are kept as their logarithms: as logits, they give back the same probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from carrywave.data.files.rows import Row
from carrywave.data.sequences import Sequences
from carrywave.runs.rows.outputs import Numbers, Outputs
from carrywave.runs.trained_run import Saved


def mean_of_shares(logits: Sequence[Tensor]) -> Tensor:
    """The logarithm of the mean of the probabilities that logits [..., classes] stand for."""
    logs = torch.stack([torch.log_softmax(each.to(torch.promote_types(each.dtype, torch.float32)), dim=-1) for each in logits])
    return torch.logsumexp(logs, dim=0) - math.log(len(logits))


def mean_of_odds(logits: Sequence[Tensor]) -> Tensor:
    """The log odds of the mean of the probabilities that logits stand for, each by itself."""
    wide = torch.stack([each.to(torch.promote_types(each.dtype, torch.float32)) for each in logits])
    return torch.logsumexp(torch.nn.functional.logsigmoid(wide), dim=0) - torch.logsumexp(torch.nn.functional.logsigmoid(-wide), dim=0)


class AveragedOutputs:
    """The average of what several runs predict for sequences, in the place of the `Outputs` of the first."""

    def __init__(self, members: Sequence[Saved]) -> None:
        self.saved = members[0]
        self._each = [Outputs(member, shares=True) for member in members]

    def of(self, *data: Sequences) -> list[Numbers]:
        """As `Outputs.of`, for the sequences as each of the runs reads them. Empty on ranks other than 0. Collective."""
        by_run = [outputs.of(sequences) for outputs, sequences in zip(self._each, data, strict=True)]
        return [self._mean(each) for each in zip(*by_run, strict=True)]

    def _mean(self, outs: Sequence[Numbers]) -> Numbers:
        task = self.saved.spec.task
        if task == "regression":
            codec = self.saved.task.codec
            values = np.mean([each.saved.task.codec.restore(out) for each, out in zip(self._each, outs, strict=True)], axis=0)
            scaled: Numbers = (values - np.array(codec.target_mean)) / np.array(codec.target_std)
            return scaled
        logits = [torch.from_numpy(out) for out in outs]
        if self.saved.spec.data.multi_label:
            return mean_of_odds(logits).numpy()
        logs = mean_of_shares(logits)
        return (logs.argmax(-1) if task == "tagging" else logs).numpy()


def mean_of_forecasts(members: Sequence[Iterable[Row]], places: Sequence[str]) -> Iterator[Row]:
    """Rows of forecasts, averaged; the fields in `places` say what a row is for, and are the same in all."""
    for together in zip(*members, strict=True):
        first = together[0]
        yield {name: value if name in places else sum(row[name] for row in together) / len(together) for name, value in first.items()}

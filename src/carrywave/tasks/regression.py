"""Regression: numbers for each sequence or, with `data.each_step`, for each step of a series."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from carrywave.data.sequences import Ints, Sequences, View
from carrywave.data.tables.step_series import LEAST_SPREAD
from carrywave.model.heads.pooled import PooledNumbers
from carrywave.model.heads.step_numbers import StepNumbers
from carrywave.tasks.kind import Kind, Part, PooledKind
from carrywave.tasks.metrics.errors import Columns, Errors, Metric
from carrywave.tasks.metrics.steps import StepErrors
from carrywave.tasks.network import Encoder
from carrywave.tasks.views import weighted


class Regression(PooledKind):
    """A single number is scored in the units of the data; several in standardised ones, and column by column in those of the data."""

    by = ("column",)

    def head(self, width: int, encoder: Encoder, train: Sequences | None, device: str | None) -> nn.Module:
        """A linear layer on what `model.pool` makes of a sequence's outputs."""
        model = self.spec.model
        return PooledNumbers(width, self.facts.outputs, model.pool, self.spec.train.loss, bidirectional=model.bidirectional)

    def meter(self, device: torch.device, part: Part, *, by_series: bool, tops: Sequence[int]) -> Metric | None:
        """MAE and RMSE."""
        units_C = torch.tensor(self.codec.target_std, dtype=torch.float64)
        if len(units_C) == 1:
            return Errors(1, self.facts.outputs, device=device, unit_C=units_C)
        return Errors(1, self.facts.outputs, device=device, columns=Columns(tuple(map(str, range(len(units_C)))), units_C[None]))


class EachStep(Kind):
    """Numbers at every step, which may be missing; scored for each series."""

    by = ("column", "series")

    def view(self, name: str, data: Sequences) -> View:
        """Each step with numbers of its own, NaN where there are none; for the NSE loss, also the weight of each [..., 2]."""
        tags = data.tags
        if tags is None:
            return self.unlabelled(data)
        order = np.argsort(data.starts, kind="stable")
        starts, weights = data.starts[order], None
        if self.spec.train.loss == "nse":
            assert data.spreads is not None
            weights = (data.spreads[order] + LEAST_SPREAD).astype(np.float32) ** -2

        def numbers(rows: Ints) -> NDArray[np.float32]:
            values: NDArray[np.float32] = np.asarray(tags[rows])
            return values if weights is None else np.stack([values, weights[np.searchsorted(starts, rows, side="right") - 1]], axis=-1)

        return weighted(View(data.inputs, data.starts, data.lengths, targets_at=numbers, warm=data.warm), data)

    def head(self, width: int, encoder: Encoder, train: Sequences | None, device: str | None) -> nn.Module:
        """A linear layer at every step."""
        return StepNumbers(width, self.facts.outputs, self.spec.train.loss)

    def meter(self, device: torch.device, part: Part, *, by_series: bool, tops: Sequence[int]) -> Metric | None:
        """NSE, KGE, MAE and RMSE."""
        return StepErrors(self.codec, part.data.names or (), device)

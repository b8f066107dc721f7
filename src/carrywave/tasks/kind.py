"""`Kind`: what one task does in its own way. A file for each: `language`, `classification`, `tagging`, `transcription`, `regression`,
`forecasting`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from carrywave.data.sequences import Sequences, View
from carrywave.model.heads.scoring import seen
from carrywave.tasks.baselines import LINEAR_METRICS, BaselineErrors
from carrywave.tasks.linear.part import LinearPart
from carrywave.tasks.metrics.errors import Metric
from carrywave.tasks.views import pooled, resets

if TYPE_CHECKING:
    from carrywave.tasks.network import Encoder
    from carrywave.tasks.task import Task


@dataclass(frozen=True)
class Part:
    """One part of the data as a task reads it: train, valid, test, or a file given later."""

    name: str
    data: Sequences
    view: View
    baselines: Mapping[str, BaselineErrors] = field(default_factory=dict)  # forecasting: what simple forecasts come to
    baseline: dict[str, float] = field(default_factory=dict)  # their metrics
    notes: tuple[str, ...] = ()  # remarks for the user
    change_SC: NDArray[np.float64] | None = None  # forecasting: denominator of MASE per series and column; 0 excludes it
    kept: bool = False  # forecasting: an evaluation keeps every forecast instead of summing errors

    @property
    def weighted(self) -> bool:
        """True if targets have weights, by which only the loss goes."""
        return self.view.weights is not None or self.view.weights_at is not None


class Kind(ABC):
    """What a task reads, its head, its metrics and its baselines."""

    by: tuple[str, ...] = ()  # what its metrics can be broken down by

    def __init__(self, task: Task) -> None:
        self.task, self.spec, self.codec, self.facts = task, task.spec, task.codec, task.facts

    @abstractmethod
    def view(self, name: str, data: Sequences) -> View:
        """The steps and targets of a part."""

    @abstractmethod
    def head(self, width: int, encoder: Encoder, train: Sequences | None, device: str | None) -> nn.Module:
        """The head on layers of this width. Balanced class weights need the training data; `device`: as in torch."""

    @abstractmethod
    def meter(self, device: torch.device, part: Part, *, by_series: bool, tops: Sequence[int]) -> Metric | None:
        """An empty metric for one pass over a part; None if all metrics follow from the loss."""

    def part(self, name: str, data: Sequences) -> Part:
        """A part with its view, its baselines and what a user should know of it."""
        return Part(name, data, self.view(name, data))

    def unlabelled(self, data: Sequences) -> View:
        """A view without targets, for prediction."""
        return View(data.inputs, data.starts, data.lengths, resets_at=resets(data))

    def derived(self, loss: float) -> dict[str, float]:
        """The metrics that follow from the loss alone."""
        return {}


class PooledKind(Kind):
    """A task with one target for each sequence, for which a linear part may answer beside the network."""

    def view(self, name: str, data: Sequences) -> View:
        """One label or row of numbers a sequence."""
        return pooled(data)

    def part(self, name: str, data: Sequences) -> Part:
        """With the answers of the linear part, if there is one, and what these score by themselves."""
        part, linear = super().part(name, data), self.task.linear
        return part if linear is None or name == "train" else self._beside_linear(part, linear)

    def unlabelled(self, data: Sequences) -> View:
        """With the answers of the linear part."""
        linear = self.task.linear
        return replace(super().unlabelled(data), linear=None if linear is None else linear.beside(linear(data)))

    def _beside_linear(self, part: Part, linear: LinearPart) -> Part:
        answers_NV = linear(part.data, held=part.name == "valid")
        part = replace(part, view=replace(part.view, linear=linear.beside(answers_NV)))
        meter = self.meter(torch.device("cpu"), part, by_series=False, tops=())
        if meter is None or part.view.labels is None:
            return part
        weights: Tensor | None = None if part.view.weights is None else torch.from_numpy(np.array(part.view.weights))
        known = seen(torch.from_numpy(np.array(part.view.labels)), weights, pooled=True)
        assert known is not None
        numbers_N = torch.arange(len(known))
        meter.update(torch.from_numpy(answers_NV), known, numbers_N, torch.zeros_like(numbers_N))
        return replace(part, baseline={f"linear_{name}": value for name, value in meter.values().items() if name in LINEAR_METRICS})

"""Classification: one label for each sequence, or any number of labels that may hold (`data.multi_label`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from carrywave.data.sequences import Sequences
from carrywave.model.heads.pooled import PooledSigmoid, PooledSoftmax
from carrywave.tasks.first_weights import class_weights
from carrywave.tasks.kind import Part, PooledKind
from carrywave.tasks.metrics.errors import Metric
from carrywave.tasks.metrics.labels import Confusion, LabelDecisions
from carrywave.tasks.network import Encoder


class Classification(PooledKind):
    """The head reads what `model.pool` makes of a sequence's outputs."""

    by = ("label",)

    def head(self, width: int, encoder: Encoder, train: Sequences | None, device: str | None) -> nn.Module:
        """A softmax over the labels, or a sigmoid for each."""
        weights, model = class_weights(self.spec, self.facts, train), self.spec.model
        kind, smoothing = PooledSigmoid if self.spec.data.multi_label else PooledSoftmax, self.spec.train.label_smoothing
        return kind(width, len(self.facts.labels), model.pool, weights, bidirectional=model.bidirectional, label_smoothing=smoothing)

    def meter(self, device: torch.device, part: Part, *, by_series: bool, tops: Sequence[int]) -> Metric | None:
        """Accuracy and F1, and beside a weighted loss the one without weights."""
        weighted, labels = part.weighted or self.spec.train.class_weights is not None, self.facts.labels
        if self.spec.data.multi_label:
            return LabelDecisions(len(labels), device, labels, weighted=weighted)
        return Confusion(len(labels), device, labels, tops, weighted=weighted)

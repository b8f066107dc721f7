"""Tagging: a label for each step of a sequence, any number of them (`data.multi_label`), or labels that are chosen together
(`model.crf`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from carrywave.data.sequences import History, Ints, Sequences, View
from carrywave.data.text.tag_scheme import check_sequences, tags_of
from carrywave.model.heads.classes import Sigmoid, Softmax
from carrywave.model.heads.crf import CRF
from carrywave.model.heads.word_scores import WordScores
from carrywave.tasks.first_weights import class_weights
from carrywave.tasks.kind import Kind, Part
from carrywave.tasks.metrics.errors import Metric
from carrywave.tasks.metrics.labels import Confusion, LabelDecisions
from carrywave.tasks.metrics.spans import TagConfusion
from carrywave.tasks.network import Encoder
from carrywave.tasks.views import resets, weighted

if TYPE_CHECKING:
    from carrywave.tasks.task import Task


class Tagging(Kind):
    """Labels that write spans (B-X, I-X, O) are judged as spans, too."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.spans = not self.spec.data.multi_label and tags_of(self.facts.labels) is not None
        self.by = ("label", "type") if self.spans else ("label",)

    def view(self, name: str, data: Sequences) -> View:
        """Each step with its tag, or a number for each label."""
        tags = data.tags
        if self.spec.model.crf:
            check_sequences(name, data, self.facts.labels, self.spec.data.scheme)
        if tags is None:
            return self.unlabelled(data)

        def tag(rows: Ints) -> NDArray[Any]:
            return np.asarray(tags[rows])

        return weighted(replace(self.unlabelled(data), targets_at=tag), data)

    def unlabelled(self, data: Sequences) -> View:
        """Each step, with the characters of its word if these are scored."""
        words = History(1, np.arange(1, data.inputs.shape[1])) if self.spec.model.word_scores else None
        return View(data.inputs, data.starts, data.lengths, resets_at=resets(data), history=words)

    def head(self, width: int, encoder: Encoder, train: Sequences | None, device: str | None) -> nn.Module:
        """A conditional random field, a softmax over the labels, or a sigmoid for each."""
        facts, model = self.facts, self.spec.model
        if model.crf:
            size, read = model.word_scores, (facts.characters, facts.word_length)
            words = WordScores(size, len(facts.labels), self.codec.characters, *read) if size else None
            return CRF(width, facts.labels, self.spec.data.scheme, words)
        weights, smoothing = class_weights(self.spec, facts, train), self.spec.train.label_smoothing
        return (Sigmoid if self.spec.data.multi_label else Softmax)(width, len(facts.labels), weights=weights, label_smoothing=smoothing)

    def meter(self, device: torch.device, part: Part, *, by_series: bool, tops: Sequence[int]) -> Metric | None:
        """Accuracy and F1 of labels, and of spans."""
        weighted, labels = part.weighted or self.spec.train.class_weights is not None, self.facts.labels
        if self.spec.data.multi_label:
            return LabelDecisions(len(labels), device, labels, weighted=weighted)
        chosen = self.spec.model.crf is True
        if self.spans:
            return TagConfusion(labels, part.data, device, tops, weighted=weighted, chosen=chosen)
        return Confusion(len(labels), device, labels, tops, weighted=weighted, chosen=chosen)

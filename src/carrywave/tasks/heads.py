"""The head of each task."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from carrywave.data.codec import Codec
from carrywave.data.sequences import Sequences
from carrywave.errors import SpecError
from carrywave.model.encoders import Embedding, Features, Numbers
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.heads.classes import Sigmoid, Softmax
from carrywave.model.heads.crf import CRF
from carrywave.model.heads.ctc import Ctc
from carrywave.model.heads.distributions import DistributionForecast
from carrywave.model.heads.forecast import Forecast
from carrywave.model.heads.pooled import PooledNumbers, PooledSigmoid, PooledSoftmax
from carrywave.model.heads.step_numbers import StepNumbers
from carrywave.model.heads.word_scores import WordScores
from carrywave.model.vocabulary.spelled_words import SpelledWords
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec
from carrywave.tasks.first_weights import class_counts, label_counts

Encoder = Embedding | SpelledWords | Numbers | Features


def head_of(
    spec: Spec, codec: Codec, facts: DataFacts, width: int, encoder: Encoder, train: Sequences | None, device: str | None
) -> Softmax | AdaptiveSoftmax | CRF | PooledSoftmax | PooledNumbers | Ctc | StepNumbers | Forecast:
    """The head of a task. Balanced class weights need the training data; `device`: as in torch."""
    match spec.task:
        case "language":
            if spec.model.softmax == "adaptive":
                return AdaptiveSoftmax(width, facts.vocabulary, spec.model.cutoffs_of(facts.vocabulary))
            tied = encoder.weight if spec.model.tie and isinstance(encoder, Embedding) else None
            return Softmax(width, facts.vocabulary, tied=tied, device=device)
        case "tagging":
            if spec.model.crf:
                size, read = spec.model.word_scores, (facts.characters, facts.word_length)
                words = WordScores(size, len(facts.labels), codec.characters, *read) if size else None
                return CRF(width, facts.labels, spec.data.scheme, words)
            kind = Sigmoid if spec.data.multi_label else Softmax
            return kind(width, len(facts.labels), weights=class_weights(spec, facts, train), label_smoothing=spec.train.label_smoothing)
        case "classification":
            pooled = PooledSigmoid if spec.data.multi_label else PooledSoftmax
            return pooled(
                width,
                len(facts.labels),
                spec.model.pool,
                class_weights(spec, facts, train),
                bidirectional=spec.model.bidirectional,
                label_smoothing=spec.train.label_smoothing,
            )
        case "transcription":
            return Ctc(width, len(facts.labels), upsample=spec.model.upsample)
        case "regression" if spec.each_step:
            return StepNumbers(width, facts.outputs, spec.train.loss)
        case "regression":
            return PooledNumbers(width, facts.outputs, spec.model.pool, spec.train.loss, bidirectional=spec.model.bidirectional)
        case "forecasting" if spec.data.distribution != "none":
            return DistributionForecast(
                width,
                spec.data.horizon,
                facts.outputs,
                spec.data.distribution,
                linear=spec.model.linear > 0,
                scaled=spec.data.standardize == "window",
                past_steps=spec.past_steps,
            )
        case "forecasting":
            return Forecast(
                width,
                spec.data.horizon,
                facts.outputs,
                spec.data.quantiles,
                loss=spec.train.loss,
                linear=spec.model.linear > 0,
                scaled=spec.data.standardize == "window",
                past_steps=spec.past_steps,
            )


def class_weights(spec: Spec, facts: DataFacts, train: Sequences | None) -> Tensor | None:
    """What the loss of each class is multiplied by; None: 1."""
    setting, labels = spec.train.class_weights, facts.labels
    if setting is None:
        return None
    if isinstance(setting, dict):
        unknown = sorted(set(setting) - set(labels))
        if unknown:
            raise SpecError(f"train.class_weights names {unknown[0]!r}, which is not a label; use {', '.join(labels)}")
        return torch.tensor([setting.get(label, 1.0) for label in labels])
    if train is None:
        return torch.ones(len(labels))  # the weights are loaded with the parameters; only their shape matters here
    if spec.data.multi_label:
        zeros, ones = label_counts(train)
        return torch.tensor(np.maximum(zeros, 1) / np.maximum(ones, 1), dtype=torch.float32)
    counts = class_counts(spec.task, train, len(labels))
    return torch.tensor(counts.sum() / (len(labels) * np.maximum(counts, 1)), dtype=torch.float32)

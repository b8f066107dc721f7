"""Weights that begin at what simple statistics of the training data say, instead of being learned from nothing.

A softmax begins with the logarithms of how often each class occurs, and each of several labels with its log odds, so that the first steps
go into what the context tells; the linear part of a forecast begins at the ridge solution. Their last bits depend on the host that computes
them, as those of orthogonal matrices do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.sequences import Sequences
from carrywave.data.text.tokenizers import UNKNOWN
from carrywave.errors import SpecError
from carrywave.model.heads.classes import Sigmoid, Softmax
from carrywave.model.heads.crf import CRF
from carrywave.model.heads.forecast import Forecast
from carrywave.model.heads.pooled import PooledSigmoid, PooledSoftmax
from carrywave.model.model import Model
from carrywave.model.vocabulary.spelled_words import token_embedding
from carrywave.spec.facts import DataFacts
from carrywave.spec.spec import Spec
from carrywave.tasks.ridge import Ridge, fit_line

BLOCK_ROWS = 1 << 22  # counted at once


def set_first_weights(model: Model, spec: Spec, codec: Codec, train: Sequences | None, line: Ridge | None) -> frozenset[str]:
    """Set what this worker holds of such weights, if there is data to begin from; return the names of all of them.

    `line`: the straight line that forecasts are compared with, which is not fitted again if it reads as many values.
    """
    head = model.head
    if train is None:
        return frozenset()
    _forget_unknown(model, spec, codec, train)
    if isinstance(head, Softmax | PooledSoftmax | CRF) and head.bias is not None and spec.model.init_bias == "frequency":
        if not head.bias.is_meta:
            several = isinstance(head, Sigmoid | PooledSigmoid)
            logs = torch.from_numpy(_log_odds(train) if several else _log_frequencies(spec, train, head.classes))
            if not isinstance(head, CRF) and head.weights is not None and not head.weights.is_meta:
                logs = _weighted(logs, head.weights.double().cpu(), several=several)
            with torch.no_grad():
                head.bias.copy_(logs)
        return frozenset({"head.bias"})
    if isinstance(head, Forecast) and head.line is not None:
        if not head.line.weight.is_meta:
            if line is None or line.weights_CNK.shape[1] != spec.model.linear:
                line = fit_line(train, np.array(codec.targets), spec.model.linear, spec.data.horizon)
            with torch.no_grad():
                head.line.weight.copy_(torch.from_numpy(line.weights_CNK))
                head.line.bias.copy_(torch.from_numpy(line.bias_CK))
        return frozenset({"head.line.weight", "head.line.bias"})
    return frozenset()


def _forget_unknown(model: Model, spec: Spec, codec: Codec, train: Sequences) -> None:
    """Set the vector of unknown words to zero if nothing will train it: a random one would mean something."""
    words, head = token_embedding(model.encoder), model.head
    if words is None or UNKNOWN not in codec.vocabulary or spec.model.dropout_rare or words.weight is getattr(head, "weight", None):
        return
    unknown = codec.vocabulary.index(UNKNOWN)
    if not words.weight.is_meta and not _token_counts(train, words.vocabulary)[unknown]:
        with torch.no_grad():
            words.weight[unknown] = 0.0


def first_rare(train: Sequences, vocabulary: int) -> int:
    """The first of the tokens that occur no more than once in the training file: a vocabulary begins with the most frequent ones."""
    return int(np.flatnonzero(_token_counts(train, vocabulary) > 1).max(initial=-1)) + 1


def _token_counts(train: Sequences, vocabulary: int) -> NDArray[np.int64]:
    """How often each token occurs in the training file, held-out rows included."""
    counts, tokens = np.zeros(vocabulary, np.int64), train.tokens
    for first in range(0, len(tokens), BLOCK_ROWS):
        counts += np.bincount(np.asarray(tokens[first : first + BLOCK_ROWS], np.int64), minlength=vocabulary)
    return counts


def _log_frequencies(spec: Spec, train: Sequences, classes: int) -> NDArray[np.float64]:
    """The logarithm of each class's share of the training targets, as if each had occurred once more."""
    counts = class_counts(spec.task, train, classes) + 1.0
    return np.asarray(np.log(counts / counts.sum()), np.float64)


def _log_odds(train: Sequences) -> NDArray[np.float64]:
    """The log odds of each of several labels in the training targets, as if each had occurred and been missing once more."""
    zeros, ones = label_counts(train)
    return np.asarray(np.log((ones + 1.0) / (zeros + 1.0)), np.float64)


def class_counts(task: str, train: Sequences, classes: int) -> NDArray[np.float64]:
    """How often each class or token is a training target; one with a weight counts that many times, in units of the mean weight above 0."""
    counts, real = np.zeros(classes), 0
    for part, weights in _targets(train, train.inputs if task == "language" else train.tags):
        labelled = part >= 0
        counts += np.bincount(part[labelled].astype(np.int64), weights[labelled], minlength=classes)
        real += int((weights[labelled] > 0).sum())
    return np.asarray(counts * (real / max(counts.sum(), np.finfo(np.float64).tiny)), np.float64)


def label_counts(train: Sequences) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How often each of several labels is 0 and 1 among the training targets, counted as `class_counts` does."""
    parts = list(_targets(train, train.tags))
    mean = sum(weights.sum() for _, weights in parts) / max(1, sum(int((weights > 0).sum()) for _, weights in parts))
    zeros, ones = (sum(((part == value) * weights[:, None]).sum(axis=0) for part, weights in parts) / (mean or 1.0) for value in (0, 1))
    return np.asarray(zeros), np.asarray(ones)


def _targets(train: Sequences, by_row: NDArray[Any] | None) -> Iterator[tuple[NDArray[Any], NDArray[np.float64]]]:
    """The targets of all sequences and their weights, or those of one after the other where each row has one: valid may share the array."""
    of_sequences = np.ones(len(train)) if train.weights is None else np.asarray(train.weights, np.float64)
    if train.labels is not None:
        yield np.asarray(train.labels), of_sequences
        return
    assert by_row is not None
    for start, length, weight in zip(train.starts, train.lengths, of_sequences, strict=True):
        rows = slice(start, start + length)
        yield np.asarray(by_row[rows]), np.full(length, weight) if train.step_weights is None else np.asarray(train.step_weights[rows])


def _weighted(logs: torch.Tensor, weights: torch.Tensor, *, several: bool) -> torch.Tensor:
    """The same of classes that count with these weights in the loss; one that does not count at all is as likely as before."""
    logs = logs + torch.where(weights > 0, weights, 1.0).log()
    return logs if several else torch.log_softmax(logs, 0)


def class_weights(spec: Spec, facts: DataFacts, train: Sequences | None) -> torch.Tensor | None:
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

"""Weights that begin at what simple statistics of the training data say, instead of being learned from nothing.

A softmax begins with the logarithms of how often each class occurs, so that the first steps go into what the context tells; the linear part
of a forecast begins at the ridge solution. Their last bits depend on the host that computes them, as those of orthogonal matrices do.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.sequences import Sequences
from carrywave.model.heads import Forecast, PooledSoftmax, Softmax
from carrywave.model.model import Model
from carrywave.spec.spec import Spec
from carrywave.tasks.ridge import Line, fit_line


def set_first_weights(model: Model, spec: Spec, codec: Codec, train: Sequences | None, line: Line | None) -> frozenset[str]:
    """Set what this worker holds of such weights, if there is data to begin from; return the names of all of them.

    `line`: the straight line that forecasts are compared with, which is not fitted again if it reads as many values.
    """
    head = model.head
    if train is None:
        return frozenset()
    if isinstance(head, Softmax | PooledSoftmax) and head.bias is not None and spec.model.init_bias == "frequency":
        rows = head.rows if isinstance(head, Softmax) else None
        if not head.bias.is_meta:
            logs = torch.from_numpy(_log_frequencies(spec, train, head.classes))
            weights = None if head.weights is None else head.weights.double()
            logs = logs if weights is None or weights.is_meta else _weighted(logs, weights.cpu())
            with torch.no_grad():
                head.bias.copy_(logs if rows is None else logs[rows.low : rows.high])
        return frozenset({"head.bias"}) if rows is None else frozenset()  # rows of a split vocabulary are no other worker's
    if isinstance(head, Forecast) and head.line is not None:
        if not head.line.weight.is_meta:
            if line is None or line.weights_CNK.shape[1] != spec.model.linear:
                line = fit_line(train, np.array(codec.targets), spec.model.linear, spec.data.horizon)
            with torch.no_grad():
                head.line.weight.copy_(torch.from_numpy(line.weights_CNK))
                head.line.bias.copy_(torch.from_numpy(line.bias_CK))
        return frozenset({"head.line.weight", "head.line.bias"})
    return frozenset()


def _log_frequencies(spec: Spec, train: Sequences, classes: int) -> NDArray[np.float64]:
    """The logarithm of each class's share of the training targets, as if each had occurred once more."""
    targets = train.labels if spec.task == "classification" else train.tags if spec.task == "tagging" else train.inputs
    assert targets is not None
    counts = np.ones(classes)
    if spec.task == "classification":
        parts = [np.asarray(targets)]
    else:  # valid may share the array
        parts = [np.asarray(targets[start : start + length]) for start, length in zip(train.starts, train.lengths, strict=True)]
    for part in parts:
        counts += np.bincount(part[part >= 0].astype(np.int64), minlength=classes)
    return np.asarray(np.log(counts / counts.sum()), np.float64)


def _weighted(logs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same of classes that count with these weights in the loss; one that does not count at all is as likely as before."""
    return torch.log_softmax(logs + torch.where(weights > 0, weights, 1.0).log(), 0)

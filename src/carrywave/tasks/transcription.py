"""Transcription: labels in a row for each sequence, in no fixed place (CTC), refused if they cannot fit into its steps; and from
log-probabilities at each step to labels again: the most likely class of each step, or a search over beginnings (prefix beam search).

Shapes: T time, B lane, L labels, V classes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from carrywave.data.codec import Codec
from carrywave.data.sequences import Ints, Sequences, View
from carrywave.errors import DataError
from carrywave.model.heads.ctc import Ctc
from carrywave.spec.model_spec import ModelSpec
from carrywave.tasks.kind import Kind, Part
from carrywave.tasks.metrics.errors import Metric
from carrywave.tasks.metrics.labels import LabelErrors
from carrywave.tasks.network import Encoder

END = -1  # follows the labels of a lane
SHOWN = 8  # labels of a transcription in a message
LEAST = 1e-6  # classes less likely than this at a step do not extend a beginning

Prefix = tuple[int, ...]


class Transcription(Kind):
    """The head answers at every step, or several times, with a label or nothing (blank)."""

    def view(self, name: str, data: Sequences) -> View:
        """Steps and labels. Rows of labels are as wide as the longest that fits a window: sizes of batches recur."""
        if data.labels is None or data.spans is None:
            return self.unlabelled(data)
        model = None if self.task.own_model else self.spec.model  # of a user's model, nothing is known of what fits
        if model is not None:
            check_fit(name, data, self.codec, model)
        labels, spans = data.labels, data.spans
        longest = int((spans[:, 1] - spans[:, 0]).max(initial=0))

        def at(sequences_B: Ints, steps: int) -> NDArray[np.int64]:
            place_L = np.arange(max(1, longest if model is None else min(longest, model.output_steps(steps))))
            first_B1, end_B1 = spans[sequences_B, :1], spans[sequences_B, 1:]
            rows_BL = np.minimum(first_B1 + place_L, max(len(labels) - 1, 0))
            labels_BL = labels[rows_BL] if len(labels) else np.full(rows_BL.shape, END)
            return np.where(first_B1 + place_L < end_B1, labels_BL, END).astype(np.int64)

        return View(data.inputs, data.starts, data.lengths, labels_at=at, weights=data.weights)

    def head(self, width: int, encoder: Encoder, train: Sequences | None, device: str | None) -> nn.Module:
        """Connectionist temporal classification."""
        return Ctc(width, len(self.facts.labels), upsample=self.spec.model.upsample)

    def meter(self, device: torch.device, part: Part, *, by_series: bool, tops: Sequence[int]) -> Metric | None:
        """How many labels and sequences are wrong."""
        return LabelErrors(len(self.facts.labels), device)


def check_fit(name: str, data: Sequences, codec: Codec, model: ModelSpec) -> None:
    """Refuse labels that no alignment fits into the steps at which the model answers: its loss would be infinite."""
    assert data.labels is not None
    assert data.spans is not None
    needed = steps_needed(np.asarray(data.labels), data.spans)
    lengths, which = np.unique(data.lengths, return_inverse=True)
    available = np.array([model.output_steps(int(length)) for length in lengths], np.int64)[which]
    short = np.flatnonzero(needed > available)
    if not len(short):
        return
    first = int(short[0])
    low, high = data.spans[first].tolist()
    written = codec.transcript(data.labels[low : min(high, low + SHOWN)].tolist())
    shown = repr(written) if isinstance(written, str) else " ".join(map(str, written))
    many = f"{len(short):,} of {len(data):,} sequences have" if len(short) > 1 else "a sequence has"
    steps = f"{data.lengths[first]:,} step{'s' * int(data.lengths[first] != 1)}"
    factor = int(np.ceil(needed[short] * model.upsample / available[short]).max())
    raise DataError(
        f"{name}: {many} more labels than the model has answers: sequence {first} ({shown}{' …' * (high - low > SHOWN)}) needs "
        f"{needed[first]}, with a blank between equal labels, but gets {available[first]} for its {steps}; set model.upsample={factor}"
        f"{', use smaller strides in model.front,' if model.front_layers else ''} or remove such sequences"
    )


def steps_needed(labels: NDArray[np.int64], spans: Ints) -> Ints:
    """[n]: the fewest steps that the labels of each sequence fit into: one for each, and one for a blank between two that are equal."""
    equal = np.zeros(len(labels) + 1, np.int64)
    equal[2:] = np.cumsum(labels[1:] == labels[:-1]) if len(labels) > 1 else 0  # [k]: pairs among the first k labels
    first, end = spans[:, 0], spans[:, 1]
    repeats = np.where(end > first, equal[end] - equal[np.minimum(first + 1, len(labels))], 0)
    return np.asarray(end - first + repeats, np.int64)


def collapse(best_T: Sequence[int], blank: int) -> list[int]:
    """Labels from a class for each step: equal neighbours count once, blanks not at all."""
    return [each for before, each in zip([blank, *best_T], best_T, strict=False) if each not in (before, blank)]


def greedy(logs_TV: NDArray[np.floating], blank: int) -> list[int]:
    """The labels of the most likely class at each step."""
    return collapse(logs_TV.argmax(-1).tolist(), blank)


def beam_search(logs_TV: NDArray[np.floating], blank: int, width: int) -> list[tuple[list[int], float]]:
    """The likeliest labels that `width` beginnings, kept at every step, lead to, and the logarithm of their probability; best first.

    A beginning is scored over all its alignments that were kept, so it may beat the labels of the likeliest single alignment.
    """
    # For each beginning, the logarithms of the probability that it ends in a blank, and in its last label.
    kept: dict[Prefix, tuple[float, float]] = {(): (0.0, -math.inf)}
    for logs_V in np.asarray(logs_TV, np.float64):
        likely = np.flatnonzero(logs_V > math.log(LEAST)).tolist()
        log_blank = float(logs_V[blank])
        grown: dict[Prefix, list[float]] = {}
        for prefix, (in_blank, in_label) in kept.items():
            either = _add(in_blank, in_label)
            same = grown.setdefault(prefix, [-math.inf, -math.inf])
            same[0] = _add(same[0], either + log_blank)
            if prefix:
                same[1] = _add(same[1], in_label + float(logs_V[prefix[-1]]))
            for label in likely:
                if label == blank:
                    continue
                # The same label again is another one only after a blank.
                before = in_blank if prefix and prefix[-1] == label else either
                if before == -math.inf:
                    continue
                longer = grown.setdefault((*prefix, label), [-math.inf, -math.inf])
                longer[1] = _add(longer[1], before + float(logs_V[label]))
        best = heapq.nlargest(width, grown.items(), key=lambda item: _add(*item[1]))
        kept = {prefix: (scores[0], scores[1]) for prefix, scores in best}
    ranked = sorted(kept.items(), key=lambda item: -_add(*item[1]))
    return [(list(prefix), _add(*scores)) for prefix, scores in ranked]


def _add(one: float, other: float) -> float:
    """The logarithm of the sum of two probabilities."""
    high, low = (one, other) if one > other else (other, one)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))

"""From log-probabilities at each step to labels: the most likely class of each step, or a search over beginnings (prefix beam search).

Shapes: T time, B lane, V classes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEAST = 1e-6  # classes less likely than this at a step do not extend a beginning

Prefix = tuple[int, ...]


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

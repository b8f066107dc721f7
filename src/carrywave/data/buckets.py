"""Choose the lengths to pad to: the few values that waste least, found exactly by dynamic programming over the length histogram.

The trade-off: more values waste less padding; fewer values give larger buckets, so that in a small data set the composition
of batches stays random. We therefore take the fewest values whose padding stays under a bound.
"""

from __future__ import annotations

import numpy as np

from carrywave.data.sequences import Ints

CANDIDATES = 512  # the search is quadratic in this; rounding to this many lengths first costs well under 1% of padding


def length_grid(lengths: Ints, *, most: int, edge: int, waste: float = 0.03) -> Ints:
    """Return at most `most` increasing values that lengths are rounded up to; the last is the longest length.

    No bucket spans `edge`, the largest length that must be kept apart from all longer ones, if two values are allowed at all.
    The result is the smallest number of values that makes at most `waste` of all steps padding.
    """
    values = _candidates(lengths, edge)
    bucket = np.searchsorted(values, lengths)
    number = np.concatenate([[0], np.cumsum(np.bincount(bucket, minlength=len(values)))]).astype(np.float64)
    # bincount sums in float64, which is exact for integers below 2**53.
    steps = np.concatenate([[0.0], np.cumsum(np.bincount(bucket, weights=lengths, minlength=len(values)))])
    # padding[i, j]: cost of rounding candidates i … j-1 up to the last of them
    tops = np.concatenate([[0.0], values.astype(np.float64)])
    padding = tops[None, :] * (number[None, :] - number[:, None]) - (steps[None, :] - steps[:, None])
    padding[np.tril_indices(len(tops))] = np.inf
    if most >= 2:
        within = int(np.searchsorted(values, edge, side="right"))
        padding[:within, within + 1 :] = np.inf
    allowed = steps[-1] * waste / (1.0 - waste)
    best = np.full(len(tops), np.inf)
    best[0] = 0.0
    came_from: list[Ints] = []
    while len(came_from) < min(most, len(values)) and not best[-1] <= allowed:
        through = best[:, None] + padding
        back = through.argmin(axis=0)
        came_from.append(back.astype(np.int64))
        best = through[back, np.arange(len(tops))]
    chosen, top = [], len(values)
    for back in reversed(came_from):
        chosen.append(values[top - 1])
        top = int(back[top])
    return np.array(chosen[::-1], dtype=np.int64)


def _candidates(lengths: Ints, edge: int) -> Ints:
    """Return all lengths that occur or, if there are too many, a subset: half dense where most steps are, half spaced geometrically."""
    values, counts = np.unique(lengths, return_counts=True)
    if len(values) <= CANDIDATES:
        return values
    each = CANDIDATES // 2 - 1
    mass = np.cumsum(values * counts, dtype=np.float64)
    by_mass = np.searchsorted(mass, np.linspace(0.0, mass[-1], each + 1)[1:])
    by_ratio = np.searchsorted(values, np.geomspace(values[0], values[-1], each))
    forced = [len(values) - 1, max(0, int(np.searchsorted(values, edge, side="right")) - 1)]
    picked = np.unique(np.concatenate([by_mass, by_ratio, forced]).clip(0, len(values) - 1))
    chosen: Ints = values[picked]
    return chosen

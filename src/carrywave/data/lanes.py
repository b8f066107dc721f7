"""Assigns sequences to the lanes of a stream, cut into pieces where that evens the lanes out. Pure functions of the lengths.

A piece starts with a window, so it takes up whole windows except at the end of its lane.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from carrywave.data.sequences import Ints


class Pieces(NamedTuple):
    """Sequences or parts of them, in the order in which their lanes read them."""

    sequence: Ints
    offset: Ints  # first step within its sequence
    length: Ints
    lane: Ints


def assign_lanes(lengths: Ints, lanes: int, steps: int, *, cut: bool) -> Pieces:
    """Assign sequences to lanes that are read in windows of `steps`: the longest first, each to the lane with the fewest windows so far.

    With `cut`, each is cut into as many even parts as it has shares of a lane; of a few numbers of shares, that with the fewest windows.
    """
    total = int(lengths.sum())
    shares = range(lanes, 2 * lanes, max(1, lanes // 8)) if cut and len(lengths) > 1 else [lanes]
    counts = [np.maximum(lengths * many // total, 1) if cut else np.ones_like(lengths) for many in shares]
    return min((_assigned(lengths, count, lanes, steps) for count in counts), key=lambda found: found[:2])[2]


def _assigned(lengths: Ints, count: Ints, lanes: int, steps: int) -> tuple[int, int, Pieces]:
    """The windows of the fullest lane, the number of pieces, and the pieces, of sequences that are cut into so many parts."""
    sequence = np.repeat(np.arange(len(lengths)), count)
    part = np.arange(len(sequence)) - np.repeat(np.cumsum(count) - count, count)
    size, longer = np.divmod(lengths[sequence], count[sequence])
    length = size + (part < longer)
    windows = -(-length // steps)
    lane = np.zeros(len(sequence), np.int64)
    heap = [(0, number) for number in range(lanes)]
    for piece in np.argsort(-windows, kind="stable").tolist():
        loaded, lane[piece] = heap[0]
        heapq.heapreplace(heap, (loaded + int(windows[piece]), int(lane[piece])))
    return max(heap)[0], len(sequence), Pieces(sequence, part * size + np.minimum(part, longer), length, lane)

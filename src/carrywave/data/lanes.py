"""Assigns sequences to the lanes of a stream, cut into pieces where that evens the lanes out. Pure functions of the lengths.

A piece starts with a window, so it takes up whole windows except at the end of its lane. An epoch has as many windows as the fullest lane:
at best all windows of all sequences, divided by the number of lanes.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from carrywave.data.sequences import Ints

LESS_WORK = 0.95  # of the steps of an epoch, padding included: worth other pieces where there are as many windows


class Pieces(NamedTuple):
    """The pieces, in the order in which their lanes read them."""

    sequence: Ints
    offset: Ints  # first step within its sequence
    length: Ints
    lane: Ints


def assign_lanes(lengths: Ints, lanes: int, steps: int, *, cut: bool) -> Pieces:
    """Deal sequences out to lanes that are read in windows of `steps`. Without `cut`, every sequence is one piece.

    Each piece goes to the least loaded lane, unless it is clearly better to fill one lane after the other or, without `cut`, to begin with
    the longest sequence.
    """
    dealt = _evenly(lengths, lanes, steps, cut=cut)
    if len(lengths) == 1:
        return dealt
    if cut:
        other = _laid_end_to_end(lengths, lanes, steps)
    else:
        windows = -(-lengths // steps)
        longest_first = np.argsort(-windows, kind="stable")
        lane = np.empty_like(dealt.lane)
        lane[longest_first] = _least_loaded(windows[longest_first], lanes)
        other = dealt._replace(lane=lane)
    (many, work), (other_many, other_work) = (_size(each, lanes, steps) for each in (dealt, other))
    return other if other_many < many or (other_many == many and other_work < LESS_WORK * work) else dealt


def _evenly(lengths: Ints, lanes: int, steps: int, *, cut: bool) -> Pieces:
    """Whole sequences, each in the lane that is least loaded when its turn comes; with `cut`, those longer than an even share in even parts
    of at most that share.
    """
    total = int(lengths.sum())
    share = -(-total // lanes) if cut else total
    # Use the exact quotient, not the rounded share: a single corpus must give every lane a piece, however short.
    count = np.where(lengths > share, -(-lengths * lanes // total), 1)
    sequence = np.repeat(np.arange(len(lengths)), count)
    part = np.arange(len(sequence)) - np.repeat(np.cumsum(count) - count, count)
    size, longer = np.divmod(lengths[sequence], count[sequence])
    length = size + (part < longer)
    return Pieces(sequence, part * size + np.minimum(part, longer), length, _least_loaded(-(-length // steps), lanes))


def _size(dealt: Pieces, lanes: int, steps: int) -> tuple[int, int]:
    """Return the windows of an epoch, and the steps in all of them: a window is as long as the longest piece in it."""
    by_lane = np.argsort(dealt.lane, kind="stable")
    length, lane = dealt.length[by_lane], dealt.lane[by_lane]
    windows = -(-length // steps)
    of_lane = np.bincount(lane, weights=windows, minlength=lanes).astype(np.int64)
    first = np.cumsum(windows) - windows - (np.cumsum(of_lane) - of_lane)[lane]  # the window in which each piece begins
    longest = np.zeros(int(of_lane.max()), np.int64)
    np.maximum.at(longest, first + windows - 1, length - (windows - 1) * steps)
    # Windows that a piece fills: more pieces have begun than have come to their last window.
    begun = np.bincount(first, minlength=len(longest)) - np.bincount(first + windows - 1, minlength=len(longest))
    longest[np.cumsum(begun) > 0] = steps
    return len(longest), int(longest.sum())


def _least_loaded(loads: Ints, lanes: int) -> Ints:
    """Assign pieces to lanes greedily: each in turn goes to the least loaded lane, the lowest-numbered on ties."""
    heap = [(0, lane) for lane in range(lanes)]
    lane_of = []
    for load in loads.tolist():
        loaded, lane = heap[0]
        lane_of.append(lane)
        heapq.heapreplace(heap, (loaded + load, lane))
    return np.array(lane_of, dtype=np.int64)


def _laid_end_to_end(lengths: Ints, lanes: int, steps: int) -> Pieces:
    """Fill one lane after the other, and continue in the next with what is left of a sequence: at most one cut for each lane.

    Lanes of as many windows as all sequences have, divided by the lanes, always suffice: every piece then begins and ends with a window.
    A shorter last window, which would have less padding, is found by bisection.
    """
    fewest = -(-int((-(-lengths // steps)).sum()) // lanes)
    low, high = (fewest - 1) * steps, fewest * steps
    best = _filled(lengths, lanes, steps, high)
    assert best is not None
    while high - low > 1:
        middle = (low + high) // 2
        shorter = _filled(lengths, lanes, steps, middle)
        low, high, best = (middle, high, best) if shorter is None else (low, middle, shorter)
    return best


def _filled(lengths: Ints, lanes: int, steps: int, capacity: int) -> Pieces | None:
    """Fill lanes up to `capacity` steps; None if they do not hold everything."""
    pieces: list[tuple[int, int, int, int]] = []
    lane, position = 0, 0
    for sequence, whole in enumerate(lengths.tolist()):
        offset = 0
        while offset < whole:
            if position >= capacity:
                lane, position = lane + 1, 0
            if lane == lanes:
                return None
            length = min(whole - offset, capacity - position)
            pieces.append((sequence, offset, length, lane))
            offset, position = offset + length, position - (-length // steps) * steps
    return Pieces(*np.array(pieces, dtype=np.int64).T)

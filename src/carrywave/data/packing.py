"""`PackedOrder`: separate sequences one after the other in a lane, each starting anew, instead of each in a lane with padding behind it.

Sequences are never cut. A lane is as long as the window of its batch: the longest sequence, or a half, a quarter or an eighth of it, so
that short sequences do not wait for long ones. The longest sequence that is left begins a lane, and the longest that fits follows, until
none does. How lengths share lanes is the same in every epoch, and so are the few shapes of batches; which sequences of a length are where,
and which lanes share a batch, are redrawn. A pure function of (lengths, seed, epoch), as every order is.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from carrywave.data.order import Cursor, Segments, Window, checked_lengths, in_range
from carrywave.data.sequences import Ints
from carrywave.data.shuffle import BATCHES, LANES, MEMBERS, permutation
from carrywave.spec.data_spec import packed_windows


class PackedOrder:
    """Batches of full lanes, as many as fit a budget of steps; one lane if that is less than the longest sequence."""

    def __init__(self, lengths: Ints, *, tokens: int, seed: int = 0) -> None:
        self._lengths = checked_lengths(lengths)
        self._seed = seed
        self.windows = np.array(packed_windows(int(self._lengths.max())))
        # By place, in the order of lanes: its lane, its first step there, and its length.
        self._lane, self._length, kind = _filled(self._lengths, self.windows)
        counts = np.bincount(self._lane)
        self._begin = np.concatenate([[0], np.cumsum(counts)])  # of each lane, among the places
        after = np.cumsum(self._length)
        self._first = after - self._length - np.concatenate([[0], after])[self._begin[self._lane]]
        self._kind, self.most = kind, int(counts.max())  # the window of each lane; the most sequences in one
        lanes = np.maximum(1, tokens // self.windows)
        lanes_of = np.bincount(kind, minlength=len(self.windows))
        batches = -(-lanes_of // lanes)
        # Evened out, so that the last batch of a window is about as full as the others.
        self._lanes = -(-lanes_of // np.maximum(batches, 1))
        self._batch_kind = np.repeat(np.arange(len(self.windows)), batches)
        self._batch_number = np.arange(len(self._batch_kind)) - np.repeat(np.cumsum(batches) - batches, batches)
        self._lanes_before = np.cumsum(lanes_of) - lanes_of
        self._lanes_of = lanes_of
        self._table = lru_cache(maxsize=2)(self._tabulate)

    def num_steps(self, epoch: int) -> int:
        """Return the number of batches in an epoch."""
        return len(self._batch_kind)

    def window(self, cursor: Cursor) -> Window:
        """Return the batch at a cursor; a lane that is left over is idle."""
        in_range(cursor.step, len(self._batch_kind))
        sequences, lanes, order = self._table(cursor.epoch)
        batch = order[cursor.step]
        kind = self._batch_kind[batch]
        count, low = int(self._lanes[kind]), int(self._batch_number[batch] * self._lanes[kind])
        high = min(low + count, int(self._lanes_of[kind]))
        held = lanes[self._lanes_before[kind] + low : self._lanes_before[kind] + high]
        begin, end = self._begin[held], self._begin[held + 1]
        many = end - begin
        place = np.repeat(begin - (np.cumsum(many) - many), many) + np.arange(int(many.sum()))
        segments = Segments(np.repeat(np.arange(len(held)), many), sequences[place], self._first[place], self._length[place], self.most)
        length = np.zeros(count, np.int64)
        length[: len(held)] = self._first[end - 1] + self._length[end - 1]
        sequence = np.full(count, -1, np.int64)
        sequence[: len(held)] = sequences[begin]
        return Window(int(self.windows[kind]), sequence, np.zeros(count, np.int64), length, length > 0, segments=segments)

    def waste(self, epoch: int) -> float:
        """Return the fraction of an epoch's steps that is padding."""
        return 1.0 - float(self._lengths.sum()) / float((self.windows * self._lanes)[self._batch_kind].sum())

    def shapes(self, epoch: int) -> list[tuple[int, int]]:
        """Return the distinct (steps, lanes) of an epoch's batches."""
        return [(int(self.windows[kind]), int(self._lanes[kind])) for kind in np.unique(self._batch_kind)]

    def _tabulate(self, epoch: int) -> tuple[Ints, Ints, Ints]:
        """Return the sequence at each place, the lanes by window, and the order of the batches."""
        drawn = permutation(len(self._lengths), seed=self._seed, epoch=epoch, site=MEMBERS)
        sequences = np.empty_like(drawn)
        sequences[np.argsort(self._length, kind="stable")] = drawn[np.argsort(self._lengths[drawn], kind="stable")]
        lanes = permutation(len(self._kind), seed=self._seed, epoch=epoch, site=LANES)
        order = permutation(len(self._batch_kind), seed=self._seed, epoch=epoch, site=BATCHES)
        return sequences, lanes[np.argsort(self._kind[lanes], kind="stable")], order


def _filled(lengths: Ints, windows: Ints) -> tuple[Ints, Ints, Ints]:
    """For each place, its lane and its length; and for each lane, which of the windows it has."""
    left = np.bincount(lengths).tolist()
    shorter = list(range(-1, len(left) - 1))  # from each length that is used up, to one below it that may not be

    def longest(most: int) -> int:
        """The greatest length up to this one of which sequences are left; 0 if there is none."""
        length_left = most
        while length_left > 0 and not left[length_left]:
            length_left = shorter[length_left]
        while most > length_left:  # so that the way is shorter the next time
            shorter[most], most = length_left, shorter[most]
        return length_left

    lane, length, kinds = [], [], []
    while begins := longest(len(left) - 1):
        kinds.append(int(np.searchsorted(windows, begins)))
        room = int(windows[kinds[-1]])
        while room and (fitting := longest(min(room, len(left) - 1))):
            lane.append(len(kinds) - 1)
            length.append(fitting)
            left[fitting] -= 1
            room -= fitting
    return np.array(lane, np.int64), np.array(length, np.int64), np.array(kinds, np.int64)

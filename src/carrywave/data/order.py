"""The order of training data: a pure function of (lengths, seed, epoch), free of torch and independent of the number of workers.

`StreamOrder` walks through contiguous streams in parallel lanes, window by window. `SequenceOrder` batches separate sequences
of similar length under a budget of steps, `WindowOrder` random windows of series. All compute window k of epoch e directly, so resuming
replays nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from carrywave.data.lanes import assign_lanes
from carrywave.data.sequences import Ints
from carrywave.data.shuffle import BATCHES, MEMBERS, PHASES, draw_words, permutation, varied_steps
from carrywave.errors import DataError

MOST_SHAPES = 64  # of the batches of an epoch
CANDIDATES = 512  # the search for a grid of lengths is quadratic in this; rounding to so many first costs well under 1% of padding


class Cursor(NamedTuple):
    """The complete position in the data."""

    epoch: int
    step: int


@dataclass(frozen=True, eq=False)
class Window:
    """Which steps of which sequences each lane of one batch holds."""

    steps: int  # including padding
    sequence: Ints  # [B] index of the sequence, -1 in an idle lane
    offset: Ints  # [B] first step within its sequence
    length: Ints  # [B] real steps, 0 … steps
    fresh: NDArray[np.bool_]  # [B] True if a sequence, or a piece of one, starts here
    skip: Ints | None = None  # [B] leading steps that warm up the carry and are not scored


class Order(Protocol):
    """Random access to the windows of an epoch."""

    def num_steps(self, epoch: int) -> int:
        """Return the number of windows in an epoch."""
        ...

    def window(self, cursor: Cursor) -> Window:
        """Return the window at a cursor."""
        ...


class _Layout(NamedTuple):
    """Where the pieces lie on one epoch's grid of windows."""

    first: Ints  # [pieces] window in which each piece starts
    edges: Ints  # [windows + 1] planned steps before each window
    keys: Ints  # [pieces] sorted by lane, then window, so that one search finds the piece of every lane


class StreamOrder:
    """Contiguous streams: each lane works through its pieces in turn, and all lanes share one grid of windows.

    With `cut`, sequences are cut into pieces so that all lanes are about as long: a single corpus gives each lane one piece. Without it,
    sequences stay whole, and there are at most as many lanes as sequences.
    """

    def __init__(self, lengths: Ints, *, lanes: int, steps: int, seed: int = 0, vary: bool = False, cut: bool = True) -> None:
        total = int(lengths.sum())
        if cut and total < lanes:
            raise DataError(f"batch.lanes={lanes} is more than the {total} steps in train; use batch.lanes<={total}")
        self.lanes = lanes if cut else min(lanes, len(lengths))
        self.steps, self.cut = steps, cut
        self._seed, self._vary = seed, vary
        sequence, offset, length, lane = assign_lanes(lengths, self.lanes, steps, cut=cut)
        by_lane = np.argsort(lane, kind="stable")
        self._sequence, self._offset, self._length = sequence[by_lane], offset[by_lane], length[by_lane]
        self._lane = lane[by_lane]
        self._count = np.bincount(lane, minlength=self.lanes)  # pieces per lane
        self._begin = np.cumsum(self._count) - self._count
        self._layout = lru_cache(maxsize=2)(self._lay_out)  # thread-safe: shared by the loader's thread and the training loop

    def num_steps(self, epoch: int) -> int:
        """Return the number of windows in an epoch."""
        return len(self._layout(self._key(epoch)).edges) - 1

    def window(self, cursor: Cursor) -> Window:
        """Return the window at a cursor."""
        layout, at = self._layout(self._key(cursor.epoch)), cursor.step
        # For a lane without pieces the search returns another lane's piece, or -1; its length is set to 0 below.
        piece = np.searchsorted(layout.keys, np.arange(self.lanes) * len(layout.edges) + at, side="right") - 1
        first = layout.first[piece]
        done = layout.edges[at] - layout.edges[first]
        planned = layout.edges[at + 1] - layout.edges[at]
        length = np.where(self._count > 0, np.clip(self._length[piece] - done, 0, planned), 0)
        active = length > 0
        return Window(
            steps=int(length.max()),
            sequence=np.where(active, self._sequence[piece], -1),
            offset=np.where(active, self._offset[piece] + done, 0),
            length=length,
            fresh=active & (first == at),
        )

    def _key(self, epoch: int) -> int:
        return epoch if self._vary else 0  # windows of fixed length are laid out the same in every epoch

    def _lay_out(self, epoch: int) -> _Layout:
        """Draw windows until every lane has read its pieces, the next of all lanes at a time."""
        edges = np.zeros(1, dtype=np.int64)
        first = np.zeros_like(self._length)
        position = np.zeros(self.lanes, dtype=np.int64)  # next window of each lane
        for rank in range(int(self._count.max())):
            lanes = np.flatnonzero(self._count > rank)
            piece = self._begin[lanes] + rank
            first[piece] = position[lanes]
            while True:
                # A lane's position is never past the last edge: the search that set it found an edge.
                end = edges[position[lanes]] + self._length[piece]
                missing = int(end.max() - edges[-1])
                if missing <= 0:
                    break
                drawn, count = len(edges) - 1, missing // self.steps + 1024
                more = np.full(count, self.steps)
                if self._vary:
                    more = varied_steps(self.steps, seed=self._seed, epoch=epoch, first=drawn, count=count)
                edges = np.concatenate([edges, edges[-1] + np.cumsum(more)])
            position[lanes] = np.searchsorted(edges, end)
        edges = edges[: int(position.max()) + 1]
        return _Layout(first, edges, self._lane * len(edges) + first)


class SequenceOrder:
    """Separate sequences, bucketed by length; a batch holds as many as fit a budget of steps, padding included.

    Lengths are rounded up to a grid. From the longest down, a batch takes the grid value of its first sequence as its window and
    fills up, from the next smaller bucket if necessary. An epoch thus has few shapes, and the same ones every epoch; which
    sequences share a batch, and the order of the batches, are redrawn each epoch.
    """

    def __init__(self, lengths: Ints, *, tokens: int, seed: int = 0, shuffle: bool = True) -> None:
        self._lengths = lengths
        self._seed, self._shuffle = seed, shuffle
        self.oversized = int((self._lengths > tokens).sum())
        """Sequences over the budget; each is a batch of its own."""
        # Two fewer than the allowed shapes: the last batch may be partial, and one shape is kept in reserve.
        self.grid = length_grid(lengths, most=MOST_SHAPES - 2, edge=tokens)
        # Bucket 0 holds the longest. NumPy radix-sorts uint8, many times faster.
        self._bucket = (len(self.grid) - 1 - np.searchsorted(self.grid, lengths)).astype(np.uint8)
        self._starts, self._steps = _walk(np.bincount(self._bucket, minlength=len(self.grid)), self.grid[::-1], tokens)
        self._table = lru_cache(maxsize=2)(self._tabulate)

    def num_steps(self, epoch: int) -> int:
        """Return the number of batches in an epoch."""
        return len(self._steps)

    def window(self, cursor: Cursor) -> Window:
        """Return the batch at a cursor."""
        members, order = self._table(cursor.epoch if self._shuffle else 0)
        batch = order[cursor.step]
        sequence = members[self._starts[batch] : self._starts[batch + 1]]
        return Window(
            steps=int(self._steps[batch]),
            sequence=sequence,
            offset=np.zeros_like(sequence),
            length=self._lengths[sequence],
            fresh=np.ones(len(sequence), dtype=np.bool_),
        )

    def waste(self, epoch: int) -> float:
        """Return the fraction of an epoch's steps that is padding."""
        return 1.0 - float(self._lengths.sum()) / float((self._steps * np.diff(self._starts)).sum())

    def shapes(self, epoch: int) -> list[tuple[int, int]]:
        """Return the distinct (steps, lanes) of an epoch's batches."""
        return sorted({(int(steps), int(lanes)) for steps, lanes in zip(self._steps, np.diff(self._starts), strict=True)})

    def _tabulate(self, epoch: int) -> tuple[Ints, Ints]:
        """Return the sequences in batch order, and the order of the batches."""
        drawn, order = np.arange(len(self._lengths)), np.arange(len(self._steps))
        if self._shuffle:
            drawn = permutation(len(drawn), seed=self._seed, epoch=epoch, site=MEMBERS)
            order = permutation(len(order), seed=self._seed, epoch=epoch, site=BATCHES)
        return drawn[np.argsort(self._bucket[drawn], kind="stable")], order


def _walk(counts: Ints, tops: Ints, tokens: int) -> tuple[Ints, Ints]:
    """Return the batch boundaries in the sorted sequences, and the steps of each batch."""
    starts, steps = [], []
    position = 0
    for end, top in zip(np.cumsum(counts).tolist(), tops.tolist(), strict=True):
        if position < end:  # otherwise earlier batches have used up this bucket
            lanes = max(1, tokens // top)
            begins = np.arange(position, end, lanes)
            starts.append(begins)
            steps.append(np.full(len(begins), top))
            position = int(begins[-1]) + lanes
    return np.concatenate([*starts, [int(counts.sum())]]), np.concatenate(steps)


def length_grid(lengths: Ints, *, most: int, edge: int, waste: float = 0.03) -> Ints:
    """Return at most `most` increasing values that lengths are rounded up to; the last is the longest length.

    No bucket spans `edge`, the largest length that must be kept apart from all longer ones, if two values are allowed at all.
    The result is the smallest number of values that makes at most `waste` of all steps padding, found exactly by dynamic programming: fewer
    values give larger buckets, so that in a small data set the composition of batches stays random.
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


class WindowOrder:
    """Windows of `steps` scored steps of series after up to `warm` others, `lanes` at a time, in random order.

    A batch of neighbouring streams sees a few places of each series; one of random windows sees many, so that its gradient says more about
    the whole. The price is the warm-up: steps that bring the carry up to date and are not scored. Every step of a series is scored once an
    epoch; where windows begin is drawn anew each epoch.
    """

    def __init__(self, lengths: Ints, *, lanes: int, steps: int, warm: int, seed: int = 0) -> None:
        self._lengths = lengths
        self.steps, self.warm, self._seed = steps, warm, seed
        self._counts = -(-self._lengths // steps) + 1  # windows begin at a phase below `steps`, so there may be one more
        self.lanes = min(lanes, int(self._counts.sum() - len(self._counts)))
        self._epoch = lru_cache(maxsize=2)(self._lay_out)

    def num_steps(self, epoch: int) -> int:
        """Return the number of batches in an epoch."""
        return -(-len(self._epoch(epoch)[0]) // self.lanes)

    def window(self, cursor: Cursor) -> Window:
        """Return the batch at a cursor; lanes that are left over are idle."""
        at = slice(cursor.step * self.lanes, (cursor.step + 1) * self.lanes)
        held = [each[at] for each in self._epoch(cursor.epoch)]
        sequence, first, scored = (np.pad(each, (0, self.lanes - len(each))) for each in held)
        skip = np.minimum(first, self.warm)
        active = scored > 0
        return Window(
            steps=self.warm + self.steps,
            sequence=np.where(active, sequence, -1),
            offset=np.where(active, first - skip, 0),
            length=np.where(active, skip + scored, 0),
            fresh=active,
            skip=np.where(active, skip, 0),
        )

    def _lay_out(self, epoch: int) -> tuple[Ints, Ints, Ints]:
        """Cut each sequence at its phase and every `steps` after it, and shuffle: sequence, first scored step and scored steps of each."""
        counts = self._counts
        sequence = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
        phases = (draw_words(self._seed, epoch, PHASES, np.arange(len(counts))) % np.uint64(self.steps)).astype(np.int64)
        first = np.maximum(phases[sequence] + (place - 1) * self.steps, 0)
        end = np.minimum(phases[sequence] + place * self.steps, self._lengths[sequence])
        some = np.flatnonzero(end > first)
        order = some[permutation(len(some), seed=self._seed, epoch=epoch, site=MEMBERS)]
        return sequence[order], first[order], (end - first)[order]

"""`WindowOrder`: windows of series in random order, each read after a warm-up, instead of contiguous streams whose carry is kept.

A batch of neighbouring streams sees a few places of each series; one of random windows sees many, so that its gradient says more about the
whole. The price is the warm-up: steps that bring the carry up to date and are not scored. Every step of a series is scored once an epoch;
where windows begin is drawn anew each epoch. A pure function of (lengths, seed, epoch), as every order is.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from carrywave.data.order import Cursor, Window
from carrywave.data.sequences import Ints
from carrywave.data.shuffle import MEMBERS, PHASES, draw_words, permutation


class WindowOrder:
    """Windows of `steps` scored steps after up to `warm` others, `lanes` at a time."""

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

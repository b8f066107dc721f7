"""The time chunks of the micro-batches of one run: their steps, lengths and windows, computed once, because every launch counts.

Shapes: B lane, C chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.kernels.window import Window, WindowChunk
from carrywave.model.state import Chunk


class Chunks:
    """`counts`: chunks of each micro-batch, of `chunk_steps` each if there are several. `windowed`: micro-batches whose kernels may keep
    what weight gradients need until the end. `reads_lengths`: there is a head, which reads the lengths of full chunks too.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        counts: Sequence[int],
        chunk_steps: int | None,
        windowed: Collection[int],
        *,
        reads_lengths: bool,
    ) -> None:
        self.batches, self.counts, self.chunk_steps = batches, counts, chunk_steps
        self.windowed, self.reads_lengths = windowed, reads_lengths
        self._windows: dict[int, Window] = {}
        self._lengths: dict[int, tuple[Tensor, Tensor]] = {}  # of a micro-batch's window, and of each chunk

    def step_range(self, micro_batch: int, chunk: int) -> tuple[int, int]:
        """The half-open range of steps of a chunk."""
        steps = self.batches[micro_batch].inputs.shape[0]
        size = steps if self.counts[micro_batch] == 1 else cast(int, self.chunk_steps)
        return chunk * size, min((chunk + 1) * size, steps)

    def at(self, micro_batch: int, chunk: int, key: Tensor | None, *, in_window: bool) -> Chunk:
        """The position of a chunk: its lengths, fresh lanes, lane numbers, first step, random key, window, past values, resets,
        weights and the answers of a linear part.
        """
        batch = self.batches[micro_batch]
        steps, lanes = batch.inputs.shape[0], batch.lanes.shape[0]
        first, end = (0, steps) if self.counts[micro_batch] == 1 else self.step_range(micro_batch, chunk)
        full = batch.real == steps * lanes
        lengths = None if full and not self.reads_lengths else self.lengths(micro_batch)[1][chunk]
        window = self._window(micro_batch, full=full) if in_window and micro_batch in self.windowed else None
        return Chunk(
            lengths,
            batch.fresh if chunk == 0 else None,
            batch.lanes,
            first,
            key,
            full,
            None if window is None else WindowChunk(window, chunk),
            self.counts[micro_batch] == 1 and (batch.part_of is None or batch.part_of[1] == lanes),
            None if batch.history is None else batch.history[first : end + batch.history.shape[0] - steps],
            None if batch.resets is None else batch.resets[first:end],
            batch.weights if batch.weights is None or batch.weights.dim() == 1 else batch.weights[first:end],
            batch.linear,
        )

    def lengths(self, micro_batch: int) -> tuple[Tensor, Tensor]:
        """[B], [C, B]: the real steps of each lane in the window and in each chunk."""
        if micro_batch not in self._lengths:
            batch = self.batches[micro_batch]
            steps = batch.inputs.shape[0]
            lengths_B = batch.lengths.clamp(0, steps)
            chunks_CB = lengths_B[None]
            if self.counts[micro_batch] > 1:
                size = cast(int, self.chunk_steps)
                chunks_CB = (lengths_B - torch.arange(0, steps, size, device=lengths_B.device)[:, None]).clamp_(0, size)
            self._lengths[micro_batch] = lengths_B, chunks_CB
        return self._lengths[micro_batch]

    def finish(self, micro_batch: int) -> None:
        """The backward of a micro-batch is done: its window is no longer needed."""
        self._windows.pop(micro_batch, None)

    def _window(self, micro_batch: int, *, full: bool) -> Window:
        if micro_batch not in self._windows:
            spans = tuple(self.step_range(micro_batch, chunk) for chunk in range(self.counts[micro_batch]))
            self._windows[micro_batch] = Window(spans, None if full else self.lengths(micro_batch)[0])
        return self._windows[micro_batch]

"""The time chunks of the micro-batches of one pass: their steps, lengths and windows, computed once, because every launch counts.

Shapes: B lane, C chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.kernels.window import ChunkedWindow, WindowChunk
from carrywave.model.state import Chunk


class Chunks:
    """`counts`: chunks of each micro-batch, of `chunk_steps` each if there are several. `windowed`: micro-batches whose kernels may keep
    what weight gradients need until the end. `reads_lengths`: a module reads the lengths of full chunks too.
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
        self._windows: dict[int, ChunkedWindow] = {}
        self._lengths: dict[int, tuple[Tensor, Tensor]] = {}  # of a micro-batch's window, and of each chunk

    def step_range(self, micro_batch: int, chunk: int) -> tuple[int, int]:
        """The half-open range of steps of a chunk."""
        steps = self.batches[micro_batch].inputs.shape[0]
        size = steps if self.counts[micro_batch] == 1 else cast(int, self.chunk_steps)
        return chunk * size, min((chunk + 1) * size, steps)

    def at(self, micro_batch: int, chunk: int, key: Tensor | None, *, in_window: bool) -> Chunk:
        """What is known of a chunk. `in_window`: kernels may keep its buffers and carry for the next one."""
        batch = self.batches[micro_batch]
        steps, lanes = batch.inputs.shape[0], batch.lanes.shape[0]
        alone, full = self.counts[micro_batch] == 1, batch.real == steps * lanes
        first, end = (0, steps) if alone else self.step_range(micro_batch, chunk)
        part = slice(first, end)
        window = self._window(micro_batch, full=full) if in_window and micro_batch in self.windowed else None
        history, weights = batch.history, batch.weights
        return Chunk(
            None if full and not self.reads_lengths else self._lengths_of(micro_batch)[1][chunk],
            batch.fresh if chunk == 0 else None,
            batch.lanes,
            first,
            key,
            full,
            None if window is None else WindowChunk(window, chunk),
            alone and (batch.part_of is None or batch.part_of[1] == lanes),
            None if history is None else history[first : end + history.shape[0] - steps],
            None if batch.resets is None else batch.resets[part],
            weights if weights is None or weights.dim() == 1 else weights[part],
            batch.linear,
        )

    def finish(self, micro_batch: int) -> None:
        """The backward of a micro-batch is done: its window is no longer needed."""
        self._windows.pop(micro_batch, None)

    def _lengths_of(self, micro_batch: int) -> tuple[Tensor, Tensor]:
        """[B], [C, B]: the real steps of each lane in the window and in each chunk."""
        if micro_batch not in self._lengths:
            steps = self.batches[micro_batch].inputs.shape[0]
            lengths_B = self.batches[micro_batch].lengths.clamp(0, steps)
            chunks_CB = lengths_B[None]
            if self.counts[micro_batch] > 1:
                size = cast(int, self.chunk_steps)
                chunks_CB = (lengths_B - torch.arange(0, steps, size, device=lengths_B.device)[:, None]).clamp_(0, size)
            self._lengths[micro_batch] = lengths_B, chunks_CB
        return self._lengths[micro_batch]

    def _window(self, micro_batch: int, *, full: bool) -> ChunkedWindow:
        if micro_batch not in self._windows:
            spans = tuple(self.step_range(micro_batch, chunk) for chunk in range(self.counts[micro_batch]))
            self._windows[micro_batch] = ChunkedWindow(spans, None if full else self._lengths_of(micro_batch)[0])
        return self._windows[micro_batch]

"""Build batches from a view and an order: gathered in NumPy, prefetched by one background thread, copied to CUDA without blocking.

A thread rather than worker processes: a batch is a handful of gathers that take a fraction of a millisecond, so there is
nothing to configure, no memory is copied between processes, and batches arrive in the order of the data.

Shapes: T time, B lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.data.augmentation import Augmentation
from carrywave.data.batch import IGNORED, Batch
from carrywave.data.order import Cursor, Order, Window
from carrywave.data.sequences import History, Ints, View


@dataclass(frozen=True)
class Share:
    """The part of every batch that one process reads: an even share of the lanes, with inputs and targets only if it needs them."""

    index: int = 0
    of: int = 1
    inputs: bool = True
    targets: bool = True

    def bounds(self, lanes: int) -> tuple[int, int]:
        """Return the range [first, end) of `lanes` that this process holds; it may be empty if there are few lanes."""
        return lanes * self.index // self.of, lanes * (self.index + 1) // self.of


def build(view: View, window: Window, cursor: Cursor, *, share: Share | None = None, augmentation: Augmentation | None = None) -> Batch:
    """Build the batch of a window, or this process's share of it; a share without lanes becomes one idle lane."""
    shared, share = share is not None, share or Share()
    total = len(window.sequence)
    low, high = share.bounds(total)
    held = np.arange(low, max(high, low + 1)).clip(max=total - 1)
    sequence, offset, length, fresh = (each[held] for each in (window.sequence, window.offset, window.length, window.fresh))
    if low == high:
        sequence, offset, length, fresh = sequence * 0 - 1, offset * 0, length * 0, fresh | True
    sequence_read = np.maximum(sequence, 0)  # an idle lane reads the first sequence, fully masked
    time_T1 = np.arange(window.steps)[:, None]
    # Padding repeats the last real row, so that every requested row exists, and its target too.
    steps_TB = np.minimum(time_T1, np.maximum(length - 1, 0))
    steps_TB = steps_TB if augmentation is None else augmentation.steps(steps_TB, length, sequence, cursor.epoch)
    rows_TB = view.starts[sequence_read] + offset + steps_TB
    padded_TB = time_T1 >= length
    inputs, targets, weights, history, linear = np.empty((*rows_TB.shape, 0), dtype=np.float32), None, None, None, None
    if share.inputs:
        inputs = np.take(np.asarray(view.inputs), rows_TB, axis=0) if view.inputs_at is None else view.inputs_at(rows_TB)
        if augmentation is not None:
            inputs = augmentation.inputs(inputs.astype(np.float32, copy=False), sequence, cursor.epoch)
        inputs = _marked(inputs, padded_TB, whole=0, real=0.0)
    if share.targets:
        if view.targets_at is not None:
            ignored_TB = padded_TB if view.warm is None else padded_TB | (time_T1 + offset < view.warm[sequence_read])
            ignored_TB = ignored_TB if window.skip is None else ignored_TB | (time_T1 < window.skip[held])
            targets = _marked(view.targets_at(rows_TB), ignored_TB)
        elif view.labels_at is not None:
            targets = _marked(view.labels_at(sequence_read, window.steps), sequence < 0)
        elif view.labels is not None:
            targets = _marked(view.labels[sequence_read], sequence < 0)
        if view.weights_at is not None:
            weights = _marked(view.weights_at(rows_TB), padded_TB, real=0.0)
        elif view.weights is not None:
            weights = _marked(view.weights[sequence_read], sequence < 0, real=0.0)
        history = None if view.history is None else past_values(view, view.history, rows_TB, sequence_read)
        linear = None if view.linear is None else view.linear[sequence_read]
    resets = None if view.resets_at is None else view.resets_at(rows_TB) & ~padded_TB
    return Batch(
        inputs=torch.from_numpy(inputs),
        targets=_tensor(targets),
        lengths=torch.from_numpy(length),
        fresh=torch.from_numpy(fresh),
        lanes=torch.from_numpy(held),
        sequence=torch.from_numpy(sequence),
        offset=torch.from_numpy(offset),
        epoch=cursor.epoch,
        step=cursor.step,
        real=int(length.sum()),
        begun=_begun(view, window),
        # Set even if the share covers every lane: a pipeline stage may hold all lanes and still lack the inputs or the targets.
        part_of=(int(window.length.sum()), total) if shared else None,
        history=_tensor(history),
        resets=_tensor(resets),
        weights=_tensor(weights),
        linear=_tensor(linear),
    )


def _begun(view: View, window: Window) -> int:
    """The real steps of a window, over all lanes, that come first in their lane or start anew."""
    begun = int((window.length > 0).sum())
    if view.resets_at is None:
        return begun
    time_T1 = np.arange(window.steps)[:, None]
    rows_TB = view.starts[np.maximum(window.sequence, 0)] + window.offset + np.minimum(time_T1, np.maximum(window.length - 1, 0))
    return begun + int((view.resets_at(rows_TB) & (time_T1 < window.length) & (time_T1 > 0)).sum())


def _marked(values: NDArray[Any], ignored: NDArray[np.bool_], *, whole: int = IGNORED, real: float = np.nan) -> NDArray[Any]:
    """The values in a dtype that models and losses accept, with a mark in the place of those that are ignored."""
    floats = values.dtype.kind == "f"
    marked: NDArray[Any] = np.require(values, dtype=np.float32 if floats else np.int64, requirements=["C", "W", "O"])
    marked[ignored] = real if floats else whole
    return marked


def _tensor(values: NDArray[Any] | None) -> Tensor | None:
    return None if values is None else torch.from_numpy(values)


def past_values(view: View, history: History, rows_TB: Ints, sequence_B: Ints) -> NDArray[Any]:
    """Past values [N - 1 + T, B, C], or codes; the first of them come before the window."""
    before = np.arange(1 - history.steps, 0)[:, None]
    firsts = view.starts if history.firsts is None else history.firsts
    rows = np.concatenate([np.maximum(rows_TB[0] + before, firsts[sequence_B]), rows_TB])
    values = np.asarray(view.inputs[rows[..., None], history.columns])
    values = values.astype(np.float32 if values.dtype.kind == "f" else np.int64, copy=False)
    if history.units is None:
        return values
    units = history.units[sequence_B].astype(np.float32)
    return np.concatenate([values, np.broadcast_to(units, values.shape)], axis=-1)


@dataclass(frozen=True, eq=False)
class Loader:
    """Iterate over the batches of an epoch from any cursor, on a device, with prefetching."""

    view: View
    order: Order
    _: KW_ONLY
    device: torch.device
    share: Share | None = None
    ahead: int = 4
    augmentation: Augmentation | None = None

    def batches(self, start: Cursor) -> Generator[Batch, None, None]:
        """Yield the batches from `start` to the end of its epoch. Closing the iterator stops the thread and waits for it."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="carrywave-loader")
        cursors = (Cursor(start.epoch, step) for step in range(start.step, self.order.num_steps(start.epoch)))
        made = deque(thread.submit(self._make, cursor) for cursor in islice(cursors, self.ahead))
        try:
            while made:
                batch, arrived = made.popleft().result()
                made.extend(thread.submit(self._make, cursor) for cursor in islice(cursors, 1))
                if arrived is not None:
                    current = torch.cuda.current_stream(self.device)
                    current.wait_event(arrived)
                    for tensor in batch.tensors().values():
                        tensor.record_stream(
                            current
                        )  # allocated on the side stream, which must not reuse the memory while it is in use here
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)

    def _make(self, cursor: Cursor) -> tuple[Batch, torch.cuda.Event | None]:
        """A batch and, on CUDA, the event that marks the end of its copy."""
        batch = build(self.view, self.order.window(cursor), cursor, share=self.share, augmentation=self.augmentation)
        if self.device.type != "cuda":
            return batch.to(self.device), None
        # A separate stream: copies overlap with the computation and do not wait for work queued on its stream.
        # Pinning memory here breaks a concurrent CUDA graph capture unless its capture_error_mode is thread_local.
        with torch.cuda.stream(side := copy_stream(self.device)):
            # The pinned-memory allocator does not reuse a block until the copies from it are done.
            return batch.each_tensor(lambda _, tensor: tensor.pin_memory()).to(self.device), side.record_event()


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The same stream on every call.

    torch hands out streams from a pool of 32, in turns. A new stream for every pass over the data would, after 32 of them, be the stream on
    which CUDA graphs are captured, and a copy made there during a capture would become part of the graph instead of being carried out.
    Streams of high priority come from a pool of their own.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

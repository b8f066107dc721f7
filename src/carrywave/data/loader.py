"""Build batches from a view and an order: gathered in NumPy, prefetched by one background thread, copied to CUDA without blocking.

A thread rather than worker processes: a batch is a handful of gathers that take a fraction of a millisecond, so there is
nothing to configure, no memory is copied between processes, and batches arrive in the order of the data.

Shapes: T time, B lane.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from queue import SimpleQueue
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
    window = window if augmentation is None else augmentation.window(window, cursor.epoch)
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
    inputs = np.empty((*rows_TB.shape, 0), dtype=np.float32)
    if share.inputs:
        change = None if augmentation is None else partial(augmentation.inputs, sequence=sequence, epoch=cursor.epoch)
        inputs = _inputs(view, rows_TB, padded_TB, change)
    resets = None if view.resets_at is None else view.resets_at(rows_TB) & ~padded_TB
    targets = None
    history = None if view.history is None or not share.targets else past_values(view, view.history, rows_TB, sequence_read)
    if not share.targets:
        pass
    elif view.targets_at is not None:
        ignored_TB = padded_TB if view.warm is None else padded_TB | (time_T1 + offset < view.warm[sequence_read])
        ignored_TB = ignored_TB if window.skip is None else ignored_TB | (time_T1 < window.skip[held])
        targets = _ignoring(view.targets_at(rows_TB), ignored_TB)
    elif view.labels_at is not None:
        targets = _ignoring(view.labels_at(sequence_read, window.steps), sequence < 0)
    elif view.labels is not None:
        targets = _ignoring(view.labels[sequence_read], sequence < 0)
    weights = _weights(view, rows_TB, sequence, padded_TB) if share.targets else None
    return Batch(
        inputs=torch.from_numpy(inputs),
        targets=None if targets is None else torch.from_numpy(targets),
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
        history=None if history is None else torch.from_numpy(history),
        resets=None if resets is None else torch.from_numpy(resets),
        weights=None if weights is None else torch.from_numpy(weights),
    )


def _weights(view: View, rows_TB: Ints, sequence_B: Ints, padded_TB: NDArray[np.bool_]) -> NDArray[np.float32] | None:
    """The weights of the targets, [T, B, …] or [B]; 0 where there is only padding."""
    if view.weights_at is not None:
        weights = np.require(view.weights_at(rows_TB), dtype=np.float32, requirements=["C", "W", "O"])
        weights[padded_TB] = 0.0
        return weights
    if view.weights is None:
        return None
    return np.where(sequence_B < 0, np.float32(0.0), view.weights[np.maximum(sequence_B, 0)])


def _begun(view: View, window: Window) -> int:
    """The real steps of a window, over all lanes, that come first in their lane or start anew."""
    begun = int((window.length > 0).sum())
    if view.resets_at is None:
        return begun
    time_T1 = np.arange(window.steps)[:, None]
    rows_TB = view.starts[np.maximum(window.sequence, 0)] + window.offset + np.minimum(time_T1, np.maximum(window.length - 1, 0))
    return begun + int((view.resets_at(rows_TB) & (time_T1 < window.length) & (time_T1 > 0)).sum())


def _inputs(view: View, rows_TB: Ints, padded_TB: NDArray[np.bool_], change: Callable[[NDArray[Any]], NDArray[Any]] | None) -> NDArray[Any]:
    inputs = np.take(np.asarray(view.inputs), rows_TB, axis=0) if view.inputs_at is None else view.inputs_at(rows_TB)
    inputs = inputs.astype(np.float32 if inputs.dtype.kind == "f" else np.int64, copy=False)
    inputs = inputs if change is None else change(inputs)
    inputs[padded_TB] = 0
    return inputs


def past_values(view: View, history: History, rows_TB: Ints, sequence_B: Ints) -> NDArray[np.float32]:
    """Past values [N - 1 + T, B, C]; the first of them come before the window."""
    before = np.arange(1 - history.steps, 0)[:, None]
    firsts = view.starts if history.firsts is None else history.firsts
    rows = np.concatenate([np.maximum(rows_TB[0] + before, firsts[sequence_B]), rows_TB])
    values = np.asarray(view.inputs[rows[..., None], history.columns], dtype=np.float32)
    if history.units is None:
        return values
    units = history.units[sequence_B].astype(np.float32)
    return np.concatenate([values, np.broadcast_to(units, values.shape)], axis=-1)


class Loader:
    """Iterate over the batches of an epoch from any cursor, on a device, with prefetching."""

    def __init__(
        self,
        view: View,
        order: Order,
        *,
        device: torch.device,
        share: Share | None = None,
        ahead: int = 4,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.view, self.order, self.device, self.share, self.ahead = view, order, device, share, ahead
        self.augmentation = augmentation

    def batches(self, start: Cursor) -> Generator[Batch, None, None]:
        """Yield the batches from `start` to the end of its epoch. Closing the iterator stops the thread and waits for it."""
        number = self.order.num_steps(start.epoch)
        if not 0 <= start.step <= number:
            raise ValueError(f"step {start.step} is out of range for an epoch of {number} steps")
        return self._run(start, number)

    def _run(self, start: Cursor, number: int) -> Generator[Batch, None, None]:
        made: SimpleQueue[_Made | BaseException] = SimpleQueue()
        room = threading.Semaphore(self.ahead)
        stopped = threading.Event()

        def stop() -> None:
            stopped.set()
            room.release()  # wake the worker if it is waiting for room

        worker = threading.Thread(target=self._make, args=(start, number, made, room, stopped), name="carrywave-loader", daemon=True)
        worker.start()
        _RUNNING[worker] = stop
        try:
            for _ in range(start.step, number):
                item = made.get()
                room.release()
                if isinstance(item, BaseException):
                    raise item
                yield item.take()
        finally:
            stop()
            worker.join()
            _RUNNING.pop(worker, None)

    def _make(
        self, start: Cursor, number: int, made: SimpleQueue[_Made | BaseException], room: threading.Semaphore, stopped: threading.Event
    ) -> None:
        try:
            # A separate stream: copies overlap with the computation and do not wait for work queued on its stream.
            # Pinning memory here breaks a concurrent CUDA graph capture unless its capture_error_mode is thread_local.
            side = copy_stream(self.device) if self.device.type == "cuda" else None
            with nullcontext() if side is None else torch.cuda.stream(side):
                for step in range(start.step, number):
                    room.acquire()
                    if stopped.is_set():
                        return
                    cursor = Cursor(start.epoch, step)
                    batch = build(self.view, self.order.window(cursor), cursor, share=self.share, augmentation=self.augmentation)
                    if side is None:
                        made.put(_Made(batch.to(self.device)))
                    else:
                        # The pinned-memory allocator does not reuse a block until the copies from it are done.
                        moved = _each_tensor(batch, Tensor.pin_memory).to(self.device)
                        made.put(_Made(moved, side.record_event()))
        except BaseException as fault:  # of any kind: the consumer re-raises it
            made.put(fault)


_RUNNING: dict[threading.Thread, Callable[[], None]] = {}  # how to stop each worker


@atexit.register
def _stop_all() -> None:
    """Stop iterators still open at exit, so that no thread runs during interpreter shutdown."""
    for worker, stop in list(_RUNNING.items()):
        stop()
        worker.join(timeout=5.0)


class _Made:
    """A batch and, on CUDA, the event that marks the end of its copy."""

    def __init__(self, batch: Batch, arrived: torch.cuda.Event | None = None) -> None:
        self.batch, self.arrived = batch, arrived

    def take(self) -> Batch:
        """Return the batch, ready for use on the current stream."""
        if self.arrived is None:
            return self.batch
        current = torch.cuda.current_stream(self.batch.inputs.device)
        current.wait_event(self.arrived)

        def used_here(tensor: Tensor) -> Tensor:
            tensor.record_stream(current)  # allocated on the side stream, which must not reuse the memory while it is in use here
            return tensor

        return _each_tensor(self.batch, used_here)


def _each_tensor(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    changed: dict[str, Any] = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(batch, **changed)


def _ignoring(values: NDArray[Any], ignored: NDArray[np.bool_]) -> NDArray[Any]:
    """Convert targets to a dtype that losses accept, and mark the ignored ones."""
    real = values.dtype.kind == "f"
    targets: NDArray[Any] = np.require(values, dtype=np.float32 if real else np.int64, requirements=["C", "W", "O"])
    targets[ignored] = np.nan if real else IGNORED
    return targets


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The same stream on every call.

    torch hands out streams from a pool of 32, in turns. A new stream for every pass over the data would, after 32 of them, be the stream on
    which CUDA graphs are captured, and a copy made there during a capture would become part of the graph instead of being carried out.
    Streams of high priority come from a pool of their own.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

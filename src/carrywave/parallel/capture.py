"""Optimizer steps as CUDA graphs: a step of a fixed shape is recorded once and replayed, so the host no longer limits the GPU.

A recurrent step is hundreds of small kernels, and launching them one by one takes longer than running them. Everything that
differs between two steps of one shape is a tensor that is written before the replay: inputs, targets, lengths, the lanes'
state, the key of the randomness, the learning rate. So a replay computes what the step itself would have computed.

The first step of a shape runs as usual (libraries set themselves up in it), the second is recorded. Graphs share one pool of
memory: they run one after the other, and what outlives a step (the state of the lanes) is copied out of it.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from carrywave.data.batch import Batch

MOST_SHAPES = 64  # as many as an epoch of bucketed sequences has
MOST_SEEN = 4096

Result = TypeVar("Result")
Key = tuple[tuple[object, ...], ...]
# A step over batches, each with the key of its randomness, from and to the state of the lanes.
Step = Callable[[Sequence[Batch], Sequence[Tensor], list[Tensor] | None], tuple[Result, list[Tensor] | None]]


@dataclass
class _Recorded(Generic[Result]):
    graph: torch.cuda.CUDAGraph
    batches: list[Batch]
    keys: list[Tensor]
    state: list[Tensor] | None
    result: Result


class Capture(Generic[Result]):
    """Runs a step, from a recording where there is one for its shape."""

    def __init__(self, step: Step[Result], *, most: int = MOST_SHAPES) -> None:
        self.step, self.most = step, most
        self._recorded: OrderedDict[Key, _Recorded[Result]] = OrderedDict()
        self._seen: set[Key] = set()
        self._pool: Any = None
        self._broken = False

    def __call__(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: list[Tensor] | None) -> tuple[Result, list[Tensor] | None]:
        """One step; what it returns lasts until the next one."""
        shape = (*(_shape(batch) for batch in batches), _shapes(state))
        recorded = self._recorded.get(shape)
        if recorded is None and not self._broken and shape in self._seen:
            recorded = self._record(shape, batches, keys, state)
        if recorded is None:
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()  # shapes that hardly ever come again are not worth remembering
            self._seen.add(shape)
            return self.step(batches, keys, state)
        self._recorded.move_to_end(shape)
        for own, batch in zip(recorded.batches, batches, strict=True):
            _copy(_tensors(own), _tensors(batch))
        _copy(recorded.keys, keys)
        if recorded.state is not None and state is not None and recorded.state[0] is not state[0]:
            _copy(recorded.state, state)
        recorded.graph.replay()
        return recorded.result, recorded.state

    def _record(self, shape: Key, batches: Sequence[Batch], keys: Sequence[Tensor], state: list[Tensor] | None) -> _Recorded[Result] | None:
        """Record one step of this shape. Nothing of it runs yet. Where that fails, steps go on unrecorded, and we say so once."""
        device = batches[0].lengths.device
        own = [_clone(batch) for batch in batches]
        own_keys = [key.to(device).clone() for key in keys]
        own_state = None if state is None else [tensor.clone() for tensor in state]
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(device)
        try:
            # Thread-local: the loader's thread allocates and copies meanwhile, which is none of the graph's business.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result, left = self.step(own, own_keys, own_state)
                if own_state is not None and left is not None:
                    _copy(own_state, left)
        except Exception as error:
            self._broken = True
            torch.cuda.synchronize(device)
            warnings.warn(f"steps are not recorded as CUDA graphs, and run slower: {' '.join(str(error).split())[:200]}", stacklevel=2)
            return None
        recorded = _Recorded(graph, own, own_keys, own_state, result)
        self._recorded[shape] = recorded
        if len(self._recorded) > self.most:
            self._recorded.popitem(last=False)
        return recorded


def _clone(batch: Batch) -> Batch:
    copies: dict[str, Any] = {name: tensor.clone() for name, tensor in _named(batch)}
    return replace(batch, **copies)


def _named(batch: Batch) -> list[tuple[str, Tensor]]:
    pairs = [(field.name, getattr(batch, field.name)) for field in fields(batch)]
    return [(name, value) for name, value in pairs if isinstance(value, Tensor)]


def _tensors(batch: Batch) -> list[Tensor]:
    return [tensor for _, tensor in _named(batch)]


def _shape(batch: Batch) -> tuple[object, ...]:
    """What a recording depends on. Whether all steps are real decides which code runs; how many are does not."""
    full = batch.real == batch.steps * batch.lanes.shape[0]
    return (full, *((name, tuple(tensor.shape), tensor.dtype) for name, tensor in _named(batch)))


def _shapes(state: list[Tensor] | None) -> tuple[object, ...]:
    return () if state is None else tuple((tuple(tensor.shape), tensor.dtype) for tensor in state)


def _copy(own: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    for to, source in zip(own, given, strict=True):
        to.copy_(source, non_blocking=True)

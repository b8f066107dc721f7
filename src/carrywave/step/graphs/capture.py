"""Capture repeated GPU work as CUDA graphs and replay it, so that kernel launches on the host no longer limit the GPU.

A recurrent step is hundreds of small kernels, and launching them one by one takes longer than running them. Everything that differs between
two steps of the same shape is a tensor that is written before the replay: inputs, targets, lengths, the lanes' state, the random key, the
learning rate. A replay therefore computes exactly what the step itself would have computed, as long as nothing else has changed: `watch`
tracks the values baked into a graph, and a separate graph is captured for each state it finds.

The first step of a shape runs normally (libraries initialize themselves in it); the second is captured. Graphs share one memory pool: they
run one after another, and whatever outlives a step (the lanes' state) is copied out of the pool.

Graphs know nothing of what they hold. Work of different kinds is captured separately, and several pieces of work can make up a step: the
same combination of batch shapes hardly ever recurs, but the individual shapes do.
"""

from __future__ import annotations

import gc
import os
import traceback
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from carrywave.data.batch import Batch
from carrywave.parallel import process_groups
from carrywave.plan.plan import Plan
from carrywave.step.graphs.recorded_state import Watch, ours
from carrywave.step.passes.jobs import FlatCarry

MOST_SHAPES = 64  # graphs kept per kind of work; about as many shapes as an epoch of bucketed sequences has
MOST_SEEN = 4096
MOST_TRIES = 2  # a capture that another thread or a neighbour disturbed works the next time

Result = TypeVar("Result")
Key = tuple[object, ...]
# A function of batches, other tensors (their random keys) and the lanes' state, returning a result and the lanes' new state.
Step = Callable[[Sequence[Batch], Sequence[Tensor], FlatCarry], tuple[Result, FlatCarry]]


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    batches: list[Batch]
    tensors: list[Tensor]
    state: FlatCarry
    result: Any
    left: FlatCarry  # lanes' state after the step: `state` itself if the shapes match, so that consecutive steps need no copy


@dataclass
class _Kind:
    """One kind of work: its captured graphs by shape, least recently used first, and the shapes seen so far."""

    recorded: OrderedDict[Key, _Recorded] = field(default_factory=OrderedDict)
    seen: set[Key] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)  # captures that came to nothing, and why


class Capture:
    """Runs work of several kinds, replaying a captured graph if there is one for its shape."""

    def __init__(self, device: torch.device, *, most: int = MOST_SHAPES, watch: Watch | None = None) -> None:
        self.device, self.most, self.watch = device, most, watch
        self.replays: Counter[str] = Counter()  # by kind
        self._kinds: dict[str, _Kind] = {}
        self._pool: Any = None
        process_groups.hold(self)

    @staticmethod
    def of(
        device: torch.device, plan: Plan, model: nn.Module, optimizer: Optimizer | None = None, *, on_device: bool = False
    ) -> Capture | None:
        """Return a Capture, or None if nothing may be captured: without CUDA, in a pipeline whose messages pass through the host (they do
        not if `on_device`), if the head's work depends on the targets, or with CARRYWAVE_CAPTURE=0.

        User-defined modules and hooks are not captured either, because a replay would not run their code, unless CARRYWAVE_CAPTURE=1. Pass
        `optimizer` if its step is captured too.
        """
        wanted = os.environ.get("CARRYWAVE_CAPTURE", "")
        on_host = (plan.stages > 1 and not on_device) or getattr(getattr(model, "head", None), "picks_rows", False)
        if wanted == "0" or device.type != "cuda" or on_host or not (wanted == "1" or ours(model)):
            return None
        return Capture(device, watch=Watch(model, optimizer, strict=wanted != "1"))

    def __call__(
        self, kind: str, step: Step[Result], batches: Sequence[Batch], tensors: Sequence[Tensor], state: FlatCarry, *, under: Key = ()
    ) -> tuple[Result, FlatCarry]:
        """Return what `step` returns, valid until the next call of the same kind. `under`: anything else a captured graph depends on."""
        history = self._kinds.setdefault(kind, _Kind())
        version = 0 if self.watch is None else self.watch.version()
        if version is None:
            return step(batches, [tensor.to(self.device) for tensor in tensors], state)
        shape = (version, *under, *(_shape(batch) for batch in batches), _shapes(tensors), _shapes(state))
        recorded = history.recorded.get(shape)
        if recorded is None and len(history.failures) < MOST_TRIES and shape in history.seen:
            recorded = self._record(history, shape, step, batches, tensors, state)
        if recorded is None:
            if len(history.seen) >= MOST_SEEN:
                history.seen.clear()  # shapes that rarely recur are not worth remembering
            outcome = step(batches, [tensor.to(self.device) for tensor in tensors], state)
            history.seen.add(shape)  # only now: what a step makes when it first runs, such as memory shared with others, cannot be captured
            return outcome
        history.recorded.move_to_end(shape)
        for recorded_batch, batch in zip(recorded.batches, batches, strict=True):
            _copy(_tensors(recorded_batch), _tensors(batch))
        _copy(recorded.tensors, tensors)
        if recorded.state is not None and state is not None:
            _copy_others(recorded.state, state)
        recorded.graph.replay()
        self.replays[kind] += 1
        return recorded.result, recorded.left

    def held(self, kind: str) -> int:
        """The number of graphs captured for this kind."""
        return len(self.graphs(kind))

    def graphs(self, kind: str) -> list[torch.cuda.CUDAGraph]:
        """The graphs captured for this kind, least recently used first."""
        return [each.graph for each in self._kinds[kind].recorded.values()] if kind in self._kinds else []

    def failure(self, kind: str) -> str:
        """Why a capture of this kind of work failed last; empty if none has."""
        return next(reversed(self._kinds[kind].failures), "") if kind in self._kinds else ""

    def forget(self) -> None:
        """Drop all graphs, because tensors that they read or write have been replaced."""
        self._kinds.clear()
        self._pool = None  # a pool whose graphs have all been destroyed cannot be reused

    def _record(
        self, history: _Kind, shape: Key, step: Step[Any], batches: Sequence[Batch], tensors: Sequence[Tensor], state: FlatCarry
    ) -> _Recorded | None:
        """Capture one step of this shape without running it. If that fails repeatedly, warn once and run this kind of work uncaptured from
        then on.
        """
        static_batches = [_clone(batch) for batch in batches]
        static_tensors = [tensor.to(self.device).clone() for tensor in tensors]
        static_state = None if state is None else [tensor.clone() for tensor in state]
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        if not history.recorded:  # so also before the second try
            # An autograd graph that waits for collection belongs to the stream of its own step, and would break the capture. None of ours
            # does, but what ran before in this process may have left some.
            gc.collect()
        torch.cuda.synchronize(self.device)
        try:
            # Thread-local: the data loader's thread may allocate and copy during the capture without invalidating it.
            with _nothing_collected(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result, left = step(static_batches, static_tensors, static_state)
                if static_state is not None and left is not None and _shapes(static_state) == _shapes(left):
                    _copy(static_state, left)
                    left = static_state
        except Exception as error:
            history.failures.append(_reason(error))
            self._pool = None
            torch.cuda.synchronize(self.device)
            if len(history.failures) == MOST_TRIES:
                warnings.warn(f"steps could not be captured as CUDA graphs and will run slower: {history.failures[-1]}", stacklevel=3)
            return None
        recorded = _Recorded(graph, static_batches, static_tensors, static_state, result, left)
        history.recorded[shape] = recorded
        if len(history.recorded) > self.most:
            history.recorded.popitem(last=False)
        return recorded


def _reason(error: BaseException) -> str:
    """What went wrong first, and where, in one line: ending a capture that has failed raises an error of its own, which says only that it
    has.
    """
    while error.__context__ is not None:
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    our_frames = [frame for frame in frames if f"{os.sep}carrywave{os.sep}" in frame.filename] or frames
    where = f" ({os.path.basename(our_frames[-1].filename)}, line {our_frames[-1].lineno})" if our_frames else ""
    return (" ".join(str(error).split())[:200] or type(error).__name__) + where


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Disable garbage collection in this context: destroying an old graph during a capture invalidates the capture."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _clone(batch: Batch) -> Batch:
    copies: dict[str, Any] = {name: tensor.clone() for name, tensor in _named(batch)}
    return replace(batch, **copies)


def _named(batch: Batch) -> list[tuple[str, Tensor]]:
    pairs = [(field.name, getattr(batch, field.name)) for field in fields(batch)]
    return [(name, value) for name, value in pairs if isinstance(value, Tensor)]


def _tensors(batch: Batch) -> list[Tensor]:
    return [tensor for _, tensor in _named(batch)]


def _shape(batch: Batch) -> tuple[object, ...]:
    """The properties of a batch that a graph depends on. Whether any step is padding selects the code path; how many are does not."""
    full = batch.real == batch.steps * batch.lanes.shape[0]
    return (full, batch.idle, *((name, tuple(tensor.shape), tensor.dtype) for name, tensor in _named(batch)))


def _shapes(tensors: Sequence[Tensor] | None) -> tuple[object, ...]:
    return () if tensors is None else tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def _copy_others(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy what is not there already: of a carry, a user may have set any part, even to another part of it."""
    pairs = [(to, source) for to, source in zip(destinations, sources, strict=True) if to is not source]
    own = {id(to) for to in destinations}
    _copy([to for to, _ in pairs], [source.clone() if id(source) in own else source for _, source in pairs])


def _copy(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for to, source in zip(destinations, sources, strict=True):
        to.copy_(source, non_blocking=True)

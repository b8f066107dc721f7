"""Predicts the peak memory of each stage of a plan: what it holds between steps, plus the chunks in flight at the worst moment.

Needs no times, so no profile. Buffers in device memory, which two or more workers share and which live as long as the run, have sizes that
are powers of two, so that batches of other shapes find them large enough (`plan.schedule.buffers`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from carrywave.plan.plan import Plan
from carrywave.plan.profile import DEVICE_MEMORY
from carrywave.plan.schedule.buffers import shared_bytes
from carrywave.plan.schedule.wavefront_order import MOST_WAITING, extra
from carrywave.plan.transports import Transports
from carrywave.plan.unit import Unit
from carrywave.plan.units import BatchShape, Units

INDEX_BYTES = 8  # per token index
SUMS_LEAST_BYTES = 1 << 16  # of memory in which replicas sum
_ALIGNED = 256  # bytes at whose multiples parts of it begin
# Gradients that are summed together; a larger parameter is summed alone. A collective costs its workers the same messages whatever it sums,
# so that few large ones cost least; in device memory, where a sum costs hardly more than its bytes, the buffer is as large as a bucket.
BUCKET_BYTES, DEVICE_BUCKET_BYTES = 25 << 20, 8 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes of one stage."""

    parameters: int
    gradients: int
    optimizer: int  # its state; and the weights that replicas agreed on, where they do not exchange at every step
    activations: int  # saved for chunks in flight and for deferred weight gradients
    carries: int
    workspace: int  # temporary memory of the running task
    links: int = 0  # buffers of messages and sums in device memory

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.carries + self.workspace + self.links


class Footprint:
    """One plan, without its cuts, on one batch shape."""

    def __init__(self, plan: Plan, shape: BatchShape, units: Units, transports: Transports | None = None) -> None:
        self.plan, self.shape, self.units, self.transports = plan, shape, units, transports or Transports()
        self.replica_lanes = max(1, -(-shape.lanes // plan.replicas))
        self.lanes = units.micro_batches(plan, self.replica_lanes) * units.accumulate
        self.chunk_steps = shape.steps if units.whole or plan.chunk_steps is None else min(plan.chunk_steps, shape.steps)
        self.chunks = -(-shape.steps // self.chunk_steps)
        self.counts = (self.chunks,) * len(self.lanes)
        self.defer_weights = self.chunks > 1 and not plan.recompute
        self.share_head = plan.shares_head and not units.pooled
        self._memory: dict[tuple[int, int, int], Memory] = {}

    def memory(self, stage: int, first: int, last: int) -> Memory:
        """Bytes of units [first, last) as this stage."""
        key = stage, first, last
        if key not in self._memory:
            self._memory[key] = self._bytes(stage, first, last)
        return self._memory[key]

    def _load(self, stage: int) -> list[tuple[int, int]]:
        """Chunks in flight and chunks with pending weight gradients, as pairs of which one is the worst case."""
        if self.plan.stages == 1 or len(self.lanes) == 1:  # all chunks forward, then all backward, one micro-batch after another
            return [(self.chunks, 0), (0, self.chunks)] if self.defer_weights else [(self.chunks, 0)]
        held = min(sum(self.counts), self.chunks + extra(self.chunks, self.plan.stages - 1 - stage))
        return [(held, self.chunks * min(len(self.lanes), MOST_WAITING) if self.defer_weights else 0)]

    def _bytes(self, stage: int, first: int, last: int) -> Memory:
        units, split = self.units, self._load(stage)
        e, lanes = units.activation_bytes, max(self.lanes)
        half = e < units.parameter_bytes
        held, head = list(units.units[first:last]), units.units[-1]
        if self.share_head and last == len(units):  # its logits live only while it runs, on whichever stage that is
            held.pop()
        chunk = lanes * self.chunk_steps
        kept = sum(unit.kept for unit in held)
        entering = units.units[first].width_in or -(-INDEX_BYTES // e)
        if self.transports.messages == DEVICE_MEMORY and first > 0:
            entering = 0  # messages are read in place, in the buffers of the links
        flight = (entering if self.plan.recompute else entering + kept) * chunk * e
        pending = sum(unit.deferred for unit in held) * chunk * e
        # In half precision, on GPUs, kernels hold what they saved of a window until all of its gradients are pending.
        most_held, most_pending = (max(each) for each in zip(*split, strict=True))
        split = [(most_held, most_pending)] if self.defer_weights and half else split
        # The running chunk's temporaries; deferred gradients instead need a second copy of the largest unit's pending rows for the window.
        work = max([unit.work for unit in held] + [head.work + head.kept] * self.share_head, default=0)
        workspace = (work + (kept if self.plan.recompute else 0)) * chunk * e
        if self.defer_weights:
            workspace = max(workspace, max((unit.deferred for unit in held), default=0) * lanes * self.shape.steps * e)
        parameters = units.parameters(first, last, share_head=self.share_head) * units.parameter_bytes
        if half:  # the layers read a lower-precision copy of the weights
            workspace += parameters * e // units.parameter_bytes
        # The carries at the starts of segments, and those within the one that is being recomputed.
        segment = self.plan.segment(self.chunks)
        entered = -(-most_held // segment) + segment - 1
        carry = sum(unit.carry for unit in held) * e
        reduced = self.plan.replicas > 1 and not units.outer  # in separate buffers
        return Memory(
            parameters,
            parameters * (2 if reduced else 1),
            parameters * (units.outer + units.states),
            max(flights * flight + waiting * pending for flights, waiting in split),
            carry * (self.replica_lanes + lanes * (entered + 1)),
            workspace,
            sum(self._link_buffers(first, last)),
        )

    def _link_buffers(self, first: int, last: int) -> Iterable[int]:
        """Bytes of each buffer in device memory: both ways of messages with each other stage, and what sums over replicas go through."""
        units, stages, head = self.units, self.plan.stages, self.units.units[-1]
        if self.transports.messages == DEVICE_MEMORY:
            in_flight = min(len(self.lanes), stages + 2)  # micro-batches whose messages a channel holds at once; never more
            each = max(self.lanes) * self.shape.steps * units.activation_bytes * in_flight
            if first > 0:
                yield shared_bytes(units.units[first].width_in * each)
            if last < len(units):
                yield shared_bytes(units.units[last - 1].width_out * each)
            if self.share_head:  # the last stage has a pair of buffers with every other one, which scores its share of the chunks
                yield (stages - 1 if last == len(units) else 1) * shared_bytes(-(-head.width_in * each // stages))
        whole = units.parameters(first, last, share_head=self.share_head) * units.parameter_bytes
        if self.transports.sums == DEVICE_MEMORY and self.plan.replicas > 1 and whole:
            held = [*units.units[first:last], *([head] if self.share_head else [])]
            largest = max(map(_largest_tensor, held)) * units.parameter_bytes
            part = -(-max(min(whole, DEVICE_BUCKET_BYTES), largest) // self.plan.replicas)  # of a bucket, which one replica adds up
            yield shared_bytes(2 * self.plan.replicas * -(-part // _ALIGNED) * _ALIGNED, least=SUMS_LEAST_BYTES)


def _largest_tensor(unit: Unit) -> int:
    """Elements of the largest parameter of a unit."""
    largest = max((layer.inputs * layer.channels for layer in unit.front), default=0)
    if unit.kind == "numbers":
        return largest
    if unit.cell is not None:
        return unit.cell.gates * unit.outputs * max(unit.inputs, (unit.projection or unit.outputs) // unit.heads)
    return max(largest, unit.inputs * unit.outputs)


def largest_stage(units: Units, plan: Plan, transports: Transports | None = None) -> Memory:
    """Bytes of the stage that needs the most memory, on the batch shape that needs the most. `transports`: how workers reach each other."""
    spans = list(pairwise(plan.edges(len(units))))
    cases = [Footprint(plan, shape, units, transports) for shape in units.shapes]
    return max((case.memory(stage, *span) for case in cases for stage, span in enumerate(spans)), key=lambda memory: memory.total)


def say(num_bytes: int) -> str:
    """Format bytes with a unit, to three digits."""
    for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {name}" if num_bytes < 1000 * size else f"{num_bytes / size:.0f} {name}"
    return f"{num_bytes} bytes"

"""Predicts the peak memory of each stage of a plan: what it holds between steps, plus the chunks in flight at the worst moment.

Needs no times, so no profile.
"""

from __future__ import annotations

from dataclasses import dataclass

from carrywave.plan.plan import Plan
from carrywave.plan.schedule.wavefront_order import MOST_WAITING, extra
from carrywave.plan.units import BatchShape, Units

INDEX_BYTES = 8  # per token index


@dataclass(frozen=True)
class Memory:
    """Bytes of one stage."""

    parameters: int
    gradients: int
    optimizer: int  # its state; and the weights that replicas agreed on, where they do not exchange at every step
    activations: int  # saved for chunks in flight and for deferred weight gradients
    carries: int
    workspace: int  # temporary memory of the running task

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.carries + self.workspace


class Footprint:
    """One plan, without its cuts, on one batch shape."""

    def __init__(self, plan: Plan, shape: BatchShape, units: Units) -> None:
        self.plan, self.shape, self.units = plan, shape, units
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
        )


def say(num_bytes: int) -> str:
    """Format bytes with a unit, to three digits."""
    for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {name}" if num_bytes < 1000 * size else f"{num_bytes / size:.0f} {name}"
    return f"{num_bytes} bytes"

"""Counts the buffers of messages and sums in device memory, which two or more workers share and which live as long as the run.

Their sizes are rounded up to powers of two, so that batches of different shapes find the same one. Between two stages, both have a buffer
for all messages of a micro-batch, one way and back, times the micro-batches in flight (`plan.schedule.buffers`, `parallel.device_links`).
Sums over replicas go through two halves, each as large as the largest bucket of gradients (`parallel.device_sums`).
"""

from __future__ import annotations

from dataclasses import dataclass

from carrywave.plan.cost.unit import Unit
from carrywave.plan.cost.units import Units
from carrywave.plan.schedule.buffers import shared_bytes

SUMS_LEAST_BYTES = 1 << 16  # of memory in which replicas sum
_ALIGNED = 256  # bytes at whose multiples parts of it begin
# Gradients that are summed together; a larger parameter is summed alone. A collective costs its workers the same messages whatever it sums,
# so that few large ones cost least; in device memory, where a sum costs hardly more than its bytes, the buffer is as large as a bucket.
BUCKET_BYTES, DEVICE_BUCKET_BYTES = 25 << 20, 8 << 20


@dataclass(frozen=True)
class Links:
    """What of a plan's traffic lies in device memory."""

    messages: bool = False  # between stages
    sums: int = 1  # replicas over which gradients are summed there; 1: none are
    stages: int = 1
    slots: int = 1  # micro-batches whose messages a channel holds at once


NO_LINKS = Links()


def link_bytes(units: Units, first: int, last: int, links: Links, *, lanes: int, window: int, share_head: bool) -> int:
    """Bytes of the buffers of a stage with units [first, last). `lanes`: of the largest micro-batch."""
    total = 0
    each = lanes * window * units.activation_bytes * links.slots
    if links.messages and first > 0:
        total += shared_bytes(units.units[first].width_in * each)
    if links.messages and last < len(units):
        total += shared_bytes(units.units[last - 1].width_out * each)
    if links.messages and share_head and (first > 0 or last < len(units)):
        # The last stage has a pair of buffers with every other one, which scores its share of the chunks.
        pairs = links.stages - 1 if last == len(units) else 1
        total += pairs * shared_bytes(-(-units.units[-1].width_in * each // links.stages))
    if links.sums > 1:
        whole = units.parameters(first, last, share_head=share_head) * units.parameter_bytes
        held = [*units.units[first:last], *([units.units[-1]] if share_head else [])]
        largest = max((_largest_tensor(unit) for unit in held), default=0) * units.parameter_bytes
        part = -(-max(min(whole, DEVICE_BUCKET_BYTES), largest) // links.sums)  # of a bucket, which one replica adds up
        total += shared_bytes(2 * links.sums * -(-part // _ALIGNED) * _ALIGNED, least=SUMS_LEAST_BYTES) if whole else 0
    return total


def _largest_tensor(unit: Unit) -> int:
    """Elements of the largest parameter of a unit."""
    largest = max((layer.inputs * layer.channels for layer in unit.front), default=0)
    if unit.kind == "numbers":
        return largest
    if unit.cell is not None:
        return unit.cell.gates * unit.outputs * max(unit.inputs, (unit.projection or unit.outputs) // unit.heads)
    return max(largest, unit.inputs * unit.outputs)

"""Tells how the workers of a plan would reach each other, and what of a step would be recorded: what the runtime will decide, foreseen.

Workers of one host whose GPUs reach each other's memory write messages and sums there, and nothing of a step needs the host: the whole step
of a worker is recorded as a CUDA graph. So are messages and sums over NCCL, between hosts as well. If messages go over gloo, the host
launches every task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from carrywave.plan.cluster import Cluster, Placement
from carrywave.plan.plan import Plan
from carrywave.plan.profile import DEVICE_MEMORY, Transport
from carrywave.plan.units import Units

_RECORDED = {
    "steps": "whole steps are recorded as CUDA graphs",
    "passes": "forward and backward are recorded as CUDA graphs",
    "": "the host launches every task",
}


@dataclass(frozen=True)
class Transports:
    """How messages and sums travel, and what is recorded as a CUDA graph."""

    messages: Transport = ""  # between stages; "": there is one
    sums: Transport = ""  # over workers; "": there is one
    recorded: Literal["", "passes", "steps"] = ""  # whole steps, or each forward and backward with sums and update after it
    on_gpu: bool = False

    def __str__(self) -> str:
        """In words; empty for one worker."""
        if not self.sums:
            return ""
        if self.messages in ("", self.sums):
            routes = f"{'messages and sums' if self.messages else 'sums'} {_by(self.sums)}"
        else:
            routes = f"messages {_by(self.messages)}, sums {_by(self.sums)}"
        return f"{routes}; {_RECORDED[self.recorded]}" if self.on_gpu else routes


def transports_of(plan: Plan, units: Units, cluster: Cluster, placed: Placement) -> Transports:
    """The transports of a plan whose workers are placed on a cluster."""
    on_gpu = all(profile.recorded for profile in placed.kinds)
    within = cluster.link_within(placed.kinds).transport or (DEVICE_MEMORY if on_gpu else "gloo")
    within = "gloo" if within == DEVICE_MEMORY and not on_gpu else within
    between = cluster.link_between(placed.kinds).transport if placed.hosts > 1 else ""
    # Only GPUs of one host have memory that others write to.
    between = between if between not in ("", DEVICE_MEMORY) else "NCCL" if on_gpu else "gloo"
    messages: Transport = "" if plan.stages == 1 else between if any(placed.crossing) else within
    sums: Transport = "" if plan.workers == 1 else between if placed.hosts > 1 else within
    if not on_gpu or units.precision == "fp64" or messages == "gloo" or units.picks_rows:
        return Transports(messages, sums, "", on_gpu)
    one_piece = sums != "gloo" and (plan.stages > 1 or units.accumulate == 1)
    return Transports(messages, sums, "steps" if one_piece else "passes", on_gpu)


def _by(transport: Transport) -> str:
    return f"in {transport}" if transport == DEVICE_MEMORY else f"over {transport}"

"""A `Plan` says how the work of one step is split over devices and time. Frozen, torch-free; serial is a value, never a branch."""

from __future__ import annotations

from dataclasses import dataclass

from carrywave.errors import PlanError
from carrywave.spec.spec import PlanSpec


@dataclass(frozen=True)
class Plan:
    """Replicas × stages, where the units are cut, and how a batch is cut in time (chunks) and lanes (slices).

    Units are the encoder, each LSTM layer, and the head, in this order. `cuts` names the first unit of each stage after
    the first.
    """

    replicas: int = 1
    stages: int = 1
    cuts: tuple[int, ...] = ()
    chunk_steps: int | None = None  # None: the whole window is one chunk
    slices: int = 1
    recompute: bool = False
    kernel: str = "auto"

    @staticmethod
    def serial() -> Plan:
        """One device, one chunk, one slice."""
        return Plan()

    @property
    def workers(self) -> int:
        """Processes that this plan needs."""
        return self.replicas * self.stages

    def chunks(self, steps: int) -> int:
        """Time chunks in a window of so many steps."""
        return 1 if self.chunk_steps is None else -(-steps // self.chunk_steps)


def resolve(asked: PlanSpec, *, layers: int, workers: int, lanes: int | None) -> Plan:
    """The plan a spec asks for, checked against the model, the workers and (for streams) the lanes."""
    units = layers + 2
    if asked.stages > units:
        raise PlanError(
            f"plan.stages={asked.stages}, but the model has {units} units (encoder, {layers} layers, head); use plan.stages <= {units}"
        )
    replicas = asked.replicas if asked.replicas is not None else max(1, workers // asked.stages)
    if replicas * asked.stages != workers:
        raise PlanError(
            f"plan.replicas={replicas} x plan.stages={asked.stages} needs {replicas * asked.stages} workers, {workers} are running; "
            f"set plan.replicas and plan.stages so that their product is {workers}"
        )
    if lanes is not None and lanes < replicas * asked.slices:
        raise PlanError(
            f"batch.lanes={lanes} cannot be shared by {replicas} replicas x {asked.slices} slices; "
            f"use batch.lanes >= {replicas * asked.slices}"
        )
    cuts = asked.cuts if asked.cuts is not None else even_cuts(units, asked.stages)
    if len(cuts) != asked.stages - 1 or list(cuts) != sorted(set(cuts)) or any(not 0 < cut < units for cut in cuts):
        raise PlanError(
            f"plan.cuts={list(cuts)} must be {asked.stages - 1} rising unit numbers between 1 and {units - 1}; change it or leave it out"
        )
    return Plan(replicas, asked.stages, tuple(cuts), asked.chunk_steps, asked.slices, asked.recompute, asked.kernel)


def even_cuts(units: int, stages: int) -> tuple[int, ...]:
    """Cuts that give every stage the same number of units, as near as can be."""
    return tuple(units * stage // stages for stage in range(1, stages))

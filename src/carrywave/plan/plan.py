"""A `Plan` says how the work of one step is split over devices and time.

Frozen and torch-free. Serial execution is a plan like any other, not a special case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from carrywave.errors import PlanError, option
from carrywave.spec.plan_spec import PlanSpec

CHUNK_STEPS = 16  # default steps per chunk when there are several stages; shorter chunks cost more than they gain


@dataclass(frozen=True)
class Plan:
    """Replicas × stages, where the units are cut into stages, and how a batch is cut in time (chunks) and lanes (micro-batches).

    Units are the encoder, each recurrent layer, and the head, in this order. `cuts` holds the first unit of every stage but the
    first; if empty, layers are divided evenly.

    >>> import carrywave as cw
    >>> cw.Plan(replicas=2, stages=3, chunk_steps=16).workers
    6
    """

    replicas: int = 1
    stages: int = 1
    cuts: tuple[int, ...] = ()
    chunk_steps: int | None = None  # None: the whole window is one chunk
    micro_batches: int = 1
    recompute: bool | Literal["twice"] = False
    kernel: str = "auto"
    share_head: bool = False  # distribute the head's work over all stages instead of leaving it to the last one

    @staticmethod
    def serial() -> Plan:
        """One device, one chunk, one micro-batch."""
        return Plan()

    @property
    def workers(self) -> int:
        """Number of processes this plan needs."""
        return self.replicas * self.stages

    @property
    def shares_head(self) -> bool:
        """True if several stages share the head's work; a single stage has none to share it with."""
        return self.share_head and self.stages > 1

    def chunks(self, steps: int) -> int:
        """Number of chunks in a window of `steps` steps."""
        return 1 if self.chunk_steps is None else -(-steps // self.chunk_steps)

    def segment(self, chunks: int) -> int:
        """Chunks from one carry that is kept for backward to the next: one, or with recompute=twice about the root of their number, so that
        as many carries are kept as are recomputed at a time.
        """
        return math.isqrt(chunks - 1) + 1 if self.recompute == "twice" else 1

    def edges(self, units: int) -> tuple[int, ...]:
        """The first unit of each stage, then the end of the last stage (`units`, exclusive)."""
        cuts = self.cuts or even_cuts(units, self.stages)
        edges = (0, *cuts, units)
        if len(edges) != self.stages + 1:
            made = f"{len(cuts) + 1} stage{'s' * bool(cuts)}"
            raise PlanError(
                f"plan.cuts={list(cuts)} makes {made}, but plan.stages is {self.stages}; list the first layer of each stage but the first"
            )
        if list(edges) != sorted(set(edges)):
            raise PlanError(
                f"plan.cuts={list(cuts)} must increase, from 1 (layer 1) to at most {units - 1} (the head); correct or remove it"
            )
        return edges

    def span(self, stage: int, units: int) -> tuple[int, int]:
        """The units of a stage: the first, and the end (exclusive)."""
        return self.edges(units)[stage], self.edges(units)[stage + 1]


def resolve(asked: PlanSpec, *, layers: int, workers: int, lanes: int | None, pooled: bool = False, whole: bool = False) -> Plan:
    """The plan that a spec asks for, validated against the model, the number of workers and (for streams) the lanes.

    `whole`: the head reads whole sequences, so time is not cut unasked.
    """
    units = layers + 2
    if asked.stages > units:
        raise PlanError(
            f"plan.stages={asked.stages}, but the model has {units} units (encoder, {layers} layer{'s' * (layers > 1)}, head); "
            f"use plan.stages <= {units}"
        )
    replicas = asked.replicas if asked.replicas is not None else max(1, workers // asked.stages)
    needed = replicas * asked.stages
    if needed != workers:
        raise PlanError(
            f"plan.replicas={replicas} x plan.stages={asked.stages} needs {needed} worker{'s' * (needed > 1)}, got {workers}; "
            f"use {option('devices', needed)}, or set plan.replicas and plan.stages so that their product is {workers}"
        )
    if lanes is not None and lanes < replicas * asked.micro_batches:
        raise PlanError(
            f"batch.lanes={lanes} cannot be divided among plan.replicas={replicas} x plan.micro_batches={asked.micro_batches}; "
            f"use batch.lanes >= {replicas * asked.micro_batches}"
        )
    chunk_steps = asked.chunk_steps
    if chunk_steps is None and asked.stages > 1 and asked.micro_batches == 1 and not whole:
        chunk_steps = CHUNK_STEPS
    cuts = asked.cuts if asked.cuts is not None else even_cuts(units, asked.stages)
    plan = Plan(
        replicas,
        asked.stages,
        tuple(cuts),
        chunk_steps,
        asked.micro_batches,
        asked.recompute,
        asked.kernel,
        asked.share_head,
    )
    plan.edges(units)
    check_head(plan, pooled=pooled)
    return plan


def fewer(asked: PlanSpec, workers: int) -> PlanSpec:
    """The plan to request when fewer workers remain: as many of the requested stages as divide them evenly, replicas for the rest."""
    stages = next(stages for stages in range(min(asked.stages, workers), 0, -1) if workers % stages == 0)
    cuts = asked.cuts if stages == asked.stages else None  # cuts are only valid for the number of stages they were given for
    return asked.model_copy(update={"replicas": None, "stages": stages, "cuts": cuts})


def check_sync(plan: Plan, sync: str) -> None:
    """Refuse a plan under which replicas cannot exchange in the way that `train.sync` asks for."""
    if sync == "async" and plan.stages > 1:
        raise PlanError(
            f"train.sync=async trains a whole model on each worker, but plan.stages={plan.stages}; "
            "use plan.stages=1, or train.sync=local or diloco"
        )


def check_head(plan: Plan, *, pooled: bool) -> None:
    """Reject a shared head when the head scores whole sequences: there are no per-step scores to distribute."""
    if plan.shares_head and pooled:
        raise PlanError(
            "plan.share_head=true needs a head that scores single steps, but the head of this model scores whole sequences; "
            "remove plan.share_head"
        )


def even_cuts(units: int, stages: int) -> tuple[int, ...]:
    """Cuts that divide the layers as evenly as possible; any surplus goes to the earlier stages, because the last also has the head.

    The encoder and the head are cheap compared with a layer. They get stages of their own only if there are more stages than layers.
    """
    layers = units - 2
    if stages > units:
        raise PlanError(
            f"{units} units (encoder, {layers} layer{'s' * (layers > 1)}, head) cannot fill {stages} stages; use plan.stages <= {units}"
        )
    if stages > layers:
        return tuple(range(1 if stages == units else 2, units))
    each, more = divmod(layers, stages)
    return tuple(1 + each * stage + min(stage, more) for stage in range(1, stages))

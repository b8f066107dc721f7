"""`stats, carry = compute(batches, keys, carry)`: forward and backward of batches on this worker's stage and lanes.

The gradients are left in the parameters' `.grad`; the stats are a vector as in `pass_slots`. A single device runs a schedule of one
stage, by the same code as a stage of a pipeline. Nothing is read on the host, and what a call depends on besides its arguments (weights,
loss scale) is in tensors at fixed addresses, so a call can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.stage import Stage
from carrywave.model.state import State
from carrywave.parallel.mesh import Mesh
from carrywave.plan.schedule.schedule import wavefront
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.gradients import Gradients
from carrywave.step.nonfinite import watched_encoder
from carrywave.step.norms import norm_of_each
from carrywave.step.passes import executor
from carrywave.step.passes.job import BatchOutcome, Job
from carrywave.step.passes.micro_batches import FlatCarry, flatten
from carrywave.step.passes.programs import Scheduler, program_for
from carrywave.step.passes.task_clock import TaskClock
from carrywave.step.stats import pass_slots, total


class Compute:
    """The forward and backward passes of one worker. `scale` multiplies the loss (fp16)."""

    def __init__(
        self, stage: Stage | OpaqueModel, mesh: Mesh, spec: TrainSpec, *, keep_state: bool, uncut_time: bool, scale: Tensor | None
    ) -> None:
        self.stage, self.mesh, self.spec, self.scale = stage, mesh, spec, scale
        self.slots = pass_slots(len(stage.parts))
        self.keep_state = keep_state  # True: lanes keep their carry from batch to batch
        self.uncut_time = uncut_time  # True: time is not cut, because layers read both ways, or the head whole sequences
        # Real steps for each change from one step to the next; None if changes are not penalised.
        self.per_change = torch.ones((), dtype=torch.float64, device=mesh.device) if spec.beta else None
        self.scheduler: Scheduler = wavefront
        self.clock: TaskClock | None = None  # if set, times the tasks
        self.last: Batch | None = None  # this worker's part of the last batch that was computed rather than replayed from a graph

    def __call__(
        self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry, gradients: Gradients | None = None
    ) -> tuple[Tensor, FlatCarry]:
        """`gradients`: learns which become final, if this is the last pass of a step."""
        plan = self.mesh.plan
        self.last = batches[-1]
        program = program_for(plan, batches, backward=True, uncut_time=self.uncut_time, scheduler=self.scheduler)
        with watched_encoder(self.stage) as encoded:
            outcomes = executor.run(
                self.stage,
                plan,
                program,
                self._jobs(batches, keys, carry),
                self.mesh.links,
                stage_number=self.mesh.stage,
                gradients=gradients,
                clock=self.clock,
            )
        return self._stats(outcomes, encoded), flatten(outcomes[-1].state) if self.keep_state else None

    def count_changes(self, batches: Sequence[Batch]) -> None:
        """Before a step over these batches: what the penalty on changes is a mean over."""
        if self.per_change is not None:
            self.per_change.fill_(sum(batch.cells[0] for batch in batches) / max(1, sum(batch.changes for batch in batches)))

    def start(self, lanes: int) -> list[Tensor]:
        """The initial carry of this many lanes."""
        return flatten(self.stage.start(lanes, self.mesh.device).detach())

    def _jobs(self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry) -> list[Job]:
        jobs: list[Job] = []
        for batch, key in zip(batches, keys, strict=True):
            lanes = batch.lanes.shape[0]
            before = None if not jobs else jobs[-1].batch.lanes.shape[0]
            entered: State | None = None
            if not self.keep_state or (before is not None and before != lanes):
                entered = self.stage.start(lanes, self.mesh.device)
            elif before is None:
                entered = State(self.stage.carries(carry or []))
            jobs.append(
                Job(
                    batch,
                    entered,
                    key.to(self.mesh.device),
                    self.scale,
                    self.spec.alpha,
                    self.spec.beta,
                    self.per_change,
                    self.spec.precision,
                )
            )
        return jobs

    def _stats(self, outcomes: Sequence[BatchOutcome], encoded: Sequence[Tensor]) -> Tensor:
        """Loss, count and penalty of all batches, and the norms of what must be finite."""
        norms = norm_of_each([part for outcome in outcomes for carry in outcome.state.carries for part in carry]).to(self.mesh.device)
        zero = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        return self.slots.pack(
            loss=total([outcome.loss_sum for outcome in outcomes]),
            count=total([outcome.count for outcome in outcomes]),
            penalty=total([outcome.penalty for outcome in outcomes]),
            encoded=torch.stack(list(encoded)).amax() if encoded else zero,
            carries=norms if len(outcomes) == 1 else norms.view(len(outcomes), -1).sum(0),
        )

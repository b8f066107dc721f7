"""`numbers, carry = compute(batches, keys, carry)`: forward and backward of batches on this worker's stage and lanes.

The gradients are left in the parameters' `.grad`; the numbers are a vector as `stats` describes it. A single device runs a schedule of one
stage, by the same code as a stage of a pipeline. Nothing is read on the host, and what a call depends on besides its arguments (weights,
loss scale) is in tensors at fixed addresses, so a call can be recorded as a CUDA graph.
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
from carrywave.step.norms import norm_of_each
from carrywave.step.passes import executor
from carrywave.step.passes.job import Job
from carrywave.step.passes.micro_batches import FlatCarry, flatten
from carrywave.step.passes.programs import Scheduler, program_for
from carrywave.step.passes.task_clock import TaskClock


class Compute:
    """The forward and backward passes of one worker. `scale` multiplies the loss (fp16)."""

    def __init__(
        self, stage: Stage | OpaqueModel, mesh: Mesh, spec: TrainSpec, *, keep_state: bool, uncut_time: bool, scale: Tensor | None
    ) -> None:
        self.stage, self.mesh, self.spec, self.scale = stage, mesh, spec, scale
        self.keep_state = keep_state  # True: lanes keep their carry from batch to batch
        self.uncut_time = uncut_time  # True: time is not cut, because layers read both ways, or the head whole sequences
        # Real steps for each change from one step to the next; None if changes are not penalised.
        self.per_change = torch.ones((), dtype=torch.float64, device=mesh.device) if spec.beta else None
        self.scheduler: Scheduler = wavefront
        self.clock: TaskClock | None = None  # if set, times the tasks

    def __call__(
        self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry, gradients: Gradients | None = None
    ) -> tuple[Tensor, FlatCarry]:
        """`gradients`: learns which become final, if this is the last pass of a step."""
        mesh, plan = self.mesh, self.mesh.plan
        program = program_for(plan, batches, backward=True, uncut_time=self.uncut_time, scheduler=self.scheduler)
        jobs = self._jobs(batches, keys, carry)
        outcomes = executor.run(self.stage, plan, program, jobs, mesh.links, stage_number=mesh.stage, gradients=gradients, clock=self.clock)
        norms = norm_of_each([part for outcome in outcomes for carry in outcome.state.carries for part in carry]).to(mesh.device)
        if len(outcomes) == 1:
            [outcome] = outcomes
            return torch.cat([outcome.sums, norms]), flatten(outcome.state) if self.keep_state else None
        numbers = torch.cat([torch.stack([outcome.sums for outcome in outcomes]).sum(0), norms.view(len(outcomes), -1).sum(0)])
        return numbers, flatten(outcomes[-1].state) if self.keep_state else None

    def count_changes(self, batches: Sequence[Batch]) -> None:
        """Before a step over these batches: what the penalty on changes is a mean over."""
        if self.per_change is not None:
            self.per_change.fill_(sum(batch.cells[0] for batch in batches) / max(1, sum(batch.changes for batch in batches)))

    def start(self, lanes: int) -> list[Tensor]:
        """The initial carry of this many lanes."""
        return flatten(self.stage.start(lanes, self.mesh.device).detach())

    def _jobs(self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry) -> list[Job]:
        jobs: list[Job] = []
        lanes_before: int | None = None
        for batch, key in zip(batches, keys, strict=True):
            lanes = batch.lanes.shape[0]
            entered: State | None = None
            if not self.keep_state or (lanes_before is not None and lanes_before != lanes):
                entered = self.stage.start(lanes, self.mesh.device)
            elif lanes_before is None:
                entered = State(self.stage.carries(carry or []))
            lanes_before, spec = lanes, self.spec
            jobs.append(Job(batch, entered, key.to(self.mesh.device), self.scale, spec.alpha, spec.beta, self.per_change, spec.precision))
        return jobs

"""The story of a step on one worker, once its lanes are chosen: forward and backward, sum over the workers, divide once, clip, update.

Every plan takes this one way. A *pass* is the forward and backward of one batch; a pipeline takes all batches of a step in one pass, so
that they follow each other through its stages. Where all workers are replicas, one message carries the gradients and all else that workers
tell each other. In a pipeline a second one follows it, because each stage knows only its part of the norm.

If `graphs` are given, work whose shapes recur is replayed from CUDA graphs: the whole step if it is one pass, and all that workers exchange
in it is work of the device; otherwise each pass, and, unless gradients are summed over workers, the update. The host waits for the device
only in rare cases: backward missed a parameter here that it may have reached on another worker, or the user's optimizer cannot skip a step
by a flag on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from carrywave.data.batch import Batch
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.stage import Stage
from carrywave.model.state import State
from carrywave.parallel.mesh import Mesh
from carrywave.plan.schedule.schedule import wavefront
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.checks.agreement import Agreement
from carrywave.step.checks.hooks import Hooks
from carrywave.step.gradients import Flags, Gradients
from carrywave.step.graphs.capture import Capture
from carrywave.step.nonfinite import NonfiniteRecord, reset_nonfinite_lanes
from carrywave.step.optim import weight_average
from carrywave.step.optim.loss_scaler import Scaler, step_unless
from carrywave.step.optim.optimizer import NTASGD
from carrywave.step.passes.executor import Pass
from carrywave.step.passes.jobs import FlatCarry, PassJob, Scheduler, flatten, program_for
from carrywave.step.passes.timing import TaskClock, span
from carrywave.step.result import StepResult, Votes
from carrywave.step.stats import COUNT, LOSS, SharedNumbers, mean_of, norms, scale_, total


class Compute:
    """How one worker runs forward and backward. `scale` multiplies the loss (fp16)."""

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

    def count_changes(self, batches: Sequence[Batch]) -> None:
        """Before a step over these batches: what the penalty on changes is a mean over."""
        if self.per_change is not None:
            self.per_change.fill_(sum(batch.cells[0] for batch in batches) / max(1, sum(batch.changes for batch in batches)))

    def start(self, lanes: int) -> list[Tensor]:
        """The initial carry of this many lanes."""
        return flatten(self.stage.start(lanes, self.mesh.device).detach())

    def jobs(self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry) -> list[PassJob]:
        """What a pass over these batches is given, from this carry on."""
        jobs: list[PassJob] = []
        spec, device, lanes_before = self.spec, self.mesh.device, None
        for batch, key in zip(batches, keys, strict=True):
            lanes = batch.lanes.shape[0]
            entered: State | None = None
            if not self.keep_state or (lanes_before is not None and lanes_before != lanes):
                entered = self.stage.start(lanes, device)
            elif lanes_before is None:
                entered = State(self.stage.carries(carry or []))
            lanes_before = lanes
            jobs.append(PassJob(batch, entered, key.to(device), self.scale, spec.alpha, spec.beta, self.per_change, spec.precision))
        return jobs


@dataclass
class Engine:
    """One worker's part of every step, for the parameters that are trained now."""

    compute: Compute
    gradients: Gradients
    names: Sequence[str]  # of all parameters of the model
    held: Mapping[str, nn.Parameter]  # those on this worker, trained or not
    counted: Sequence[nn.Parameter]  # those that this worker counts in the global norm
    optimizer: torch.optim.Optimizer
    scaler: Scaler | None
    nonfinite: NonfiniteRecord
    agreement: Agreement
    hooks: Hooks
    shared: SharedNumbers | None  # what workers tell each other; None: there is one
    guards_weights: bool  # True if a non-finite step leaves the weights unchanged
    _missed: set[object] = field(default_factory=set, init=False)  # batches of which a step has left summed gradients unreached, by `_kind`
    _reached: dict[tuple[bool, ...], Tensor] = field(default_factory=dict, init=False)  # flags by their pattern, of which few occur
    _none: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mesh = self.compute.mesh
        self.spec = self.compute.spec
        self.nonfinite.expect(self.counted, self.gradients)
        self._none = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        self._codes = torch.zeros(self.mesh.world.size, dtype=torch.float64, device=self.mesh.device)  # of a step in which all is finite

    def step(
        self,
        batches: Sequence[Batch],
        keys: Sequence[Tensor],
        carry: FlatCarry,
        votes: Votes,
        graphs: Capture | None = None,
        *,
        applies: bool = True,
    ) -> tuple[StepResult, FlatCarry]:
        """One step over this worker's lanes: its result, valid until the next one, and the carry after it. `applies`: with the update;
        otherwise the gradient of the mean loss over all workers is left in `.grad`.
        """
        # What this worker tells the others besides its sums is known before the step, so that a recorded step can read it.
        marks = None if self.shared is None else self.agreement.marks(votes)
        reads = graphs is None and self.mesh.device.type == "cpu"
        with span("step" if applies else "backward"):
            if graphs is not None and applies and self._is_one_piece(batches):

                def recorded(batches: Sequence[Batch], tensors: Sequence[Tensor], carry: FlatCarry) -> tuple[StepResult, FlatCarry]:
                    return self._take(batches, tensors[: len(batches)], carry, None if marks is None else tensors[-1])

                tensors = keys if marks is None else [*keys, marks]
                result, carry = graphs("step", recorded, batches, tensors, carry, under=self._restarts())
            else:
                result, carry = self._take(batches, keys, carry, marks, graphs if applies else None, applies=applies, reads=reads)
            if marks is not None and not self.agreement.at_once:
                self.agreement.after(result.marks)  # where nothing runs ahead of the host, that was done before the weights changed
        return result, carry

    def _take(
        self,
        batches: Sequence[Batch],
        keys: Sequence[Tensor],
        carry: FlatCarry,
        marks: Tensor | None,
        graphs: Capture | None = None,
        *,
        applies: bool = True,
        reads: bool = False,
    ) -> tuple[StepResult, FlatCarry]:
        """All of a step, recorded or not. `reads`: the host may look at numbers, which costs nothing on a CPU."""
        self.gradients.begin()
        size = len(batches) if self.mesh.plan.stages > 1 else 1
        found: list[Tensor] = []
        reached: list[Flags] = []
        for first in range(0, len(batches), size):
            group, group_keys = batches[first : first + size], keys[first : first + size]
            if first and carry is not None and group[0].lanes.shape[0] != batches[first - 1].lanes.shape[0]:
                carry = self.compute.start(group[0].lanes.shape[0])
            if graphs is not None:
                (numbers, flags), carry = graphs("batch", self.run_pass, group, group_keys, carry)
                numbers = numbers.clone()  # the next replay overwrites it
            else:
                (numbers, flags), carry = self.run_pass(group, group_keys, carry, final=first + size >= len(batches))
            found.append(numbers)
            reached.append(flags)
        self.gradients.end_passes(reached)
        passes = total(found)
        if self.gradients.unreached:
            self._missed.add(_kind(batches))
        if graphs is not None and self.shared is None and not self.gradients.buckets:
            under = (*self._restarts(), *self.gradients.given)
            result, _ = graphs("update", lambda _, tensors, __: (self._update(tensors[0], None), None), [], [passes], None, under=under)
        else:
            result = self._update(passes, marks, applies=applies, reads=reads)
        if carry and self.spec.on_nan == "skip":  # lanes whose carry is not finite start over
            stage = self.compute.stage
            carry = reset_nonfinite_lanes(stage.carries(carry), stage.start(carry[0].shape[1], self.mesh.device).detach().carries)
        return result, carry

    def run_pass(
        self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry, *, final: bool = False
    ) -> tuple[tuple[Tensor, Flags], FlatCarry]:
        """Forward and backward of one pass: its numbers, which parameters it has reached, and the carry after it. Gradients are added to
        `.grad`. `final`: the last of a step, not recorded, so gradients may be summed as soon as they are complete.
        """
        self.gradients.begin_pass()
        compute, mesh = self.compute, self.mesh
        program = program_for(mesh.plan, batches, backward=True, uncut_time=compute.uncut_time, scheduler=compute.scheduler)
        jobs, gradients = compute.jobs(batches, keys, carry), self.gradients if final else None
        links, stage = mesh.links, mesh.stage
        outcomes = Pass(compute.stage, mesh.plan, program, jobs, links, stage_number=stage, gradients=gradients, clock=compute.clock).run()
        left = [[part for carry in outcome.state.carries for part in carry] for outcome in outcomes]
        finite = norms([part for parts in left for part in parts]).to(mesh.device)  # of a carry, these say whether it is finite
        sums = outcomes[0].sums
        if len(outcomes) > 1:
            sums, finite = torch.stack([outcome.sums for outcome in outcomes]).sum(0), finite.view(len(outcomes), -1).sum(0)
        return (torch.cat([sums, finite]), self.gradients.end_pass()), left[-1] if compute.keep_state else None

    def _update(self, passes: Tensor, marks: Tensor | None, *, applies: bool = True, reads: bool = False) -> StepResult:
        """From the gradients and numbers of this worker's passes to new weights: sum over the workers, unscale (fp16), divide by the number
        of targets and clip by the norm, and step unless something is not finite. Collective.
        """
        gradients, shared, clip = self.gradients, self.shared, self.spec.clip if applies else None
        if shared is not None and marks is not None:
            gradients.watch()
            shared.fill(passes, marks, self._flags(), self.nonfinite.of_passes(passes, gradients))
        with span("sum of gradients"):
            gradients.sum()
        overflow = self._none[0]
        if self.scaler is not None:
            overflow = self.scaler.unscale_([p.grad for p in gradients.trained if p.grad is not None]).double()
        of_grads = norms(gradients.of(self.counted)).to(self.mesh.device)
        squared = of_grads.square().sum()
        if shared is None:
            loss, count, votes, marks_of_all = passes[LOSS], passes[COUNT], self._none, self._none[:0]
        else:
            if not shared.travels:
                shared.parts["squared"].copy_(squared)
                shared.parts["overflow"].copy_(overflow)
                own = shared.codes[self.mesh.world.rank]
                own.copy_(torch.maximum(own, self.nonfinite.of_gradients(of_grads)))
                shared.sum()
                squared, overflow = shared.parts["squared"], shared.parts["overflow"]
            (loss, count), votes, marks_of_all = shared.score, shared.parts["votes"], shared.marks
            if self.agreement.at_once:
                self.agreement.after(marks_of_all)
            if gradients.unreached:
                self._forget(shared.parts["reached"])
        norm, factor = mean_of(squared, count, clip)
        gradients.scale(factor)
        finite, overflowed = loss - loss + norm - norm == 0.0, None
        if self.scaler is not None:  # if any worker overflowed, all skip the step, which is no bad one
            overflowed = overflow > 0
            finite = (norm.isfinite() | overflowed) & loss.isfinite()
        fine = reads and bool(finite)  # otherwise it is not known here, or it is known that something is wrong
        if fine:
            codes = self._codes
        elif shared is None:
            codes = self.nonfinite.of_step(passes, of_grads)[None]
        else:
            codes = shared.codes.double()
            codes = torch.maximum(codes, self.nonfinite.of_gradients(of_grads)) if shared.travels else codes
        if applies:
            with span("update"):
                self._take_step(finite, overflowed, fine=fine)
                self.nonfinite.note(finite, codes, fine=fine)
        return StepResult(loss, count, norm, finite, votes, marks_of_all, codes)

    def _take_step(self, finite: Tensor, overflowed: Tensor | None, *, fine: bool = False) -> None:
        """From final gradients to new weights; a step that is not finite, or overflowed, leaves the weights unchanged. `fine`: the host
        knows that it is finite.
        """
        if self.hooks.waiting:
            self.hooks.call()
        skip: Tensor | None = None
        if self.scaler is not None and overflowed is not None:
            skip = self.scaler.found_inf
            skip.copy_(overflowed | ~finite)
            self.scaler.step(self.optimizer)
        elif self.guards_weights and not fine:
            skip = (~finite).to(torch.float32)
            step_unless(skip, self.optimizer)
        else:
            self.optimizer.step()
        if self.spec.ema is not None:
            weight_average.move(self.optimizer, self.spec.ema, skip)

    def norm(self) -> Tensor:
        """The norm of what is in `.grad` on all workers. Collective."""
        grads = [p.grad for p in self.counted if p.grad is not None]
        squared = norms(grads).to(self.mesh.device).square().sum()
        knows = self.shared is None or self.shared.travels  # it has the whole summed gradient
        return (squared if knows else self.mesh.sum_(squared)).sqrt()

    def apply(self, finite: Tensor, codes: Tensor) -> StepResult:
        """Clip what is in `.grad` and take the optimizer step, unless it is not finite. `finite` and `codes`: of the passes. Collective."""
        norm = self.norm()
        one = torch.ones_like(norm)
        factor = one if self.spec.clip is None else (self.spec.clip / (norm + 1e-6)).clamp(max=1.0)
        scale_([p.grad for p in self.gradients.trained if p.grad is not None], factor)
        overflowed = None
        if self.scaler is None:
            finite = finite & norm.isfinite()
        else:  # a number that is not finite counts as an overflow, as in any step
            overflowed = ~norm.isfinite()
        self._take_step(finite, overflowed)
        self.nonfinite.note(finite, codes)
        return StepResult(one, one, norm, finite, self._none[:0], self._none[:0], codes)

    def _flags(self) -> Tensor:
        """A 0/1 flag for each parameter of the model: did backward reach it on this worker?"""
        missing = self.gradients.unreached
        pattern = tuple(name in self.held and id(self.held[name]) not in missing for name in self.names) if missing else ()
        if pattern not in self._reached:
            flags = pattern or [name in self.held for name in self.names]
            self._reached[pattern] = torch.tensor(flags, dtype=torch.float64).to(self.mesh.device)
        return self._reached[pattern]

    def _forget(self, reached: Tensor) -> None:
        """Remove gradients that no worker produced, as one device has none: an optimizer with momentum or weight decay would still update
        such a parameter. `reached` is the sum of all workers' `_flags`.
        """
        for name, count in zip(self.names, reached.tolist(), strict=True):
            parameter = self.held.get(name)
            if not count and parameter is not None and id(parameter) in self.gradients.unreached:
                parameter.grad = None

    def _is_one_piece(self, batches: Sequence[Batch]) -> bool:
        """True if a step is one pass, and nothing in it needs the host."""
        one_pass = len(batches) == 1 or self.mesh.plan.stages > 1
        # A gradient that this worker lacks and another may have is looked up on the host. A worker without lanes lacks all of them.
        return one_pass and self.mesh.on_device and self.gradients.on_device and _kind(batches) not in self._missed

    def _restarts(self) -> tuple[int, ...]:
        """What a recorded update of NT-ASGD depends on: with averaging it differs, and a restarted average is in different tensors."""
        return (self.optimizer.restarts,) if isinstance(self.optimizer, NTASGD) else ()


def _kind(batches: Sequence[Batch]) -> object:
    """What decides which gradients a step reaches."""
    return tuple((batch.steps, batch.lanes.shape[0], batch.idle, batch.targets is None) for batch in batches)

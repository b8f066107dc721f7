"""The update: from summed gradients and the stats of the backward passes to new weights, in one pass over the gradients for each of:
unscale (fp16), norm, divide and clip, optimizer, average of the weights.

Between norm and division, a single all-reduce shares what all workers must know (`step_slots`). Where all workers are replicas, each knows
the norm by itself, and the all-reduce runs beside those of the gradients. The host waits for the device only in rare
cases: backward missed a parameter here that it may have reached on another worker, or the user's optimizer cannot skip a step by a flag on
the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from carrywave.parallel.mesh import Mesh
from carrywave.parallel.sums.group_sums import Working
from carrywave.step.checks.agreement import Agreement
from carrywave.step.checks.hooks import Hooks
from carrywave.step.checks.reached import ReachedParameters
from carrywave.step.gradients import Gradients
from carrywave.step.nonfinite import NonfiniteRecord
from carrywave.step.norms import factor, norm_of_mean, norms, scale_
from carrywave.step.optim import weight_average
from carrywave.step.optim.loss_scaler import Scaler, step_unless
from carrywave.step.stats import Slots, StepStats, step_slots

Votes = tuple[float, float]  # to stop as on Ctrl-C, to stop as on SIGTERM


@lru_cache
def _one_bad(device: torch.device) -> Tensor:
    return torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64, device=device)


@dataclass(frozen=True)
class StepResult:
    """Sums of one optimizer step over all workers, still on the device."""

    loss_sum: Tensor
    count: Tensor
    norm: Tensor  # gradient norm before clipping
    finite: Tensor  # bool: loss and gradient are finite (an overflow that the fp16 scaler skips counts as finite)
    votes: Tensor  # [2]: how many workers had been asked to stop, as in `Trainer.votes`
    sound: Tensor  # [2] bool: `finite`; and False if a non-zero loss has no targets to divide by
    marks: Tensor  # [workers, columns]: the checksums that `Agreement` compares
    codes: Tensor  # [workers]: each worker's code for non-finite numbers

    def mean(self, precision: str) -> Tensor:
        """The mean loss over the real targets."""
        mean = self.loss_sum / self.count.clamp(min=1e-30)
        return mean if precision == "fp64" else mean.to(torch.float32)

    @property
    def learned(self) -> Tensor:
        """The targets that the weights were changed by: none if the step was skipped, as one that is not finite or overflowed in fp16."""
        return torch.where(self.finite & self.norm.isfinite(), self.count, 0.0)  # a step that fp16 skips has no norm

    def counted(self) -> Tensor:
        """[5]: loss, targets, norm and 1 for a step, or 1 in the last place for a non-finite one; sums of these describe several steps."""
        one = torch.ones_like(self.loss_sum)
        norm = torch.where(self.norm.isfinite(), self.norm, 0.0).double()  # a step that fp16 skips has no norm
        numbers = torch.stack([self.loss_sum, self.count, norm, one, torch.zeros_like(one)])
        return torch.where(self.finite, numbers, _one_bad(numbers.device))


@dataclass
class StatsAhead:
    """Stats on their way to the sum over all workers, still without what the summed gradient adds."""

    stats: StepStats
    work: Working | None  # to wait for


@dataclass
class Update:
    """Everything between the passes of a step and its new weights."""

    mesh: Mesh
    named: Sequence[tuple[str, nn.Parameter]]
    counted: Sequence[Tensor]  # parameters that this worker counts in the global norm, grouped by dtype
    optimizer: torch.optim.Optimizer
    scaler: Scaler | None
    gradients: Gradients
    pass_slots: Slots
    nonfinite: NonfiniteRecord
    agreement: Agreement
    reach: ReachedParameters
    hooks: Hooks
    clip: float | None
    guards_weights: bool  # True if a non-finite step leaves the weights unchanged
    ema: float | None = None  # decay of an average of the weights, which each step moves
    has_whole_gradient: bool = False  # True if every worker has the whole summed gradient, so that nothing has to be exchanged after it

    def __post_init__(self) -> None:
        columns, flags = self.agreement.columns, self.reach.count
        self.slots = step_slots(self.mesh, parameters=flags, mark_columns=columns)

    def local_marks(self, votes: Votes) -> Tensor | None:
        """What this worker tells the others besides its sums: votes and checksums. It is known before the step, so that a captured step can
        read it. None with a single worker.
        """
        if self.mesh.world.size == 1:
            return None
        local_votes = torch.tensor(votes, dtype=torch.float64).to(self.mesh.device, non_blocking=True)
        return torch.cat([local_votes, self.agreement.marks()])

    def check_marks(self, result: StepResult) -> None:
        """Compare the marks of all workers; where nothing runs ahead of the host, that was done before the weights changed."""
        if not self.agreement.at_once:
            self.agreement.after(result.marks)

    def ahead(self, of_passes: Tensor, marks: Tensor | None) -> StatsAhead | None:
        """Begin to share what is known before the gradients are summed; None if that has to wait for them. Collective."""
        if not self.has_whole_gradient:
            return None
        code = self.nonfinite.code([], self._zeros(0), of_passes, self.gradients)
        stats = self._packed(of_passes, marks, squared=None, overflow=None, code=code)
        return StatsAhead(stats, self.mesh.sum_later(stats.vector))

    def __call__(self, of_passes: Tensor, marks: Tensor | None, ahead: StatsAhead | None = None) -> StepResult:
        """Take the optimizer step. `of_passes`: what the passes reported, added up. `ahead`: from the method."""
        result, overflowed = self._divide(of_passes, marks, ahead, self.clip)
        self._take_step(result.finite, overflowed)
        self.nonfinite.note(result.finite, result.codes)
        return result

    def divide(self, of_passes: Tensor, marks: Tensor | None, ahead: StatsAhead | None = None) -> StepResult:
        """Leave in `.grad` the gradient of the mean loss over all workers, and the weights as they are."""
        return self._divide(of_passes, marks, ahead, None)[0]

    def norm(self) -> Tensor:
        """The norm of what is in `.grad` on all workers. Collective."""
        squared = self._norms()[1].square().sum()
        return (squared if self.has_whole_gradient else self.mesh.sum_(squared)).sqrt()

    def apply(self, sound: Tensor, codes: Tensor) -> StepResult:
        """Clip what is in `.grad` and take the optimizer step, unless it is not finite. `sound` and `codes`: of the passes. Collective."""
        norm = self.norm()
        one = torch.ones_like(norm)
        grads = [p.grad for _, p in self.named if p.grad is not None]
        scale_(grads, factor(norm, one, self.clip))
        # fp16: a number that is not finite counts as an overflow, as in any step.
        overflowed = ~torch.isfinite(norm) if self.scaler is not None else torch.zeros_like(norm, dtype=torch.bool)
        finite = (torch.isfinite(norm) | overflowed) & sound[0]
        self._take_step(finite, overflowed)
        self.nonfinite.note(finite, codes)
        none = self._zeros(0)
        return StepResult(one, one, norm, finite, none, torch.stack([finite, sound[1]]), none, codes)

    def _divide(self, of_passes: Tensor, marks: Tensor | None, ahead: StatsAhead | None, clip: float | None) -> tuple[StepResult, Tensor]:
        """Turn summed gradients into those of the mean loss: unscale them (fp16), share the stats of the step with all workers, compare
        what they were given, divide by the number of targets and clip by the norm. Returns the numbers, and whether any worker overflowed.
        Collective.
        """
        grads = [p.grad for _, p in self.named if p.grad is not None]
        overflow = self.scaler.unscale_(grads) if self.scaler is not None else None
        # The all-reduce of a step, unless it has begun already.
        stats = self._local_stats(of_passes, marks, overflow).over(self.mesh) if ahead is None else self._completed(ahead, overflow)
        if self.agreement.at_once:
            self.agreement.after(stats["marks"])
        self.reach.forget(stats["reached"])
        loss_sum, count = stats.score
        norm = norm_of_mean(stats.squared, count)
        scale_(grads, factor(norm, count, clip))
        # If any worker overflowed, all skip the step.
        overflowed = stats["overflow"] > 0
        finite = (torch.isfinite(norm) | overflowed if self.scaler is not None else torch.isfinite(norm)) & torch.isfinite(loss_sum)
        sound = torch.stack([finite, (count > 0) | (loss_sum == 0) | ~finite])
        return StepResult(loss_sum, count, norm, finite, stats["votes"], sound, stats["marks"], stats["codes"]), overflowed

    def _take_step(self, finite: Tensor, overflowed: Tensor) -> None:
        """From final gradients to new weights."""
        self.hooks.call()
        self._step_optimizer(finite, overflowed)

    def _local_stats(self, of_passes: Tensor, marks: Tensor | None, overflow: Tensor | None) -> StepStats:
        """This worker's numbers, before the all-reduce."""
        counted, of_grads = self._norms()
        return self._packed(
            of_passes,
            marks,
            squared=of_grads.square().sum(),
            overflow=overflow,
            code=self.nonfinite.code(counted, of_grads, of_passes, self.gradients),
        )

    def _completed(self, ahead: StatsAhead, overflow: Tensor | None) -> StepStats:
        """What was shared ahead, with what the summed gradient adds, the same on every worker."""
        stats = ahead.stats
        if ahead.work is not None:
            ahead.work.wait()
            ahead.work = None  # it would keep the connections open if the rest of the step failed
        counted, of_grads = self._norms()
        stats["squared"].copy_(of_grads.square().sum())
        if overflow is not None:
            stats["overflow"].copy_(overflow.double())
        codes = stats["codes"]
        torch.maximum(codes, self.nonfinite.summed_code(counted, of_grads), out=codes)
        return stats

    def _norms(self) -> tuple[list[Tensor], Tensor]:
        """The parameters that this worker counts, and the norms of their gradients."""
        pairs = [(p, p.grad) for p in self.counted if p.grad is not None]
        return [p for p, _ in pairs], norms([grad for _, grad in pairs]).to(self.mesh.device)

    def _packed(
        self, of_passes: Tensor, marks: Tensor | None, *, squared: Tensor | None, overflow: Tensor | None, code: Tensor
    ) -> StepStats:
        """This worker's numbers in its slots, and zeros in those of others."""
        stats = StepStats(self.slots, self._zeros(self.slots.size))
        rank, reported = self.mesh.world.rank, self.pass_slots.parts(of_passes)
        stats["score"][0].copy_(reported["loss"])
        stats["score"][1].copy_(reported["count"])
        if squared is not None:
            stats["squared"].copy_(squared)
        if overflow is not None:
            stats["overflow"].copy_(overflow)
        if self.reach.count:
            stats["reached"].copy_(self.reach.own())
        stats["codes"][rank].copy_(code)
        if marks is not None:
            stats["votes"].copy_(marks[:2])
            stats["marks"][rank].copy_(marks[2:])
        return stats

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.mesh.device)

    def _step_optimizer(self, finite: Tensor, overflowed: Tensor) -> None:
        """Step the optimizer; a step that is not finite, or overflowed, leaves the weights unchanged."""
        skip: Tensor | None = None
        if self.scaler is not None:
            skip = self.scaler.found_inf
            skip.copy_(overflowed | ~finite)
            self.scaler.step(self.optimizer)
        elif self.guards_weights:
            skip = (~finite).to(torch.float32)
            step_unless(skip, self.optimizer)
        else:
            self.optimizer.step()
        if self.ema is not None:
            weight_average.move(self.optimizer, self.ema, skip)

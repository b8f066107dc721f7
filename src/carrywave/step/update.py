"""The update: sum gradients, loss and count over the workers, divide once, clip, and take the optimizer's step.

Gradients are passed over once for each of: unscale (fp16), norm, divide and clip, optimizer, average of the weights. Where all workers are
replicas, one message carries all that they tell each other, and each knows the norm by itself. In a pipeline, a second one follows the sum
of the gradients, because each stage knows only its part of the norm. The host waits for the device only in rare cases: backward missed a
parameter here that it may have reached on another worker, or the user's optimizer cannot skip a step by a flag on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn

from carrywave.parallel.mesh import Mesh
from carrywave.step.checks.agreement import Agreement
from carrywave.step.checks.hooks import Hooks
from carrywave.step.checks.reached import ReachedParameters
from carrywave.step.gradients import Gradients
from carrywave.step.nonfinite import NonfiniteRecord
from carrywave.step.norms import factor, norm_of_mean, norms, scale_
from carrywave.step.optim import weight_average
from carrywave.step.optim.loss_scaler import Scaler, step_unless
from carrywave.step.passes.profiler_ranges import span
from carrywave.step.stats import COUNT, LOSS, SharedNumbers

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
class Update:
    """Everything between the passes of a step and its new weights."""

    mesh: Mesh
    named: Sequence[tuple[str, nn.Parameter]]
    counted: Sequence[nn.Parameter]  # parameters that this worker counts in the global norm, grouped by dtype
    optimizer: torch.optim.Optimizer
    scaler: Scaler | None
    gradients: Gradients
    nonfinite: NonfiniteRecord
    agreement: Agreement
    reach: ReachedParameters
    hooks: Hooks
    shared: SharedNumbers | None  # what workers tell each other; None: there is one
    clip: float | None
    guards_weights: bool  # True if a non-finite step leaves the weights unchanged
    ema: float | None = None  # decay of an average of the weights, which each step moves
    _none: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.nonfinite.expect(self.counted, self.gradients)
        self._none = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)

    def local_marks(self, votes: Votes) -> Tensor | None:
        """What this worker tells the others besides its sums: votes and checksums. It is known before the step, so that a recorded step can
        read it. None with a single worker.
        """
        if self.shared is None:
            return None
        return self.agreement.marks(votes)

    def check_marks(self, result: StepResult) -> None:
        """Compare the marks of all workers; where nothing runs ahead of the host, that was done before the weights changed."""
        if self.shared is not None and not self.agreement.at_once:
            self.agreement.after(result.marks)

    def __call__(self, passes: Tensor, marks: Tensor | None) -> StepResult:
        """Take the optimizer step. `passes`: what the passes reported, added up."""
        result, overflowed = self._divided(passes, marks, self.clip)
        with span("update"):
            self._take_step(result.finite, overflowed)
            self.nonfinite.note(result.finite, result.codes)
        return result

    def divide(self, passes: Tensor, marks: Tensor | None) -> StepResult:
        """Leave in `.grad` the gradient of the mean loss over all workers, and the weights as they are."""
        return self._divided(passes, marks, None)[0]

    def norm(self) -> Tensor:
        """The norm of what is in `.grad` on all workers. Collective."""
        grads = [p.grad for p in self.counted if p.grad is not None]
        squared = norms(grads).to(self.mesh.device).square().sum()
        return (squared if self._knows_norm else self.mesh.sum_(squared)).sqrt()

    def apply(self, sound: Tensor, codes: Tensor) -> StepResult:
        """Clip what is in `.grad` and take the optimizer step, unless it is not finite. `sound` and `codes`: of the passes. Collective."""
        norm = self.norm()
        one = torch.ones_like(norm)
        scale_([p.grad for _, p in self.named if p.grad is not None], factor(norm, one, self.clip))
        # fp16: a number that is not finite counts as an overflow, as in any step.
        overflowed = ~torch.isfinite(norm) if self.scaler is not None else torch.zeros_like(norm, dtype=torch.bool)
        finite = (torch.isfinite(norm) | overflowed) & sound[0]
        self._take_step(finite, overflowed)
        self.nonfinite.note(finite, codes)
        return StepResult(one, one, norm, finite, self._none[:0], torch.stack([finite, sound[1]]), self._none[:0], codes)

    @property
    def _knows_norm(self) -> bool:
        """True if this worker has the whole summed gradient, so that nothing has to be exchanged after it."""
        return self.shared is None or self.shared.travels

    def _divided(self, passes: Tensor, marks: Tensor | None, clip: float | None) -> tuple[StepResult, Tensor]:
        """Sum gradients, loss and count over the workers, unscale (fp16), divide by the number of targets and clip by the norm. Returns the
        numbers, and whether any worker overflowed. Collective.
        """
        gradients, shared = self.gradients, self.shared
        if shared is not None:
            assert marks is not None
            gradients.watch()
            shared.fill(passes, marks, self.reach.own(), self.nonfinite.of_passes(passes, gradients))
        with span("sum of gradients"):
            gradients.sum()
        overflow = self._none[0]
        if self.scaler is not None:
            overflow = self.scaler.unscale_([p.grad for _, p in self.named if p.grad is not None]).double()
        of_grads = norms(gradients.of(self.counted)).to(self.mesh.device)
        squared = of_grads.square().sum()
        if shared is None:
            loss_sum, count, votes, marks_of_all = passes[LOSS], passes[COUNT], self._none, self._none[:0]
            codes = self.nonfinite.of_step(passes, of_grads)[None]
        else:
            codes, code = shared.parts["codes"], self.nonfinite.of_gradients(of_grads)
            if not shared.travels:
                shared.parts["squared"].copy_(squared)
                shared.parts["overflow"].copy_(overflow)
                own = codes[self.mesh.world.rank]
                own.copy_(torch.maximum(own, code))
                shared.sum()
                squared, overflow, code = shared.parts["squared"], shared.parts["overflow"], self._none[0]
            (loss_sum, count), votes, marks_of_all = shared.score, shared.parts["votes"], shared.marks
            codes = torch.maximum(codes.double(), code)
            if self.agreement.at_once:
                self.agreement.after(marks_of_all)
            self.reach.forget(shared.parts["reached"])
        norm = norm_of_mean(squared, count)
        gradients.scale(factor(norm, count, clip))
        # If any worker overflowed, all skip the step.
        overflowed = overflow > 0
        finite = (torch.isfinite(norm) | overflowed if self.scaler is not None else torch.isfinite(norm)) & torch.isfinite(loss_sum)
        sound = torch.stack([finite, (count > 0) | (loss_sum == 0) | ~finite])
        return StepResult(loss_sum, count, norm, finite, votes, sound, marks_of_all, codes), overflowed

    def _take_step(self, finite: Tensor, overflowed: Tensor) -> None:
        """From final gradients to new weights; a step that is not finite, or overflowed, leaves the weights unchanged."""
        self.hooks.call()
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

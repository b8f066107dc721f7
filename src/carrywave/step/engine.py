"""The story of a step on one worker, once its lanes are chosen: forward and backward, sum over the workers, divide once, clip, update.

Every plan takes this one way. A *pass* is the forward and backward of one batch; a pipeline takes all batches of a step in one pass, so
that they follow each other through its stages.

If `graphs` are given, work whose shapes recur is replayed from CUDA graphs: the whole step if it is one pass, and all that workers exchange
in it is work of the device; otherwise each pass, and, unless gradients are summed over workers, the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.parallel.mesh import Mesh
from carrywave.step.gradients import Flags, Gradients
from carrywave.step.graphs.capture import Capture
from carrywave.step.nonfinite import reset_nonfinite_lanes
from carrywave.step.optim.optimizer import NTASGD
from carrywave.step.passes.compute import Compute
from carrywave.step.passes.micro_batches import FlatCarry
from carrywave.step.passes.profiler_ranges import span
from carrywave.step.stats import total
from carrywave.step.update import StepResult, Update, Votes


@dataclass
class Engine:
    """One worker's part of every step."""

    mesh: Mesh
    compute: Compute
    gradients: Gradients
    update: Update
    resets: bool = False  # True if lanes whose carry is not finite start over
    _missed: set[object] = field(default_factory=set, init=False)  # batches of which a step has left summed gradients unreached, by `_kind`

    def step(
        self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry, votes: Votes, graphs: Capture | None
    ) -> tuple[StepResult, FlatCarry]:
        """One optimizer step over this worker's lanes; returns its result, valid until the next step, and the carry after it."""
        several = self.mesh.world.size > 1
        marks = self.update.local_marks(votes) if several else None
        with span("step"):
            if graphs is not None and self._is_one_piece(batches):

                def recorded(batches: Sequence[Batch], tensors: Sequence[Tensor], carry: FlatCarry) -> tuple[StepResult, FlatCarry]:
                    return self._take(batches, tensors[: len(batches)], carry, None if marks is None else tensors[-1])

                tensors = keys if marks is None else [*keys, marks]
                result, carry = graphs("step", recorded, batches, tensors, carry, under=self._restarts())
            else:
                result, carry = self._take(batches, keys, carry, marks, graphs)
            if several:
                self.update.check_marks(result)
        return result, carry

    def _take(
        self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry, marks: Tensor | None, graphs: Capture | None = None
    ) -> tuple[StepResult, FlatCarry]:
        """All of a step, recorded or not."""
        passes, carry = self.forward_backward(batches, keys, carry, graphs)
        if self.gradients.unreached:
            self._missed.add(_kind(batches))
        alone = self.mesh.world.size == 1 and not self.gradients.buckets
        result = self._recorded_update(passes, graphs) if graphs is not None and alone else self.update(passes, marks)
        return result, self._reset(carry) if carry and self.resets else carry

    def backward(
        self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry, votes: Votes, graphs: Capture | None = None
    ) -> tuple[StepResult, FlatCarry]:
        """A step that ends before the update: the gradient of the mean loss over all workers is left in `.grad`. It is not recorded."""
        with span("backward"):
            marks = self.update.local_marks(votes)
            passes, carry = self.forward_backward(batches, keys, carry, None)
            result = self.update.divide(passes, marks)
            self.update.check_marks(result)
        return result, self._reset(carry) if carry and self.resets else carry

    def forward_backward(
        self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry, graphs: Capture | None
    ) -> tuple[Tensor, FlatCarry]:
        """Run all passes; returns the sum of what they report, and the carry after the last. Gradients are not summed over workers yet."""
        self.gradients.begin()
        size = len(batches) if self.mesh.plan.stages > 1 else 1
        passes: list[Tensor] = []
        reached: list[Flags] = []
        for first in range(0, len(batches), size):
            group, group_keys = batches[first : first + size], keys[first : first + size]
            if first and carry is not None and group[0].lanes.shape[0] != batches[first - 1].lanes.shape[0]:
                carry = self.compute.start(group[0].lanes.shape[0])
            if graphs is not None:
                (of_pass, flags), carry = graphs("batch", self._pass, group, group_keys, carry)
                of_pass = of_pass.clone()  # the next replay overwrites it
            else:
                (of_pass, flags), carry = self._pass(group, group_keys, carry, final=first + size >= len(batches))
            passes.append(of_pass)
            reached.append(flags)
        self.gradients.end_passes(reached)
        return passes[0] if len(passes) == 1 else total(passes), carry

    def _pass(
        self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry, *, final: bool = False
    ) -> tuple[tuple[Tensor, Flags], FlatCarry]:
        """One pass; `final`: the last of the step, not recorded, so gradients may be summed as soon as they are complete."""
        self.gradients.begin_pass()
        numbers, carry = self.compute(batches, keys, carry, self.gradients if final else None)
        return (numbers, self.gradients.end_pass()), carry

    def _recorded_update(self, passes: Tensor, graphs: Capture) -> StepResult:
        def update(batches: Sequence[Batch], tensors: Sequence[Tensor], carry: FlatCarry) -> tuple[StepResult, FlatCarry]:
            return self.update(tensors[0], None), None

        return graphs("update", update, [], [passes], None, under=(*self._restarts(), *self.gradients.given))[0]

    def _is_one_piece(self, batches: Sequence[Batch]) -> bool:
        """True if a step is one pass, and nothing in it needs the host."""
        one_pass = len(batches) == 1 or self.mesh.plan.stages > 1
        # A gradient that this worker lacks and another may have is looked up on the host. A worker without lanes lacks all of them.
        return one_pass and self.mesh.on_device and self.gradients.on_device and _kind(batches) not in self._missed

    def _restarts(self) -> tuple[int, ...]:
        """What a recorded update of NT-ASGD depends on: with averaging it differs, and a restarted average is in different tensors."""
        optimizer = self.update.optimizer
        return (optimizer.restarts,) if isinstance(optimizer, NTASGD) else ()

    def _reset(self, carry: list[Tensor]) -> FlatCarry:
        """The carry, anew in lanes in which it is not finite."""
        stage = self.compute.stage
        return reset_nonfinite_lanes(stage.carries(carry), stage.start(carry[0].shape[1], self.mesh.device).detach().carries)


def _kind(batches: Sequence[Batch]) -> object:
    """What decides which gradients a step reaches."""
    return tuple((batch.steps, batch.lanes.shape[0], batch.idle, batch.targets is None) for batch in batches)

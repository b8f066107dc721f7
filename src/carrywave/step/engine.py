"""The engine of a training step: run forward and backward of every batch, sum the gradients over workers, update the weights.

Every plan takes this one way. A *pass* is the forward and backward of one batch; a pipeline takes all batches of a step in one pass, so
that they follow each other through its stages. What else differs is how gradients are summed (`Gradients` and
`AllReduce`).

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
from carrywave.step.update import StatsAhead, StepResult, Update, Votes


@dataclass
class Engine:
    """One worker's part of every step."""

    compute: Compute
    gradients: Gradients
    update: Update
    resets: bool = False  # True if lanes whose carry is not finite start over
    _missed: set[object] = field(default_factory=set, init=False)  # batches of which a step has left summed gradients unreached, by `_kind`

    @property
    def mesh(self) -> Mesh:
        """This worker's place among all."""
        return self.compute.mesh

    def step(
        self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry, votes: Votes, graphs: Capture | None
    ) -> tuple[StepResult, FlatCarry]:
        """One optimizer step over this worker's lanes; returns its result, valid until the next step, and the carry after it."""
        marks = self.update.local_marks(votes)

        def captured(batches: Sequence[Batch], tensors: Sequence[Tensor], carry: FlatCarry) -> tuple[StepResult, FlatCarry]:
            return self._run_step(batches, tensors[: len(batches)], carry, tensors[-1] if self.mesh.world.size > 1 else None)

        with span("step"):
            if graphs is not None and self._is_one_piece(batches):
                tensors = keys if marks is None else [*keys, marks]
                result, carry = graphs("step", captured, batches, tensors, carry, under=self._restarts())
            else:
                result, carry = self._run_step(batches, keys, carry, marks, graphs)
            self.update.check_marks(result)
        return result, carry

    def _run_step(
        self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry, marks: Tensor | None, graphs: Capture | None = None
    ) -> tuple[StepResult, FlatCarry]:
        """All of a step, captured or not: the passes, the sums over workers, the update."""
        stats, carry, ahead = self._summed_gradients(batches, keys, carry, marks, graphs)
        if self.gradients.unreached:
            self._missed.add(_kind(batches))
        return self._apply_update(stats, marks, graphs, ahead), self._reset(carry)

    def backward(
        self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry, votes: Votes, graphs: Capture | None = None
    ) -> tuple[StepResult, FlatCarry]:
        """A step that ends before the update: the gradient of the mean loss over all workers is left in `.grad`. It is not captured."""
        with span("backward"):
            marks = self.update.local_marks(votes)
            stats, carry, ahead = self._summed_gradients(batches, keys, carry, marks, None)
            result = self.update.divide(stats, marks, ahead)
            self.update.check_marks(result)
        return result, self._reset(carry)

    def _summed_gradients(
        self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry, marks: Tensor | None, graphs: Capture | None
    ) -> tuple[Tensor, FlatCarry, StatsAhead | None]:
        """Run all passes, and sum their gradients over the workers."""
        self.gradients.begin_step()
        stats, carry = self.run_passes(batches, keys, carry, graphs)
        with span("sum of gradients"):
            ahead = self.gradients.sum_over_workers(meanwhile=lambda: self.update.ahead(stats, marks))
        return stats, carry, ahead

    def run_passes(
        self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry, graphs: Capture | None
    ) -> tuple[Tensor, FlatCarry]:
        """Run forward and backward of all batches; returns the sum of what the passes report."""
        size = len(batches) if self.mesh.plan.stages > 1 else 1
        firsts = range(0, len(batches), size)
        self.gradients.begin_passes(len(firsts), static=graphs is not None)
        stats: list[Tensor] = []
        reached: list[Flags] = []
        for first in firsts:
            group, group_keys = batches[first : first + size], keys[first : first + size]
            if first and carry is not None and group[0].lanes.shape[0] != batches[first - 1].lanes.shape[0]:
                carry = self.compute.start(group[0].lanes.shape[0])
            if graphs is not None:
                (of_pass, flags), carry = graphs("batch", self._pass, group, group_keys, carry, under=(self.gradients.adds,))
                of_pass = of_pass.clone()  # the next replay overwrites it
            else:
                (of_pass, flags), carry = self._pass(group, group_keys, carry, final=first == firsts[-1])
            stats.append(of_pass)
            reached.append(flags)
        self.gradients.end_passes(reached)
        return total(stats), carry

    def _pass(
        self, batches: Sequence[Batch], keys: Sequence[Tensor], carry: FlatCarry, *, final: bool = False
    ) -> tuple[tuple[Tensor, Flags], FlatCarry]:
        """One pass; `final`: the last of the step, not captured, so gradients may be summed as soon as they are complete."""
        self.gradients.begin_pass()
        stats, carry = self.compute(batches, keys, carry, self.gradients if final else None)
        return (stats, self.gradients.end_pass()), carry

    def _apply_update(self, stats: Tensor, marks: Tensor | None, graphs: Capture | None, ahead: StatsAhead | None) -> StepResult:
        if graphs is None or not self._is_alone:
            with span("update"):
                return self.update(stats, marks, ahead)

        def update(batches: Sequence[Batch], tensors: Sequence[Tensor], carry: FlatCarry) -> tuple[StepResult, FlatCarry]:
            return self.update(tensors[0], None), None

        return graphs("update", update, [], [stats], None, under=(*self._restarts(), *self.gradients.given))[0]

    def _is_one_piece(self, batches: Sequence[Batch]) -> bool:
        """True if a step is one pass, and nothing in it needs the host."""
        one_pass = len(batches) == 1 or self.mesh.plan.stages > 1
        # A gradient that this worker lacks and another may have is looked up on the host. A worker without lanes lacks all of them.
        return one_pass and self.mesh.on_device and self.gradients.on_device and _kind(batches) not in self._missed

    @property
    def _is_alone(self) -> bool:
        """True if nothing is sent to other workers, or summed, between the passes and the new weights."""
        return self.mesh.world.size == 1 and not self.gradients.sums

    def _restarts(self) -> tuple[int, ...]:
        """What a captured update of NT-ASGD depends on: with averaging it differs, and a restarted average is in different tensors."""
        optimizer = self.update.optimizer
        return (optimizer.restarts,) if isinstance(optimizer, NTASGD) else ()

    def _reset(self, carry: FlatCarry) -> FlatCarry:
        if not carry or not self.resets:
            return carry
        stage = self.compute.stage
        return reset_nonfinite_lanes(stage.carries(carry), stage.start(carry[0].shape[1], self.mesh.device).detach().carries)


def _kind(batches: Sequence[Batch]) -> object:
    """What decides which gradients a step reaches."""
    return tuple((batch.steps, batch.lanes.shape[0], batch.idle, batch.targets is None) for batch in batches)

"""Finds on which worker and in which layer the first non-finite number of a step arose, and handles the step that has it.

This needs no read on the host and no extra message. A step computes forward from the encoder through the layers to the head and its loss,
and then backward, and a non-finite number makes everything computed from it non-finite too. So every worker encodes in one number what came
first in that order: a layer whose carry is non-finite after the step (a bad output persists in its lane, so the final carry reveals it),
the loss, or a layer with a non-finite gradient. The codes travel with the step's other sums, one slot per rank, and the largest code is the
earliest in the order of computation:

    3 U - u    the output of unit u (of U units: encoder, layers, head, whose output is the loss)
    U + 1 + u  the gradient of unit u, on this worker alone
    1 + u      the gradient of unit u, only after it was summed over workers
    0          nothing non-finite

A gradient summed over replicas is non-finite on all of them afterwards, so one small gradient of each unit is inspected before the sum.

The optimizer learns of it through its `found_inf`, and leaves parameters and its own state unchanged, whatever `train.on_nan` says
(except where `Engine.guards_weights` is False).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from carrywave.errors import Diverged, UserError
from carrywave.kernels.carry import AnyCarries
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.model.parameter_placement import unit_of
from carrywave.model.stage import Stage
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.parallel.world import World, all_gather_text
from carrywave.step.gradients import Gradients

MOST_IN_A_ROW = 10  # consecutive skipped steps before the run stops
MOST_BACKS = 3  # returns to the last snapshot before the run stops
BACK_FACTOR = 0.5  # learning-rate factor at each return
LOSS = "the loss that"  # begins the words for a loss that is not finite
SMALL = 1 << 16  # most elements of a gradient that is inspected before the all-reduce


@dataclass(frozen=True)
class ComputeOrder:
    """The units of a model in order of computation, by name; the last one computes the loss."""

    names: tuple[str, ...]
    of: dict[str, int]  # unit of each parameter

    @staticmethod
    def in_model(model: Model | OpaqueModel) -> ComputeOrder:
        """Encoder, layers and head; for a one-piece model, its parameters and finally the module itself."""
        parameters = [name for name, _ in model.named_parameters()]
        if isinstance(model, OpaqueModel):
            return ComputeOrder((*parameters, type(model.module).__name__), {name: number for number, name in enumerate(parameters)})
        names = ("encoder", *(f"lstm.l{layer}" for layer in range(model.lstm.num_layers)), "head")
        return ComputeOrder(names, {name: unit_of(name, model.units) for name in parameters})

    def forward(self, unit: int) -> int:
        """The code for a non-finite output."""
        return 3 * len(self.names) - unit

    def backward(self, unit: int, *, summed: bool = False) -> int:
        """The code for a non-finite gradient."""
        return 1 + unit + (0 if summed else len(self.names))

    def words(self, code: int, rank: int) -> str:
        """A code in words, as the subject of a sentence."""
        count = len(self.names)
        if code > 2 * count:
            unit = 3 * count - code
            what = LOSS if unit == count - 1 else "the output that"
            return f"{what} {self.names[unit]} computes on rank {rank}"
        if code > count:
            return f"the gradient of {self.names[code - count - 1]} on rank {rank}"
        return f"the gradient of {self.names[code - 1]}, summed over the replicas of rank {rank},"


@dataclass(frozen=True)
class Seen:
    """What `NonfiniteRecord.look` found in the steps since the previous look."""

    ago: int | None = None  # how many steps before the last step the first bad one was; None: all were good
    codes: tuple[int, ...] = ()  # each rank's code for the first bad step
    bad: int = 0  # number of bad steps
    longest: int = 0  # longest series of consecutive bad steps, including those before the previous look
    in_a_row: int = 0  # consecutive bad steps up to the last one


class NonfiniteRecord:
    """Watches the steps of one worker. The record is a single tensor on the device, which a captured step updates in place."""

    def __init__(
        self, model: Model | OpaqueModel, stage: Stage | OpaqueModel, named: Sequence[tuple[str, nn.Parameter]], world: World
    ) -> None:
        self.units = units = ComputeOrder.in_model(model)
        self.world, self.named = world, list(named)
        self.unit = {id(p): units.of[name] for name, p in named}
        # Number of steps; consecutive bad steps; then, since the last look: most consecutive bad steps, number of bad steps, first bad step
        # (counted from 1); then each rank's code for that first bad step.
        self.kept = torch.zeros(5 + world.size, dtype=torch.float64, device=world.device)
        _, self._in_a_row, self._longest, self._bad_steps, _ = self.kept[:5].unbind()
        self._clean = True  # there is nothing in the record
        loss = units.forward(len(units.names) - 1)
        # The code for each number that a pass reports. The penalty has none: it is computed from outputs that have.
        self._pass_codes = self._tensor([loss, loss, 0, *(units.forward(layer + 1) for layer, _ in stage.parts)])
        self.watched = self._smallest()
        self._local_codes = self._tensor([units.backward(self.unit[id(p)]) for p in self.watched])
        self._gradient_codes = self._all_codes = self._tensor([])  # until `expect`

    def _smallest(self) -> list[nn.Parameter]:
        """The smallest parameter of each unit, inspected before the all-reduce: a non-finite gradient anywhere in a unit reaches it too."""
        smallest: dict[int, nn.Parameter] = {}
        for _, parameter in sorted(self.named, key=lambda pair: pair[1].numel()):
            smallest.setdefault(self.unit[id(parameter)], parameter)
        return [parameter for parameter in smallest.values() if parameter.numel() <= SMALL]

    def expect(self, counted: Sequence[Tensor], gradients: Gradients) -> None:
        """Learn which gradients `of_gradients` will be given the norms of, in their order."""
        self._gradient_codes = self._tensor([self.units.backward(self.unit[id(p)], summed=gradients.reduces(p)) for p in counted])
        self._all_codes = torch.cat([self._pass_codes, self._gradient_codes])

    @torch.no_grad()
    def of_step(self, passes: Tensor, norms: Tensor) -> Tensor:
        """The code of a worker that is alone: of what its passes reported, and of gradients with these norms."""
        return _first(torch.cat([passes, norms.square()]), self._all_codes)

    @torch.no_grad()
    def of_passes(self, passes: Tensor, gradients: Gradients) -> Tensor:
        """This worker's code for what its passes reported and for the gradients that it watches before their sum, a float64 scalar."""
        code = _first(passes, self._pass_codes)
        local = [gradients.local[id(p)] for p in self.watched if id(p) in gradients.local]
        return torch.maximum(code, _first(torch.stack(local), self._local_codes)) if len(local) == len(self._local_codes) > 0 else code

    @torch.no_grad()
    def of_gradients(self, norms: Tensor) -> Tensor:
        """The code for gradients with these norms."""
        # Squared: with float64 gradients a square may overflow where the norm does not, and then the global norm is infinite too.
        return _first(norms.square(), self._gradient_codes)

    def _tensor(self, codes: Sequence[int]) -> Tensor:
        return torch.tensor(codes, dtype=torch.float64, device=self.world.device)

    @torch.no_grad()
    def note(self, finite: Tensor, codes: Tensor, *, fine: bool = False) -> None:
        """Count a step, and keep all workers' codes for the first bad one. `fine`: the host knows that it is finite."""
        if fine and self._clean:
            return
        self._clean = False
        bad = (~finite).to(torch.float64)
        self.kept[:2].add_(1)
        self._in_a_row.mul_(bad)
        torch.maximum(self._longest, self._in_a_row, out=self._longest)
        torch.where(
            self._bad_steps == 0, torch.cat([self.kept[:1], codes]), self.kept[4:], out=self.kept[4:]
        )  # of no meaning until one is bad
        self._bad_steps.add_(bad)

    def look(self) -> Seen:
        """Read on the host what was recorded since the last look; the same on every worker that looks after the same step."""
        steps, in_a_row, longest, bad, first, *codes = (int(number) for number in self.kept.tolist())
        self._clean = not in_a_row
        if not bad:
            return Seen(in_a_row=in_a_row)
        self.kept[2:] = 0
        return Seen(steps - first, tuple(codes), bad, longest, in_a_row)

    def take_over(self, before: NonfiniteRecord) -> None:
        """Go on from another record of the same workers."""
        self.kept.copy_(before.kept)
        self._clean = before._clean

    def forget(self, in_a_row: int = 0) -> None:
        """Reset the record, with `in_a_row` consecutive bad steps already counted."""
        self.kept.zero_()
        self.kept[1] = in_a_row
        self._clean = not in_a_row

    def cause(self, seen: Seen, *, weights: bool, world: World | None = None) -> str:
        """The first non-finite number, as the subject of a sentence. Collective: every rank must call it.

        `weights`: True if a bad step leaves the weights unchanged, so that any non-finite weight was there before it. `world`: those who
        have seen it, if there are more than the workers of one replica.
        """
        units, count = self.units, len(self.units.names)
        code = max(seen.codes, default=0)
        subject = units.words(code, seen.codes.index(code)) if code else "the loss or its gradient"
        # A weight precedes its unit's output; even if no output reveals it, it precedes every gradient.
        bad_weight = self._bad_weight() if weights else ""
        named = [(units.of[name], rank, name) for rank, name in enumerate(all_gather_text(world or self.world, bad_weight)) if name]
        if named:
            unit, rank, name = min(named)
            if code <= 2 * count or unit <= 3 * count - code:
                return f"the weight {name} of {units.names[unit]} on rank {rank}"
        return subject

    def _bad_weight(self) -> str:
        """The name of the first non-finite parameter on this worker in the order of computation; empty if all are finite."""
        bad = [(self.units.of[name], name) for name, p in self.named if not bool(p.detach().isfinite().all())]
        return min(bad)[1] if bad else ""


def _first(values: Tensor, codes: Tensor) -> Tensor:
    """The largest code of the values that are not finite, which is that of the first in the order of computation; 0 if all are."""
    # x − x is NaN, hence != 0, when x is NaN or infinite.
    return ((values - values != 0) * codes).amax() if len(codes) else codes.new_zeros(())


@torch.no_grad()
def reset_nonfinite_lanes(left: AnyCarries, start: AnyCarries) -> list[Tensor]:
    """The tensors of the carries at the end of a step; non-finite lanes of a layer are reset, so that they do not spoil the next step."""
    result: list[Tensor] = []
    for carry, begun in zip(left, start, strict=True):
        bad_B = torch.stack([(part - part != 0).any(dim=0).any(dim=-1) for part in carry]).any(dim=0)
        result += [torch.where(bad_B[None, :, None], new.to(old.dtype), old) for old, new in zip(carry, begun, strict=True)]
    return result


def uncounted() -> UserError:
    """The error for a non-zero loss whose target count is not positive."""
    return UserError("the loss returned a sum over targets with a count that is not positive; return (sum, number of targets)")


def diverged(model: Model | OpaqueModel, record: NonfiniteRecord, *, guards_weights: bool) -> UserError:
    """The error for a step that was not finite. Collective: every rank must call it."""
    cause = record.cause(record.look(), weights=guards_weights)
    advice = remedy(model, cause, "lower the learning rate, or set train.clip")
    return on_every_rank(
        Diverged(
            f"{cause} is no longer finite; {advice}; the weights are as they were before that step "
            "(to continue without it, set train.on_nan=skip)"
        )
    )


def remedy(model: Model | OpaqueModel, cause: str, usual: str) -> str:
    """The remedy for a cause as `NonfiniteRecord.cause` names it. A user's loss may be a mean over no targets, 0 / 0: right until a chunk
    or a replica has none, and then not finite, however low the learning rate is.
    """
    own_loss = cause.startswith(LOSS) and not type(model.head).__module__.startswith("carrywave.")
    return f"{usual}, and let the loss be 0 where a part of a batch has no targets" if own_loss else usual

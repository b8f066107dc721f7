"""A `Batch` is what one step trains on: tensors [time, lane, …], the real length of each lane, and where lanes start anew.

Padding carries no target: an integer target of -100, a float target of NaN. So what is real can be read off the targets,
and nothing else has to be passed to a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from carrywave.errors import UserError

IGNORED = -100  # an integer target that counts for nothing; NaN plays this part among float targets


@dataclass(frozen=True)
class Batch:
    """One window of every lane. Lanes are global numbers, whatever part of them this process holds."""

    inputs: Tensor  # [T, B] int64 tokens, or [T, B, F] float32
    targets: Tensor | None  # per step [T, B, …]; pooled [B, …]; None where there are none (prediction)
    lengths: Tensor  # [B] int64, real steps of each lane in this window, 0 for an idle lane
    fresh: Tensor  # [B] bool, the lane starts a new sequence in this window
    lanes: Tensor  # [B] int64, global number of each lane
    sequence: Tensor  # [B] int64, number of the sequence in each lane, -1 for an idle lane
    offset: Tensor  # [B] int64, first step of the window within its sequence
    epoch: int = 0
    step: int = 0  # position in the epoch; (epoch, step) is the cursor, and keys the randomness; -1: the trainer counts
    real: int = 0  # real steps, the sum of lengths, known on the host; -1: not known
    goes_on: bool = False  # whoever made it said that some lanes go on from a carry
    unsure: bool = False  # its targets may be one for each step or several for each lane, and lengths shut some off
    whole: tuple[int, int] | None = None  # (real steps, lanes) of the batch that these lanes are a part of; None: this is all of it

    @staticmethod
    def of(
        inputs: Tensor,
        targets: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        fresh: Tensor | Sequence[bool] | bool | None = None,
        *,
        epoch: int = 0,
        step: int | None = None,
        lanes: Tensor | Sequence[int] | None = None,
        pooled: bool | None = None,
    ) -> Batch:
        """A batch from tensors that are time first: inputs [T, B] of tokens or [T, B, F] of numbers.

        Targets are [T, B, …], one for each step, or [B, …], one for each lane (`pooled=True` where both readings fit); those
        beyond a lane's length are taken out. Without `lengths` every step is real. Every lane starts a new sequence unless
        `fresh` says otherwise: `fresh=False` goes on from the carry that the trainer keeps. Dropout is keyed by (epoch, step);
        where `step` is left out, the trainer counts.
        """
        inputs = torch.as_tensor(inputs)
        if inputs.dim() < 2 or 0 in inputs.shape[:2]:
            raise UserError(f"a batch's inputs have shape {list(inputs.shape)}; give [time, lane, …] with at least one step and one lane")
        steps, count = inputs.shape[:2]
        inputs = inputs if inputs.is_floating_point() else inputs.to(torch.int64)
        device = inputs.device
        lengths_B = _one_a_lane(steps if lengths is None else lengths, "lengths", count, torch.int64, device)
        real = steps * count
        if lengths is not None:
            padded = torch.arange(steps, device=device)[:, None] >= lengths_B
            # Whatever stood there: NaN times a mask of zeros would still be NaN in a gradient.
            inputs = inputs.masked_fill(padded.reshape(steps, count, *[1] * (inputs.dim() - 2)), 0)
            low, high, real = (int(value) for value in (lengths_B.min(), lengths_B.max(), lengths_B.sum()))
            if low < 0 or high > steps:
                raise UserError(f"lengths go from {low} to {high}; they must lie between 0 and the {steps} steps of the inputs")
        if targets is not None:
            targets = _targets(torch.as_tensor(targets, device=device), None if lengths is None else lengths_B, steps, count, pooled)
        numbers_B = torch.arange(count, device=device)
        return Batch(
            inputs=inputs,
            targets=targets,
            lengths=lengths_B,
            fresh=_one_a_lane(True if fresh is None else fresh, "fresh", count, torch.bool, device),
            lanes=numbers_B if lanes is None else _one_a_lane(lanes, "lanes", count, torch.int64, device),
            sequence=torch.where(lengths_B > 0, numbers_B, -1),
            offset=torch.zeros_like(numbers_B),
            epoch=epoch,
            step=-1 if step is None else step,
            real=real,
            goes_on=fresh is not None and not bool(torch.as_tensor(fresh).all()),
            unsure=pooled is None and lengths is not None and targets is not None and targets.shape[:2] == (steps, count) == (count, count),
        )

    @property
    def steps(self) -> int:
        """Steps of the window, padding included."""
        return self.inputs.shape[0]

    @property
    def cells(self) -> tuple[int, int]:
        """Real steps, and steps with padding, of the whole batch, whatever part of its lanes this is."""
        real, lanes = self.whole or (self.real, self.lanes.shape[0])
        return real, lanes * self.steps

    @property
    def idle(self) -> bool:
        """Whether it is known to be a part without any real step: it stands in for lanes that a worker does not have, and is not scored."""
        return self.real == 0 and self.whole is not None

    @property
    def waste(self) -> float:
        """Share of the whole batch that is padding."""
        real, total = self.cells
        return 1.0 - real / total if total else 0.0

    def take(self, low: int, high: int, *, pooled: bool) -> Batch:
        """The lanes from `low` up to `high`; where there are none, one idle lane that adds nothing. `pooled`: a target for each lane."""
        if low == high:
            return self._idle(pooled)
        total = self.lanes.shape[0]
        if (low, high) == (0, total):
            return self
        targets = self.targets
        if targets is not None:
            targets = targets[low:high] if pooled else targets[:, low:high]
        full = self.real == self.steps * total
        return replace(
            self,
            inputs=self.inputs[:, low:high],
            targets=targets,
            lengths=self.lengths[low:high],
            fresh=self.fresh[low:high],
            lanes=self.lanes[low:high],
            sequence=self.sequence[low:high],
            offset=self.offset[low:high],
            # How many steps of some lanes are real is not known on the host.
            real=self.steps * (high - low) if full else -1,
            whole=self.whole or (self.real, total),
        )

    def without(self, *, inputs: bool, targets: bool) -> Batch:
        """The batch without its inputs, its targets or both: a worker that holds only middle layers reads neither."""
        empty = self.inputs.new_empty((*self.inputs.shape[:2], 0)) if inputs else self.inputs
        return replace(self, inputs=empty, targets=None if targets else self.targets)

    def _idle(self, pooled: bool) -> Batch:
        one = self.take(0, 1, pooled=pooled)
        targets = one.targets
        if targets is not None:
            targets = torch.full_like(targets, torch.nan if targets.is_floating_point() else IGNORED)
        return replace(
            one,
            inputs=torch.zeros_like(one.inputs),
            targets=targets,
            lengths=torch.zeros_like(one.lengths),
            fresh=torch.ones_like(one.fresh),
            sequence=torch.full_like(one.sequence, -1),
            offset=torch.zeros_like(one.offset),
            real=0,
            whole=one.whole or (self.real, self.lanes.shape[0]),
        )

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; copies from pinned memory do not block."""
        to_device = device.type != "cpu"  # what comes from a GPU is there only once the copy is done
        moved = {
            name: getattr(self, name).to(device, non_blocking=to_device)
            for name in ("inputs", "targets", "lengths", "fresh", "lanes", "sequence", "offset")
            if getattr(self, name) is not None
        }
        return replace(self, **moved)


def _one_a_lane(value: Any, name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A value for each lane, or one for all of them."""
    value_B = torch.as_tensor(value)
    if value_B.dim() == 0:
        value_B = value_B.expand(count)
    if value_B.shape != (count,) or value_B.is_floating_point() or (value_B.dtype == torch.bool) != (dtype == torch.bool):
        kind = "true or false" if dtype == torch.bool else "a whole number"
        raise UserError(f"{name} has shape {list(value_B.shape)} and dtype {value_B.dtype}; give {kind} for each of the {count} lanes")
    return value_B.to(device, dtype)


def _targets(targets: Tensor, lengths_B: Tensor | None, steps: int, count: int, pooled: bool | None) -> Tensor:
    """Targets in a type that losses take, without those of padding and of idle lanes."""
    each_step, each_lane = targets.shape[:2] == (steps, count), targets.shape[:1] == (count,)
    if pooled is None:
        # [lane, time] is more likely a batch that was not turned over than as many numbers a lane as there are steps.
        pooled = each_lane and not each_step and targets.shape[1:2] != (steps,)
    if not (each_lane if pooled else each_step):
        raise UserError(
            f"targets have shape {list(targets.shape)} for {steps} steps of {count} lanes; give [{steps}, {count}, …], time first, "
            f"one for each step, or [{count}, …] with pooled=True, one for each lane"
        )
    targets = targets if targets.is_floating_point() else targets.to(torch.int64)
    if lengths_B is None:
        return targets
    padded = lengths_B == 0 if pooled else torch.arange(steps, device=targets.device)[:, None] >= lengths_B
    padded = padded.reshape(*padded.shape, *[1] * (targets.dim() - padded.dim()))
    return torch.where(padded, torch.nan if targets.is_floating_point() else IGNORED, targets)

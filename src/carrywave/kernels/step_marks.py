"""`StepMarks`: what happens to the carry of a layer at some of its steps, besides what the cell computes: where lanes start again.

Shapes: T time, B lane, P output width, H hidden, D directions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from carrywave.kernels.carry import AnyCarry, changed
from carrywave.kernels.lengths import real_steps, reversed_steps


@dataclass(frozen=True, eq=False)
class StepMarks:
    """Of one layer, over the steps of one call."""

    resets: Tensor | None = None  # [T, B] bool: before this step, the lane's carry is the initial one; None: nowhere
    initial: AnyCarry | None = None  # the initial carry, [D, 1 or B, P] and so on; None: zeros

    def initial_like(self, carry: AnyCarry) -> AnyCarry:
        """The initial carry in the dtype of a carry."""
        if self.initial is None:
            return changed(carry, lambda part: part.new_zeros(part.shape[0], 1, part.shape[2]))
        return changed(self.initial, lambda new, old: new.to(old.dtype), carry)

    def real(self, real_TB1: Tensor | None) -> StepMarks:
        """The same without marks at padded steps, which leave the carry alone."""
        if self.resets is None or real_TB1 is None:
            return self
        return replace(self, resets=self.resets & real_TB1[..., 0])

    def resets_of(self, direction: int) -> Tensor | None:
        """[T, B] bool: where a direction starts again. The reverse one does so at the last step of a sequence: before the next reset."""
        if self.resets is None or direction == 0:
            return self.resets
        return torch.cat((self.resets[1:], torch.zeros_like(self.resets[:1])))

    def begins(self, carry: AnyCarry, lengths_B: Tensor | None, steps: int) -> list[tuple[Tensor | None, ...]]:
        """For each direction, the parts of its initial carry, [1 or B, P] and so on, and where lanes start again, [T, B] in the order in
        which the direction goes through each lane; None for all of them without resets.
        """
        if self.resets is None:
            return [(None,) * (len(carry) + 1)] * carry[0].shape[0]
        real = self.real(None if lengths_B is None else real_steps(lengths_B, steps))
        initial, found = self.initial_like(carry), []
        for direction in range(carry[0].shape[0]):
            resets_TB = real.resets_of(direction)
            if direction == 1 and resets_TB is not None:
                resets_TB = reversed_steps(resets_TB[..., None], lengths_B)[..., 0]
            found.append((*(part[direction] for part in initial), resets_TB))
        return found

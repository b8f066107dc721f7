"""`StepMarks`: what happens to the carry of a layer at its steps, besides what the cell computes: where lanes start again, and `CellNoise`.

Shapes: T time, B lane, P output width, H hidden, D directions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from carrywave.kernels import random
from carrywave.kernels.carry import AnyCarry, changed
from carrywave.kernels.dropout import Coordinates, multiplier


@dataclass(frozen=True, eq=False)
class CellNoise:
    """Keyed noise inside the cell of one layer, by global time, lane and unit: dropout of the candidate, which is what a step would add to
    the carry, and zoneout, by which units keep the value that they had before the step.

    Without a key, as in evaluation, nothing is dropped, and zoneout takes the mean of what a unit may keep and what it may become.
    """

    recurrent_dropout: float
    zoneout: tuple[float, ...]  # for each part of the carry, the chance that a unit keeps its value
    sites: tuple[str, ...]  # of each direction, the beginning of the names of its sites
    locked: bool = False  # the same units are dropped at every step
    key: Tensor | None = None
    lanes: Tensor | None = None  # [B]; None: 0, 1, …
    start: int = 0  # the time of the first step

    def candidate_site(self, direction: int) -> int:
        """Where dropout of the candidate is drawn."""
        return random.site(f"{self.sites[direction]}.candidate")

    def kept_site(self, direction: int, part: int) -> int:
        """Where zoneout of a part of the carry is drawn."""
        return random.site(f"{self.sites[direction]}.zoneout.{part}")

    def candidate(self, direction: int, like_TBH: Tensor) -> Tensor | None:
        """[T, B, H]: what the candidate is multiplied with, in the dtype of another tensor; None: nothing is dropped."""
        if self.key is None or not self.recurrent_dropout:
            return None
        place = Coordinates(self.candidate_site(direction), self.recurrent_dropout, self.locked, self.start)
        return multiplier(like_TBH, self.key, self.lanes, place).expand(like_TBH.shape)

    def kept(self, direction: int, part: int, like_TBP: Tensor) -> Tensor | float | None:
        """[T, B, P] in the dtype of another tensor: 1 where a part of the carry keeps its value, 0 elsewhere; without a key, the share of
        it that is kept; None: nothing is.
        """
        chance = self.zoneout[part]
        if self.key is None or not chance:
            return chance or None
        place = Coordinates(self.kept_site(direction, part), chance, start=self.start)
        return multiplier(like_TBP, self.key, self.lanes, place).eq(0.0).to(like_TBP.dtype)


@dataclass(frozen=True, eq=False)
class StepMarks:
    """Of one layer, over the steps of one call."""

    resets: Tensor | None = None  # [T, B] bool: before this step, the lane's carry is the initial one; None: nowhere
    initial: AnyCarry | None = None  # the initial carry, [D, 1 or B, P] and so on; None: zeros
    noise: CellNoise | None = None

    def initial_like(self, carry: AnyCarry) -> AnyCarry:
        """The initial carry in the dtype of a carry."""
        if self.initial is None:
            return changed(carry, lambda part: part.new_zeros(part.shape[0], 1, part.shape[2]))
        return changed(self.initial, lambda new, old: new.to(old.dtype), carry)

    def real(self, real_TB1: Tensor | None) -> StepMarks:
        """The same without resets at padded steps, which leave the carry alone."""
        if self.resets is None or real_TB1 is None:
            return self
        return replace(self, resets=self.resets & real_TB1[..., 0])

    def resets_of(self, direction: int) -> Tensor | None:
        """[T, B] bool: where a direction starts again. The reverse one does so at the last step of a sequence: before the next reset."""
        if self.resets is None or direction == 0:
            return self.resets
        return torch.cat((self.resets[1:], torch.zeros_like(self.resets[:1])))

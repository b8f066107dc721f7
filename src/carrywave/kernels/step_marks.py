"""`StepMarks`: what happens to the carry of a layer at its steps, besides what the cell computes: where lanes start again, and `CellNoise`.
`both_ways` takes them through a layer in both directions.

Shapes: T time, B lane, I input, P output width, H hidden, D directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from carrywave.kernels import random
from carrywave.kernels.carry import AnyCarry, changed
from carrywave.kernels.dropout import Coordinates, multiplier
from carrywave.kernels.lengths import real_steps, reversed_steps
from carrywave.kernels.weights import Layer, LayerWeights


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
        coords = Coordinates(self.candidate_site(direction), self.recurrent_dropout, self.locked, self.start)
        return multiplier(like_TBH, self.key, self.lanes, coords).expand(like_TBH.shape)

    def kept(self, direction: int, part: int, like_TBP: Tensor) -> Tensor | float | None:
        """[T, B, P] in the dtype of another tensor: 1 where a part of the carry keeps its value, 0 elsewhere; without a key, the share of
        it that is kept; None: nothing is.
        """
        chance = self.zoneout[part]
        if self.key is None or not chance:
            return chance or None
        coords = Coordinates(self.kept_site(direction, part), chance, start=self.start)
        return multiplier(like_TBP, self.key, self.lanes, coords).eq(0.0).to(like_TBP.dtype)


@dataclass(frozen=True, eq=False)
class StepMarks:
    """Of one layer, over the steps of one call."""

    resets: Tensor | None = None  # [T, B] bool: before this step, the lane's carry is the initial one; None: nowhere
    initial: AnyCarry | None = None  # the initial carry, [D, 1, P] and so on; None: zeros
    noise: CellNoise | None = None

    def __post_init__(self) -> None:
        """Refuse what backends would read as the same for all lanes."""
        if self.initial is not None and any(part.shape[1] != 1 for part in self.initial):
            raise ValueError(f"an initial carry for {self.initial[0].shape[1]} lanes; all lanes start again from the same")

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

    def one_way(self, direction: int, lengths_B: Tensor | None) -> StepMarks:
        """Where one direction starts again, and from which carry, in the order in which it goes through each lane."""
        if self.resets is None:
            return StepMarks()
        real = self.real(None if lengths_B is None else real_steps(lengths_B, self.resets.shape[0]))
        resets_TB = real.resets_of(direction)
        if resets_TB is not None and direction == 1:
            resets_TB = reversed_steps(resets_TB[..., None], lengths_B)[..., 0]
        return StepMarks(resets_TB, None if self.initial is None else changed(self.initial, lambda part: part[direction : direction + 1]))


# One direction over all steps: inputs, the parts of its carry [B, …], its weights, and its resets in the order of its steps; outputs
# [T, B, P] and the parts at the end.
Direction = Callable[[Tensor, Sequence[Tensor], LayerWeights, StepMarks | None], tuple[Tensor, Sequence[Tensor]]]


def both_ways(
    run: Direction, x_TBI: Tensor, carry: AnyCarry, weights: Layer, lengths_B: Tensor | None, marks: StepMarks | None = None
) -> tuple[Tensor, AnyCarry]:
    """Each direction of a layer by itself, the second on lanes that are reversed: outputs [T, B, P·D] and the carry at the end."""
    ys, ends = [], []
    for direction, each in enumerate(weights):
        parts = [part[direction] for part in carry]
        way = None if marks is None else marks.one_way(direction, lengths_B)
        y_TBP, end = run(x_TBI if direction == 0 else reversed_steps(x_TBI, lengths_B), parts, each, way)
        ys.append(y_TBP if direction == 0 else reversed_steps(y_TBP, lengths_B))
        ends.append(end)
    of_parts: Any = type(carry)
    if len(ys) == 1:
        return ys[0], of_parts(*(part[None] for part in ends[0]))
    return torch.cat(ys, dim=-1), of_parts(*(torch.stack(parts) for parts in zip(*ends, strict=True)))


def begins(way: StepMarks | None, parts: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Of one direction: what each part of its carry begins with, [1, P] and so on in the dtype of these parts, and where lanes start again,
    [T, B]; None for all of them without resets.
    """
    if way is None or way.resets is None:
        return (None,) * (len(parts) + 1)
    if way.initial is None:
        return *(part.new_zeros(1, part.shape[1]) for part in parts), way.resets
    return *(new[0].to(old.dtype) for new, old in zip(way.initial, parts, strict=True)), way.resets


def where_any(resets_TB: Tensor | None) -> dict[int, Tensor]:
    """[B, 1] bool for each step at which at least one lane starts again. Reads them on the host."""
    if resets_TB is None:
        return {}
    return {t: resets_TB[t][:, None] for t, some in enumerate(resets_TB.any(1).tolist()) if some}


class InitialGradients:
    """The gradients of the initial carry, added up over the resets on the way back."""

    def __init__(self, initial: Sequence[Tensor | None], wanted: Sequence[bool]) -> None:
        self.parts = [torch.zeros_like(part) if part is not None and want else None for part, want in zip(initial, wanted, strict=True)]

    def take(self, reset_B1: Tensor, *grads: Tensor) -> None:
        """Take, out of the gradients of the carry before a step, those of the lanes that start again there."""
        for part, grad_BH in zip(self.parts, grads, strict=True):
            if part is not None:
                part += torch.where(reset_B1, grad_BH, 0.0).sum(0)
            grad_BH.masked_fill_(reset_B1, 0.0)

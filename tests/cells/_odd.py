"""A cell that no model needs, in place of those that nobody has thought of yet: three parts in its carry, one of them projected, two gates,
and parameters of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from carrywave.cells.cell import Cell, Extra, StepWeights, names
from carrywave.model.lstm import class_of
from carrywave.model.recurrent import Recurrent


class Carry(NamedTuple):
    out: Tensor
    slow: Tensor
    moved: Tensor


def step(gates: Tensor, carry: tuple[Tensor, ...], weights: StepWeights) -> tuple[Tensor, ...]:
    out, slow, moved = carry
    new, gate = (gates + weights.recurrent(out)).chunk(2, dim=-1)
    moved = 0.5 * moved + weights.named("gain") * weights.candidate(new.tanh())
    slow = slow + gate.sigmoid() * (moved - slow) * weights.named("pace").sigmoid()
    return weights.projected(weights.normed(slow).tanh()), slow, moved


def extra(hidden: int) -> dict[str, Extra]:
    return {"gain": Extra((hidden,), 1.0), "pace": Extra((1,), 0.5)}


class Odd(Recurrent):
    cell = Cell("odd", gates=2, carry=Carry, step=step, extra=extra, projects=True, memory=True, forget_gate=1)


CELLS: dict[str, type[Recurrent]] = {**{name: class_of(name) for name in names()}, "odd": Odd}

"""A layer of any cell in plain PyTorch, step by step: the definition that every other backend is tested against.

A padded step outputs 0 and leaves the carry unchanged; the reverse direction starts at each lane's last real step. Where a lane is reset,
a step starts from the initial carry, in either direction.

Shapes: T time, B lane, I input, H hidden, G = gates · H, P output width (the projection, or H), D directions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from carrywave.cells import lstm
from carrywave.cells.cell import Cell
from carrywave.errors import UserError
from carrywave.kernels.carry import AnyCarry
from carrywave.kernels.derivatives import traced
from carrywave.kernels.lengths import real_steps
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.weights import Layer, LayerWeights

Begins = tuple[Tensor, list[Tensor]]  # [T, B, 1] bool: where lanes start again, and from which carry


def layer(
    x_TBI: Tensor,
    carry: AnyCarry,
    weights: Layer,
    lengths_B: Tensor | None,
    cell: Cell = lstm.CELL,
    *,
    marks: StepMarks | None = None,
) -> tuple[Tensor, AnyCarry]:
    """One layer: outputs [T, B, P·D] and the carry at each lane's last real step."""
    real_TB1 = None if lengths_B is None else real_steps(lengths_B, x_TBI.shape[0])
    if real_TB1 is not None:
        # torch.where, not a product: padding may hold NaN.
        x_TBI = torch.where(real_TB1, x_TBI, 0.0)
    ys, ends = [], []
    for direction, of_direction in enumerate(weights):
        gates_TBG = linear(x_TBI, of_direction.w_ih, of_direction.b_ih)
        run = _exported if torch.compiler.is_exporting() else _direction
        begins = None if marks is None else _begins(marks.real(real_TB1), carry, direction)
        y_TBP, end = run(cell, gates_TBG, [part[direction] for part in carry], of_direction, real_TB1, begins, direction == 1)
        ys.append(y_TBP)
        ends.append(end)
    stacked: AnyCarry = cell.carry(*(torch.stack(parts) for parts in zip(*ends, strict=True)))
    for part, new, old in zip(cell.parts, stacked, carry, strict=True):
        if not traced() and new.shape != old.shape:
            raise UserError(f"step of the cell {cell.name} returns {part} in another shape than it was given; return [lane, …] as given")
    return torch.cat(ys, dim=-1), stacked


def _begins(marks: StepMarks, carry: AnyCarry, direction: int) -> Begins | None:
    resets_TB = marks.resets_of(direction)
    return None if resets_TB is None else (resets_TB[..., None], [part[direction] for part in marks.initial_like(carry)])


def _direction(
    cell: Cell,
    gates_TBG: Tensor,
    carry: Sequence[Tensor],
    weights: LayerWeights,
    real_TB1: Tensor | None,
    begins: Begins | None,
    backwards: bool,
) -> tuple[Tensor, Sequence[Tensor]]:
    gates = gates_TBG.unbind()  # at once: the gradient of a step taken by its index is as large as all of them
    steps = range(len(gates))
    outputs: list[Tensor] = [carry[0]] * len(steps)
    for t in reversed(steps) if backwards else steps:
        if begins is not None:
            carry = _begun(carry, begins[0][t], begins[1])
        carry, outputs[t] = _step(cell, gates[t], carry, weights, None if real_TB1 is None else real_TB1[t])
    return torch.stack(outputs), carry


def _step(
    cell: Cell, gates_BG: Tensor, carry: Sequence[Tensor], weights: LayerWeights, real_B1: Tensor | None
) -> tuple[Sequence[Tensor], Tensor]:
    """The carry after a step and the output."""
    after = cell.step(gates_BG, cell.carry(*carry), weights)
    if not isinstance(after, tuple) or len(after) != len(carry):
        raise UserError(f"step of the cell {cell.name} must return a tuple of {', '.join(cell.parts)}")
    if real_B1 is None:
        return after, after[0]
    kept = [torch.where(real_B1, new, old) for new, old in zip(after, carry, strict=True)]
    return kept, torch.where(real_B1, after[0], 0.0)


def _begun(carry: Sequence[Tensor], resets_B1: Tensor, initial: Sequence[Tensor]) -> Sequence[Tensor]:
    """The carry before a step, of which some lanes start again."""
    return [torch.where(resets_B1, new, old) for new, old in zip(initial, carry, strict=True)]


def _exported(
    cell: Cell,
    gates_TBG: Tensor,
    carry: Sequence[Tensor],
    weights: LayerWeights,
    real_TB1: Tensor | None,
    begins: Begins | None,
    backwards: bool,
) -> tuple[Tensor, Sequence[Tensor]]:
    """The same as one operation, whose number of steps stays free where a loop would bind it."""
    from torch._higher_order_ops.scan import scan

    of_steps = [gates_TBG, *([] if real_TB1 is None else [real_TB1]), *([] if begins is None else [begins[0]])]

    def combine(carry: list[Tensor], given: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        before = carry if begins is None else _begun(carry, given[-1], begins[1])
        after, y_BP = _step(cell, given[0], before, weights, None if real_TB1 is None else given[1])
        return [part.clone() for part in after], y_BP.clone()  # of which none may be the memory of another

    ends, y_TBP = scan(combine, [part.contiguous() for part in carry], of_steps, dim=0, reverse=backwards)
    return y_TBP, ends

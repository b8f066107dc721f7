"""A layer of any cell in plain PyTorch, step by step: the definition that every other backend is tested against.

A padded step outputs 0 and leaves the carry unchanged; the reverse direction starts at each lane's last real step. Where a lane is reset,
a step starts from the initial carry, in either direction. Zoneout applies to what a step returns, so that a cell computes its output from
what it would have kept without it.

Shapes: T time, B lane, I input, H hidden, G = gates · H, P output width (the projection, or H), D directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from carrywave.cells import lstm
from carrywave.cells.cell import Cell
from carrywave.errors import UserError
from carrywave.kernels.carry import AnyCarry
from carrywave.kernels.derivatives import traced
from carrywave.kernels.lengths import real_steps
from carrywave.kernels.step_marks import StepMarks
from carrywave.kernels.weights import Layer, LayerWeights


class Rest(NamedTuple):
    """What one direction of a layer does besides its steps' own tensors."""

    cell: Cell
    weights: LayerWeights
    initial: Sequence[Tensor] | None = None  # the carry of lanes that start again, [1 or B, P] and so on
    shares: tuple[float, ...] = ()  # in evaluation, how much of each part of the carry zoneout keeps


# torch.compile also claims to be exporting. torch 2.11's scan loses the gradients of the carry there, without a word.
SCAN_HAS_GRADIENTS = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"

Steps = dict[str, Tensor]  # of all steps, [T, B, …]: their gates, and which lanes are real, start again, drop or keep units


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
    run = _exported if torch.compiler.is_exporting() and (SCAN_HAS_GRADIENTS or not torch.compiler.is_dynamo_compiling()) else _direction
    for direction, of_direction in enumerate(weights):
        steps, rest = {"gates": of_direction.inputs(x_TBI)}, Rest(cell, of_direction.by_heads(carry[0].shape[-1]))
        if real_TB1 is not None:
            steps["real"] = real_TB1
        if marks is not None:
            steps, rest = _marked(steps, rest, marks.real(real_TB1), carry, direction)
        y_TBP, end = run(steps, rest, [part[direction] for part in carry], direction == 1)
        ys.append(y_TBP)
        ends.append(end)
    stacked: AnyCarry = cell.carry(*(torch.stack(parts) for parts in zip(*ends, strict=True)))
    for part, new, old in zip(cell.parts, stacked, carry, strict=True):
        if not traced() and new.shape != old.shape:
            raise UserError(f"step of the cell {cell.name} returns {part} in another shape than it was given; return [lane, …] as given")
    return torch.cat(ys, dim=-1), stacked


def _marked(steps: Steps, rest: Rest, marks: StepMarks, carry: AnyCarry, direction: int) -> tuple[Steps, Rest]:
    """The steps with what happens at them besides what the cell computes."""
    resets_TB, noise = marks.resets_of(direction), marks.noise
    if resets_TB is not None:
        steps = steps | {"resets": resets_TB[..., None]}
        rest = rest._replace(initial=[part[direction] for part in marks.initial_like(carry)])
    if noise is None:
        return steps, rest
    gates_TBG, hidden = steps["gates"], steps["gates"].shape[-1] // rest.cell.gates
    multiplier_TBH = noise.candidate(direction, gates_TBG[..., :hidden])
    steps = steps if multiplier_TBH is None else steps | {"multiplier": multiplier_TBH}
    shares = []
    for number, part in enumerate(carry):
        kept = noise.kept(direction, number, part[direction].expand(gates_TBG.shape[0], -1, -1))
        shares.append(kept if isinstance(kept, float) else 0.0)
        steps = steps | {f"kept {number}": kept.bool()} if isinstance(kept, Tensor) else steps
    return steps, rest._replace(shares=tuple(shares))


def _direction(steps: Steps, rest: Rest, carry: Sequence[Tensor], backwards: bool) -> tuple[Tensor, Sequence[Tensor]]:
    apart = {name: each.unbind() for name, each in steps.items()}  # at once: the gradient of a step by its index is as large as all of them
    times = range(len(apart["gates"]))
    outputs: list[Tensor] = [carry[0]] * len(times)
    for t in reversed(times) if backwards else times:
        carry, outputs[t] = step({name: each[t] for name, each in apart.items()}, rest, carry)
    return torch.stack(outputs), carry


def step(given: Steps, rest: Rest, carry: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor]:
    """The carry after a step and the output."""
    cell, weights = rest.cell, rest.weights
    if "resets" in given and rest.initial is not None:
        carry = [torch.where(given["resets"], new, old) for new, old in zip(rest.initial, carry, strict=True)]
    if "multiplier" in given:
        weights = weights._replace(multiplier=given["multiplier"])
    after: Sequence[Tensor] = cell.step(given["gates"], cell.carry(*carry), weights)
    if not isinstance(after, tuple) or len(after) != len(carry):
        raise UserError(f"step of the cell {cell.name} must return a tuple of {', '.join(cell.parts)}")
    if rest.shares:
        after = [_zoned(given.get(f"kept {part}"), rest.shares[part], after[part], old) for part, old in enumerate(carry)]
    if "real" not in given:
        return after, after[0]
    kept = [torch.where(given["real"], new, old) for new, old in zip(after, carry, strict=True)]
    return kept, torch.where(given["real"], after[0], 0.0)


def _zoned(kept: Tensor | None, share: float, new: Tensor, old: Tensor) -> Tensor:
    """A part of the carry after zoneout: the old value where units are kept, or a share of it."""
    if kept is not None:
        return torch.where(kept, old, new)
    return share * old + (1.0 - share) * new if share else new


def _exported(steps: Steps, rest: Rest, carry: Sequence[Tensor], backwards: bool) -> tuple[Tensor, Sequence[Tensor]]:
    """The same as one operation, whose number of steps stays free where a loop would bind it."""
    from torch._higher_order_ops.scan import scan

    def combine(carry: list[Tensor], given: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        after, y_BP = step(dict(zip(steps, given, strict=True)), rest, carry)
        return [part.clone() for part in after], y_BP.clone()  # of which none may be the memory of another

    ends, y_TBP = scan(combine, [part.contiguous() for part in carry], list(steps.values()), dim=0, reverse=backwards)
    return y_TBP, ends

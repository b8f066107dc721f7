"""A `Formula` in torch: the module that torch.export writes, and what runs a formula here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.exporting.portable import Port
from carrywave.exporting.single_step.formula import BINARY, UNARY, Formula, Operation, Value


class StepModule(nn.Module):
    """From the inputs of a step and the states to the result and the states after it, in the order of the formula's ports."""

    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula, self.operations = formula, formula.needed
        self._places = {name: f"weight_{place}" for place, name in enumerate(formula.weights)}
        for name, weight in formula.weights.items():
            self.register_buffer(self._places[name], weight.clone())

    @property
    def inputs(self) -> tuple[Port, ...]:
        """What goes in."""
        return self.formula.inputs

    def sample(self, lanes: int, steps: int, seed: int) -> list[Tensor]:
        """Inputs of a first step for this many lanes; all zeros, as values do not matter to a tracer."""
        inputs = (torch.zeros(lanes, *map(int, port.shape[1:]), dtype=port.dtype) for port in self.formula.step_inputs)
        return [*inputs, *(state.clone() for state in self.formula.initial(lanes))]

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """One step."""
        formula = self.formula
        assert formula.result is not None
        weights = ((name, getattr(self, place)) for name, place in self._places.items())
        rows = {name: weight[None] if weight.dim() == 1 else weight for name, weight in weights}
        for port, tensor in zip(formula.inputs, given, strict=True):
            rows[port.name] = tensor if len(port.shape) == 2 else tensor.flatten(1) if len(port.shape) > 2 else tensor[:, None]
        for operation in self.operations:
            rows[operation.out.name] = _computed(operation, rows)
        port, value = formula.result
        result = rows[value.name]
        return _shaped(result, port), *(rows[formula.after[name].name] for name in formula.states)


def _shaped(row: Tensor, port: Port) -> Tensor:
    return row if len(port.shape) == 2 else row.reshape(-1, *(int(size) for size in port.shape[1:]))


def _computed(operation: Operation, rows: Mapping[str, Tensor]) -> Tensor:
    kind, sizes = operation.kind, operation.sizes
    operands: list[Any] = [rows[each.name] if isinstance(each, Value) else each for each in operation.inputs]
    if kind in UNARY:
        return (torch.nn.functional.softplus if kind == "softplus" else getattr(torch, kind))(operands[0])
    if kind in BINARY:
        return _elements(kind, *operands)
    return SHAPED[kind](*operands, width=operation.out.width, **sizes)


def _elements(kind: str, left: Tensor | float, right: Tensor | float) -> Tensor:
    bounds: dict[str, Callable[..., Tensor]] = {"maximum": torch.clamp_min, "minimum": torch.clamp_max}
    if kind in bounds and not isinstance(right, Tensor):
        return bounds[kind](left, right)
    if kind == "sub" and not isinstance(left, Tensor):
        return torch.rsub(right, left)  # type: ignore[arg-type]
    if kind == "div" and not isinstance(left, Tensor):
        return torch.reciprocal(right) * left  # type: ignore[arg-type]
    result: Tensor = getattr(torch, kind)(left, right)
    return result


def _linear(x: Tensor, weight: Tensor, *, width: int, columns: int, blocks: int, period: int) -> Tensor:
    if blocks == 1:
        return torch.nn.functional.linear(x, weight)
    # [periods, blocks, rows of a block, columns]: in each period, each block has some rows.
    per_block = weight.view(-1, blocks, period // blocks, columns).permute(1, 3, 0, 2).flatten(2)
    products = x.reshape(-1, blocks, 1, columns) @ per_block
    return products.reshape(-1, blocks, width // period, period // blocks).transpose(1, 2).reshape(-1, width)


SHAPED: dict[str, Callable[..., Tensor]] = {
    "linear": _linear,
    "row": lambda table, codes, *, width, place: torch.nn.functional.embedding(codes[:, place], table),
    "part": lambda x, *, width, low: x[:, low : low + width],
    "joined": lambda *xs, width: torch.cat(xs, dim=1),
    "turned": lambda x, *, width, rows: x.reshape(-1, rows, width // rows).transpose(1, 2).reshape(-1, width),
    "mean": lambda x, *, width: x.reshape(-1, width, x.shape[1] // width).mean(-1),
    "highest": lambda x, *, width: x.amax(1, keepdim=True),
}

"""Checks the options of a stack of layers. Messages name the user's class."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from carrywave.cells.cell import Cell
from carrywave.errors import UserError, WrongType


def check_options(layers: nn.Module, *, bias: bool, batch_first: bool, proj_size: int) -> None:
    """Refuse flags that are none, and a projection that the cell does not have."""
    name = type(layers).__name__
    cell: Cell | None = getattr(layers, "cell", None)
    if cell is None:
        raise UserError(f"{name} names no cell; use cw.LSTM, or a subclass with cell = …")
    for option, flag in (("bias", bias), ("batch_first", batch_first)):
        if not isinstance(flag, bool):
            raise WrongType(f"{name} got {option}={flag!r}; pass True or False")
    if proj_size and not cell.projects:
        raise UserError(f"{name} has no projection; remove proj_size={proj_size}")


def checked_sizes(
    input_size: int, hidden_size: int | Sequence[int], num_layers: int, proj_size: int, num_heads: int
) -> tuple[int, int | tuple[int, ...], tuple[int, ...], int, int]:
    """Input size, hidden size as given, the width of each layer, the projection and the heads: whole numbers that fit each other."""
    input_size, num_layers = whole(input_size=input_size, num_layers=num_layers)
    proj_size, num_heads = whole(proj_size=proj_size, num_heads=num_heads)
    if isinstance(hidden_size, Sequence):
        hidden_size = widths = tuple(width for each in hidden_size for width in whole(hidden_size=each))
    else:
        [hidden_size] = whole(hidden_size=hidden_size)
        widths = (hidden_size,) * num_layers
    if isinstance(hidden_size, tuple) and num_layers not in (1, len(widths)):
        raise UserError(f"hidden_size lists {len(widths)} widths for num_layers={num_layers}; pass one width for each layer")
    if input_size < 1 or not widths or min(widths) < 1:
        raise UserError(f"input_size={input_size}, hidden_size={hidden_size}, num_layers={num_layers} must all be at least 1")
    if proj_size < 0 or (proj_size and proj_size >= min(widths)):
        raise UserError(f"proj_size={proj_size} must be smaller than hidden_size={min(widths)}; 0 means no projection")
    if num_heads < 1 or any(width % num_heads for width in widths):
        raise UserError(f"num_heads={num_heads} must divide hidden_size={hidden_size}; each head has an equal share of the units")
    if num_heads > 1 and proj_size:
        raise UserError(f"proj_size={proj_size} would mix what num_heads={num_heads} keep apart; remove one of them")
    return input_size, hidden_size, widths, proj_size, num_heads


def check_shares(**shares: float) -> None:
    """Refuse a kind of dropout that would drop everything, or less than nothing."""
    for name, share in shares.items():
        if not 0.0 <= share < 1.0:
            raise UserError(f"{name}={share} must be at least 0 and below 1; 0 switches it off")


class _Asked:
    """Takes the place of the weights of a layer, and notes which of its methods a step calls."""

    def __init__(self, cell: Cell, hidden: int, projection: int) -> None:
        self.cell, self.hidden, self.projection = cell, hidden, projection
        self.calls: set[str] = set()

    def recurrent(self, h_BP: Tensor) -> Tensor:
        return h_BP.new_zeros(len(h_BP), self.cell.gates * self.hidden)

    def candidate(self, new_BH: Tensor) -> Tensor:
        self.calls.add("candidate")
        return new_BH

    def normed(self, c_BH: Tensor) -> Tensor:
        self.calls.add("normed")
        return c_BH

    def projected(self, h_BH: Tensor) -> Tensor:
        return h_BH[:, : self.projection] if self.projection else h_BH

    def named(self, name: str) -> Tensor:
        extra = self.cell.extra(self.hidden)[name]
        return torch.full(extra.shape, extra.value, device="cpu")


def check_step(cell: Cell, hidden: int, projection: int, *, recurrent_dropout: float, cell_norm: bool) -> None:
    """Refuse noise and norms that the cell's step has no place for: run it once, on zeros."""
    asked = _Asked(cell, hidden, projection)
    carry = cell.carry(*(torch.zeros(1, width, device="cpu") for width in cell.widths(hidden, projection)))
    with torch.no_grad():
        cell.step(torch.zeros(1, cell.gates * hidden, device="cpu"), carry, asked)
    if recurrent_dropout and "candidate" not in asked.calls:
        raise UserError(
            f"recurrent_dropout={recurrent_dropout}, but the step of the cell {cell.name} drops nothing; let it pass what it would add to "
            "its carry through weights.candidate"
        )
    if cell_norm and cell.memory != ("normed" in asked.calls):
        calls = "calls weights.normed, but has memory=False" if "normed" in asked.calls else "has memory=True, but calls no weights.normed"
        raise UserError(f"cell_norm=True, but the cell {cell.name} {calls}; change one of them")


def whole(**sizes: int) -> tuple[int, ...]:
    """Convert sizes to Python ints, from any integer type (numpy scalars, one-element tensors)."""
    for name, size in sizes.items():
        try:
            operator.index(size)
        except TypeError:
            raise WrongType(f"{name}={size!r} must be a whole number") from None
    return tuple(operator.index(size) for size in sizes.values())

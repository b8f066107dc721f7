"""The carry of a stack of layers: passed in and out, never hidden in a module. `Carry` (h, c) is the LSTM's.

The carry of a layer is a NamedTuple of tensors, whose fields its cell names: [D, B, P] for the first, which is the output, [D, B, H] for
the others.

Shapes: D directions, B lanes, H hidden, P output width (the projection, or H).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from carrywave.cells.lstm import Carry

__all__ = ["AnyCarries", "AnyCarry", "Carries", "Carry", "changed"]

AnyCarry = tuple[Tensor, ...]  # of one layer, whatever its cell
AnyCarries = tuple[AnyCarry, ...]  # one per layer of a stack, so that widths may differ
Carries = tuple[Carry, ...]  # those of LSTM layers


def changed(carry: AnyCarry, change: Callable[..., Tensor], *others: AnyCarry) -> AnyCarry:
    """Apply a function to every part of a carry, and to the same parts of the others."""
    of_parts: Any = type(carry)
    made: AnyCarry = of_parts(*map(change, carry, *others))
    return made

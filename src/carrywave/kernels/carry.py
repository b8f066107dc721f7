"""The carry (h, c) of a stack of LSTM layers: passed in and out, never hidden in a module.

Shapes: L layers, D directions, B lanes, H hidden, P output width (the projection, or H).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Carry(NamedTuple):
    """State of one layer ([D, B, P] and [D, B, H]), or of a stack in nn.LSTM's shapes ([L·D, B, P] and [L·D, B, H])."""

    h: Tensor
    c: Tensor


Carries = tuple[Carry, ...]  # one per layer of a stack, so that widths may differ

"""The carry (h, c) of a stack of LSTM layers: passed in and out, never hidden in a module.

Shapes: L layers, D directions, B lanes, H hidden, P output width (the projection, or H).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Carry(NamedTuple):
    """State of one layer ([D, B, P] and [D, B, H]), or of a stack in nn.LSTM's shapes ([L·D, B, P] and [L·D, B, H]).

    >>> import torch
    >>> import carrywave as cw
    >>> y, carry = cw.LSTM(3, 8, num_layers=2)(torch.zeros(5, 4, 3))
    >>> h, c = carry
    >>> isinstance(carry, cw.Carry), tuple(h.shape), torch.equal(carry.c, c)
    (True, (2, 4, 8), True)
    """

    h: Tensor
    c: Tensor


Carries = tuple[Carry, ...]  # one per layer of a stack, so that widths may differ

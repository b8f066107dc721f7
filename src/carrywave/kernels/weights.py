"""The weights of one layer as kernels take them: nn.LSTM's tensors, with gates in the order input, forget, cell, output.

Shapes: I input, H hidden, G = 4H, P output width (the projection, or H).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LayerWeights(NamedTuple):
    """One direction of one layer."""

    w_ih: Tensor  # [G, I]
    w_hh: Tensor  # [G, P]
    b_ih: Tensor | None = None  # [G]
    b_hh: Tensor | None = None  # [G]
    w_hr: Tensor | None = None  # [P, H], the projection

    def to(self, dtype: torch.dtype) -> LayerWeights:
        """The same weights, cast to a dtype."""
        b_ih, b_hh, w_hr = (None if tensor is None else tensor.to(dtype) for tensor in self[2:])
        return LayerWeights(self.w_ih.to(dtype), self.w_hh.to(dtype), b_ih, b_hh, w_hr)


Layer = tuple[LayerWeights, ...]  # one direction, or forward and reverse

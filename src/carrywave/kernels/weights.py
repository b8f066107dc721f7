"""The weights of one layer as kernels take them: the tensors that torch.nn's layers have, with gates in the order of the cell.

Shapes: B lane, I input, H hidden, G = gates · H, P output width (the projection, or H).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear


class LayerWeights(NamedTuple):
    """One direction of one layer."""

    w_ih: Tensor  # [G, I]
    w_hh: Tensor  # [G, P]
    b_ih: Tensor | None = None  # [G]
    b_hh: Tensor | None = None  # [G]
    w_hr: Tensor | None = None  # [P, H], the projection
    extra: Any = None  # the cell's other parameters by name, if it has any, and the gains of norms inside it
    multiplier: Tensor | None = None  # [B, H]: of the candidate at one step, by recurrent dropout

    def to(self, dtype: torch.dtype) -> LayerWeights:
        """The same weights, cast to a dtype."""
        b_ih, b_hh, w_hr = (None if tensor is None else tensor.to(dtype) for tensor in (self.b_ih, self.b_hh, self.w_hr))
        extra = None if self.extra is None else {name: tensor.to(dtype) for name, tensor in self.extra.items()}
        return LayerWeights(self.w_ih.to(dtype), self.w_hh.to(dtype), b_ih, b_hh, w_hr, extra)

    def tensors(self) -> Iterator[Tensor]:
        """Those that there are, in the order of torch.nn's layers."""
        yield from (tensor for tensor in (self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.w_hr) if tensor is not None)
        yield from (self.extra or {}).values()

    def inputs(self, x_TBI: Tensor) -> Tensor:
        """[T, B, G]: the inputs, times `w_ih`, with their bias; normalised before it if the cell has norms."""
        return self._product(x_TBI, self.w_ih, self.b_ih, "norm_ih")

    def recurrent(self, h_BP: Tensor) -> Tensor:
        """[B, G]: the output of the step before, times `w_hh`, with its bias; normalised before it if the cell has norms."""
        return self._product(h_BP, self.w_hh, self.b_hh, "norm_hh")

    def candidate(self, new_BH: Tensor) -> Tensor:
        """[B, H]: what the step would add to the carry, after recurrent dropout if there is any."""
        return new_BH if self.multiplier is None else new_BH * self.multiplier

    def normed(self, c_BH: Tensor) -> Tensor:
        """[B, H]: a memory, normalised if the cell has norms."""
        if self.extra is None or "norm_c" not in self.extra:
            return c_BH
        return layer_norm(c_BH, c_BH.shape[-1:], self.extra["norm_c"], self.extra["norm_c_bias"])

    def projected(self, h_BH: Tensor) -> Tensor:
        """[B, P]: an output, projected if there is a projection."""
        return h_BH if self.w_hr is None else linear(h_BH, self.w_hr)

    def named(self, name: str) -> Tensor:
        """One of the cell's other parameters."""
        tensor: Tensor = self.extra[name]
        return tensor

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: str) -> Tensor:
        if self.extra is None or norm not in self.extra:
            return linear(x, weight, bias)
        return layer_norm(linear(x, weight), weight.shape[:1], self.extra[norm], bias)


Layer = tuple[LayerWeights, ...]  # one direction, or forward and reverse

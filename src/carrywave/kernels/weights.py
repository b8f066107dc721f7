"""The weights of one layer as kernels take them: the tensors that torch.nn's layers have, with gates in the order of the cell.

Shapes: B lane, I input, H hidden, G = gates · H, P output width (the projection, or H).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from carrywave.kernels.carry import AnyCarry, changed


class LayerWeights(NamedTuple):
    """One direction of one layer."""

    w_ih: Tensor  # [G, I]
    w_hh: Tensor  # [G, P]; with K heads [G, P/K], where the row of a unit multiplies the outputs of its own head
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

    def by_heads(self, width: int) -> LayerWeights:
        """The same for outputs of some width, in the form in which `recurrent` multiplies by heads: `w_hh` is [K, P/K, G/K]."""
        units = self.w_hh.shape[1]
        if units == width:
            return self
        blocks = self.w_hh.view(-1, width // units, units, units).permute(1, 3, 0, 2)
        return self._replace(w_hh=blocks.reshape(width // units, units, -1))

    def tensors(self) -> tuple[Tensor, ...]:
        """Those that there are, in the order of torch.nn's layers."""
        plain = (tensor for tensor in (self.w_ih, self.w_hh, self.b_ih, self.b_hh, self.w_hr) if tensor is not None)
        return (*plain, *(self.extra or {}).values())

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
        gain = None if self.extra is None else self.extra.get(norm)
        if gain is None and weight.dim() == 2:
            return linear(x, weight, bias)
        product = linear(x, weight) if weight.dim() == 2 else _blockwise(x, weight)
        if gain is not None:
            return layer_norm(product, product.shape[-1:], gain, bias)
        return product if bias is None else product + bias


def _blockwise(h_BP: Tensor, blocks: Tensor) -> Tensor:
    """[B, G]: the units of each head times its own block, [K, P/K, G/K]; the rows of a gate are those of its heads."""
    heads, units, _ = blocks.shape
    of_heads = torch.bmm(h_BP.view(-1, heads, units).transpose(0, 1), blocks)
    return of_heads.view(heads, h_BP.shape[0], -1, units).permute(1, 2, 0, 3).reshape(h_BP.shape[0], -1)


Layer = tuple[LayerWeights, ...]  # one direction, or forward and reverse
# One layer, in both directions if it has two: outputs [T, B, O] and the carry at each lane's last real step.
# A backend that runs layers with marks takes them by their name, `marks`.
Backend = Callable[..., tuple[Tensor, Any]]


def heads_of(layer: Layer, gates: int) -> int:
    """The number of blocks of the recurrent matrix of a layer whose cell has this many gates."""
    first = layer[0]
    outputs = first.w_ih.shape[0] // gates if first.w_hr is None else first.w_hr.shape[0]
    return outputs // first.w_hh.shape[1]


def in_dtype(
    compute: torch.dtype, x_TBI: Tensor, carry: AnyCarry, layer: Layer, lengths_B: Tensor | None, backend: Backend, marks: Any = None
) -> tuple[Tensor, AnyCarry]:
    """Run a backend in a dtype; outputs have that of x. The carry keeps its own, so that it is the same in every chunk and window."""
    named = {} if marks is None else {"marks": marks}
    if all(tensor.dtype == compute for tensor in (x_TBI, *carry, *(tensor for direction in layer for tensor in direction.tensors()))):
        return backend(x_TBI, carry, layer, lengths_B, **named)
    weights = tuple(direction.to(compute) for direction in layer)
    y_TBO, end = backend(x_TBI.to(compute), changed(carry, lambda part: part.to(compute)), weights, lengths_B, **named)
    return y_TBO.to(x_TBI.dtype), changed(end, lambda part, before: part.to(before.dtype), carry)

"""Weights packed for products with few rows, of which a layer makes one at every step.

Before it multiplies, MKL copies a weight into the order in which its kernel reads it. With as few rows as there are lanes, that takes up to
half of the time, step after step. A packed weight is copied once a pass instead (`pass_cache`).

Shapes: N rows, G outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from carrywave.kernels.pass_cache import cached

Product = Callable[..., Tensor]  # x [N, I], and perhaps a bias [G], to x @ weight.T + bias

_BACKENDS: Any = torch.backends
_MKL: Any = torch.ops.mkl
# MKL is part of torch's builds for x86 only. Its two operations are undocumented, so we look whether they are there.
AVAILABLE: bool = _BACKENDS.mkl.is_available() and all(hasattr(_MKL, name) for name in ("_mkl_linear", "_mkl_reorder_linear_weight"))
DTYPE = torch.float32  # the only one that they take
FEWEST_ROWS = 4  # fewer are nearly a product with a vector, for which MKL copies nothing
FEWEST_USES = 8  # packing takes as long as it saves in 2 to 7 products
SMALLEST = 2**19  # elements of a weight; those of 256 units, half as many, are read so fast that pipelines gain nothing
SMALLEST_TRANSPOSED = 2**20  # those of 512 units: plain products with a transpose are fast, and packing it takes 3 times as long


def packed(weight_GI: Tensor, rows: int, *, transposed: bool = False) -> Product | None:
    """Products with a weight, or with its transpose, for inputs of this many rows; None where plain ones are faster or all there is."""
    smallest = SMALLEST_TRANSPOSED if transposed else SMALLEST
    if not AVAILABLE or weight_GI.dtype != DTYPE or weight_GI.numel() < smallest or rows < FEWEST_ROWS:
        return None
    used = weight_GI.t() if transposed else weight_GI
    mine = cached((weight_GI,), ("packed", rows, transposed), lambda: _MKL._mkl_reorder_linear_weight(used, rows))

    def product(x_NI: Tensor, bias_G: Tensor | None = None) -> Tensor:
        result: Tensor = _MKL._mkl_linear(x_NI, mine, used, bias_G, rows)
        return result

    return product

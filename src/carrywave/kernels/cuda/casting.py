"""Casts dense rows to padded rows in half precision and back, on CUDA with our own kernels (`casting.cu`).

torch copies rows of unequal pitch element by element, several times slower than memory bandwidth allows. Elsewhere, and if the kernel is
unavailable, torch's copy is used, with the same bits.

Shapes: N rows, I width, J padded width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.derivatives import plain_only

HALVES = (torch.bfloat16, torch.float16)
EACH = 8  # half-precision numbers in 16 bytes
_SOURCE = "casting.cu"
_GROUPS = (4, 2, 1)  # numbers read and written at once, if they are aligned
_ROWS, _TILE = 8, 128  # rows per block, one warp each; groups of a row that a warp processes at once
BLOCK = (32 * _ROWS, 1)
_ENOUGH = 16_384  # warps that keep a large GPU busy
MOST = 1 << 30  # the kernel uses 32-bit indices
_cuda_kernel = nvrtc.Replaceable("casting rows")


def padded_width(width: int) -> int:
    """The next multiple of 16 bytes in half precision."""
    return -(-width // EACH) * EACH


def padded_rows(x_NI: Tensor, dtype: torch.dtype, width: int | None = None) -> Tensor:
    """[N, J]: the rows in this dtype, zero-padded to `width`, or to the next multiple of 16 bytes in half precision."""
    rows, inputs = x_NI.shape
    return write_padded(x_NI, x_NI.new_empty(rows, width or padded_width(inputs), dtype=dtype))


def write_padded(x_NI: Tensor, to_NJ: Tensor) -> Tensor:
    """Write the rows, and zeros after them."""
    if not _cast(x_NI, to_NJ):
        inputs = x_NI.shape[1]
        to_NJ[:, :inputs].copy_(x_NI)
        to_NJ[:, inputs:].zero_()
    return to_NJ


def dense_rows(x_NI: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows in this dtype, without padding between them."""
    dense_NI = x_NI.new_empty(x_NI.shape, dtype=dtype)
    return dense_NI if _cast(x_NI, dense_NI) else dense_NI.copy_(x_NI)


def _cast(x_NI: Tensor, to_NJ: Tensor) -> bool:
    """Write the rows, and zeros after them, with the kernel; False if it does not apply or is unavailable."""
    return _serves(x_NI, to_NJ) and _cuda_kernel.tried(lambda: _launch(x_NI, to_NJ)) is not None


def _serves(x_NI: Tensor, to_NJ: Tensor) -> bool:
    """True if the kernel supports these tensors and pays: rows that are dense on both sides are cast as fast by torch."""
    dtypes = {x_NI.dtype, to_NJ.dtype}
    halves = dtypes.intersection(HALVES)
    supported = len(halves) == 1 and dtypes <= {torch.float32, *halves}
    dense = x_NI.is_contiguous() and x_NI.shape == to_NJ.shape
    small = max(x_NI.stride(0), *to_NJ.shape) < MOST
    readable = x_NI.is_cuda and x_NI.numel() > 0 and x_NI.stride(1) == 1 and small
    return supported and readable and not dense and not plain_only()


def _launch(x_NI: Tensor, to_NJ: Tensor) -> Tensor:
    rows, inputs = x_NI.shape
    width = to_NJ.shape[1]
    group = next(group for group in _GROUPS if begin_at_multiples(group, x_NI) and begin_at_multiples(group, to_NJ))
    name = "widen" if to_NJ.dtype == torch.float32 else "narrow" if x_NI.dtype == torch.float32 else "move"
    half = x_NI if x_NI.dtype in HALVES else to_NJ
    kernel = nvrtc.kernel(_SOURCE, f"{name}_{group}", (("FP16", int(half.dtype == torch.float16)),), 0, x_NI.get_device())
    grid = grid_of(rows, -(-width // (_TILE * group)))
    kernel(grid, BLOCK, x_NI, to_NJ, rows, inputs, width, x_NI.stride(0), to_NJ.stride(0))
    return to_NJ


def begin_at_multiples(group: int, x: Tensor) -> bool:
    """True if each row of x (its last dimension) consists of groups of this many elements, all aligned to the size of a group."""
    pitches = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return not any(measure % group for measure in (x.shape[-1], x.data_ptr() // x.element_size(), *pitches))


def grid_of(rows: int, tiles: int) -> tuple[int, int, int]:
    """A grid with one warp per row; if there are few rows, several blocks share the tiles of each."""
    return -(-rows // _ROWS), min(tiles, -(-_ENOUGH // rows)), 1

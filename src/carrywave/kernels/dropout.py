"""Keyed dropout over [time, lane, unit]: on CUDA with our own kernel (`dropout.cu`) for forward and backward, which stores no mask.

By definition, the multiplier is `random.keep` with the site's key at (start + time, lane, unit), without time when locked, and the output
is x times the multiplier. The kernel draws the multiplier again in backward. It is checked against the definition on first use; if they
differ, or the kernel is unavailable, the definition runs instead, with a warning.

Shapes: T time, B lane, U unit.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carrywave.kernels import derivatives, random
from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.cuda.casting import BLOCK, HALVES, MOST, begin_at_multiples, grid_of

_SOURCE = "dropout.cu"
_TILE = 256  # units of a row that a warp processes at once
_cuda_kernel = nvrtc.Replaceable("dropout")
_checked: set[tuple[int, torch.dtype]] = set()  # devices and dtypes for which the kernel has been checked against the definition


class Coordinates(NamedTuple):
    """The coordinates of a tensor's elements, except their lanes: a site, its dropout rate, and the time of the first step."""

    site: int
    p: float
    locked: bool = False
    start: int = 0


def dropped(x_TBU: Tensor, key: Tensor, lanes_B: Tensor | None, coords: Coordinates) -> Tensor:
    """Zero a fraction p of x and divide the rest by 1 - p; `lanes_B` are the global numbers of its lanes, or None for 0, 1, …"""
    if _serves(x_TBU, key, lanes_B, coords.p):
        apply: Any = _Dropped.apply
        y_TBU: Tensor = apply(x_TBU, key, lanes_B, coords)
        return y_TBU
    return x_TBU * _defined(x_TBU, key, lanes_B, coords)


def multiplier(like_TBU: Tensor, key: Tensor, lanes_B: Tensor | None, coords: Coordinates) -> Tensor:
    """The multiplier that `dropped` applies: [T, B, U], or [1, B, U] when locked."""
    if not _serves(like_TBU, key, lanes_B, coords.p):
        return _defined(like_TBU, key, lanes_B, coords)
    return _launch(None, like_TBU[:1] if coords.locked else like_TBU, key, lanes_B, coords)


def _defined(like_TBU: Tensor, key: Tensor, lanes_B: Tensor | None, coords: Coordinates) -> Tensor:
    """The multiplier by definition, in plain operations."""
    steps, count, units = like_TBU.shape
    device = like_TBU.device
    if torch.compiler.is_dynamo_compiling():
        multiplier_TBU: Tensor = _whole([steps, count, units], key, lanes_B, *coords, like_TBU.dtype)
        return multiplier_TBU
    key = random.fold(key, coords.site)
    lane_B1 = (torch.arange(count, device=device) if lanes_B is None else lanes_B)[:, None]
    unit_U = torch.arange(units, device=device)
    if coords.locked:
        return random.keep(key, coords.p, lane_B1, unit_U, dtype=like_TBU.dtype)[None]
    time_T11 = torch.arange(coords.start, coords.start + steps, device=device)[:, None, None]
    return random.keep(key, coords.p, time_T11, lane_B1, unit_U, dtype=like_TBU.dtype)


@torch.library.custom_op("carrywave::multiplier", mutates_args=())
def _whole(
    shape: Sequence[int], key: Tensor, lanes_B: Tensor | None, site: int, p: float, locked: bool, start: int, dtype: torch.dtype
) -> Tensor:
    """The definition as one opaque operation: torch.compile would take minutes over its many small integer operations."""
    return _defined(key.new_empty((), dtype=dtype).expand(*shape), key, lanes_B, Coordinates(site, p, locked, start))


@_whole.register_fake
def _(
    shape: Sequence[int], key: Tensor, lanes_B: Tensor | None, site: int, p: float, locked: bool, start: int, dtype: torch.dtype
) -> Tensor:
    steps, count, units = shape
    return key.new_empty((1 if locked else steps, count, units), dtype=dtype)


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TBU: Tensor, key: Tensor, lanes_B: Tensor | None, coords: Coordinates) -> Tensor:
        ctx.save_for_backward(key, lanes_B)
        ctx.coords = coords
        return _launch(x_TBU, x_TBU, key, lanes_B, coords)

    @staticmethod
    def backward(ctx: Any, grad_TBU: Tensor) -> tuple[Tensor, None, None, None]:
        key, lanes_B = ctx.saved_tensors
        if derivatives.beyond_numbers(grad_TBU):
            return grad_TBU * _defined(grad_TBU, key, lanes_B, ctx.coords), None, None, None
        return _launch(grad_TBU, grad_TBU, key, lanes_B, ctx.coords), None, None, None


def _launch(x_TBU: Tensor | None, like_TBU: Tensor, key: Tensor, lanes_B: Tensor | None, coords: Coordinates) -> Tensor:
    """x times its multiplier, or the multiplier alone if x is None: dense, in the shape and dtype of `like_TBU`."""
    steps, lanes, units = like_TBU.shape
    dtype = like_TBU.dtype
    y_TBU = like_TBU.new_empty(steps, lanes, units)
    if x_TBU is not None and not _readable(x_TBU):
        x_TBU = x_TBU.contiguous()
    widest = 16 // dtype.itemsize
    groups = [group for group in (8, 4, 2, 1) if group <= widest]
    group = next(group for group in groups if all(begin_at_multiples(group, each) for each in (y_TBU, x_TBU) if each is not None))
    constants = (("FP16", int(dtype == torch.float16)), ("WIDE", int(dtype == torch.float32)))
    kernel = nvrtc.kernel(_SOURCE, f"drop_{group}", constants, 0, like_TBU.get_device())
    pitches = (0, 0) if x_TBU is None else x_TBU.stride()[:2]
    numbers_B = None if lanes_B is None else lanes_B.to(torch.int64).contiguous()
    kernel(
        grid_of(steps * lanes, -(-units // _TILE)), BLOCK, x_TBU, y_TBU, key.contiguous(), numbers_B, steps * lanes, lanes, units, *pitches,
        random.signed(coords.site), int(not coords.locked), random.signed(coords.start), random.threshold(coords.p),
        _scale(coords.p, dtype),
    )  # fmt: skip
    return y_TBU


@cache
def _scale(p: float, dtype: torch.dtype) -> int:
    """The factor of a kept number, rounded as `random.keep` rounds it, as the bits of a float32."""
    kept = torch.ones((), dtype=dtype, device="cpu").mul_(1.0 / (1.0 - p))
    [word] = struct.unpack("<i", struct.pack("<f", kept.item()))
    return int(word)


def _readable(x_TBU: Tensor) -> bool:
    return x_TBU.stride(2) == 1 and max(x_TBU.stride()) < MOST


def _serves(x_TBU: Tensor, key: Tensor, lanes_B: Tensor | None, p: float) -> bool:
    """True if the kernel supports these arguments and is available."""
    if _cuda_kernel.failures or not x_TBU.is_cuda or x_TBU.dtype not in (torch.float32, *HALVES) or derivatives.plain_only():
        return False
    supported = key.dtype == torch.int32 and key.shape == (2,) and key.device == x_TBU.device
    if lanes_B is not None:
        integers = lanes_B.dtype in (torch.int64, torch.int32)
        supported = supported and integers and lanes_B.shape == x_TBU.shape[1:2] and lanes_B.device == x_TBU.device
    # The kernel uses 32-bit indices.
    small = x_TBU.numel() > 0 and x_TBU.shape[0] * x_TBU.shape[1] < MOST and x_TBU.shape[2] < MOST and random.threshold(p) < 1 << 31
    return supported and small and _holds(x_TBU.device, x_TBU.dtype)


def _holds(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the kernel matches the definition, checked on first use."""
    name = (device.index or 0, dtype)
    if name in _checked:
        return True
    if torch.cuda.is_current_stream_capturing():
        return False  # no values can be read back during graph capture; the next use decides
    if not _cuda_kernel.tried(lambda: _compare(device, dtype)):
        return False
    _checked.add(name)
    return True


@torch.no_grad()
def _compare(device: torch.device, dtype: torch.dtype) -> bool:
    """Compare the kernel bit for bit with the definition on the CPU, for all of its access patterns: return True, or raise."""
    word = torch.int32 if dtype == torch.float32 else torch.int16
    # Not from torch's generator: the user's random numbers must not depend on whether this has run.
    x_TBU = (torch.arange(3 * 5 * 640) % 251 - 125).mul(0.37).to(dtype).view(3, 5, 640)
    key, lanes_B = random.key(1, 2), torch.tensor([7, 0, -3, 2**40 + 1, 12])
    on_device, device_key, device_lanes = (each.to(device) for each in (x_TBU, key, lanes_B))
    for number, units in enumerate((640, 540, 302, 7)):
        for locked in (False, True):
            coords = Coordinates(0x89ABCDEF + number, (0.5, 0.3)[number % 2], locked, start=-2)
            given, sent = (None, None) if number == 1 else (lanes_B, device_lanes)
            here, seen = x_TBU[..., :units], on_device[..., :units]
            mask = _defined(here, key, given, coords)
            got = _launch(None, seen[: len(mask)], device_key, sent, coords), _launch(seen, seen, device_key, sent, coords)
            if not all(torch.equal(one.cpu().view(word), other.view(word)) for one, other in zip(got, (mask, here * mask), strict=True)):
                raise nvrtc.KernelError(f"its numbers differ from the definition ({units} units)")
    return True

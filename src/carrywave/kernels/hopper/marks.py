"""Makes `LayerMarks` of `StepMarks`: what the persistent kernels read of steps besides their inputs: where lanes start again, noise.

Shapes: T time, B lane, H hidden (P padded), W words of a lane, Q = 4P.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from carrywave.kernels.hopper import recurrence
from carrywave.kernels.hopper.buffers import NOTHING, LayerMarks, Noise, Resets
from carrywave.kernels.hopper.layout import LayerShape
from carrywave.kernels.step_marks import CellNoise, StepMarks


def resets_of(resets_TB: Tensor | None, first: int = 0, bits_BW: Tensor | None = None) -> Resets | None:
    """The resets of some steps, from `first` on of a window whose bits are given, or of all steps there are."""
    if resets_TB is None:
        return None
    rows_TB = resets_TB.contiguous()
    if bits_BW is None:
        bits_BW = empty_bits(rows_TB.shape[0], rows_TB.shape[1], rows_TB)
    recurrence.set_reset_bits(rows_TB, first, bits_BW)
    return Resets(rows_TB, bits_BW, first)


def empty_bits(steps: int, lanes: int, like: Tensor) -> Tensor:
    """[B, W]: no resets in a window of this many steps. One bit more than steps: a launch also asks about the step after its last."""
    return torch.zeros(lanes, steps // 32 + 1, dtype=torch.int32, device=like.device)


def marks_of(
    marks: Sequence[StepMarks | None] | None, count: int, resets: Resets | None, shape: LayerShape, x_TBI: Tensor
) -> list[LayerMarks]:
    """The marks of all layers as the kernels read them. `resets` are the same for all."""
    if marks is None:
        return [NOTHING] * count
    return [_of_layer(each or StepMarks(), resets, shape, x_TBI) for each in marks]


def _of_layer(marks: StepMarks, resets: Resets | None, shape: LayerShape, x_TBI: Tensor) -> LayerMarks:
    begin: tuple[Tensor | None, Tensor | None] = (None, None)
    if marks.initial is not None and resets is not None:
        h, memory = marks.initial[0], marks.initial[-1]
        begin = tuple(  # type: ignore[assignment]
            recurrence.padded_to(part[0].detach(), shape.width, dtype)[0] for part, dtype in ((h, x_TBI.dtype), (memory, torch.float32))
        )
    return LayerMarks(resets, None if marks.noise is None else _noise(marks.noise, shape, x_TBI), *begin)


def _noise(noise: CellNoise, shape: LayerShape, x_TBI: Tensor) -> Noise:
    """The noise of a layer in one direction; a cell whose memory is h has one chance for both."""
    if noise.key is None:
        return Noise(None, 1.0, noise.zoneout[0], noise.zoneout[-1])
    return Noise(recurrence.noise_bytes(noise, shape, x_TBI), 1.0 / (1.0 - noise.recurrent_dropout), 0.0, 0.0)

"""`LayerMarks`: what the persistent kernels read about some steps of a layer besides their inputs: where lanes start again, and noise.

Shapes: T time, B lane, H hidden (P padded), W words of a lane, Q = 4P.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from carrywave.kernels.hopper import recurrence
from carrywave.kernels.hopper.layout import LayerShape
from carrywave.kernels.step_marks import CellNoise, StepMarks


class Resets(NamedTuple):
    """Where lanes start again. The bits are those of a whole window; its steps from `first` on are the rows."""

    rows_TB: Tensor  # bool
    bits_BW: Tensor
    first: int = 0


class Noise(NamedTuple):
    """Noise of the candidate and zoneout (see `cell.cuh`)."""

    bytes_TBP: Tensor | None  # uint8; None: nothing is dropped, and old values have these weights
    scale: float
    old_h: float
    old_memory: float


class LayerMarks(NamedTuple):
    """Of one layer."""

    resets: Resets | None = None
    noise: Noise | None = None
    h_P: Tensor | None = None  # what resets put into h, in the kernel's dtype; None: zeros
    memory_P: Tensor | None = None  # and into the memory, in float32

    @property
    def kinds(self) -> tuple[int, int]:
        """The kernel's constants for resets and noise."""
        noise = 0 if self.noise is None else 1 if self.noise.bytes_TBP is not None else 2
        return 0 if self.resets is None else 1 if self.memory_P is None else 2, noise

    def part(self, first: int, end: int) -> LayerMarks:
        """Those of some steps."""
        resets, noise = self.resets, self.noise
        if resets is not None:
            resets = Resets(resets.rows_TB[first:end], resets.bits_BW, resets.first + first)
        if noise is not None and noise.bytes_TBP is not None:
            noise = noise._replace(bytes_TBP=noise.bytes_TBP[first:end])
        return self._replace(resets=resets, noise=noise)


NOTHING = LayerMarks()


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

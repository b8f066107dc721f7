"""What the kernels of a layer read and write: its activations, gradients, and what is marked at its steps.

Shapes: T time, B lane, J input (padded), H hidden (P padded), Q = 4P, N = T·B, S = T + 1, C pieces, E groups of lanes, W words of a lane.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from carrywave.kernels.window import Span

Ends = tuple[Tensor | None, Tensor | None]  # gradients [B, P] of h and c after the last step; None: zero


class Activations(NamedTuple):
    """What the forward of one layer reads and writes, and its backward reads again."""

    inputs_NJ: Tensor | None
    hs_SBP: Tensor  # h before the first step and after each
    gates_NQ: Tensor
    cells_TBP: Tensor | None  # None: nothing is kept for backward
    cs_CBP: Tensor  # c at the start of each piece, and after the last one
    mask: Tensor | None  # of the outputs, for the next layer: [T, B, P], or [1, B, P] if it is the same for all steps

    def part(self, span: Span, pieces: slice) -> Activations:
        """Some steps of the same, which are these pieces. The mask and the first layer's inputs are the chunk's own: they are left out."""
        return self._replace(mask=None).of_steps(span)._replace(cs_CBP=self.cs_CBP[pieces.start : pieces.stop + 1])

    def of_steps(self, span: Span) -> Activations:
        """Some steps of the same, with the memory of all pieces."""
        first, end = span
        rows = slice(first * self.hs_SBP.shape[1], end * self.hs_SBP.shape[1])
        return Activations(
            None if self.inputs_NJ is None else self.inputs_NJ[rows],
            self.hs_SBP[first : end + 1],
            self.gates_NQ[rows],
            None if self.cells_TBP is None else self.cells_TBP[first:end],
            self.cs_CBP,
            None if self.mask is None else steps_of(self.mask, first, end),
        )


class LayerGradients(NamedTuple):
    """What the backward of one layer writes."""

    gates_NQ: Tensor
    ring: Tensor  # for sums exchanged via memory, one for each piece
    starts: tuple[Tensor, Tensor]  # gradients of h and of the memory at the start of each piece, [C, B, P] and as wide as the memory
    bias_CEQ: Tensor
    resets_CEP2: Tensor | None  # of what resets put into the memory and into h, if that is learned

    def part(self, span: Span, lanes: int, pieces: slice) -> LayerGradients:
        """Some steps of the same, which are these pieces."""
        rows = slice(span[0] * lanes, span[1] * lanes)
        resets = None if self.resets_CEP2 is None else self.resets_CEP2[pieces]
        return LayerGradients(
            self.gates_NQ[rows], self.ring[pieces], (self.starts[0][pieces], self.starts[1][pieces]), self.bias_CEQ[pieces], resets
        )


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


def steps_of(mask: Tensor, first: int, end: int) -> Tensor:
    """The mask of some steps."""
    return mask if mask.shape[0] == 1 else mask[first:end]

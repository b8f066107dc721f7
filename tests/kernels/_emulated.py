"""The launches around the recurrence of `persistent.cu` on the CPU, with the same arguments as `recurrence` has: four rows for each unit,
interleaved and padded, resets that are bits in forward, and noise that is bytes. What a launch has not written holds NaN.

Shapes: T time, B lane, I input (J padded), H hidden (P padded), K units of a head, G = gates · H, Q = 4P interleaved, S = T + 1, N rows,
M numbers of a unit's memory, W words of a lane's resets, E groups.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))


def interleaved(weight_GI: Tensor, rows: tuple[int, ...], padded: int, width: int) -> Tensor:
    """[Q, width]: four rows for each unit, zeros where there is no weight."""
    hidden, inputs = weight_GI.shape[0] // len(rows), weight_GI.shape[1]
    out = weight_GI.new_zeros(padded, 4, width)
    out[:hidden, rows, :inputs] = weight_GI.view(len(rows), hidden, inputs).transpose(0, 1)
    return out.view(4 * padded, width)

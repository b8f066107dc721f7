"""The GRU layer on torch's own kernels: cuDNN on CUDA, torch's native loop on the CPU.

Lengths need neither packing nor a device synchronisation. Padding follows the real steps of a lane, in both directions, and the
carry is the output: padded steps run like any other, on zeros, but nothing of them is read. h is that of the last real step, and later
outputs are zeroed.

Shapes: T time, B lane, I input, H hidden, D directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from carrywave.cells.gru import GRUCarry
from carrywave.kernels import torch_kernels
from carrywave.kernels.carry import AnyCarry
from carrywave.kernels.lengths import last_real, real_steps
from carrywave.kernels.step_marks import StepMarks, both_ways
from carrywave.kernels.weights import Layer, LayerWeights

KERNEL: torch_kernels.Kernel = torch.gru


def layer(
    x_TBI: Tensor, carry: AnyCarry, weights: Layer, lengths_B: Tensor | None, *, marks: StepMarks | None = None
) -> tuple[Tensor, AnyCarry]:
    """One layer: outputs [T, B, H·D] and the carry at each lane's last real step."""
    if lengths_B is None and marks is None:
        return _run(x_TBI, carry, weights)
    real_TB1 = None if lengths_B is None else real_steps(lengths_B, x_TBI.shape[0])

    def run(x_TBI: Tensor, parts: Sequence[Tensor], each: LayerWeights, way: StepMarks | None) -> tuple[Tensor, Sequence[Tensor]]:
        [h_BH] = parts
        y_TBH, end = torch_kernels.cut_at_resets(partial(_run, weights=(each,)), x_TBI, GRUCarry(h_BH[None]), way)
        if real_TB1 is None or lengths_B is None:
            return y_TBH, [end[0][0]]
        y_TBH = torch.where(real_TB1, y_TBH, 0.0)
        return y_TBH, [last_real(y_TBH, lengths_B, h_BH.to(y_TBH.dtype))]

    return both_ways(run, x_TBI if real_TB1 is None else torch.where(real_TB1, x_TBI, 0.0), carry, weights, lengths_B, marks)


def prefers_onednn(x_TBI: Tensor, weights: LayerWeights, *, trains: bool = True) -> bool:
    """False: torch runs no GRU on oneDNN."""
    return False


def _run(x_TBI: Tensor, carry: AnyCarry, weights: Layer) -> tuple[Tensor, AnyCarry]:
    return torch_kernels.run(KERNEL, x_TBI, carry, weights)

"""The LSTM layer on torch's own kernels: cuDNN on CUDA, oneDNN or torch's native loop on the CPU.

Lengths need neither packing nor a device synchronisation. Padded steps run like any other, but their input has a flag column whose
weights saturate the input gate at 0 and the forget gate at 1, so c passes through them bit for bit; h is read at the last real
step, and later outputs are zeroed.

Shapes: T time, B lane, I input, H hidden, G = 4H, P output width (the projection, or H), D directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from carrywave.kernels import torch_kernels
from carrywave.kernels.carry import AnyCarry, Carry
from carrywave.kernels.lengths import last_real, real_steps
from carrywave.kernels.step_marks import StepMarks, both_ways
from carrywave.kernels.torch_kernels import FEW_STEPS, ONEDNN_IS_FAST
from carrywave.kernels.weights import Layer, LayerWeights

# sigmoid(±1e4) is exactly 1 and 0 in every precision, whatever the other inputs add, and 1e4 is still within fp16's range.
_SATURATED = 1.0e4
KERNEL: torch_kernels.Kernel = torch.lstm
# oneDNN prepares the weights at every call, which so many steps are worth, or fewer if there is little to prepare: in training,
# 2 x 128 units are faster than `manual` from 3 steps on, 2 x 256 from 16.
LONG_STEPS, LITTLE, LITTLE_A_STEP = 32, 2**18, 2**15


def layer(
    x_TBI: Tensor, carry: AnyCarry, weights: Layer, lengths_B: Tensor | None, *, marks: StepMarks | None = None
) -> tuple[Tensor, AnyCarry]:
    """One layer: outputs [T, B, P·D] and the carry at each lane's last real step."""
    if lengths_B is None and marks is None:
        return _run(x_TBI, carry, weights)
    real_TB1 = None if lengths_B is None else real_steps(lengths_B, x_TBI.shape[0])
    padded_TBJ = x_TBI if real_TB1 is None else _flagged(x_TBI, real_TB1)

    def run(x_TBJ: Tensor, parts: Sequence[Tensor], each: LayerWeights, way: StepMarks | None) -> tuple[Tensor, Sequence[Tensor]]:
        each = each if real_TB1 is None else _with_flag(each, x_TBJ.shape[-1])
        y_TBP, end = torch_kernels.cut_at_resets(partial(_run, weights=(each,)), x_TBJ, Carry(*(part[None] for part in parts)), way)
        if real_TB1 is None or lengths_B is None:
            return y_TBP, [part[0] for part in end]
        y_TBP = torch.where(real_TB1, y_TBP, 0.0)
        return y_TBP, (last_real(y_TBP, lengths_B, parts[0].to(y_TBP.dtype)), end[1][0])

    return both_ways(run, padded_TBJ, carry, weights, lengths_B, marks)


def prefers_onednn(x_TBI: Tensor, weights: LayerWeights, *, trains: bool = True) -> bool:
    """True if oneDNN's LSTM is the fastest for this layer; it supports no projection, and prepares the weights again for every chunk."""
    steps: object = x_TBI.shape[0]
    if not isinstance(steps, int):  # a tracer leaves the number of steps free, and a question about it would bind it
        return False
    if not ONEDNN_IS_FAST or x_TBI.device.type != "cpu" or x_TBI.dtype != torch.float32 or weights.w_hr is not None:
        return False
    worth = not trains or steps >= LONG_STEPS or weights.w_ih.numel() + weights.w_hh.numel() <= max(LITTLE, LITTLE_A_STEP * steps)
    return steps > FEW_STEPS and worth


def _flagged(x_TBI: Tensor, real_TB1: Tensor) -> Tensor:
    """The input with padding zeroed and a column that is 1 at padded steps, its width rounded up to a multiple of 8."""
    steps, lanes, inputs = x_TBI.shape
    rest = -(inputs + 1) % 8
    columns = [torch.where(real_TB1, x_TBI, 0.0), (~real_TB1).to(x_TBI.dtype)]
    if rest:
        columns.append(x_TBI.new_zeros(steps, lanes, rest))
    return torch.cat(columns, dim=-1)


def _with_flag(weights: LayerWeights, width: int) -> LayerWeights:
    hidden = weights.w_ih.shape[0] // 4
    extra_GJ = weights.w_ih.new_zeros(4 * hidden, width - weights.w_ih.shape[1])
    extra_GJ[:hidden, 0] = -_SATURATED
    extra_GJ[hidden : 2 * hidden, 0] = _SATURATED
    return weights._replace(w_ih=torch.cat((weights.w_ih, extra_GJ), dim=1))


def _run(x_TBI: Tensor, carry: AnyCarry, weights: Layer) -> tuple[Tensor, AnyCarry]:
    return torch_kernels.run(KERNEL, x_TBI, carry, weights, onednn=prefers_onednn(x_TBI, weights[0]))

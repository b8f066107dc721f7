"""The LSTM layer in plain PyTorch, step by step: the definition that every other backend is tested against.

A padded step outputs 0 and leaves h and c unchanged; the reverse direction starts at each lane's last real step.

Shapes: T time, B lane, I input, H hidden, G = 4H, P output width (the projection, or H), D directions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from carrywave.kernels.carry import Carry
from carrywave.kernels.lengths import real_steps
from carrywave.kernels.weights import Layer, LayerWeights


def layer(x_TBI: Tensor, carry: Carry, weights: Layer, lengths_B: Tensor | None) -> tuple[Tensor, Carry]:
    """One layer: outputs [T, B, P·D] and the carry at each lane's last real step."""
    real_TB1 = None if lengths_B is None else real_steps(lengths_B, x_TBI.shape[0])
    if real_TB1 is not None:
        # torch.where, not a product: padding may hold NaN.
        x_TBI = torch.where(real_TB1, x_TBI, 0.0)
    ys, hs, cs = [], [], []
    for direction, direction_weights in enumerate(weights):
        y_TBP, h_BP, c_BH = _direction(x_TBI, carry.h[direction], carry.c[direction], direction_weights, real_TB1, backwards=direction == 1)
        ys.append(y_TBP)
        hs.append(h_BP)
        cs.append(c_BH)
    return torch.cat(ys, dim=-1), Carry(torch.stack(hs), torch.stack(cs))


def _direction(
    x_TBI: Tensor, h_BP: Tensor, c_BH: Tensor, weights: LayerWeights, real_TB1: Tensor | None, *, backwards: bool
) -> tuple[Tensor, Tensor, Tensor]:
    steps = range(x_TBI.shape[0])
    outputs: list[Tensor] = [h_BP] * len(steps)
    for t in reversed(steps) if backwards else steps:
        gates_BG = linear(x_TBI[t], weights.w_ih, weights.b_ih) + linear(h_BP, weights.w_hh, weights.b_hh)
        input_BH, forget_BH, cell_BH, output_BH = gates_BG.chunk(4, dim=-1)
        next_c_BH = forget_BH.sigmoid() * c_BH + input_BH.sigmoid() * cell_BH.tanh()
        next_h_BP = output_BH.sigmoid() * next_c_BH.tanh()
        if weights.w_hr is not None:
            next_h_BP = linear(next_h_BP, weights.w_hr)
        if real_TB1 is None:
            outputs[t], h_BP, c_BH = next_h_BP, next_h_BP, next_c_BH
        else:
            outputs[t] = torch.where(real_TB1[t], next_h_BP, 0.0)
            h_BP = torch.where(real_TB1[t], next_h_BP, h_BP)
            c_BH = torch.where(real_TB1[t], next_c_BH, c_BH)
    return torch.stack(outputs), h_BP, c_BH

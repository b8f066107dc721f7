"""The LSTM of torch.nn.LSTM, with gates in the order input, forget, cell, output.

Shapes: B lane, H hidden, G = 4H, P output width (the projection, or H), L layers, D directions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from carrywave.cells.cell import Cell, OnnxForm, StepWeights

if TYPE_CHECKING:
    from torch import Tensor


class Carry(NamedTuple):
    """State of one layer ([D, B, P] and [D, B, H]), or of a stack in nn.LSTM's shapes ([L·D, B, P] and [L·D, B, H]).

    >>> import torch
    >>> import carrywave as cw
    >>> y, carry = cw.LSTM(3, 8, num_layers=2)(torch.zeros(5, 4, 3))
    >>> h, c = carry
    >>> isinstance(carry, cw.Carry), tuple(h.shape), torch.equal(carry.c, c)
    (True, (2, 4, 8), True)
    """

    h: Tensor
    c: Tensor


def step(gates_BG: Tensor, carry: tuple[Tensor, ...], weights: StepWeights) -> tuple[Tensor, ...]:
    """The definition: one step of one direction."""
    h_BP, c_BH = carry
    input_BH, forget_BH, cell_BH, output_BH = (gates_BG + weights.recurrent(h_BP)).chunk(4, dim=-1)
    next_c_BH = forget_BH.sigmoid() * c_BH + input_BH.sigmoid() * weights.candidate(cell_BH.tanh())
    return weights.projected(output_BH.sigmoid() * weights.normed(next_c_BH).tanh()), next_c_BH


CELL = Cell(
    name="lstm",
    gates=4,
    carry=Carry,
    step=step,
    projects=True,
    forget_gate=1,
    memory=True,
    kernels=True,
    torch_module="LSTM",
    torch_function="lstm",
    onnx=OnnxForm("LSTM", order=(0, 3, 1, 2)),
    kept=6,  # four gates, the cell and its tanh
)
